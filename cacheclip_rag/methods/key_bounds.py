"""Key bounds: a cheap guess, from the primary's keys as they are stored, at what the question will attend to.

Source: Quest (arXiv:2406.10774), which bounds the attention of a query to each page of keys by their smallest and
largest components, and attends to the best pages while decoding. Here the best pages are recomputed; where else this
departs from it says :mod:`cacheclip_rag.selection.bounds`. The question is read by itself, as by
``query_attention:alone=true``: a pass over its own few rows. No weight on a chunk token is formed; with pages of one
token it is that method, with ``softmax=chunks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import check_whole_number
from ..selection.bounds import bounds_to_tokens
from ..selection.question import pick_layers
from .base import SelectionRequest, split_by_span
from .selective import Selective

__all__ = ["KeyBounds"]


@dataclass(frozen=True, slots=True)
class KeyBounds(Selective):
    """Exact at ``recompute_ratio`` 1.0; at 0.0 it equals direct reuse. All tokens of a page score alike: it is one to
    mix with another, as in ``mixed:first=key_bounds:second=epic/reach=64``."""

    name: ClassVar[str] = "key_bounds"

    layers: str = "upper"
    """As in :class:`~cacheclip_rag.methods.query_attention.QueryAttention`."""
    page: int = 16
    """Tokens of a page."""

    def __post_init__(self) -> None:
        super(KeyBounds, self).__post_init__()
        pick_layers(self.layers, 1024)
        check_whole_number("page", self.page, least=1, of="tokens")

    def rate(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert request.cache is not None, "keys are looked at after the caches are read"
        fresh = set(request.fresh.tolist())
        found = bounds_to_tokens(
            request.runtime,
            request.cache,
            request.layout.ids,
            request.question,
            # exact chunks too, which will not be chosen from
            [slice(span.start, span.stop) for span in request.layout.chunks if span.start not in fresh],
            pick_layers(self.layers, request.runtime.num_layers),
            page=self.page,
        )
        return split_by_span(found, request.spans)
