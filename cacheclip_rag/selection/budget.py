"""Budgets, how many tokens are recomputed, and groupings, how their scores become spans.

Source: CacheClip (arXiv:2510.10129v1), section on grouping: windows of 8 tokens, threshold 5. The paper does not say
whether dropped tokens are replaced, nor whether windows may start anywhere; the two groupings with windows are two
readings. All groupings are deterministic, ties go to the lower index, and no grouping exceeds its budget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..base.checks import check_ratio, check_share, check_whole_number
from ..base.errors import ConfigurationError
from .views import PromptView, per_span

Scores = Sequence[torch.Tensor]
"""Per chunk ``(num_tokens,)`` float scores; tokens with higher scores are recomputed first."""
Masks = list[torch.Tensor]
"""Per chunk ``(num_tokens,)`` bool, True where the token is recomputed."""


_NEVER = torch.iinfo(torch.int64).max
_MOST_START_TOKENS = 16
"""Most first tokens of a chunk that the share for chunk starts pays for: later positions say little."""


@dataclass(frozen=True, slots=True)
class Grouping(ABC):
    """How scores become spans."""

    def take(
        self,
        scores: Scores,
        count: int,
        *,
        first: Scores | None = None,
        among: Scores | None = None,
    ) -> Masks:
        """At most ``count`` tokens of all chunks.

        Args:
            first: per chunk a bool mask of tokens that are taken before all others, within ``count``.
            among: per chunk a bool mask of candidates, default all. Other tokens are removed before windows are formed,
                so that the tokens on both sides of them become neighbours.
        """
        if not scores:
            return []
        lengths = [len(each) for each in scores]
        flat, early = torch.cat([*scores]), torch.cat([*first]) if first else None
        if not among:
            return list(self._take(flat, lengths, count, early).split(lengths))
        kept = torch.cat([*among])
        sums = np.append(0, kept.numpy().cumsum(dtype=np.int64))
        counts = np.diff(sums[np.cumsum(lengths)], prepend=0).tolist()
        chosen = self._take(flat[kept], counts, count, None if early is None else early[kept])
        return list(torch.zeros_like(kept).masked_scatter(kept, chosen).split(lengths))

    @abstractmethod
    def _take(
        self, scores: torch.Tensor, lengths: Sequence[int], count: int, first: torch.Tensor | None
    ) -> torch.Tensor:
        """A ``(num_tokens,)`` bool mask over all chunks, which have these ``lengths``, one after the other. ``first``:
        bool mask of the tokens that are taken before all others."""


@dataclass(frozen=True, slots=True)
class Tokens(Grouping):
    """Single tokens by their own score; the budget is spent exactly."""

    def _take(
        self, scores: torch.Tensor, lengths: Sequence[int], count: int, first: torch.Tensor | None
    ) -> torch.Tensor:
        return _best(scores, None, count, first)


@dataclass(frozen=True, slots=True)
class Windows(Grouping):
    """Whole spans by their mean score; the budget is spent exactly. The default.

    A window is a run of ``size`` tokens inside a chunk, scored by the mean of its tokens. Tokens are ordered by the
    best window that contains them, then by their own score. So spans stay together, and a larger budget never drops a
    token. Departure from the paper: dropped tokens are replaced.
    """

    size: int = 8
    """Tokens of a window."""

    def __post_init__(self) -> None:
        check_whole_number("size", self.size, least=1, of="tokens")

    def _take(
        self, scores: torch.Tensor, lengths: Sequence[int], count: int, first: torch.Tensor | None
    ) -> torch.Tensor:
        runs = _Runs(lengths, self.size)
        means = runs.means(scores)
        rank = torch.empty(len(means), dtype=torch.int64)  # of each window, over all chunks
        rank[means.argsort(descending=True, stable=True)] = torch.arange(len(means))
        return _best(scores, runs.smallest(rank), count, first)


@dataclass(frozen=True, slots=True)
class AlignedWindows(Grouping):
    """The paper's grouping as written: the top tokens, except in aligned windows with ``threshold`` or fewer of them.

    Windows are aligned to the start of each chunk. Dropped tokens are not replaced, so that much less than the budget
    may be spent.
    """

    size: int = 8
    """Tokens of a window."""
    threshold: int = 5
    """A window is kept if more than this many of its tokens are among the top tokens."""

    def __post_init__(self) -> None:
        check_whole_number("size", self.size, least=1, of="tokens")
        check_whole_number("threshold", self.threshold, of="tokens")
        if self.threshold >= self.size:
            raise ConfigurationError(
                f"threshold must be below the window size, got threshold={self.threshold} and size={self.size}. Lower "
                f"it: a window cannot contain more than {self.size} chosen tokens."
            )

    def _take(
        self, scores: torch.Tensor, lengths: Sequence[int], count: int, first: torch.Tensor | None
    ) -> torch.Tensor:
        mask = _best(scores, None, count, first)
        for stop, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True):
            for start in range(stop - length, stop, self.size):
                window = slice(start, min(start + self.size, stop))
                if int(mask[window].sum()) <= self.threshold:
                    mask[window] &= False if first is None else first[window]
        return mask


class _Runs:
    """All windows of some chunks: every run of ``size`` consecutive tokens, and each shorter chunk as a whole. All
    chunks are computed at once, because one by one they would cost hundreds of small operations."""

    def __init__(self, of_chunks: Sequence[int], size: int) -> None:
        lengths = np.array(of_chunks, np.int64)
        starts = lengths.cumsum() - lengths
        self._size, self._num_tokens = size, int(lengths.sum())
        self._short = [(n, starts[lengths == n]) for n in sorted({*lengths.tolist()}) if 0 < n < size]
        counts = np.where(lengths >= size, lengths - size + 1, (lengths > 0).astype(np.int64))
        within = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        self._first = starts.repeat(counts) + within  # token at which each window begins, in order
        self._is_long = (lengths >= size).repeat(counts)

    def means(self, flat: torch.Tensor) -> torch.Tensor:
        """``(num_windows,)`` mean values of ``(num_tokens,)`` values, in order of chunks and tokens."""
        of_windows: torch.Tensor | None = None
        if self._is_long.any():
            means = flat.unfold(0, self._size, 1).mean(-1)
            of_windows = means[torch.from_numpy(np.where(self._is_long, self._first, 0))]
        for length, starts in self._short:
            values = flat[torch.from_numpy(starts[:, None] + np.arange(length))].mean(-1)
            if of_windows is None:
                of_windows = values.new_zeros(len(self._first))
            of_windows[torch.from_numpy(np.searchsorted(self._first, starts))] = values
        return flat.new_zeros(0) if of_windows is None else of_windows

    def smallest(self, values: torch.Tensor) -> torch.Tensor:
        """``(num_tokens,)``: smallest value, int64, among the windows that contain each token."""
        others = self._size - 1
        padded = torch.full((self._num_tokens + others,), _NEVER, dtype=torch.int64)
        padded[torch.from_numpy(self._first[self._is_long] + others)] = values[torch.from_numpy(self._is_long)]
        least = padded.unfold(0, self._size, 1).amin(-1) if self._num_tokens else padded[:0]
        for length, starts in self._short:
            own = values[torch.from_numpy(np.searchsorted(self._first, starts))]
            least[torch.from_numpy(starts[:, None] + np.arange(length))] = own[:, None].expand(-1, length)
        return least


def _best(scores: torch.Tensor, rank: torch.Tensor | None, count: int, first: torch.Tensor | None) -> torch.Tensor:
    """``(num_tokens,)`` bool: the first ``count`` tokens by (those of ``first``, rank ascending, score descending,
    index ascending). ``rank``: default all alike."""
    rank = torch.zeros(len(scores), dtype=torch.int64) if rank is None else rank
    if first is not None:
        rank = rank.masked_fill(first, -1)
    by_score = scores.argsort(descending=True, stable=True)
    order = by_score[rank[by_score].argsort(stable=True)]
    mask = torch.zeros(len(scores), dtype=torch.bool)
    mask[order[: max(0, count)]] = True
    return mask


@dataclass(frozen=True, slots=True)
class TokenBudget(ABC):
    """Base of budgets."""

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
    """How scores become spans."""
    chunk_starts: float = 0.0
    """Share of the budget that is spent first, on chunk starts: the same number of first tokens of each chunk, at most
    16."""

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not isinstance(self.grouping, Grouping):
            raise ConfigurationError(f"grouping must be a Grouping such as Windows(8), got {self.grouping!r}.")
        check_share("chunk_starts", self.chunk_starts, "the budget")

    def num_tokens(self, view: PromptView) -> int:
        return round(self.ratio * view.num_chunk_tokens)

    def is_open(self, view: PromptView) -> bool:
        return 0 < self.num_tokens(view) < sum(len(span.tokens) for span in view.spans)

    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        count, among = self.num_tokens(view), view.candidates
        if not self.is_open(view):
            return per_span(view.spans, count > 0)
        lengths = [len(s) for s in scores]
        most = sum(lengths) if among is None else int(torch.cat([*among]).sum())
        starts = [not span.continues for span in view.spans]
        # what the share for chunk starts pays for
        num_first = min(_MOST_START_TOKENS, int(self.chunk_starts * count / max(1, sum(starts))))
        first = None
        if num_first and any(starts):
            places = [np.arange(n) < num_first * begins for n, begins in zip(lengths, starts, strict=True)]
            first = list(torch.from_numpy(np.concatenate(places)).split(lengths))
        return self.grouping.take(scores, min(count, most), first=first, among=among)
