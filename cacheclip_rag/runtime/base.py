"""The protocol of a running model. The transformers runtime is one, the fake of the tests another, a serving engine a
third. Nobody asks which: attributes say what a runtime can do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..chunks.prefix_cache import Match
    from ..clock import PhaseClock
    from ..types import Message, Plan, Trace

__all__ = ["Fused", "Runtime", "TokenizedText"]


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Token ids of one text, each with the characters it covers."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    """Per token ``(start, end)`` in characters of the text; ``start == end`` for tokens that cover none. Empty for a
    tokenizer that knows none (its model reuses nothing)."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Fused:
    """What :meth:`Runtime.fuse` did."""

    state: Any
    """The prompt's KV, for :meth:`Runtime.decode_step`."""
    logits: torch.Tensor
    """Of the prompt's last token, ``(vocab_size,)``."""
    plan: Plan
    """As it was carried out: chunks that turned out damaged are no longer among the reused ones."""
    recomputed_tokens: int
    """Tokens of reused chunks that were computed again."""
    charged_tokens: float
    """Chunk tokens given fresh KV; a token that only some layers computed counts by their share."""
    first_computed: int | None
    """Position of the first token that was computed; None if this KV must not be kept for other prompts."""
    trace: Trace | None = None


class Runtime(ABC):
    """One loaded causal language model."""

    name: str
    """As the user gave it."""
    fingerprint: str
    """Identifies config, weights and compute dtype; part of every chunk key."""
    rope_pin: str
    """The rotary embedding as part of the chunk key."""
    can_reuse: bool = True
    """Whether stored KV can be reused exactly; if not, ``unsupported`` says why and only plain prefill is asked for."""
    can_score: bool = True
    """Whether its attention weights can be looked at, as an auxiliary model's must be."""
    keeps_prefixes: bool = True
    """Whether the engine's prefix cache can hold its KV."""
    unsupported: str | None = None
    """Why its KV cannot be reused, None if it can."""
    context_tokens: int
    reuse_tokens: int
    """Longest prompt for which reuse is exact; longer ones are answered by plain prefill."""
    pinned_rope: bool = False
    """Whether the rotary frequencies change above ``reuse_tokens``, so that KV from below is wrong above."""
    eos_ids: frozenset[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    """Where token ids go in."""
    tokenizer_sha256: str
    """Digest of the tokenizer and its chat template: what turns text into ids."""
    tokenizer: Any
    """A Hugging Face tokenizer, by whose counts documents are split."""
    opening: str
    """Special tokens that the tokenizer puts before any text, as text: usually one BOS token, or nothing."""

    # -- text ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def tokenize(self, text: str, *, control: bool = False) -> TokenizedText:
        """Token ids of ``text`` on its own; special tokens mean what they say with ``control`` alone."""

    @abstractmethod
    def decode_ids(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""

    @property
    @abstractmethod
    def has_chat_template(self) -> bool:
        """Whether messages are rendered by a template."""

    @abstractmethod
    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, date: str | None = None
    ) -> str:
        """The chat template's text; ``date`` is what a template that states the date writes (default today's)."""

    # -- KV -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, ids: Sequence[int], context: torch.Tensor | None = None) -> torch.Tensor:
        """Position-free KV of ``ids`` computed right behind ``context`` (stored KV, or None for nothing):
        ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``."""

    @abstractmethod
    def prefill(self, ids: torch.Tensor, capacity: int) -> tuple[Any, torch.Tensor]:
        """Plain prefill of ``ids`` ``(num_tokens,)``: a state with room for ``capacity`` tokens, and the last
        logits ``(vocab_size,)``."""

    def prefill_behind(
        self, match: Match, ids: torch.Tensor, capacity: int, clock: PhaseClock
    ) -> tuple[Any, torch.Tensor]:
        """Plain prefill of ``ids`` behind the start that the prefix cache holds; only where ``keeps_prefixes``."""
        raise AssertionError("a runtime that keeps no prefixes is given none")

    @abstractmethod
    def fuse(self, plan: Plan, sources: Any, *, capacity: int, clock: PhaseClock, trace: bool = False) -> Fused | None:
        """Carry out a plan that reuses chunks, with their KV from ``sources``
        (:class:`~cacheclip_rag.chunks.sources.Sources`); None if nothing could be read after all."""

    @abstractmethod
    def decode_step(self, state: Any, token_id: int) -> torch.Tensor:
        """Append one token to the state and return the next logits, ``(vocab_size,)``."""
