"""Budgets: how many tokens are recomputed, and how scores become spans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..base.checks import check_flag, check_ratio, check_share, check_whole_number
from ..base.errors import ConfigurationError
from .grouping import Grouping, Windows
from .views import PromptView, per_span

_MOST_START_TOKENS = 16
"""Most first tokens of a chunk that the share for chunk starts pays for: later positions say little."""


@dataclass(frozen=True, slots=True)
class TokenBudget(ABC):
    """Base of the two kinds of budget: a share of the chunk tokens, or fixed numbers of tokens per chunk."""

    @abstractmethod
    def is_open(self, view: PromptView) -> bool:
        """Whether scores have an influence on this prompt; if not, nothing is scored."""

    @abstractmethod
    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Per span a ``(num_tokens,)`` bool mask of the tokens to recompute. Ignores ``scores`` unless
        :meth:`is_open`."""


@dataclass(frozen=True, slots=True)
class Budget(TokenBudget):
    """A share of the chunk tokens, spent exactly: 0.0 is direct reuse, 1.0 is full prefill."""

    ratio: float = 0.2
    """Share of all reused chunk tokens to recompute."""
    grouping: Grouping = field(default_factory=Windows)
    """How scores become spans; see :mod:`cacheclip_rag.selection.grouping`."""
    chunk_starts: float = 0.0
    """Share of the budget that is spent first, on chunk starts: the same number of first tokens of each chunk, at most
    16."""
    first_tokens: int = 0
    """First tokens of every chunk that the budget takes before all others, because each is a false attention sink
    (EPIC, arXiv:2410.15332)."""
    skip_first_chunk: bool = False
    """True: nothing is spent on the prompt's first chunk, except at ratio 1.0."""

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not isinstance(self.grouping, Grouping):
            raise ConfigurationError(f"grouping must be a Grouping such as Windows(8), got {self.grouping!r}.")
        check_share("chunk_starts", self.chunk_starts, "the budget")
        check_whole_number("first_tokens", self.first_tokens, of="tokens")
        check_flag("skip_first_chunk", self.skip_first_chunk)

    def num_tokens(self, view: PromptView) -> int:
        return round(self.ratio * view.num_chunk_tokens)

    def takes_all(self, view: PromptView) -> bool:
        """Whether the budget covers every token, including the tokens of a skipped chunk."""
        return self.num_tokens(view) >= sum(len(span.tokens) for span in view.spans)

    def is_open(self, view: PromptView) -> bool:
        return self.num_tokens(view) > 0 and not self.takes_all(view)

    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.is_open(view):
            return self.choose(view, scores, self.num_tokens(view), view.candidates)
        return per_span(view.spans, self.takes_all(view))

    def choose(
        self,
        view: PromptView,
        scores: Sequence[torch.Tensor],
        count: int,
        among: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """The best ``count`` tokens of all spans, or all candidates if there are fewer.

        Args:
            among: per span a bool mask of candidates; default every token. Tokens of a skipped chunk never are.
        """
        skipped = self.num_skipped(view)
        lengths = [len(s) for s in scores]
        if skipped or among is not None:
            open_ = torch.ones(sum(lengths), dtype=torch.bool) if among is None else torch.cat([*among])
            open_[: sum(lengths[:skipped])] = False
            among = open_.split(lengths)
            count = min(count, int(open_.sum()))
        starts = [not span.continues for span in view.spans]
        # what the share for chunk starts pays for
        paid = int(self.chunk_starts * self.num_tokens(view) / max(1, sum(starts[skipped:])))
        num_first = max(self.first_tokens, min(_MOST_START_TOKENS, paid))
        return self.grouping.take(
            scores,
            min(count, sum(lengths)),
            first=_first_tokens(lengths, [num_first if begins else 0 for begins in starts]),
            among=among,
        )

    def num_skipped(self, view: PromptView) -> int:
        """Leading spans on which nothing is spent: those of the first chunk if it is skipped, without exact ones, which
        are not among the spans."""
        return _num_skipped(view) if self.skip_first_chunk else 0


@dataclass(frozen=True, slots=True)
class FixedStarts(TokenBudget):
    """Fixed numbers of first and last tokens of every chunk, independent of scores: EPIC as published (``k_init``,
    ``k_final``). There is no ratio."""

    first: int = 16
    """First tokens of every chunk."""
    last: int = 0
    """Last tokens of every chunk."""
    skip_first_chunk: bool = False
    """True: nothing is spent on the prompt's first chunk."""

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
            goes_on = number + 1 < len(view.spans) and view.spans[number + 1].continues
            chosen = ((places < self.first) & (not span.continues)) | (
                (places >= len(places) - self.last) & (not goes_on)
            )
            masks.append(chosen & (number >= skipped))
        return masks


def _first_tokens(lengths: Sequence[int], counts: Sequence[int]) -> list[torch.Tensor] | None:
    """Per span a bool mask of its first tokens; None if there are none."""
    if not any(counts):
        return None
    masks = [np.arange(length) < count for length, count in zip(lengths, counts, strict=True)]
    return list(torch.from_numpy(np.concatenate(masks)).split(list(lengths)))


def _num_skipped(view: PromptView) -> int:
    """Leading spans of the prompt's first chunk, which may stand there in several."""
    chunks = view.layout.chunks
    end = next((number for number, span in enumerate(chunks) if number and not span.continues), len(chunks))
    first = {span.start for span in chunks[:end]}
    return sum(span.start in first for span in view.spans)
