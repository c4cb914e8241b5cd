"""Runs a transformers model over partly filled caches.

Models are used unmodified, through two extension points of transformers. A ``Cache`` scatters new rows into the fused
KV. An attention function, registered as ``cacheclip``, follows an
:class:`~cacheclip_rag.runtime.transformers.attention_pattern.AttentionPattern` in the forward's keyword arguments.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from ...base.errors import UnsupportedModelError
from ...store import COPIES_BESIDE, KVShape, LayerKV, upload
from ..base import KVMatch
from .architectures import has_pinned_rope, reuse_tokens, rope_pin, scales_by_row
from .attention import ATTENTION_NAME, pattern_attention
from .attention_pattern import AttentionPattern, PassEnded, Probe, causal_pattern, install_layer_hooks
from .batched_encoding import batches_of, empty_kv, encode_batch
from .cache import FusedCache, FusedLayer, LatentLayer, StepLayer, cache_argument
from .prompt_tensors import LayerTensors
from .rotary import ModelRotary, unrotate
from .short_convolution import install_short_convolutions
from .structure import Structure, kept_structure, layers_of, rotary_modules
from .text import TextModel, check_process

logger = logging.getLogger(__name__)


def device_of(module: torch.nn.Module) -> torch.device:
    """Device on which a module computes: its weights' device, or the device to which accelerate's hooks move them."""
    for part in module.modules():
        device = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(module.parameters()).device


def _is_offloaded(model: torch.nn.Module) -> bool:
    """Whether accelerate loads weights for each pass and drops them after it."""
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    each = (single for hook in hooks for single in getattr(hook, "hooks", [hook]))
    return any(getattr(hook, "offload", False) for hook in each)


def may_gather(widths: Sequence[tuple[int, int, int]], devices: Sequence[torch.device]) -> bool:
    """Whether the layers are alike, keys as wide as values, and on one GPU."""
    is_alike = len({*widths}) == len({*devices}) == 1 and widths[0][1] == widths[0][2]
    return is_alike and devices[0].type in COPIES_BESIDE


class ModelRuntime(TextModel):
    """One loaded causal language model: tokenise, encode chunks, fill caches, run rows, decode.

    Stored KV has the shape ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, keys before RoPE. If layers differ,
    these are the largest numbers, and the others are padded with zeros.
    """

    _find_structure: Callable[[Any, str, torch.device, str], Structure] = staticmethod(kept_structure)
    can_move = True
    can_extend = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        fingerprint: str,
        fuse: Callable[..., Any] | None = None,
        like: ModelRuntime | None = None,
    ) -> None:
        """``fuse``: :func:`cacheclip_rag.fusion.fuse.fuse`; None for a runtime that is never asked to fuse. ``like``:
        as of :class:`~.text.TextModel`."""
        AttentionInterface.register(ATTENTION_NAME, pattern_attention)
        model.set_attn_implementation(ATTENTION_NAME)
        super().__init__(model, tokenizer, name, like)
        config = model.config
        config.return_dict = True  # whatever its file says
        self.fingerprint = fingerprint
        self._fuse = fuse
        self.rope_pin = rope_pin(config)
        self.device: torch.device = device_of(model.get_input_embeddings())
        layers = layers_of(model)
        self.without_attention = install_short_convolutions(layers, config)
        structure = self._find_structure(model, name, self.device, fingerprint)
        self.widths = structure.widths
        self.num_layers, _, self.num_kv_heads, _, self.head_dim = KVShape(self.widths, 0)
        self.context_tokens: int = config.max_position_embeddings
        self.reuse_tokens: int = reuse_tokens(config)
        self.vocab_size: int = config.vocab_size
        self.dtype: torch.dtype = model.dtype
        self.layer_devices = [device_of(layer) for layer in layers[: self.num_layers]]
        self.gathers = may_gather(self.widths, [self.device, *self.layer_devices])
        install_layer_hooks(list(layers), self.num_layers)
        self.pinned_rope: bool = has_pinned_rope(config)
        self.is_offloaded = _is_offloaded(model)
        shares = self.num_layers < len(layers)
        if shares and self.is_offloaded:  # rows leave such a pass, which the hooks of its weights would not see
            raise UnsupportedModelError(
                f"model {name!r} has layers that read the KV of others, and weights that do not fit on its device. "
                "Expected one that holds them all: choose another device, dtype or model."
            )
        self._layer = LatentLayer if structure.is_latent else FusedLayer
        self._decodes_alone = shares or not structure.reads_cached or scales_by_row(config)
        """Whether a pass decodes one answer's token: attention reads more than each layer's own keys and values, or the
        number of its row."""
        # a pinned rotary module changes its frequencies in place with the length of each pass
        one_at_a_time = self.pinned_rope or self.is_offloaded
        self.pass_lock: AbstractContextManager[Any] = threading.Lock() if one_at_a_time else nullcontext()
        """Held during a pass."""
        modules = rotary_modules(model)
        self.rotary = ModelRotary(modules, structure.readings, self.dtype, name, self.layer_devices, self.pass_lock)
        """Its rotary tables."""
        self.prompt_tensors = LayerTensors(self.new_cache)

    def check(self) -> None:
        super().check()
        if not self.is_offloaded and self.model.device.type != "meta":
            self.encode([0, 0])  # without the vocabulary, whose packed weights a model that only scores never has

    # -- KV -----------------------------------------------------------------------------------------------------

    def new_cache(self, capacity: int, *, one_layer: bool = False) -> FusedCache:
        """An empty cache with room for ``capacity`` tokens. It grows if decoding needs more. ``one_layer``: all layers
        share one layer's memory, for a single pass that fills each layer right before it runs
        (:attr:`AttentionPattern.before_layer`). It begins with zeros: slots that nobody fills are hidden, not left
        out."""
        # stored KV is written, by several threads, before the model is first used
        check_process(self.name, self._process)
        shared: dict[object, Sequence[torch.Tensor]] = {}
        layers, memory = [], None
        if self.gathers:
            shape, make = self.kv_shape(capacity), torch.zeros if one_layer else torch.empty
            memory = make(shape, dtype=self.dtype, device=self.layer_devices[0])
        for number, kind in enumerate(zip(self.widths, self.layer_devices, strict=True)):
            widths, device = kind
            own = shared.get(kind) if memory is None else memory[number].unsqueeze(1).unbind()
            layer = self._layer(widths, capacity, self.dtype, device, own, is_zero=one_layer)
            if one_layer and not self.is_offloaded:  # whose layers are all filled before the pass
                shared.setdefault(kind, (layer._keys, layer._values))
            layer.whole = memory
            layers.append(layer)
        cache = FusedCache(layers=layers)
        cache.memory = memory
        cache.rotary = self.rotary
        cache.token_bytes = sum(layer.token_bytes for layer in layers)
        return cache

    def extract(self, cache: FusedCache, start: int, stop: int) -> torch.Tensor:
        """Position-free KV of slots start to stop - 1 (slot = position): the inverse of :meth:`FusedCache.fill`."""
        kv = empty_kv(self, stop - start)
        if start == stop:
            return kv
        for target, layer, tables in zip(kv, cache.layers, self.rotary.tables(torch.arange(start, stop)), strict=True):
            keys, values, _ = layer.used(LayerKV(*target))
            keys[:] = unrotate(layer.keys[0, :, start:stop], tables)
            values[:] = layer.values[0, :, start:stop]
        return kv

    @torch.inference_mode()
    def encode(self, ids: Sequence[int], context: torch.Tensor | None = None) -> torch.Tensor:
        start = 0 if context is None else context.shape[3]
        cache = self.new_cache(start + len(ids))
        if context is not None:
            cache.fill(context, slot=0, position=0)
        self.extend(cache, torch.tensor(ids), start, head=False)
        return self.extract(cache, start, start + len(ids))

    @torch.inference_mode()
    def encode_many(self, chunks: Sequence[Sequence[int]], context: torch.Tensor | None = None) -> list[torch.Tensor]:
        encoded: list[torch.Tensor] = []
        for each in batches_of([len(chunk) for chunk in chunks], 0 if context is None else context.shape[3]):
            group = chunks[each]
            encoded += encode_batch(self, group, context) if len(group) > 1 else [self.encode(group[0], context)]
        return encoded

    # -- forward passes -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor, capacity: int) -> tuple[FusedCache, torch.Tensor]:
        cache = self.new_cache(capacity)
        with self.pass_lock:
            output = self.model(
                input_ids=upload(ids[None], self.device),
                use_cache=True,
                logits_to_keep=1,
                **cache_argument(self.model.base_model, cache),
            )
        return cache, output.logits[0, -1]

    def begin(self, match: KVMatch, capacity: int) -> FusedCache:
        cache = self.new_cache(capacity)
        match.write_to(cache)
        return cache

    def cut(self, state: FusedCache, num_tokens: int) -> None:
        state.cut(num_tokens)

    @torch.inference_mode()
    def run_rows(
        self,
        cache: FusedCache,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pattern: AttentionPattern,
        *,
        slots: torch.Tensor | None = None,
        head: bool = True,
        logits_to_keep: int = 1,
    ) -> torch.Tensor | None:
        """Run tokens ``ids`` at ``positions``, ``(num_rows,)`` int64, best on the CPU, against ``cache``, overwriting
        their KV at ``slots`` (default the positions). The pattern's probe may end the pass before the last layer; then
        ``head`` must be False.

        Returns:
            Logits of the last row, ``(vocab_size,)``, or ``(logits_to_keep, vocab_size)`` for several rows; None if
            not ``head``: the pass ends with the last layer's KV.
        """
        assert not head or pattern.probe is None or pattern.probe.stop is None, "a pass that ends early has no logits"
        if not self.is_offloaded:
            pattern = replace(pattern, last_rows=logits_to_keep if head else 0, last_layer=self.num_layers - 1)
        elif pattern.probe is not None:
            # hooks after each layer move weights away again, and an exception would skip them
            pattern = replace(pattern, probe=replace(pattern.probe, stop=None))
        if self.is_offloaded and pattern.before_layer is not None:  # it may raise, too
            for layer in range(self.num_layers):
                pattern.before_layer(layer)
            pattern = replace(pattern, before_layer=None)
        cache.scatter(positions if slots is None else slots)
        if pattern.position_embeddings is not None:
            positions = positions[-logits_to_keep:]  # the rotary module makes nothing for the others
        arguments = {
            "input_ids": upload(ids[None], self.device),
            "position_ids": upload(positions[None], self.device),
            "use_cache": True,
            "cacheclip_pattern": pattern,
            **cache_argument(self.model.base_model, cache),
        }
        try:
            with self.pass_lock:
                if not head:
                    self.model.base_model(**arguments)
                    return None
                logits: torch.Tensor = self.model(**arguments, logits_to_keep=logits_to_keep).logits[0]
            return logits[-1] if logits_to_keep == 1 else logits
        except PassEnded:
            return None
        finally:
            cache.scatter(None)

    def extend(
        self, state: FusedCache, ids: torch.Tensor, start: int, *, head: bool = True, logits_to_keep: int = 1
    ) -> torch.Tensor | None:
        """Run ``ids`` right after the first ``start`` tokens of ``state``, with causal attention."""
        slots = torch.arange(start, start + len(ids))
        return self.run_slots(state, ids, slots, head=head, logits_to_keep=logits_to_keep)

    def run_slots(
        self,
        cache: FusedCache,
        ids: torch.Tensor,
        slots: torch.Tensor,
        *,
        probe: Probe | None = None,
        before_layer: Callable[[int], None] | None = None,
        head: bool = True,
        logits_to_keep: int = 1,
    ) -> torch.Tensor | None:
        """Run tokens ``ids`` at ``slots`` with causal attention. ``before_layer`` is called with each layer's number
        before it runs, and must run no pass. Otherwise as :meth:`run_rows`."""
        pattern = causal_pattern(slots, self.device)
        pattern.probe, pattern.before_layer = probe, before_layer
        pattern.position_embeddings = (
            self.rotary.embeddings(cache.tables_of(slots)) if cache.tables and self.rotary.hands_tables else None
        )
        return self.run_rows(cache, ids, slots, pattern, head=head, logits_to_keep=logits_to_keep)

    @torch.inference_mode()
    def decode_step(self, state: FusedCache, token_id: int) -> torch.Tensor:
        with self.pass_lock:
            output = self.model(
                input_ids=torch.tensor([[token_id]], device=self.device),
                position_ids=torch.tensor([[state.get_seq_length()]], device=self.device),
                use_cache=True,
                **cache_argument(self.model.base_model, state),
            )
        following: torch.Tensor = output.logits[0, -1]
        return following

    @torch.inference_mode()
    def decode_steps(self, states: Sequence[FusedCache], token_ids: Sequence[int]) -> list[torch.Tensor]:
        """One pass in which each state's token is a row of its own: the weights are read once for all."""
        slots = [state.get_seq_length() for state in states]
        if len(states) == 1 or self.pinned_rope or self.is_offloaded or self._decodes_alone:
            return super().decode_steps(states, token_ids)
        layers = [StepLayer(each) for each in zip(*(state.layers for state in states), strict=True)]
        try:
            with self.pass_lock:
                output = self.model(
                    input_ids=torch.tensor([list(token_ids)], device=self.device),
                    position_ids=torch.tensor([slots], device=self.device),
                    use_cache=True,
                    cacheclip_steps=states,
                    **cache_argument(self.model.base_model, Cache(layers=layers)),
                )
        except BaseException:
            for state, slot in zip(states, slots, strict=True):
                state.cut(slot)
            raise
        return list(output.logits[0])
