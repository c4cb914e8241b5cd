"""The base of a running model, for transformers, llama.cpp, the fake of the tests or a serving engine. Attributes say
what a runtime can do, so that no code asks for its class.

KV that caches have of earlier prompts comes to a runtime as a :class:`KVMatch`, which says the source of each part.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ..base.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from ..base.clock import PhaseClock


class KVSource(IntEnum):
    """Where the KV of a prompt's token comes from."""

    COMPUTED = 0
    """From nowhere: text between chunks, the question, missing chunks."""
    STORED = 1
    """A chunk's, as it was stored: approximate."""
    OWN_CONTEXT = 2
    """A chunk's, as it was stored, right behind the text that it was computed behind: exact."""
    PREFIX = 3
    """The shared prefix's, as it was stored: exact."""
    CACHED = 4
    """Earlier prompts' in the prefix cache: exact."""
    CONTINUED = 5
    """An earlier prompt's or answer's that began in the same way: approximate."""
    MOVED = 6
    """An earlier prompt's or answer's, of the same tokens at another position or behind other text: approximate."""


class KVRun(NamedTuple):
    """Neighbouring tokens of a prompt whose KV a cache has."""

    source: KVSource
    start: int
    stop: int
    turns: int = 0
    """Answers whose approximate KV it is, one after the other."""
    stale: np.ndarray[Any, Any] | None = None
    """``(num_tokens,)`` bool, of these tokens: those whose KV is a chunk's as it was stored. None: none is."""
    source_start: int = 0
    """Of moved KV: position of the first token in its earlier prompt."""
    past: np.ndarray[Any, Any] | None = None
    """``(num_tokens,)``, 0 to 1, of each of these tokens: share of what stood before it where its KV was computed, or
    stands before it now, that did both. None: 1."""


class KVPart(NamedTuple):
    """A run, and its KV."""

    run: KVRun
    blocks: Sequence[Any]
    """Of neighbouring tokens of the earlier prompt."""
    skip: int = 0
    """Tokens of the first block before the run."""


class KeptKV(Protocol):
    """A state whose exact KV the prefix cache can keep, and continued KV too. The cache does not look into blocks."""

    token_bytes: int
    """Bytes of the KV of one token."""

    def get_seq_length(self) -> int:
        """Number of tokens."""

    def blocks(self, start: int, stop: int, size: int) -> Iterable[Any]:
        """Copies of the KV of tokens ``start`` to ``stop - 1``, in blocks of ``size``; the last may be shorter."""

    def write_blocks(self, part: KVPart) -> None:
        """Take the KV of a run. Moved keys are turned to their new positions."""


class PromptTensors(Protocol):
    """KV of a prompt's neighbouring tokens as tensors for the store, ``(num_layers, 2, num_kv_heads, num_tokens,
    head_dim)``, one a group of layers with equal shapes."""

    def shapes(self, num_tokens: int) -> Sequence[tuple[int, ...]]: ...

    def join(self, blocks: Sequence[Any]) -> Sequence[torch.Tensor]:
        """The KV of neighbouring blocks (:meth:`KeptKV.blocks`)."""

    def state(self, start: int, pieces: Sequence[Sequence[torch.Tensor]]) -> KeptKV:
        """A state that has the KV of neighbouring pieces from token ``start`` on, and none before it."""


class KVMatch:
    """What caches have of a prompt. It can be read until the ``with`` block ends, even if a cache drops it."""

    def __init__(self, parts: Sequence[KVPart] = (), release: Callable[[], None] | None = None) -> None:
        """
        Args:
            parts: in prompt order. Before and between moved runs there may be other tokens, elsewhere not.
            release: ends the hold on it.
        """
        self.parts: Sequence[KVPart] | None = parts
        self._release, self._lock = release, threading.Lock()
        self.runs = tuple(part.run for part in parts)
        self.num_tokens = max((run.stop for run in self.runs if run.source != KVSource.MOVED), default=0)
        """First tokens that are there, all of them."""
        self.num_exact = sum(run.stop - run.start for run in self.runs if run.source == KVSource.CACHED)
        """Tokens of them whose KV is from the prefix cache, and exact."""

    def write_to(self, cache: KeptKV) -> None:
        """Copy the KV into the slots of ``cache``."""
        assert self.parts is not None, "a released match cannot be read: its KV may be evicted"
        for part in self.parts:
            cache.write_blocks(part)

    def release(self, *_: object) -> None:
        """End the hold. A second call does nothing."""
        with self._lock:
            release, self._release, self.parts = self._release, None, None
        if release is not None:
            release()

    def __enter__(self) -> KVMatch:
        return self

    __exit__ = release


DTYPES = ("float32", "bfloat16", "float16")
"""Compute dtypes of models, and dtypes that stored KV may have."""

Message = dict[str, Any]
"""``{"role": "user", "content": "…"}``; an assistant's and a tool's have more (:mod:`cacheclip_rag.prompt.tools`)."""


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """Token ids of one text, and the characters that each token covers."""

    token_ids: Sequence[int] | np.ndarray[Any, Any]
    places: Sequence[tuple[int, int]] | np.ndarray[Any, Any]
    """Per token ``(start, end)`` in characters of the text; ``start == end``: it covers none."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenizedText) and (self.ids, self.offsets) == (other.ids, other.offsets)

    @cached_property
    def columns(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """``(num_tokens,)`` ids and ``(num_tokens, 2)`` places, int64."""
        return np.asarray(self.token_ids, np.int64), np.asarray(self.places, np.int64).reshape(-1, 2)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.columns[0].tolist())

    @cached_property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        return tuple(map(tuple, self.columns[1].tolist()))

    def part(self, start: int = 0, stop: int | None = None, by: int = 0) -> TokenizedText:
        """Tokens ``start`` to ``stop - 1``, ``by`` characters later in a text."""
        return TokenizedText(self.columns[0][start:stop], self.columns[1][start:stop] + by)


StoredTokens = tuple[TokenizedText, int] | None


class PromptText(Protocol):
    """A part of a prompt's text."""

    @property
    def text(self) -> str: ...

    @property
    def control(self) -> bool:
        """As in :meth:`Runtime.tokenize`."""


class Constraint(Protocol):
    """Follows one answer and says which tokens may come next."""

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """``(vocab_size,)`` logits with those of tokens that must not come next at minus infinity."""

    def accept(self, token_id: int) -> None:
        """Take the chosen token into account."""


class State(Protocol):
    """State of a model between two tokens of an answer. Runtimes add their own fields."""

    def get_seq_length(self) -> int:
        """Number of tokens so far, including tokens of the answer."""


class TextRuntime(ABC):
    """The text of one loaded model: its tokenizer and its chat template."""

    name: str
    """The model's name as the user gave it."""
    eos_ids: frozenset[int]
    tokenizer_sha256: str
    """SHA-256 of the tokenizer and its chat template."""
    tokenizer: Any
    """A Hugging Face tokenizer, or another one with ``count(text)``. Documents are split by its token counts."""
    opening: str
    """Special tokens that the tokenizer puts before any text, as a string: usually one BOS token, or nothing."""
    marks_reasoning: bool = False
    """Whether markers of reasoning are special tokens, which :meth:`decode_ids` leaves out."""
    reasoning_ends: Sequence[str] = ()
    """Markers that end reasoning (:mod:`~cacheclip_rag.runtime.markers`): in answers, even if none opened it."""
    can_constrain: bool = False
    """Whether answers can follow a JSON schema (:meth:`constrain`)."""
    template_variables: frozenset[str] = frozenset()
    """Variables that the chat template reads, such as ``enable_thinking``."""
    control_ids: Sequence[int] | None = None
    """Control tokens, ascending; None if they, or the characters of tokens, are not known."""

    @abstractmethod
    def tokenize(self, text: str, *, control: bool = False) -> TokenizedText:
        """Token ids of ``text``, with no special tokens added. Names of control tokens in the text become control
        tokens only if ``control`` is True."""

    def tokenize_prompt(self, segments: Sequence[PromptText], stored: Sequence[StoredTokens] = ()) -> TokenizedText:
        """Token ids of joined texts. Offsets are those in the joined text. They are the ids that other engines
        give the whole text, if its control tokens are known (:attr:`control_ids`). If text of users or documents would
        yield a control token so, or control tokens are not known, every change of ``control`` divides the text.
        ``stored``: of each text the tokens of one in which it stands, and at which character, if they are known."""
        if self.control_ids is not None and len({each.control for each in segments}) == 2:
            tokens = self.tokenize("".join(each.text for each in segments), control=True)
            edges = np.cumsum([0, *(len(each.text) for each in segments)])
            users = [
                (a, b) for (a, b), each in zip(pairwise(edges), segments, strict=True) if b > a and not each.control
            ]
            first, last = np.array(users, dtype=np.int64).reshape(-1, 2).T
            start, stop = tokens.columns[1][np.isin(tokens.columns[0], self.control_ids)].T
            # the first text of a user that ends after a control token's beginning; a sentinel after them all
            next_first = np.append(first, edges[-1] + 1)[np.searchsorted(last, start, side="right")]
            if not (next_first < stop).any():
                return tokens
        parts, begin = [TokenizedText((), ()).columns], 0
        for control, run in groupby(segments, key=lambda each: each.control):
            text = "".join(each.text for each in run)
            parts.append(self.tokenize(text, control=control).part(by=begin).columns)
            begin += len(text)
        return TokenizedText(*map(np.concatenate, zip(*parts, strict=True)))

    def least_tokens(self, text: str) -> int:
        """A number of tokens that ``text`` has at least, known without tokenising it; 0 if none is known."""
        return 0

    @abstractmethod
    def decode_ids(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one token, which may be a part of a character; of a control token, its name. None: not known, as of
        such parts in a runtime that does not override this."""
        text = self.decode_ids([token_id])
        return None if "\ufffd" in text else text.encode()

    def decode_calls(self, ids: Sequence[int]) -> str:
        """Like :meth:`decode_ids`, with the special tokens that mark calls of tools and reasoning
        (:mod:`~cacheclip_rag.runtime.markers`). A runtime whose tokenizer has such tokens overrides this."""
        return self.decode_ids(ids)

    def constrain(self, json_schema: str) -> Constraint:
        """A constraint on one answer, which must be JSON that follows ``json_schema``. A runtime with ``can_constrain``
        overrides this.

        Raises:
            ConfigurationError: this runtime cannot constrain answers, or the schema is not supported.
            MissingExtraError: the extra ``structured`` is not installed.
        """
        raise ConfigurationError(f"model {self.name!r} runs in a runtime that cannot follow a json_schema.")

    @property
    @abstractmethod
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""

    @abstractmethod
    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        date: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Messages rendered by the chat template. ``date`` is used by templates that state the date (default today).
        ``tools`` are definitions in OpenAI's function format; a template that does not use tools ignores them.
        ``variables`` are further ones of the template (``enable_thinking``); those that it does not use change
        nothing."""


class Runtime(TextRuntime):
    """One loaded causal language model."""

    fingerprint: str
    """Identifies config, weights and compute dtype; part of every chunk key."""
    rope_pin: str
    """Identifies the rotary embedding; part of every chunk key."""
    can_score: bool = True
    """Whether attention weights can be read. An auxiliary model needs this."""
    keeps_prefixes: bool = True
    """Whether the engine's prefix cache can hold this runtime's KV."""
    prompt_tensors: PromptTensors | None = None
    """Turns the KV of prompts into tensors, and back; None: it cannot be stored."""
    can_move: bool = False
    """Whether KV that earlier prompts left can be moved to other positions."""
    can_extend: bool = False
    """Whether a prompt can be read block by block (:meth:`begin`, :meth:`extend`, :meth:`cut`). Verified finishing
    needs this; without it, answers are not verified."""
    context_tokens: int
    reuse_tokens: int
    """Longest prompt for which reuse is exact, in tokens. Longer prompts are answered by plain prefill."""
    pinned_rope: bool = False
    """Whether the rotary frequencies change above ``reuse_tokens``: shorter prompts' KV is wrong in longer ones."""
    gathers: bool = False
    """Whether it gathers prompts from chunk caches in the memory of its device."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    widths: Sequence[tuple[int, int, int]] = ()
    """Of each layer its number of KV heads and the widths of its keys and values; empty: those above, in all."""
    without_attention: frozenset[int] = frozenset()
    """Layers that convolve a token's input with those before it instead. What they keep of it is stored as KV."""
    dtype: torch.dtype
    device: torch.device
    """Device that takes the token ids."""
    batch_characters: int | None = None
    """Characters of chunks that :meth:`encode_many` best gets at once, also of several documents; None: a batch's."""
    kv_codec: str | None = None
    """Codec of the store for this runtime's KV; None: the one in the settings. If it is opaque bytes, ``opaque``."""
    reads_kv: bool = True
    """Whether its KV can be read as tensors."""
    computed_edges: tuple[int, int] = (0, 0)
    """First and last tokens of a chunk that are computed in every prompt, if all or none of those between them are. 0:
    any tokens may be computed."""
    backend: str = ""
    """What runs the model, for certificates; empty for transformers in this process."""

    # -- KV -----------------------------------------------------------------------------------------------------

    def kv_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Shape of stored KV of so many tokens. A runtime whose KV is opaque bytes overrides this."""
        if self.widths:
            from ..store.codecs import shape_of  # it loads torch

            return shape_of(self.widths, num_tokens)
        return self.num_layers, 2, self.num_kv_heads, num_tokens, self.head_dim

    @abstractmethod
    def encode(self, ids: Sequence[int], context: torch.Tensor | None = None) -> torch.Tensor:
        """KV of ``ids`` that can be moved to other positions, in the shape of :meth:`kv_shape`, computed right after
        ``context`` (stored KV of the same layout; None if nothing comes before). Unless it is opaque: keys before
        RoPE."""

    def encode_many(self, chunks: Sequence[Sequence[int]], context: torch.Tensor | None = None) -> list[torch.Tensor]:
        """KV of several chunks, each as :meth:`encode` gives it. A runtime overrides this where one pass over many
        short chunks is cheaper than a pass each.

        Raises:
            EncodingError: some chunks failed, in a runtime in which one chunk can fail alone.
        """
        return [self.encode(ids, context) for ids in chunks]

    @abstractmethod
    def prefill(self, ids: torch.Tensor, capacity: int) -> tuple[State, torch.Tensor]:
        """Plain prefill of ``ids``, ``(num_tokens,)``. Returns a state with room for ``capacity`` tokens, and the
        last token's logits, ``(vocab_size,)``."""

    def prefill_from(
        self, match: KVMatch, ids: torch.Tensor, capacity: int, clock: PhaseClock
    ) -> tuple[State, torch.Tensor]:
        """Plain prefill of ``ids`` that takes the KV of their first tokens from ``match``. Called only if
        ``keeps_prefixes``, for which ``can_extend`` is needed."""
        with clock.phase("assemble"):
            state = self.begin(match, capacity)
        with clock.phase("recompute"):
            logits = self.extend(state, ids[match.num_tokens :], match.num_tokens)
            assert logits is not None
            wait_for(logits.device)
        return state, logits

    def begin(self, match: KVMatch, capacity: int) -> State:
        """A state that holds the KV of ``match``, with room for ``capacity`` tokens. Called only if ``can_extend``."""
        raise AssertionError("begin was called on a runtime whose can_extend is False")

    def extend(
        self, state: Any, ids: torch.Tensor, start: int, *, head: bool = True, logits_to_keep: int = 1
    ) -> torch.Tensor | None:
        """Read ``ids`` right after the first ``start`` tokens of a state of :meth:`begin`. Called only if
        ``can_extend``. Returns logits of the last token, ``(vocab_size,)``, or ``(logits_to_keep, vocab_size)`` for
        several; None without ``head``, which skips the language-model head."""
        raise AssertionError("extend was called on a runtime whose can_extend is False")

    def cut(self, state: Any, num_tokens: int) -> None:
        """Drop all tokens of a state but the first ``num_tokens``. Called only if ``can_extend``."""
        raise AssertionError("cut was called on a runtime whose can_extend is False")

    @abstractmethod
    def fuse(self, plan: Any, kv_sources: Any, *, capacity: int, clock: PhaseClock, slices: Any = None) -> Any:
        """Carry out a :class:`~cacheclip_rag.plan.plan.Plan` that reuses chunks, whose KV comes from ``kv_sources``
        (:class:`~cacheclip_rag.plan.plan.KVSources`): ``Any`` stands for types of rooms above. ``slices``:
        :class:`Slices <cacheclip_rag.runtime.Slices>`, or None for all at once. :mod:`cacheclip_rag.fusion.fuse` and
        :mod:`~cacheclip_rag.fusion.in_order` do it. Returns a ``Fused``; None if no chunk could be read."""

    @abstractmethod
    def decode_step(self, state: Any, token_id: int) -> torch.Tensor:
        """Append one token to the state and return the next logits, ``(vocab_size,)``."""

    def decode_steps(self, states: Sequence[Any], token_ids: Sequence[int]) -> list[torch.Tensor]:
        """The same for several states, each with a token of its own. A runtime overrides this where one pass for all
        reads the weights once; it may round otherwise than a pass each. If it raises, no state has changed."""
        return [self.decode_step(state, token_id) for state, token_id in zip(states, token_ids, strict=True)]

    def drop_freed_kv(self) -> None:
        """Give back memory that is free, but still holds KV of answers that have ended. PyTorch keeps what it took of a
        GPU, and page-locked memory."""
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            # older versions of torch have the second one only
            empty = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
            empty()


def wait_for(device: torch.device) -> None:
    """Wait until an accelerator has computed all queued work, so that measured seconds include it."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
