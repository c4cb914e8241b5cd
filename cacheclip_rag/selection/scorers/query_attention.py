"""Query attention: the primary's own attention from the question, over the stale cache.

Published query-aware methods are settings of this scorer (:mod:`cacheclip_rag.methods.presets`). It runs the question's
few rows through the model once more than other methods do, and computes no chunk tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...checks import check_choice, check_flag, check_share
from ...errors import ConfigurationError
from ..auxiliary import score_chunks
from ..question import attention_to_tokens, pick_layers
from ..views import CacheView, split_by_span
from .base import CacheScorer

__all__ = ["QueryAttention"]

_CHOICES = {"heads": ("mean", "max"), "queries": ("mean", "max"), "softmax": ("row", "chunks")}
_REPEAT = "\n\nRepeat the previous context exactly."
"""KVzip's prompt (arXiv:2505.23416), as shortened by QCFuse: it attends to the tokens that carry a chunk's content."""
_SINK_TOKENS = 4
"""First tokens of each chunk that the question always sees."""


@dataclass(frozen=True, slots=True)
class QueryAttention(CacheScorer):
    """Attention of the question's tokens, in the primary model, on each chunk token."""

    layers: str = "last"
    """Layers whose attention scores: ``all``, ``last``, ``upper``, ``middle``, a range of depth (``0.6-0.7``), a depth
    and a count (``0.6+4``), or layer numbers joined by ``+``."""
    heads: str = "mean"
    """``mean`` or ``max`` over heads."""
    queries: str = "mean"
    """``mean`` (the same ranking as a sum) or ``max`` over question tokens."""
    softmax: str = "row"
    """``row``: softmax over all keys that a question token sees; ``chunks``: over tokens of reused chunks only."""
    visible_share: float = 1.0
    """Share of each chunk that the question may see in the model's own attention, tokens that carry most of the chunk's
    content first; 1.0: the whole chunk, 0.0: no token."""
    question_only: bool = False
    """True: in the model's own attention, the question sees only itself."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        pick_layers(self.layers, 1024)
        check_share("visible_share", self.visible_share, "each chunk")
        check_flag("question_only", self.question_only)
        if self.question_only and self.visible_share < 1.0:
            raise ConfigurationError(
                "with question_only=True the question sees no chunk, so visible_share must be left out; got "
                f"visible_share={self.visible_share}. Leave one of the two out."
            )

    def score(self, view: CacheView) -> list[torch.Tensor]:
        found = attention_to_tokens(
            view.runtime,
            view.cache,
            view.layout.ids,
            view.fresh,
            view.question,
            pick_layers(self.layers, view.runtime.num_layers),
            heads=self.heads,
            queries=self.queries,
            among=_chunk_slots(view) if self.softmax == "chunks" else None,
            visible=self._visible(view),
        )
        return split_by_span(found, view.spans)

    def _visible(self, view: CacheView) -> torch.Tensor | None:
        """``(num_tokens,)`` bool: tokens that the question may see; None: all."""
        if self.visible_share < 1.0:
            return self._visible_parts(view)
        if not self.question_only:
            return None
        visible = torch.zeros(view.layout.num_tokens, dtype=torch.bool)
        visible[int(view.question[0]) : int(view.question[-1]) + 1] = True
        return visible

    def _visible_parts(self, view: CacheView) -> torch.Tensor:
        """``(num_tokens,)`` bool: all tokens outside the chunks, and each chunk's sinks and most important tokens."""
        visible = torch.ones(view.layout.num_tokens, dtype=torch.bool)
        for span, score in zip(view.spans, _repeat_scores(view), strict=True):
            keep = round(self.visible_share * len(span.tokens))
            inside = torch.zeros(len(span.tokens), dtype=torch.bool)
            inside[score.argsort(descending=True, stable=True)[:keep]] = True
            inside[: _SINK_TOKENS if self.visible_share else 0] = True
            visible[span.start : span.stop] = inside
        return visible


def _chunk_slots(view: CacheView) -> torch.Tensor:
    """``(num_tokens,)`` bool: tokens of all reused chunks, including exact chunks."""
    among = torch.zeros(view.layout.num_tokens, dtype=torch.bool)
    for span in view.layout.chunks:
        among[span.start : span.stop] = True
    among[view.fresh] = False
    return among


def _repeat_scores(view: CacheView) -> list[torch.Tensor]:
    """Attention from a request to repeat each chunk. Computed for each prompt (a few rows per chunk), not stored."""
    cache, runtime = view.cache, view.runtime
    prefix = runtime.extract(cache, 0, view.layout.num_prefix)
    chunks = [runtime.extract(cache, span.start, span.stop) for span in view.spans]
    ids = runtime.tokenize(_REPEAT).ids
    return score_chunks(runtime, prefix, chunks, ids, layers=range(runtime.num_layers), heads="max", queries="max")
