"""Maps scores of the auxiliary model's tokens to the primary's tokens, by the characters they share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["map_scores"]

Offsets = Sequence[tuple[int, int]]


def map_scores(scores: torch.Tensor, source: Offsets, target: Offsets) -> torch.Tensor:
    """Score of each target token: the largest score among the source tokens that share a character with it.

    The largest, not the mean: a long number must not lose the piece that one tokenizer splits off. The paper does not
    state its rule. With identical tokenizers the mapping is the identity.

    Args:
        scores: ``(num_source_tokens,)`` float, 0 or more.
        source, target: character offsets ``(start, end)`` per token of the same text, in order.

    Returns:
        ``(num_target_tokens,)``; 0, the lowest possible attention, for tokens that share no character.
    """
    assert len(scores) == len(source), f"{len(scores)} scores for {len(source)} tokens"
    values = scores.tolist()
    result = []
    first = 0
    for start, end in target:
        while first < len(source) and source[first][1] <= start:
            first += 1
        best, position = 0.0, first
        while position < len(source) and source[position][0] < end:
            if source[position][1] > start and source[position][1] > source[position][0]:
                best = max(best, values[position])
            position += 1
        result.append(best if end > start else 0.0)
    return torch.tensor(result, dtype=scores.dtype)
