"""Estimates the cost of an ingestion: chunks, bytes, seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..chunks.caches import ChunkCaches
from ..engine import CacheClipEngine
from ..prompt.segments import chunk_texts

__all__ = ["IngestPlan", "price"]

_TIMED_CHUNKS = 3


@dataclass(slots=True)
class IngestPlan:
    """What an ingestion run would do, and its cost."""

    added: int = 0
    """Documents."""
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    chunks: int = 0
    """Passages of added and changed documents."""
    computed: int = 0
    """Passages whose KV is not stored."""
    tokens: int = 0
    """Tokens of these passages in the primary's tokenizer."""
    bytes: int = 0
    """Bytes of their KV for all models."""
    seconds: float = 0.0
    """Estimated seconds to compute the KV, from a few timed chunks; embeddings are not included."""
    failed: list[dict[str, str]] = field(default_factory=list)
    """Documents that cannot be read: ``{"path", "error"}``."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.inference_mode()
def price(engine: CacheClipEngine, texts: Sequence[str], plan: IngestPlan, *, method: str | None = None) -> None:
    """Fill in the cost of precomputing ``texts`` for a method (default the engine's method). Computes a few of them for
    timing and stores nothing. Raises the same errors as precomputing."""
    wanted = list(dict.fromkeys(chunk_texts(texts)))
    models = engine.chunk_caches(engine.context_of(method))
    for caches in models:
        for text in wanted:
            caches.check_length(text)
    missing = [[text for text in wanted if caches.can_reuse and text not in caches] for caches in models]
    plan.computed = len({text for of_model in missing for text in of_model})
    for number, (caches, of_model) in enumerate(zip(models, missing, strict=True)):
        tokens = [len(caches.tokenize(text)) for text in of_model]
        plan.tokens += sum(tokens) if number == 0 else 0
        plan.bytes += sum(map(caches.stored_bytes, tokens))
        plan.seconds += sum(tokens) * _seconds_per_token(caches, of_model)


def _seconds_per_token(caches: ChunkCaches, texts: Sequence[str]) -> float:
    if not texts:
        return 0.0
    # computed directly, without the store
    prefix = caches.runtime.encode(caches.prefix_ids) if caches.prefix_ids else None
    timed = sorted(texts, key=len)[len(texts) // 2 :][:_TIMED_CHUNKS]  # chunks of middle length
    caches.runtime.encode(caches.tokenize(timed[0]).ids, prefix)  # warm up: the first run of a shape takes longer
    started = time.perf_counter()
    for text in timed:
        caches.runtime.encode(caches.tokenize(text).ids, prefix)
    return (time.perf_counter() - started) / sum(len(caches.tokenize(text)) for text in timed)
