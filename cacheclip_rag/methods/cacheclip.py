"""CacheClip: a small auxiliary model picks the tokens that restore attention between chunks; these are recomputed.

Source: CacheClip (arXiv:2510.10129v1). Departures: the auxiliary is used as it comes (the paper fine-tunes it and
does not say how); scores are mapped to the primary's tokens before grouping, so that the ratio counts what costs time;
the default grouping fills its budget; nothing is spent on a chunk that is exact already; of a long question the last
96 tokens score.
``grouping="v1_literal"`` is the paper's own rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..selection.question import pick_layers
from .base import SelectionRequest
from .selective import Selective

__all__ = ["CacheClip"]


@dataclass(frozen=True, slots=True)
class CacheClip(Selective):
    """Exact at ``recompute_ratio`` 1.0; at 0.0 it equals direct reuse."""

    name: ClassVar[str] = "cacheclip"
    needs_auxiliary: ClassVar[bool] = True

    layers: str = "last"
    """Layers of the auxiliary whose attention scores: ``last`` (the paper), ``all``, ``upper``, ``middle``, a range of
    depth (``0.3-0.6``), a depth and a count (``0.3+4``) or numbers joined by ``+``."""
    pooled: bool = False
    """True takes one softmax over the tokens of all chunks, so that chunks compare; False (the paper) one a chunk."""

    def __post_init__(self) -> None:
        super(CacheClip, self).__post_init__()
        pick_layers(self.layers, 1024)

    def score(self, request: SelectionRequest) -> list[torch.Tensor]:
        if not self.is_open(request):
            return [torch.zeros(len(span.tokens)) for span in request.spans]
        return request.auxiliary_scores(self.layers, self.pooled)
