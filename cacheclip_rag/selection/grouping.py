"""From token scores to the set of tokens to recompute.

Source: CacheClip (arXiv:2510.10129v1), section on grouping: windows of 8 tokens, threshold 5. The paper leaves open
what happens to the budget that dropped tokens free, and whether windows may straddle; the three modes with windows are
the three readings. Whole sentences are ours: windows that end where the text does. All are deterministic, ties going to
the lower index, and none ever exceeds its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .modes import check_grouping

__all__ = ["GROUPINGS", "group", "spread", "v1_literal", "vote_sliding", "whole_sentences", "window_score"]

Scores = Sequence[torch.Tensor]
"""Per chunk ``(num_tokens,)`` float scores, higher is more worth recomputing."""
Masks = list[torch.Tensor]
"""Per chunk ``(num_tokens,)`` bool, True where the token is recomputed."""
Sentences = Sequence[torch.Tensor]
"""Per chunk ``(num_tokens,)`` int64, increasing: number of the token's sentence within the chunk."""


def window_score(
    scores: Scores,
    budget: int,
    *,
    window: int = 8,
    threshold: int = 5,
    first: Masks | None = None,
    sentences: Sentences | None = None,
) -> Masks:
    """Whole spans by their mean score, budget filled exactly (the default).

    Every run of ``window`` tokens inside a chunk has the mean of its scores; tokens are ordered by the best window
    that contains them, then by their own score, and the first ``budget`` are taken. So spans stay together, exactly
    ``min(budget, all)`` tokens are chosen, and a larger budget never drops a token. ``threshold`` is not used.
    Departure from the paper: no token is dropped without another taking its place.
    """
    return _take_first(scores, _ahead(_best_window_rank(scores, window, None), first), budget)


def vote_sliding(
    scores: Scores,
    budget: int,
    *,
    window: int = 8,
    threshold: int = 5,
    first: Masks | None = None,
    sentences: Sentences | None = None,
) -> Masks:
    """Whole windows, at any offset, in which more than ``threshold`` of the top ``budget`` tokens lie.

    The union of these windows is kept, trimmed to ``budget`` by window score. At most ``budget`` tokens.
    """
    top = _top_tokens(scores, budget, first)
    qualifying = [_windows(mask.float(), window).sum(-1) > threshold for mask in top]
    rank = _ahead(_best_window_rank(scores, window, qualifying), first)
    covered = sum(int((r < _NEVER).sum()) for r in rank)
    return _take_first(scores, rank, min(budget, covered))


def v1_literal(
    scores: Scores,
    budget: int,
    *,
    window: int = 8,
    threshold: int = 5,
    first: Masks | None = None,
    sentences: Sentences | None = None,
) -> Masks:
    """The paper to the letter: the top ``budget`` tokens, dropped in aligned windows that hold ``threshold`` or fewer.

    Windows start anew at each chunk; nothing takes the place of dropped tokens, so far fewer than ``budget`` may
    remain.
    """
    masks = _top_tokens(scores, budget, first)
    for number, mask in enumerate(masks):
        for start in range(0, len(mask), window):
            part = mask[start : start + window]
            if int(part.sum()) <= threshold:
                part &= first[number][start : start + window] if first else False
    return masks


def whole_sentences(
    scores: Scores,
    budget: int,
    *,
    window: int = 8,
    threshold: int = 5,
    first: Masks | None = None,
    sentences: Sentences | None = None,
) -> Masks:
    """Whole sentences by the score of their best token, budget filled exactly.

    A question looks at a word or two of the sentence that answers it; a mean over all of its tokens would hide them.

    Of the sentence that the budget ends in, the tokens of highest score are taken. ``window`` and ``threshold`` are not
    used; without ``sentences`` every chunk is one.
    """
    if sentences is None:
        sentences = [torch.zeros(len(s), dtype=torch.int64) for s in scores]
    return _take_first(scores, _ahead(_sentence_rank(scores, sentences), first), budget)


GROUPINGS: dict[str, Callable[..., Masks]] = {
    "window_score": window_score,
    "vote_sliding": vote_sliding,
    "v1_literal": v1_literal,
    "sentence": whole_sentences,
}


def group(
    scores: Scores,
    budget: int,
    *,
    mode: str = "window_score",
    window: int = 8,
    threshold: int = 5,
    first: Masks | None = None,
    among: Sequence[torch.Tensor] | None = None,
    sentences: Sentences | None = None,
) -> Masks:
    """Apply a grouping by name.

    Args:
        first: per chunk a bool mask of tokens that come before all others, within the budget.
        among: per chunk a bool mask of the tokens to choose from, default all. The others are taken out before windows
            are formed, and those on both sides of them are neighbours: where the others are recomputed already, what
            is chosen on both sides makes one span with them.
        sentences: per chunk the number of each token's sentence, which only the mode ``sentence`` looks at.

    Raises:
        ConfigurationError: unknown mode, or window and threshold that contradict each other.
    """
    check_grouping(mode, window, threshold)
    if among is not None:
        scores = _only(scores, among)
        first = None if first is None else _only(first, among)
        sentences = None if sentences is None else _only(sentences, among)
    chosen = GROUPINGS[mode](scores, budget, window=window, threshold=threshold, first=first, sentences=sentences)
    if among is None:
        return chosen
    return [torch.zeros_like(a).masked_scatter(a, c) for a, c in zip(among, chosen, strict=True)]


def spread(free: Sequence[torch.Tensor], count: int) -> Masks:
    """``count`` tokens at even distances among all that are ``free``, per chunk as many as its free tokens are a share.

    Args:
        free: per chunk ``(num_tokens,)`` bool; if there are fewer than ``count`` in all, every one is taken.
    """
    if not free:
        return []
    flat = torch.cat(list(free))
    places = flat.nonzero().flatten()
    count = min(count, len(places))
    mask = torch.zeros_like(flat)
    mask[places[(2 * torch.arange(count) + 1) * len(places) // (2 * max(1, count))]] = True
    return list(mask.split([len(f) for f in free]))


def _only(values: Sequence[torch.Tensor], among: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [v[a] for v, a in zip(values, among, strict=True)]


_NEVER = torch.iinfo(torch.int64).max


def _windows(values: torch.Tensor, window: int) -> torch.Tensor:
    """Every run of ``window`` consecutive values: ``(num_windows, window)``; one shorter run in a shorter chunk."""
    return values.unfold(0, min(window, len(values)), 1)


def _best_window_rank(scores: Scores, window: int, qualifying: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    """Per chunk ``(num_tokens,)`` int64: rank, over all chunks, of the best (qualifying) window holding the token."""
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
    """Per token the smallest value among the windows that contain it."""
    if num_tokens == 0:
        return torch.empty(0, dtype=torch.int64)
    reach = min(window, num_tokens) - 1
    padding = torch.full((reach,), _NEVER, dtype=torch.int64)
    return torch.cat((padding, values, padding)).unfold(0, reach + 1, 1).amin(-1)


def _sentence_rank(scores: Scores, sentences: Sentences) -> list[torch.Tensor]:
    """Per chunk ``(num_tokens,)`` int64: rank, over all chunks, of the token's sentence by its best score."""
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


def _top_tokens(scores: Scores, budget: int, first: Masks | None) -> Masks:
    return _take_first(scores, _ahead([torch.zeros(len(s), dtype=torch.int64) for s in scores], first), budget)


def _ahead(ranks: list[torch.Tensor], first: Masks | None) -> list[torch.Tensor]:
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
