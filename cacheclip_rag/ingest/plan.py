"""Estimates the cost of an ingestion: chunks, bytes, seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch

from ..chunks.batches import in_batches
from ..chunks.caches import ChunkCaches
from ..engine import CacheClipEngine
from ..prompt.segments import chunk_texts
from ..store import text_digest

_SAMPLED_CHUNKS = 64
_TIMED_BATCHES = 3
"""Batches of chunks of middle length among the first ``_SAMPLED_CHUNKS``."""


Problems = list[dict[str, str]]


@dataclass(slots=True)
class IngestCounts:
    """What an ingestion run does, or would do, with documents."""

    added: int = 0
    """Documents."""
    changed: int = 0
    """Changed documents, and those that were damaged in the library."""
    unchanged: int = 0
    removed: int = 0
    chunks: int = 0
    """Passages of added and changed documents."""
    computed: int = 0
    """Passages whose KV was not stored."""
    failed: Problems = field(default_factory=list)
    """Documents that could not be read: ``{"path", "error"}``. The others are ingested."""
    skipped: Problems = field(default_factory=list)
    """Paths that are left out on purpose, such as files of other types, and links that lead out of the given folder:
    ``{"path", "error"}``."""
    notes: Problems = field(default_factory=list)
    """What readers of these documents see and their text lacks, such as pages that were scanned:
    ``{"path", "note"}``."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class IngestPlan(IngestCounts):
    """What an ingestion run would do, and its cost."""

    tokens: int = 0
    """Tokens of the passages to compute, in the primary's tokenizer."""
    bytes: int = 0
    """Bytes of their KV for all models."""
    seconds: float = 0.0
    """Estimated seconds to compute the KV, from a few timed chunks; embeddings are not included."""
    max_bytes: int | None = None
    """Limit of the store; None: no limit."""
    excess_bytes: int = 0
    """Bytes by which the store would exceed its limit. About so many bytes of chunk caches would be evicted."""


@torch.inference_mode()
def price(engine: CacheClipEngine, texts: Iterable[str], plan: IngestPlan, *, method: str | None = None) -> None:
    """Fill in the cost of precomputing ``texts`` for a method (default the engine's method). Reads one text at a time,
    computes a few of them for timing, and stores nothing. Raises the same errors as precomputing."""
    models = engine.chunk_caches(engine.context_of(method))
    known: set[bytes] = set()
    num_tokens, samples = [0] * len(models), [[] for _ in models]  # type: tuple[list[int], list[list[str]]]
    for text in chunk_texts(texts):
        digest = text_digest(text)
        if digest in known:
            continue
        known.add(digest)
        for caches in models:
            caches.check_length(text)
        missing = [text not in caches for caches in models]
        plan.computed += any(missing)
        for number, caches in enumerate(models):
            if missing[number]:
                tokens = len(caches.tokenize(text))
                num_tokens[number] += tokens
                plan.tokens += tokens if number == 0 else 0
                plan.bytes += caches.stored_bytes(tokens)
                if len(samples[number]) < _SAMPLED_CHUNKS:
                    samples[number].append(text)
    plan.seconds = sum(
        tokens * _seconds_per_token(caches, sample)
        for tokens, caches, sample in zip(num_tokens, models, samples, strict=True)
    )
    if plan.max_bytes is not None:
        plan.excess_bytes = max(0, engine.store.chunk_store.stats().bytes + plan.bytes - plan.max_bytes)


def _seconds_per_token(caches: ChunkCaches, texts: Sequence[str]) -> float:
    if not texts:
        return 0.0
    # computed directly, without the store
    prefix = caches.encode_prefix() if caches.num_prefix else None
    middle = sorted(texts, key=len)[len(texts) // 2 :]
    batches = [
        [caches.tokenize(text).ids for text in batch]
        for batch in islice(in_batches(middle, str, characters=caches.runtime.batch_characters), _TIMED_BATCHES)
    ]
    caches.runtime.encode_many(batches[0], prefix)  # warm up: the first run of a shape takes longer
    started = time.perf_counter()
    for batch in batches:
        caches.runtime.encode_many(batch, prefix)
    return (time.perf_counter() - started) / sum(len(ids) for batch in batches for ids in batch)
