"""Measures of scores over a sample's chunk tokens: recall of evidence, and similarity to a target."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["chosen", "rank_correlation", "span_recall", "token_recall"]

_WINDOW = 8


def chosen(scores: torch.Tensor, lengths: Sequence[int], ratio: float) -> torch.Tensor:
    """The choice of the default grouping (``Windows(8)``), for many scores at once.

    Tokens are ordered by the best run of 8 tokens in their chunk that contains them; ties go to the lower index.

    Args:
        scores: ``(..., num_tokens)``.
        lengths: tokens of each chunk.
        ratio: share of the tokens to take, 0 to 1.

    Returns:
        ``(..., num_tokens)`` bool, ``round(ratio * num_tokens)`` of them True.
    """
    flat = scores.reshape(-1, scores.shape[-1]).double()
    windows = [min(_WINDOW, length) for length in lengths]
    parts = flat.split(list(lengths), dim=-1)
    means = [part.unfold(-1, window, 1).mean(-1) for part, window in zip(parts, windows, strict=True)]
    by_mean = torch.cat(means, dim=-1).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(by_mean).scatter_(-1, by_mean, torch.arange(by_mean.shape[-1]).expand_as(by_mean))
    best = []
    for ranks, window in zip(rank.split([part.shape[-1] for part in means], dim=-1), windows, strict=True):
        padded = torch.nn.functional.pad(ranks, (window - 1, window - 1), value=by_mean.shape[-1])
        best.append(padded.unfold(-1, window, 1).amin(-1))
    order = flat.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, torch.cat(best, dim=-1).gather(-1, order).argsort(dim=-1, stable=True))
    mask = torch.zeros_like(flat, dtype=torch.bool)
    mask.scatter_(-1, order[:, : round(ratio * scores.shape[-1])], True)
    return mask.reshape(scores.shape)


def token_recall(mask: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Share of the wanted tokens that are chosen: ``(...)`` for a mask ``(..., num_tokens)``."""
    return mask[..., wanted].float().mean(-1)


def span_recall(mask: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Share of the runs of wanted tokens that are chosen completely."""
    edges = torch.diff(
        wanted.int(), prepend=torch.zeros(1, dtype=torch.int32), append=torch.zeros(1, dtype=torch.int32)
    )
    starts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    whole = [mask[..., start:stop].all(-1) for start, stop in zip(starts, stops, strict=True)]
    return torch.stack(whole, dim=-1).float().mean(-1)


def rank_correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Spearman's rank correlation of two ``(num_tokens,)`` tensors; equal values share the mean of their ranks. 0 if
    one is constant."""
    ranks = []
    for values in (one, other):
        _, number, counts = values.unique(return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum(0) - (counts - 1) / 2)[number].double())
    centred = [each - each.mean() for each in ranks]
    size = centred[0].norm() * centred[1].norm()
    return float((centred[0] * centred[1]).sum() / size) if float(size) else 0.0
