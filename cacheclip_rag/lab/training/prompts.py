"""Samples as prompts of an engine's primary model."""

from __future__ import annotations

from ...engine import CacheClipEngine
from ...prompt.segments import Segment
from ..evaluation.questions import ask
from ..evaluation.records import Record, RecordChunk
from .families import Sample

__all__ = ["record_of", "segments_of"]


def record_of(sample: Sample) -> Record:
    """The sample as a record for the laboratory."""
    chunks = tuple(RecordChunk("", chunk) for chunk in sample.chunks)
    return Record(f"{sample.family}/0", sample.family, sample.question, (sample.answer,), chunks, {})


def segments_of(engine: CacheClipEngine, sample: Sample) -> list[Segment]:
    """The segments of the sample's prompt."""
    return ask(engine, record_of(sample)).segments
