"""Measures how long prefills of several sizes take here, so that recompute ratios are chosen by predicted time.

Prompts of each size are answered by plain prefill and by a method that reuses chunks, with few long chunks and with
many short ones, at a small and at a large recompute ratio. Sizes are doubled until one plain prefill is long enough.
Then KV of made-up chunks is written to the engine's own store, read from each of its tiers, and removed again.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from cacheclip_rag import CacheClipEngine, ConfigurationError, StoreError
from cacheclip_rag.methods import Method, preset
from cacheclip_rag.plugins import progress_bar

from .controller import Profile, Work, find_profile
from .fitting import Timing, fitted_profile
from .reads import TimedRead, has_room, measure_reads
from .texts import QUESTION, make_texts

logger = logging.getLogger(__name__)

_LEAST_TOKENS, _MOST_TOKENS = 128, 8192
"""Tokens of chunks in the smallest and in the largest prompt."""
_ENOUGH_S = 4.0
"""No larger prompt is measured after a plain prefill of so many seconds."""
_LEAST_SIZES = 3
_LONG, _SHORT = 256, 64
"""Tokens of a chunk."""
_RATIOS = (0.05, 0.4)
_TOGETHER = 3
"""Chunks of each length that are read together, for the speed of reading."""
_PARTS = (1, 4, 16)
"""They have this part of the tokens where the store has no room for more."""
_REPEATS = 2
"""Each prefill is measured so often, in rounds. The shortest time counts: other load only adds to it."""


def measure_profile(engine: CacheClipEngine, method: Method, identity: Mapping[str, Any]) -> Profile:
    """Measure a method and plain prefill, and how long the tiers of the engine's store take to be read. The weights are
    those that are loaded; chunks of prompts go to a temporary folder, or to memory if the store is in memory. Takes one
    to two minutes with the default models on two CPU cores. Media of other stores stay, if a saved profile of the same
    ``identity`` has them. Raises ConfigurationError: the method reuses no stored chunks, or the model's context is too
    short for three sizes."""
    if not method.reuses_chunks:
        raise ConfigurationError(f"method {method.name!r} reuses no stored chunks, so there is nothing to choose.")
    config = engine.config
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheclip-profile-"))
        alone = replace(config, prefix_cache_bytes=0, max_bytes=None, store=folder if config.store else None)
        measuring = _Measuring(CacheClipEngine(alone), method)
        stack.callback(measuring.engine.close)
        with progress_bar("measuring", None, "prefills") as advance:
            found: dict[tuple[Any, ...], Timing] = {}
            for number, sample in enumerate(measuring.samples(), 1):
                key = sample.work, sample.ratio
                if key not in found or sample.seconds < found[key].seconds:
                    found[key] = sample
                advance(number)
    if len({sample.work.tokens for sample in found.values() if sample.ratio is None}) < _LEAST_SIZES:
        raise ConfigurationError(
            f"the context of model {config.primary!r} is too short for prompts of three sizes, so no profile can be "
            "measured. Set a recompute_ratio instead of 'auto'."
        )
    profile, saved = fitted_profile(identity, list(found.values()), _reads(engine, method)), find_profile(identity)
    return profile if saved is None else replace(profile, media={**saved.media, **profile.media})


def _reads(engine: CacheClipEngine, method: Method) -> list[TimedRead]:
    """Readings of few and of several entries, of short and of long ones, from each tier of the engine's own store. None
    if the store cannot be measured."""
    [caches], store = engine.chunk_caches(engine.context_of(method), with_auxiliary=False), engine.store.chunk_store
    runtime = caches.runtime
    try:
        for part in _PARTS:
            sizes = [size // part for size in (_SHORT, _LONG) for _ in range(_TOGETHER)]
            shapes = [runtime.kv_shape(size) for size in sizes]
            if has_room(store, shapes, caches.codec):
                generator = torch.Generator().manual_seed(0)
                dtype = torch.uint8 if runtime.kv_codec else runtime.dtype
                kv = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
                short, long = range(_TOGETHER), range(_TOGETHER, 2 * _TOGETHER)
                return measure_reads(store, kv, [short[:1], short, long[:1], long], caches.codec, shapes)
        logger.warning("the store is full, so that its reading speed is not measured, but learned from answers")
    except (OSError, StoreError) as error:
        logger.warning("the store's reading speed is not measured, but learned from answers: %s", error)
    return []


class _Measuring:
    """Prefills of growing prompts."""

    def __init__(self, engine: CacheClipEngine, method: Method) -> None:
        self.engine, self._method = engine, replace(method, min_confidence=0.0)
        runtime = engine.primary
        most = min(_MOST_TOKENS, int(0.75 * min(runtime.context_tokens, runtime.reuse_tokens)))
        self._texts = {
            size: make_texts(runtime.tokenize, max(1, most // size), size, seed=size) for size in (_LONG, _SHORT)
        }
        self._sizes = [2**n for n in range(20) if _LEAST_TOKENS <= 2**n <= most]

    def samples(self) -> Iterator[Timing]:
        self._timed(self._prompt(self._sizes[0], _SHORT), self._method)  # the first one makes threads and buffers
        sizes = []
        for size in self._sizes:
            sizes.append(size)
            slowest = 0.0
            for sample in self._of(size):
                slowest = max(slowest, sample.seconds)
                yield sample
            if slowest > _ENOUGH_S and len(sizes) >= _LEAST_SIZES:
                break
        for _ in range(_REPEATS - 1):
            for size in sizes:
                yield from self._of(size)

    def _of(self, size: int) -> Iterator[Timing]:
        """Plain and fused prefills of ``size`` tokens of chunks."""
        yield self._timed(self._prompt(size, _SHORT), preset("full"))
        method = self._method
        cases = [(_LONG, method), (_SHORT, method)]
        if method.has_ratio:
            few, many = _RATIOS
            cases = [(_LONG, method.at(few)), (_LONG, method.at(many)), (_SHORT, method.at(many))]
        for length, at in cases:
            yield self._timed(self._prompt(size, length), at)

    def _prompt(self, size: int, length: int) -> str:
        texts = self._texts[length][: max(1, size // length)]
        self.engine.precompute(texts, method=self._method)
        return "\n\n".join(texts) + f"\n\nQuestion: {QUESTION}"

    def _timed(self, prompt: str, method: Method) -> Timing:
        plan = self.engine.plan(prompt, method=method, question=QUESTION)
        stats = self.engine.prefill(prompt, method=method, question=QUESTION).stats
        return Timing(Work.of(plan, 0), method.nominal_ratio if method.reuses_chunks else None, stats.phases_s)
