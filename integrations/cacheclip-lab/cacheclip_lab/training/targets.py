"""Training targets of an auxiliary model: tokens that are attended to and stale in the primary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.measuring import Block, Prefilled, Probe, auxiliary_caches
from cacheclip_rag.methods import preset
from cacheclip_rag.runtime import Runtime
from cacheclip_rag.selection import pick_layers

from ..evaluation.questions import ask
from ..evaluation.records import Record, RecordChunk
from ..models import transformers_model
from .families import Sample
from .features import Offsets, spread_over

_DIRECT = preset("direct")


def attended_and_stale(engine: CacheClipEngine, sample: Sample) -> torch.Tensor | None:
    """The target over the auxiliary's tokens of all chunks: ``(num_tokens,)`` float32, sum 1; None if nothing is stale.

    It is what :func:`attention_to_stale` gives, mapped to the auxiliary's tokens by characters. It costs more than two
    prefills of the primary. ``engine`` must keep chunk caches in memory; the sample's chunks are released.
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
    """By chunk text, the scores and offsets of the chunk's tokens; empty if nothing is stale. A token that differs in
    the prompt has score 0. Chunks that were not stored before are released."""
    chunks = tuple(RecordChunk("", chunk) for chunk in sample.chunks)
    record = Record(f"{sample.family}/0", sample.family, sample.question, (sample.answer,), chunks, {})
    missing = [chunk for chunk in sample.chunks if not engine.is_stored(chunk)]
    engine.precompute(sample.chunks, method=_DIRECT)
    engine.prefixes.clear()
    try:
        stored = engine.prefill(ask(engine, record).segments, method=_DIRECT, question=sample.question)
    finally:
        engine.release(missing)
        engine.prefixes.clear()
    found: dict[str, tuple[torch.Tensor, Offsets]] = {}
    if stored.is_exact:
        return found
    scores = attention_to_stale(engine.primary, stored, sample.question)
    for span in stored.layout.chunks:
        if span.whole not in found:
            offsets = engine.primary.tokenize(span.whole).offsets
            found[span.whole] = torch.zeros(len(offsets)), offsets
        found[span.whole][0][span.first : span.first + len(span.tokens)] = scores[span.start : span.stop]
    return found


@torch.inference_mode()
def attention_to_stale(primary: Runtime, stored: Prefilled, question: str) -> torch.Tensor:
    """``(num_tokens,)`` float32, mean over layers of ``A(t) * |dV(t)| / mean |V|``: what the question's tokens attend
    to in a full prefill, times how far its value in ``stored`` is from full prefill's."""
    runtime, layout = transformers_model(primary), stored.layout
    full, _ = runtime.prefill(layout.ids, layout.num_tokens)
    stale = _staleness(full, stored.cache, layout.num_tokens)  # (num_layers, num_tokens)
    asking = question_slots(stored, question)
    rows = torch.arange(int(asking[0]), layout.num_tokens)
    full.cut(int(asking[0]))
    layers = pick_layers("all", runtime.num_layers, runtime.without_attention)
    seen: list[torch.Tensor] = []  # by layer (num_tokens,)

    def record(layer: int, number: int, weights: torch.Tensor) -> None:
        seen.append(weights.mean(0)[asking - asking[0]].mean(0).cpu())

    every = Block.of(slice(0, len(rows)), slice(0, layout.num_tokens), rows, runtime.device)
    probe = Probe(frozenset(layers), [every], record, stop=layers[-1])
    runtime.run_slots(full, layout.ids[rows], rows, probe=probe, head=False)
    return (torch.stack(seen) * stale[layers]).mean(0)


def question_slots(stored: Prefilled, question: str) -> torch.Tensor:
    """``(num_question_tokens,)`` int64, slots of the question's tokens after the last chunk; if it does not stand
    there, those of all of the user's text there."""
    layout = stored.layout
    last = layout.chunks[-1].stop
    after = [span for span in layout.spans if span.start >= last and not span.is_chunk and not span.segment.control]
    for wanted in (question.strip(), ""):
        slots = []
        for span in after:
            text = span.segment.text
            start = text.rfind(wanted) if wanted else 0
            stop = start + len(wanted) if wanted else len(text)
            for number, (first, end) in enumerate(span.tokens.offsets):
                if start >= 0 and start < end and first < stop and text[first:end].strip():
                    slots.append(span.start + number)
        if slots:
            return torch.tensor(slots)
    return torch.tensor([layout.num_tokens - 1])


def _staleness(full: Any, stale: Any, num_tokens: int) -> torch.Tensor:
    """``(num_layers, num_tokens)``: norm of each value's change, divided by the layer's mean norm."""
    changes = torch.zeros(len(full.layers), num_tokens)
    for row, fresh, old in zip(changes, full.layers, stale.layers, strict=True):
        length = min(fresh.length, old.length)
        change = (fresh.values[0, :, :length] - old.values[0, :, :length]).float().norm(dim=-1)
        size = fresh.values[0].float().norm(dim=-1)
        row[:length] = (change / size.mean(-1, keepdim=True)).mean(0).cpu()
    return changes
