"""Training targets of an auxiliary model: tokens that are attended to and stale in the primary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.measuring import auxiliary_caches
from cacheclip_rag.methods import Method
from cacheclip_rag.selection import CacheView

from ..comparators import Oracle
from ..evaluation.questions import ask
from ..evaluation.records import Record, RecordChunk
from .families import Sample
from .features import Offsets, spread_over


def attended_and_stale(engine: CacheClipEngine, sample: Sample) -> torch.Tensor | None:
    """The target over the auxiliary's tokens of all chunks: ``(num_tokens,)`` float32, sum 1; None if nothing is stale.

    It is the oracle's score, the mean over layers of ``A(t) * |dV(t)| / mean |V|``
    (:class:`~cacheclip_lab.comparators.Oracle`), mapped to the auxiliary's tokens by characters. It costs more than
    two prefills of the primary. ``engine`` must keep chunk caches in memory; the sample's chunks are released.
    """
    assert engine.config.store is None, "training needs an engine in memory, not a user's store"
    by_text = _recorded(engine, sample)
    parts = []
    for chunk in sample.chunks:
        offsets = auxiliary_caches(engine).tokenize(chunk).offsets
        if chunk in by_text:
            score, source = by_text[chunk]
            parts.append(spread_over(score.float(), source, offsets))
        else:  # the chunk is exact, or so short that it is computed with the prompt
            parts.append(torch.zeros(len(offsets)))
    found = torch.cat(parts)
    return found / found.sum() if bool(found.any()) else None


def after_sinks(target: torch.Tensor, lengths: Sequence[int], sinks: int) -> torch.Tensor | None:
    """The target without the first ``sinks`` tokens of every chunk, which get no score; None if nothing is left."""
    scored = torch.cat([torch.arange(length) >= sinks for length in lengths])
    left = target * scored
    return left / left.sum() if bool(left.any()) else None


def _recorded(engine: CacheClipEngine, sample: Sample) -> dict[str, tuple[torch.Tensor, Offsets]]:
    """By chunk text, the oracle's scores, and the offsets of the chunk's tokens; empty if there is nothing to choose. A
    token that differs in the prompt has score 0. The recompute itself is skipped. Chunks that were not stored before
    are released."""
    recording = _Recording()
    chunks = tuple(RecordChunk("", chunk) for chunk in sample.chunks)
    record = Record(f"{sample.family}/0", sample.family, sample.question, (sample.answer,), chunks, {})
    missing = [chunk for chunk in sample.chunks if not engine.is_stored(chunk)]
    engine.precompute(sample.chunks, method=recording)
    engine.prefixes.clear()
    try:
        with suppress(_Recorded):
            engine.prefill(ask(engine, record).segments, method=recording, question=sample.question)
    finally:
        engine.release(missing)
        engine.prefixes.clear()
    found: dict[str, tuple[torch.Tensor, Offsets]] = {}
    for chunk, parts in recording.found.items():
        offsets = engine.primary.tokenize(chunk).offsets
        values = torch.zeros(len(offsets))
        for first, part in parts:
            values[first : first + part.shape[-1]] = part.float()
        found[chunk] = (values, offsets)
    return found


class _Recorded(Exception):
    """Ends a prefill after the scores are recorded; not an error."""


@dataclass(frozen=True, slots=True)
class _Recording(Method):
    """Records the oracle's scores, and ends the prefill."""

    found: dict[str, list[tuple[int, torch.Tensor]]] = field(default_factory=dict, compare=False)
    """By chunk text: the first token of each part in the prompt, and the scores of the part."""

    def select(self, view: CacheView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for span, score in zip(view.spans, Oracle().score(view) if view.spans else (), strict=True):
            self.found.setdefault(span.whole, []).append((span.first, score))
        raise _Recorded
