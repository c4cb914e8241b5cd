"""Precomputing for adapters: in batches, with what it would cost, and whether it is done. Imports torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

import torch

from ..base.errors import CacheClipError
from ..base.keys import text_digest
from ..chunks.batches import in_batches
from ..chunks.caches import ChunkCaches
from ..engine import CacheClipEngine
from ..methods.base import Method
from ..prompt.segments import chunk_texts

logger = logging.getLogger(__name__)

_SAMPLED_CHUNKS = 64
_TIMED_BATCHES = 3
"""Batches of chunks of middle length among the first ``_SAMPLED_CHUNKS``."""


@dataclass(slots=True)
class PrecomputeCost:
    """What it would take to precompute texts."""

    chunks: int = 0
    """Texts, equal ones included."""
    computed: int = 0
    """Different texts of which something is not stored."""
    tokens: int = 0
    """Their tokens, in the primary's tokenizer."""
    bytes: int = 0
    """Bytes of their KV for all models."""
    seconds: float = 0.0
    """Estimated seconds to compute the KV on this machine, from a few timed chunks."""


@torch.inference_mode()
def precompute_cost(
    engine: CacheClipEngine, texts: Iterable[str], *, method: str | Method | None = None
) -> PrecomputeCost:
    """What it would take to precompute ``texts`` for a method (default the engine's method). Reads one text at a time,
    computes a few of them for timing, and stores nothing. Raises the same errors as precomputing."""
    models = engine.chunk_caches(engine.context_of(method))
    cost, known = PrecomputeCost(), set[bytes]()
    num_tokens, samples = [0] * len(models), [[] for _ in models]  # type: tuple[list[int], list[list[str]]]
    for text in chunk_texts(texts):
        cost.chunks += 1
        digest = text_digest(text)
        if digest in known:
            continue
        known.add(digest)
        for caches in models:
            caches.check_length(text)
        missing = [text not in caches for caches in models]
        cost.computed += any(missing)
        for number, caches in enumerate(models):
            if missing[number]:
                tokens = len(caches.tokenize(text))
                num_tokens[number] += tokens
                cost.tokens += tokens if number == 0 else 0
                cost.bytes += caches.stored_bytes(tokens)
                if len(samples[number]) < _SAMPLED_CHUNKS:
                    samples[number].append(text)
    cost.seconds = sum(
        tokens * _seconds_per_token(caches, sample)
        for tokens, caches, sample in zip(num_tokens, models, samples, strict=True)
    )
    return cost


def _seconds_per_token(caches: ChunkCaches, texts: Sequence[str]) -> float:
    if not texts:
        return 0.0
    # computed directly, without the store
    prefix = caches.prefix.encode() if caches.num_prefix else None
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


def precompute_in_batches(
    engine: CacheClipEngine, texts: Iterable[tuple[str, tuple[str, str] | None]], *, method: str | Method | None = None
) -> Iterator[None]:
    """Precompute texts that are not blank. Short texts are computed together, and after each batch an item is yielded,
    so that whoever leaves stops there. A text that cannot be stored is skipped with a warning that names its sources.

    Args:
        texts: texts, each with its source and document; None: it has no source.
        method: method whose chunk context is used; default the engine's method.
    """
    for batch in in_batches((each for each in texts if each[0].strip()), itemgetter(0)):
        origins: dict[str, list[tuple[str, str]]] = {}
        for text, origin in batch:
            origins.setdefault(text, []).extend([origin] if origin else [])
        engine.precompute(origins, method=method, skipped=_warn_skipped)
        yield


def _warn_skipped(text: str, sources: Sequence[str], error: Exception) -> None:
    """Say which document has no KV, and why; the index is built all the same. Prompts with it are answered as without
    this package."""
    names = ", ".join(sources) or "without an id"
    logger.warning("document %s (%r...) is not precomputed: %s", names, text[:40], error)


def all_stored(engine: CacheClipEngine, texts: Iterable[str], *, method: str | Method | None = None) -> bool:
    """Whether the KV of these texts is stored for a method (default the engine's method), apart from texts that cannot
    be stored because they are longer than a model's context."""
    models = engine.chunk_caches(engine.context_of(method))
    return all(text in caches or not _fits(text, caches) for text in chunk_texts(texts) for caches in models)


def _fits(text: str, caches: ChunkCaches) -> bool:
    try:
        caches.check_length(text)
    except CacheClipError:
        return False
    return True
