"""Samples as prompts of an engine's primary model."""

from __future__ import annotations

from ...engine import CacheClipEngine
from ...prompt.segments import Segment
from ..evaluation.questions import ask
from ..evaluation.records import Record, RecordChunk
from .families import Sample

__all__ = ["segments_of"]


def segments_of(engine: CacheClipEngine, sample: Sample) -> list[Segment]:
    """The segments of the sample's prompt."""
    chunks = tuple(RecordChunk("", chunk) for chunk in sample.chunks)
    record = Record(f"{sample.family}/0", sample.family, sample.question, (sample.answer,), chunks, {})
    return ask(engine, record).segments
