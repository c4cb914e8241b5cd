"""From a plan to the first logits, on any runtime: fused prefill if the plan reuses chunks, else plain prefill."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch

from ..base.clock import PhaseClock
from ..fusion.answer import FusionStats, Trace
from ..fusion.fused import Fused
from ..plan.kv_sources import KVSources
from ..plan.plan import Plan
from ..prompt.layout import Layout, Span
from ..prompt.occurrences import MOST_PARTIAL, occurrences
from ..runtime.base import State, wait_for
from .sampler import confidence

logger = logging.getLogger(__name__)


Keep = Callable[[Sequence[int], Any], None]
"""Lets later prompts use the KV that a state has of these tokens, of a prompt and its answer."""


def keep(
    insert: Callable[[Sequence[int], Any], object],
    ids: Sequence[int],
    state: Any,
    *,
    max_tokens: int | None = None,
    num_plain: int | None = None,
) -> None:
    """Insert KV into a cache. An answer must not fail because its KV cannot be kept, for instance out of memory.

    Args:
        max_tokens: if there are more ``ids``, nothing is kept: the rotary frequencies may have changed.
        num_plain: leading tokens whose KV equals plain prefill's; None for all tokens.
    """
    if max_tokens is not None and len(ids) > max_tokens:
        return
    try:
        insert(ids[:num_plain], state)
    except (RuntimeError, MemoryError) as error:
        logger.warning("the KV of this prompt could not be kept for later prompts: %s", error)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefilled prompt, ready to decode."""

    layout: Layout
    cache: State
    """State of the runtime that prefilled it."""
    logits: torch.Tensor
    """Logits of the prompt's last token, ``(vocab_size,)``."""
    stats: FusionStats
    missing: tuple[str, ...]
    """Texts to store after the answer: chunks computed as fresh text because their KV was not stored or was damaged, if
    half or more of them stands in the prompt."""
    keeping: Keep | None = None
    """Takes exact KV into the prefix cache; None if it may keep nothing of this prompt."""
    continuing: Keep | None = None
    """Takes approximate KV, which later prompts continue; None: it is exact, or the method does not allow it."""
    trace: Trace | None = None
    is_exact: bool = True
    """Whether all KV equals plain prefill's."""

    def keep_prefix(self, cache: State, answer: Sequence[int] = ()) -> None:
        """Keep the KV of prompt and answer for later prompts. The answer's last token has no KV in ``cache``."""
        ids = [*self.layout.token_ids, *answer][: cache.get_seq_length()] if self.keeping or self.continuing else []
        if self.keeping is not None:
            self.keeping(ids, cache)
        if self.continuing is not None and answer:  # once, when the answer is there
            self.continuing(ids, cache)


def prefill_plan(
    plan: Plan, kv_sources: KVSources, *, answer_tokens: int, clock: PhaseClock, trace: bool = False
) -> Prefilled:
    """Carry out a plan, with room for ``answer_tokens``. ``clock`` was started when the request came in. ``trace``:
    also record which tokens were computed again."""
    capacity = plan.layout.num_tokens + answer_tokens
    cleared = kv_sources.prefix_cache.cleared  # texts that are released from now on stay out of it
    if not plan.reused:
        return _plain(plan, kv_sources, cleared, capacity, clock)
    if plan.bypass is not None:
        planned = stats_of(plan, clock)  # hits and misses are those of the plan
        found = _plain_instead(plan, plan.bypass, planned, kv_sources, cleared, capacity, clock)
        return replace(found, stats=replace(found.stats, bypassed=True))
    fused = kv_sources.primary.runtime.fuse(plan, kv_sources, capacity=capacity, clock=clock)
    if fused is None:
        why = f"no chunk of {len(plan.layout.chunks)} could be read"
        return _plain(replace(plan.reusing(()), fallback=why), kv_sources, cleared, capacity, clock)
    found = _fused(fused, kv_sources, cleared, clock, trace)
    sure = found.stats.confidence
    assert sure is not None, "every prefill has a confidence"
    if found.is_exact or sure >= plan.method.min_confidence:
        return found
    plan, tried, seen = fused.plan, found.stats, found.trace
    del fused, found  # memory holds one prompt's KV at a time
    least = plan.method.min_confidence
    why = f"confidence {sure:.2f} at recompute ratio {plan.method.nominal_ratio:.2g}, below {least:.2g}"
    found = _plain_instead(plan, why, tried, kv_sources, cleared, capacity, clock)
    charged = found.stats.charged_ratio + tried.charged_ratio
    return replace(found, stats=replace(found.stats, gated=True, charged_ratio=charged), trace=seen)


_COUNTS = ("hits", "partial_hits", "partial_share", "misses", "missed_tokens")
"""Statistics of a reusing plan that stay although its prompt is prefilled in full."""


def _plain_instead(
    plan: Plan, why: str, planned: FusionStats, kv_sources: KVSources, cleared: int, capacity: int, clock: PhaseClock
) -> Prefilled:
    """Plain prefill of a plan that reuses chunks, which ``planned`` counts."""
    found = _plain(replace(plan.reusing(()), fallback=why), kv_sources, cleared, capacity, clock)
    counts = {name: getattr(planned, name) for name in _COUNTS}
    return replace(found, stats=replace(found.stats, **counts), missing=plan.missing_texts)


def _fused(fused: Fused, kv_sources: KVSources, cleared: int, clock: PhaseClock, trace: bool) -> Prefilled:
    plan, recomputed = fused.plan, fused.recomputed
    stats = stats_of(plan, clock, fused.logits, len(recomputed), fused.charged_tokens)
    keeping = None if fused.first_computed is None else _keeping(plan, kv_sources, cleared, fused.first_computed)
    # all KV is plain prefill's if every reused chunk's was, or was computed again; what follows continued KV is not
    stale = _chunk_tokens([span for span in plan.reused if not _is_plain(plan, span, kv_sources)])
    is_recomputed = plan.method.exact_at_one and len(recomputed) == stale
    is_plain = fused.first_computed is not None and not plan.layout.is_continued
    is_exact = is_plain and (not stale or is_recomputed)
    continuing = None
    if not is_exact and fused.stale is not None and kv_sources.shares_prefixes(plan):
        insert = partial(kv_sources.prefix_cache.continued.insert, plan.method, cleared=cleared)
        continuing = partial(keep, partial(insert, stale=fused.stale, turns=fused.turns + 1))
    if plan.layout.is_continued and fused.stale is not None:
        first = int(fused.stale.argmax()) if fused.stale.any() else None
        stats = replace(stats, continued_tokens=plan.layout.num_cached, continued_turns=fused.turns, stale_from=first)
    seen = None
    if trace:
        chunks = tuple((span.start, span.stop) for span in plan.reused)
        seen = Trace(plan.layout.token_ids, chunks, tuple(recomputed))
    return Prefilled(
        plan.layout, fused.state, fused.logits, stats, plan.missing_texts, keeping, continuing, seen, is_exact
    )


def _is_plain(plan: Plan, span: Span, kv_sources: KVSources) -> bool:
    """Whether a reused chunk's KV equals plain prefill's. Exact KV differs from it if a codec coarser than the compute
    dtype stored it."""
    layout = plan.layout
    if kv_sources.primary.is_lossy:
        return span.stop <= layout.num_exact
    return layout.is_exact(span)


def _keeping(plan: Plan, kv_sources: KVSources, cleared: int, first_computed: int) -> Keep | None:
    """What the prefix cache may keep: all tokens before the first reused chunk whose KV differs from plain prefill's.
    None if the store holds those tokens already."""
    layout, is_lossy, runtime = plan.layout, kv_sources.primary.is_lossy, kv_sources.primary.runtime
    if not kv_sources.shares_prefixes(plan) or is_lossy and layout.num_prefix > layout.num_cached:
        return None
    if layout.is_continued:  # of which the cache holds what is exact
        return None
    num_plain = min((span.start for span in plan.reused if not _is_plain(plan, span, kv_sources)), default=None)
    if num_plain is not None and num_plain <= first_computed:
        return None
    insert = partial(kv_sources.prefix_cache.insert, cleared=cleared)
    return partial(keep, insert, max_tokens=runtime.reuse_tokens, num_plain=num_plain)


def _plain(plan: Plan, kv_sources: KVSources, cleared: int, capacity: int, clock: PhaseClock) -> Prefilled:
    """Plain prefill of the same token ids: the method asks for it, or nothing can be reused."""
    runtime, layout, method = kv_sources.primary.runtime, plan.layout, plan.method
    with clock.phase("lookup"):
        match = kv_sources.match(plan)
    with match:
        # the stored shared prefix is not read: a coarser codec would make its KV unfit for the prefix cache
        known = match.num_tokens
        used = replace(plan, layout=replace(layout, num_prefix=0, num_cached=known, num_exact=known))
        if match.num_tokens:
            state, logits = runtime.prefill_from(match, layout.ids, capacity, clock)
        else:
            with clock.phase("recompute"):
                state, logits = runtime.prefill(layout.ids, capacity)
                wait_for(logits.device)
    stats = replace(stats_of(used, clock, logits), misses=0, missed_tokens=0)
    stats = replace(stats, charged_ratio=stats.effective_ratio)
    insert = partial(kv_sources.prefix_cache.insert, cleared=cleared)
    keeping = partial(keep, insert, max_tokens=runtime.reuse_tokens) if kv_sources.shares_prefixes(plan) else None
    if not method.reuses_chunks:
        return Prefilled(layout, state, logits, stats, (), keeping)
    stats = replace(
        stats,
        method="prefix" if match.num_tokens else "full",
        misses=len(occurrences(layout.chunks)) + len(layout.altered),
        missed_tokens=_chunk_tokens(layout.chunks) + sum(layout.altered.values()),
        fallback=plan.fallback,
    )
    logger.info("answered by plain prefill: %s", plan.fallback)
    return Prefilled(layout, state, logits, stats, plan.missing_texts, keeping)


def stats_of(
    plan: Plan, clock: PhaseClock, logits: torch.Tensor | None = None, recomputed: int = 0, charged: float = 0.0
) -> FusionStats:
    """Statistics of a plan that is carried out. ``charged``: chunk tokens that got fresh KV, as in
    :class:`~cacheclip_rag.fusion.fused.Fused`."""
    layout, reused = plan.layout, plan.reused
    chunk_tokens = plan.chunk_tokens
    found = occurrences((*reused, *plan.in_full))
    partial = [chunk.share for chunk in found if chunk.share <= MOST_PARTIAL]
    prefix_tokens = layout.num_known - _chunk_tokens([span for span in reused if layout.is_cached(span)])
    return FusionStats(
        method=plan.method.name,
        fallback=None,
        prompt_tokens=layout.num_tokens,
        prefix_tokens=prefix_tokens,
        fresh_tokens=layout.num_tokens - prefix_tokens - chunk_tokens,
        chunk_tokens=chunk_tokens,
        recomputed_tokens=recomputed,
        nominal_ratio=plan.method.nominal_ratio,
        hits=len(found),
        exact_tokens=_chunk_tokens(plan.exact),
        misses=len(occurrences(plan.missing)) + len(layout.altered),
        missed_tokens=_chunk_tokens(plan.missing) + sum(layout.altered.values()),
        phases_s=clock.seconds,
        left_to_read_s=clock.left_to_read_s,
        reading_s=clock.reading_s,
        ttft_s=clock.elapsed(),
        charged_ratio=charged / chunk_tokens if chunk_tokens else 0.0,
        cached_prefix_tokens=layout.num_exact,
        confidence=None if logits is None else confidence(logits),
        unusable=plan.unusable,
        not_found=plan.not_found,
        partial_hits=len(partial),
        partial_share=fmean(partial) if partial else None,
    )


def _chunk_tokens(spans: Sequence[Span]) -> int:
    return sum(len(span.tokens) for span in spans)
