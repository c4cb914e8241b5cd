"""Estimates the cost of an ingestion: chunks, bytes, seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from cacheclip_rag.base.errors import CacheClipError
from cacheclip_rag.chunks.batches import in_batches
from cacheclip_rag.chunks.caches import ChunkCaches
from cacheclip_rag.engine import CacheClipEngine
from cacheclip_rag.prompt.segments import chunk_texts
from cacheclip_rag.store import text_digest

from .survey import DocumentWork, IngestCounts, Survey

_SAMPLED_CHUNKS = 64
_TIMED_BATCHES = 3
"""Batches of chunks of middle length among the first ``_SAMPLED_CHUNKS``."""


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
            if reason := _reason_to_fail(passages, engine.chunk_caches() if engine is not None else ()):
                survey.tell("failed", item.name, f"{item.name}: {reason}")
                continue
            found.added += item.is_new
            found.changed += not item.is_new
            found.chunks += len(passages)
            yield from passages

    if engine is not None:
        price(engine, texts(), found)
    else:
        for _ in texts():
            pass
    found.removed = len(survey.settle(found, confirmed))
    return found


def _reason_to_fail(passages: Iterable[str], models: Sequence[ChunkCaches]) -> str:
    """Why the KV of a document cannot be stored; empty if it can."""
    try:
        for passage in passages:
            for caches in models:
                caches.check_length(passage)
    except CacheClipError as error:
        return str(error)
    return ""


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
