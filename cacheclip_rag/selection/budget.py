"""Budgets: how many tokens are recomputed, and how scores become spans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..checks import check_flag, check_ratio, check_share, check_whole_number
from ..errors import ConfigurationError
from .grouping import Grouping, Windows
from .sentences import sentence_numbers
from .views import PromptView

__all__ = ["Budget", "FixedStarts", "TokenBudget"]

_MOST_START_TOKENS = 16
"""The share for chunk starts pays for no more first tokens of a chunk: beyond them a token's place says little."""


@dataclass(frozen=True, slots=True)
class TokenBudget(ABC):
    """Base of the two kinds of budget: a share of the chunk tokens, and fixed numbers of them."""

    @abstractmethod
    def is_open(self, view: PromptView) -> bool:
        """Whether scores decide anything here; if not, scoring is spared."""

    @abstractmethod
    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Per span a ``(num_tokens,)`` bool mask of the tokens to recompute; ``scores`` are ignored unless open."""


@dataclass(frozen=True, slots=True)
class Budget(TokenBudget):
    """A share of the chunk tokens, spent exactly: 0.0 is direct reuse, 1.0 is full prefill."""

    ratio: float = 0.2
    """Share of all reused chunk tokens to recompute."""
    grouping: Grouping = field(default_factory=Windows)
    """How scores become spans: :mod:`cacheclip_rag.selection.grouping`."""
    chunk_starts: float = 0.0
    """Share of the budget that goes to the starts of chunks before all else: as many first tokens of each, 16 at
    most."""
    first_tokens: int = 0
    """Tokens at the start of every chunk that come before all others, within the budget: each is a false attention
    sink (EPIC, arXiv:2410.15332)."""
    skip_first_chunk: bool = False
    """True spends nothing on the prompt's first chunk, whatever stands before it (except at ratio 1.0)."""

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not isinstance(self.grouping, Grouping):
            raise ConfigurationError(f"grouping must be a Grouping such as Windows(8), got {self.grouping!r}.")
        check_share("chunk_starts", self.chunk_starts, "the budget")
        check_whole_number("first_tokens", self.first_tokens, of="tokens")
        check_flag("skip_first_chunk", self.skip_first_chunk)

    def num_tokens(self, view: PromptView) -> int:
        """Tokens to recompute."""
        return round(self.ratio * view.num_chunk_tokens)

    def takes_all(self, view: PromptView) -> bool:
        """Whether the budget is enough for every token that may be chosen, those of a skipped chunk included."""
        return self.num_tokens(view) >= sum(len(span.tokens) for span in view.spans)

    def is_open(self, view: PromptView) -> bool:
        return self.num_tokens(view) > 0 and not self.takes_all(view)

    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.is_open(view):
            return self.choose(view, scores, self.num_tokens(view))
        return [torch.full((len(span.tokens),), self.takes_all(view)) for span in view.spans]

    def choose(
        self,
        view: PromptView,
        scores: Sequence[torch.Tensor],
        count: int,
        among: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """The best ``count`` tokens of all spans, or as many as there are candidates.

        Args:
            among: candidates, masks per span; default every token. No token of a skipped chunk is a candidate.
        """
        skipped = self.num_skipped(view)
        if among is None:
            among = [torch.ones(len(s), dtype=torch.bool) for s in scores]
        among = [a & (number >= skipped) for number, a in enumerate(among)]
        num_first = max(self.first_tokens, self._num_start_tokens(view, len(scores) - skipped))
        return self.grouping.take(
            scores,
            min(count, sum(int(a.sum()) for a in among)),
            first=[torch.arange(len(s)) < num_first for s in scores],
            among=among,
            sentences=_sentences(view) if self.grouping.needs_sentences else None,
        )

    def num_skipped(self, view: PromptView) -> int:
        """Leading spans on which nothing is spent: 1 where the prompt's first chunk is to be skipped and is among the
        spans (an exact one is not), else 0."""
        return _num_skipped(view) if self.skip_first_chunk else 0

    def _num_start_tokens(self, view: PromptView, num_chunks: int) -> int:
        """First tokens of each chunk that the share for chunk starts pays for."""
        return min(_MOST_START_TOKENS, int(self.chunk_starts * self.num_tokens(view) / max(1, num_chunks)))


@dataclass(frozen=True, slots=True)
class FixedStarts(TokenBudget):
    """Fixed numbers of first and last tokens of every chunk, whatever they score: EPIC's own form (``k_init``,
    ``k_final``). There is no ratio."""

    first: int = 16
    """First tokens of every chunk."""
    last: int = 0
    """Last tokens of every chunk."""
    skip_first_chunk: bool = False
    """True spends nothing on the prompt's first chunk."""

    def __post_init__(self) -> None:
        check_whole_number("first", self.first, of="tokens")
        check_whole_number("last", self.last, of="tokens")
        check_flag("skip_first_chunk", self.skip_first_chunk)

    def is_open(self, view: PromptView) -> bool:
        return False

    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        skipped = _num_skipped(view) if self.skip_first_chunk else 0
        masks = []
        for number, span in enumerate(view.spans):
            places = torch.arange(len(span.tokens))
            chosen = (places < self.first) | (places >= len(places) - self.last)
            masks.append(chosen & (number >= skipped))
        return masks


def _num_skipped(view: PromptView) -> int:
    return int(view.layout.chunks[0] in view.spans[:1])


def _sentences(view: PromptView) -> list[torch.Tensor]:
    """Per span ``(num_tokens,)``: number of each token's sentence."""
    return [sentence_numbers(span.segment.text, span.tokens.offsets) for span in view.spans]
