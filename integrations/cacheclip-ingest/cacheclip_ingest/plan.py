"""Estimates the cost of an ingestion: chunks, bytes, seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cacheclip_rag import CacheClipEngine, CacheClipError
from cacheclip_rag.adapters import precompute_cost

from .survey import DocumentWork, IngestCounts, Survey


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


def plan_documents(
    survey: Survey,
    documents: Iterable[tuple[DocumentWork, list[str]]],
    engine: CacheClipEngine | None,
    *,
    confirmed: bool,
    max_bytes: int | None = None,
) -> IngestPlan:
    """What a run would do with the documents to process.

    Args:
        engine: computes their KV; None: no KV is computed.
    """
    found = survey.begin(IngestPlan)
    found.max_bytes = max_bytes

    def texts() -> Iterator[str]:
        for item, passages in documents:
            if reason := _reason_to_fail(passages, engine):
                survey.tell("failed", item.name, f"{item.name}: {reason}")
                continue
            found.added += item.is_new
            found.changed += not item.is_new
            found.chunks += len(passages)
            yield from passages

    if engine is not None:
        cost = precompute_cost(engine, texts())
        found.computed, found.tokens, found.bytes, found.seconds = cost.computed, cost.tokens, cost.bytes, cost.seconds
        if max_bytes is not None:
            found.excess_bytes = max(0, engine.store.chunk_store.stats().bytes + cost.bytes - max_bytes)
    else:
        for _ in texts():
            pass
    found.removed = len(survey.settle(found, confirmed))
    return found


def _reason_to_fail(passages: Iterable[str], engine: CacheClipEngine | None) -> str:
    """Why the KV of a document cannot be stored; empty if it can."""
    models = engine.chunk_caches() if engine is not None else []
    try:
        for passage in passages:
            for caches in models:
                caches.check_length(passage)
    except CacheClipError as error:
        return str(error)
    return ""
