"""Groupings: from token scores to the set of tokens to recompute.

Source: CacheClip (arXiv:2510.10129v1), section on grouping: windows of 8 tokens, threshold 5. The paper does not say
whether dropped tokens are replaced, nor whether windows may start anywhere; the three groupings with windows are three
readings. Whole sentences are ours. All groupings are deterministic, ties go to the lower index, and no grouping exceeds
its budget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import check_whole_number
from ..errors import ConfigurationError

__all__ = ["AlignedWindows", "Grouping", "Sentences", "Tokens", "Votes", "Windows"]

Scores = Sequence[torch.Tensor]
"""Per chunk ``(num_tokens,)`` float scores; tokens with higher scores are recomputed first."""
Masks = list[torch.Tensor]
"""Per chunk ``(num_tokens,)`` bool, True where the token is recomputed."""


@dataclass(frozen=True, slots=True)
class Grouping(ABC):
    """How scores become spans."""

    needs_sentences: ClassVar[bool] = False
    """Whether :meth:`take` uses ``sentences``."""

    def take(
        self,
        scores: Scores,
        count: int,
        *,
        first: Scores | None = None,
        among: Scores | None = None,
        sentences: Scores | None = None,
    ) -> Masks:
        """At most ``count`` tokens of all chunks.

        Args:
            first: per chunk a bool mask of tokens that are taken before all others, within ``count``.
            among: per chunk a bool mask of candidates, default all. Other tokens are removed before windows are formed,
                so that the tokens on both sides of them become neighbours.
            sentences: per chunk ``(num_tokens,)`` int64, increasing: number of the token's sentence within the chunk.
        """
        if among is None:
            return self._take(scores, count, first, sentences)
        chosen = self._take(
            _only(scores, among),
            count,
            None if first is None else _only(first, among),
            None if sentences is None else _only(sentences, among),
        )
        return [torch.zeros_like(a).masked_scatter(a, c) for a, c in zip(among, chosen, strict=True)]

    @abstractmethod
    def _take(self, scores: Scores, count: int, first: Scores | None, sentences: Scores | None) -> Masks: ...


@dataclass(frozen=True, slots=True)
class Tokens(Grouping):
    """Single tokens by their own score; the budget is spent exactly."""

    def _take(self, scores: Scores, count: int, first: Scores | None, sentences: Scores | None) -> Masks:
        return _top_tokens(scores, count, first)


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

    def _take(self, scores: Scores, count: int, first: Scores | None, sentences: Scores | None) -> Masks:
        return _take_first(scores, _ahead(_best_window_rank(scores, self.size, None), first), count)


@dataclass(frozen=True, slots=True)
class Votes(Grouping):
    """Windows at any offset that contain more than ``threshold`` of the top tokens, cut to the budget.

    Our reading of the sliding grouping in version 2 of the CacheClip paper. Spends at most the budget.
    """

    size: int = 8
    """Tokens of a window."""
    threshold: int = 5
    """A window is taken if more than this many of its tokens are among the top tokens."""

    def __post_init__(self) -> None:
        _check_threshold(self.size, self.threshold)

    def _take(self, scores: Scores, count: int, first: Scores | None, sentences: Scores | None) -> Masks:
        top = _top_tokens(scores, count, first)
        qualifying = [_windows(mask.float(), self.size).sum(-1) > self.threshold for mask in top]
        rank = _ahead(_best_window_rank(scores, self.size, qualifying), first)
        covered = sum(int((r < _NEVER).sum()) for r in rank)
        return _take_first(scores, rank, min(count, covered))


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
        _check_threshold(self.size, self.threshold)

    def _take(self, scores: Scores, count: int, first: Scores | None, sentences: Scores | None) -> Masks:
        masks = _top_tokens(scores, count, first)
        for number, mask in enumerate(masks):
            for start in range(0, len(mask), self.size):
                part = mask[start : start + self.size]
                if int(part.sum()) <= self.threshold:
                    part &= first[number][start : start + self.size] if first else False
        return masks


@dataclass(frozen=True, slots=True)
class Sentences(Grouping):
    """Whole sentences by the score of their best token; the budget is spent exactly.

    The best token decides, because a question often attends to only one or two words of the answering sentence. In the
    last sentence, which may exceed the budget, the tokens with the highest scores are taken. Without ``sentences`` each
    chunk counts as one sentence.
    """

    needs_sentences: ClassVar[bool] = True

    def _take(self, scores: Scores, count: int, first: Scores | None, sentences: Scores | None) -> Masks:
        if sentences is None:
            sentences = [torch.zeros(len(s), dtype=torch.int64) for s in scores]
        return _take_first(scores, _ahead(_sentence_rank(scores, sentences), first), count)


def _check_threshold(size: int, threshold: int) -> None:
    check_whole_number("size", size, least=1, of="tokens")
    check_whole_number("threshold", threshold, of="tokens")
    if threshold >= size:
        raise ConfigurationError(
            f"threshold must be below the window size, got threshold={threshold} and size={size}. Lower it: "
            f"a window cannot contain more than {size} chosen tokens."
        )


def _only(values: Scores, among: Scores) -> list[torch.Tensor]:
    return [v[a] for v, a in zip(values, among, strict=True)]


_NEVER = torch.iinfo(torch.int64).max


def _windows(values: torch.Tensor, window: int) -> torch.Tensor:
    """Every run of ``window`` consecutive values, ``(num_windows, window)``; a shorter chunk gives one shorter run."""
    return values.unfold(0, min(window, len(values)), 1)


def _best_window_rank(scores: Scores, window: int, qualifying: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    """Per chunk ``(num_tokens,)`` int64: rank over all chunks of the best (qualifying) window that contains the
    token."""
    means = [_windows(s, window).mean(-1) if len(s) else s for s in scores]
    flat = torch.cat(means) if means else torch.empty(0)
    rank = torch.empty(len(flat), dtype=torch.int64)
    rank[flat.argsort(descending=True, stable=True)] = torch.arange(len(flat))
    ranks, start = [], 0
    for number, (score, mean) in enumerate(zip(scores, means, strict=True)):
        own = rank[start : start + len(mean)].clone()
        start += len(mean)
        if qualifying is not None and len(own):
            own[~qualifying[number]] = _NEVER
        ranks.append(_min_over_windows(own, len(score), window))
    return ranks


def _min_over_windows(values: torch.Tensor, num_tokens: int, window: int) -> torch.Tensor:
    """``(num_tokens,)``: smallest value among the windows that contain the token."""
    if num_tokens == 0:
        return torch.empty(0, dtype=torch.int64)
    others = min(window, num_tokens) - 1
    padding = torch.full((others,), _NEVER, dtype=torch.int64)
    return torch.cat((padding, values, padding)).unfold(0, others + 1, 1).amin(-1)


def _sentence_rank(scores: Scores, sentences: Scores) -> list[torch.Tensor]:
    """Per chunk ``(num_tokens,)`` int64: rank over all chunks of the token's sentence, by the sentence's best score."""
    if not scores:
        return []
    apart, start = [], 0
    for numbers in sentences:
        apart.append(numbers + start)
        start += int(numbers.max()) + 1 if len(numbers) else 0
    flat = torch.cat(list(scores))
    known, of = torch.cat(apart).unique(return_inverse=True)
    best = torch.full((len(known),), -torch.inf, dtype=torch.float64).scatter_reduce(0, of, flat.double(), "amax")
    rank = torch.empty(len(known), dtype=torch.int64)
    rank[best.argsort(descending=True, stable=True)] = torch.arange(len(known))
    return list(rank[of].split([len(s) for s in scores]))


def _top_tokens(scores: Scores, budget: int, first: Scores | None) -> Masks:
    return _take_first(scores, _ahead([torch.zeros(len(s), dtype=torch.int64) for s in scores], first), budget)


def _ahead(ranks: list[torch.Tensor], first: Scores | None) -> list[torch.Tensor]:
    """Ranks with the tokens of ``first`` before all others."""
    return ranks if first is None else [r.masked_fill(f, -1) for r, f in zip(ranks, first, strict=True)]


def _take_first(scores: Scores, rank: Sequence[torch.Tensor], budget: int) -> Masks:
    """The first ``budget`` tokens by (rank ascending, score descending, index ascending)."""
    lengths = [len(s) for s in scores]
    if not lengths:
        return []
    flat_scores, flat_rank = torch.cat(list(scores)), torch.cat(list(rank))
    by_score = flat_scores.argsort(descending=True, stable=True)
    order = by_score[flat_rank[by_score].argsort(stable=True)]
    mask = torch.zeros(len(flat_scores), dtype=torch.bool)
    mask[order[: max(0, budget)]] = True
    return list(mask.split(lengths))
