"""Running a transformers model over partly filled caches. Every touch of transformers' internals is in this module.

The models are used unmodified. Two supported extension points carry everything: a ``Cache`` whose layers scatter new
rows into a fused KV, and an attention function (registered under ``cacheclip``) that follows an
:class:`~cacheclip_rag.models.attention.AttentionPlan` handed through the forward's keyword arguments.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..errors import ConfigurationError
from .attention import AttentionPlan, block_attention, causal_plan, query_attention_mass
from .rotary import rotate, unrotate

__all__ = ["FusedCache", "ModelRuntime", "TokenizedText", "quiet_transformers"]

logger = logging.getLogger(__name__)

ATTENTION_NAME = "cacheclip"


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Token ids of one text, each with the characters it covers."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    """Per token ``(start, end)`` in characters of the text; ``start == end`` for tokens that cover none."""

    def __len__(self) -> int:
        return len(self.ids)


def check_encodable(text: str) -> None:
    """Raise ConfigurationError for half characters (lone surrogates), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"the text holds half a character ({text[error.start]!r} at {error.start}), which cannot be written as "
            "UTF-8. Read its source with errors='replace', or remove it."
        ) from error


class FusedLayer(DynamicLayer):  # type: ignore[misc]
    """KV of one layer in a preallocated buffer: rows are scattered into it while prefilling, appended while decoding.

    Growing by concatenation would copy the whole prompt's KV at every generated token.
    """

    is_croppable = False

    def __init__(self, num_kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.dtype, self.device, self.is_initialized = dtype, device, True
        self._keys = torch.empty(1, num_kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self.slots: torch.Tensor | None = None
        """``(num_rows,)`` int64 slots the next update writes; None appends behind the last."""
        self._resize(0)

    def _resize(self, length: int) -> None:
        self.length = length
        self.keys, self.values = self._keys[:, :, :length], self._values[:, :, :length]

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put KV of shape ``(num_kv_heads, num_tokens, head_dim)`` at slots ``start`` and following."""
        stop = start + keys.shape[-2]
        self._keys[0, :, start:stop] = keys
        self._values[0, :, start:stop] = values
        self._resize(max(self.length, stop))

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Called by the model's attention with KV after RoPE, ``(1, num_kv_heads, num_rows, head_dim)``."""
        if self.slots is None:
            stop = self.length + key_states.shape[-2]
            self._reserve(stop)
            self._keys[:, :, self.length : stop] = key_states
            self._values[:, :, self.length : stop] = value_states
        else:
            stop = max(self.length, int(self.slots[-1]) + 1)
            self._keys.index_copy_(2, self.slots, key_states)
            self._values.index_copy_(2, self.slots, value_states)
        self._resize(stop)
        return self.keys, self.values

    def _reserve(self, length: int) -> None:
        capacity = self._keys.shape[2]
        if length <= capacity:
            return
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = old.new_empty(1, old.shape[1], max(length, capacity + capacity // 4), old.shape[3])
            new[:, :, :capacity] = old
            setattr(self, name, new)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.length if self.slots is not None else self.length + query_length), 0


class FusedCache(Cache):  # type: ignore[misc]
    """The KV of a whole prompt, one :class:`FusedLayer` a layer."""

    def scatter(self, slots: torch.Tensor | None) -> None:
        """Direct the next forward's rows to these slots (strictly increasing); None goes back to appending."""
        for layer in self.layers:
            layer.slots = slots


def _attention(module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """The attention function given to transformers: follow the plan if there is one, else its stock SDPA."""
    plan: AttentionPlan | None = kwargs.pop("cacheclip_plan", None)
    if plan is None:
        # Ordinary prefill from an empty cache, or one decoded token: what stock SDPA computes without a mask is exact.
        assert query.shape[2] in (1, key.shape[2]), "several rows on a partly filled cache need a plan"
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    if plan.probe_layer == module.layer_idx:
        plan.masses.extend(query_attention_mass(query, key, block, scaling) for block in plan.blocks)
        return query.new_zeros(query.transpose(1, 2).shape), None
    return block_attention(query, key, value, plan.blocks, scaling), None


class ModelRuntime:
    """One loaded causal language model: tokenise, encode chunks, fill caches, run rows, decode.

    Stored KV has the shape ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, keys before RoPE.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str, fingerprint: str, rope_pin: str) -> None:
        AttentionInterface.register(ATTENTION_NAME, _attention)
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._tokenizer_lock = threading.Lock()
        self.name = name
        self.fingerprint = fingerprint
        self.rope_pin = rope_pin
        config = model.config
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.context_tokens: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.eos_ids: frozenset[int] = self._find_eos_ids()

    # -- text ---------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, control: bool = False) -> TokenizedText:
        """Token ids of ``text`` on its own, no special tokens added.

        With ``control`` False (anything a user or a document wrote) the text of a special token such as
        ``<|im_end|>`` stays ordinary text, so a document cannot close its own turn.
        """
        check_encodable(text)
        with self._tokenizer_lock:  # split_special_tokens is a setting of the shared tokenizer, made before each call
            encoded = self.tokenizer(
                text,
                add_special_tokens=False,
                return_offsets_mapping=True,
                split_special_tokens=not control,
                verbose=False,
            )
        return TokenizedText(tuple(encoded["input_ids"]), tuple(map(tuple, encoded["offset_mapping"])))

    @cached_property
    def opening(self) -> str:
        """Special tokens that the tokenizer puts before any text, as text: usually one BOS token, or nothing."""
        with self._tokenizer_lock:
            ids = self.tokenizer("a", add_special_tokens=True)["input_ids"]
            plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        leading: list[int] = next((ids[:n] for n in range(len(ids)) if ids[n : n + len(plain)] == plain), [])
        return "".join(self.tokenizer.convert_ids_to_tokens(leading))

    def decode_ids(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def render_chat(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True, date: str | None = None
    ) -> str:
        """The chat template's text; ``date`` is what a template that states the date writes (default today's)."""
        template = self.tokenizer.get_chat_template()
        if date is not None:  # transformers hands its templates this function; a macro of that name comes before it
            template = f"{{% macro strftime_now(format) %}}{date}{{% endmacro %}}{template}"
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    chat_template=template,
                )
            )
        except TemplateError as error:  # templates raise on roles or orders that they do not know
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigurationError(
                f"the chat template of model {self.name!r} refuses messages of roles {roles}: {error}. Change roles or "
                "order, or pass the prompt as one string."
            ) from error

    def _find_eos_ids(self) -> frozenset[int]:
        """Ends of text and of turn: GGUF conversions often record only one of the two."""
        found: set[int] = set()
        for source in (self.model.generation_config.eos_token_id, self.model.config.eos_token_id):
            found.update([source] if isinstance(source, int) else source or [])
        if self.tokenizer.eos_token_id is not None:
            found.add(self.tokenizer.eos_token_id)
        for token in ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>"):
            token_id = self.tokenizer.convert_tokens_to_ids(token)
            if isinstance(token_id, int) and token_id != self.tokenizer.unk_token_id:
                found.add(token_id)
        return frozenset(found)

    # -- KV -----------------------------------------------------------------------------------------------------

    def new_cache(self, capacity: int) -> FusedCache:
        """An empty cache with room for ``capacity`` tokens (it grows beyond if decoding needs more)."""
        return FusedCache(
            layers=[
                FusedLayer(self.num_kv_heads, self.head_dim, capacity, self.dtype, self.device)
                for _ in range(self.num_layers)
            ]
        )

    def rotary_tables(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own float32 cos and sin, each ``(stop - start, head_dim)``, for positions start to stop - 1."""
        positions = torch.arange(start, stop, device=self.device)[None]
        probe = torch.empty(1, dtype=torch.float32, device=self.device)
        cos, sin = self.model.base_model.rotary_emb(probe, positions)
        return cos[0], sin[0]

    def fill(self, cache: FusedCache, kv: torch.Tensor, *, slot: int, position: int) -> None:
        """Write stored ``kv`` into ``cache`` at ``slot``, its keys rotated to ``position`` and following."""
        cos, sin = self.rotary_tables(position, position + kv.shape[3])
        for layer, (keys, values) in zip(cache.layers, kv.to(self.device), strict=True):
            layer.write(slot, rotate(keys, cos, sin), values)

    def extract(self, cache: FusedCache, start: int, stop: int) -> torch.Tensor:
        """Position-free KV of slots start to stop - 1 (slot = position): the inverse of :meth:`fill`."""
        cos, sin = self.rotary_tables(start, stop)
        scaling = float(getattr(self.model.base_model.rotary_emb, "attention_scaling", 1.0))
        kv = torch.empty(
            self.num_layers, 2, self.num_kv_heads, stop - start, self.head_dim, dtype=self.dtype, device=self.device
        )
        for target, layer in zip(kv, cache.layers, strict=True):
            target[0] = unrotate(layer.keys[0, :, start:stop], cos, sin, scaling)
            target[1] = layer.values[0, :, start:stop]
        return kv

    @torch.inference_mode()
    def encode(self, ids: Sequence[int], prefix: torch.Tensor | None = None) -> torch.Tensor:
        """KV of ``ids`` computed right behind ``prefix`` (stored KV of the shared prefix, or None)."""
        start = 0 if prefix is None else prefix.shape[3]
        cache = self.new_cache(start + len(ids))
        if prefix is not None:
            self.fill(cache, prefix, slot=0, position=0)
        positions = torch.arange(start, start + len(ids), device=self.device)
        self.run_rows(cache, torch.tensor(ids, device=self.device), positions, causal_plan(positions), head=False)
        return self.extract(cache, start, start + len(ids))

    # -- forward passes -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor, capacity: int) -> tuple[FusedCache, torch.Tensor]:
        """Ordinary prefill of all of ``ids`` ``(num_tokens,)`` by stock attention: the cache and the last logits."""
        cache = self.new_cache(capacity)
        output = self.model(input_ids=ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache, output.logits[0, -1]

    @torch.inference_mode()
    def run_rows(
        self,
        cache: FusedCache,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        *,
        slots: torch.Tensor | None = None,
        head: bool = True,
    ) -> torch.Tensor | None:
        """Run tokens ``ids`` at ``positions`` against ``cache``, overwriting their KV at ``slots``.

        Args:
            ids, positions: ``(num_rows,)`` int64.
            slots: where each row's KV goes; default its position (``slot = position``).
            head: False skips the language-model head and returns None.

        Returns:
            Logits of the last row, ``(vocab_size,)``.
        """
        cache.scatter(positions if slots is None else slots)
        try:
            arguments = {
                "input_ids": ids[None],
                "position_ids": positions[None],
                "past_key_values": cache,
                "use_cache": True,
                "cacheclip_plan": plan,
            }
            if head:
                logits: torch.Tensor = self.model(**arguments, logits_to_keep=1).logits[0, -1]
                return logits
            self.model.base_model(**arguments)
            return None
        finally:
            cache.scatter(None)

    @torch.inference_mode()
    def decode_step(self, cache: FusedCache, token_id: int) -> torch.Tensor:
        """Append one token and return the next logits, ``(vocab_size,)``."""
        position = cache.get_seq_length()
        positions = torch.tensor([position], device=self.device)
        output = self.model(
            input_ids=torch.tensor([[token_id]], device=self.device),
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[0, -1]
        return logits


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' own progress bars off unless stderr is a terminal."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging as transformers_logging

    if sys.stderr.isatty() or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    bar = gguf.tqdm  # the one bar that transformers' own switch does not reach
    transformers_logging.disable_progress_bar()
    gguf.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        gguf.tqdm = bar
        transformers_logging.enable_progress_bar()
