"""What an auxiliary model should find: the tokens of a prompt that the primary both attends to and holds stale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..engine import CacheClipEngine
from ..methods.base import SelectionRequest
from ..methods.oracle import Oracle
from .families import Sample
from .features import spread_over
from .prompts import segments_of

__all__ = ["attended_and_stale"]


@dataclass(frozen=True, slots=True)
class _Recording(Oracle):
    """The oracle, keeping what it found."""

    found: list[tuple[SelectionRequest, list[torch.Tensor]]] = field(default_factory=list, compare=False)

    def rate(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rated = super(_Recording, self).rate(request, scores)
        self.found.append((request, rated))
        return rated


def attended_and_stale(engine: CacheClipEngine, sample: Sample) -> torch.Tensor:
    """Per token of the auxiliary, over all chunks side by side: the share of the primary's attention to stale values
    that falls on it. ``(num_tokens,)`` float32, sum 1 (0 throughout where nothing is stale).

    ``u(t)`` is the mean over layers of ``A(t) * |dV(t)| / mean |V|`` (:mod:`cacheclip_rag.methods.oracle`), carried
    over to the auxiliary's tokens by the characters they share. Costs two prefills of the primary and more.
    """
    auxiliary = engine.auxiliary
    assert auxiliary is not None
    method = _Recording(recompute_ratio=0.01, behind=engine.config.behind)
    engine.precompute(sample.chunks, method=method)
    engine.prefixes.clear()
    try:
        engine.prefill(segments_of(engine, sample), method=method, question=sample.question)
    finally:
        engine.release(sample.chunks)
        engine.prefixes.clear()
    [(request, rated)] = method.found
    by_text = {
        span.segment.text: (score, span.tokens.offsets) for span, score in zip(request.spans, rated, strict=True)
    }
    parts = []
    for chunk in sample.chunks:
        offsets = auxiliary.tokenize(chunk).offsets
        if chunk in by_text:
            score, source = by_text[chunk]
            parts.append(spread_over(score.float(), source, offsets))
        else:  # exact already
            parts.append(torch.zeros(len(offsets)))
    found = torch.cat(parts)
    return found / found.sum().clamp(min=1e-12)
