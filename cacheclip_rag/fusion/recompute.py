"""Assemble a fused cache and recompute chosen rows of it, exactly.

Source: selective recompute, introduced by CacheBlend (arXiv:2405.16444, section 4). Departure from the published
implementations: their causal mask is aligned to the bottom-right corner, so that a recomputed token sees tokens that
come after it; here a row at position p sees the keys at positions up to p and no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ..prompt.layout import Layout, Span
from ..runtime.transformers.cache import FusedCache
from ..runtime.transformers.walk import RowWalk

if TYPE_CHECKING:
    from ..runtime.transformers.model import ModelRuntime

__all__ = ["assemble", "choose_rows", "recompute"]


def assemble(primary: ModelRuntime, cache: FusedCache, pieces: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Write stored KV into ``cache``, each piece ``(start position, kv)`` rotated to its true positions.

    Taken one at a time, so that no more than one chunk is held beside the fused cache.
    """
    for start, kv in pieces:
        primary.fill(cache, kv, slot=start, position=cache.position_of(start))


def choose_rows(layout: Layout, reused: Iterable[Span], selected: Iterable[tuple[Span, torch.Tensor]]) -> torch.Tensor:
    """Positions to compute: everything but the exact start and reused chunks, plus the selected tokens of these.

    The prompt's last token is always computed: its logits are the answer's first.

    Args:
        reused: chunk spans whose KV was assembled.
        selected: per span a ``(num_tokens,)`` bool mask of tokens to recompute.

    Returns:
        Strictly increasing int64 positions.
    """
    active = torch.ones(layout.num_tokens, dtype=torch.bool)
    active[: layout.num_exact] = False
    for span in reused:
        active[span.start : span.stop] = False
    for span, mask in selected:
        active[span.start : span.stop] |= mask
    active[-1] = True
    return active.nonzero().flatten()


def recompute(
    primary: ModelRuntime,
    cache: FusedCache,
    layout: Layout,
    rows: torch.Tensor,
    walk: RowWalk | None = None,
    layer_starts: list[float] | None = None,
) -> torch.Tensor:
    """One forward pass over ``rows``; overwrites their KV in ``cache`` and returns the last row's logits.

    Args:
        walk: lets rows leave between layers (methods that select again while the pass runs).
        layer_starts: filled with the time at which each layer begins.
    """
    logits = primary.run_slots(cache, layout.ids[rows], rows, walk=walk, layer_starts=layer_starts)
    assert logits is not None
    return logits
