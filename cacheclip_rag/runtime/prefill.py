"""From a plan to the first logits, on any runtime: fused prefill if the plan reuses chunks, else plain prefill."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..chunks.captured import capture
from ..chunks.prefix_cache import PrefixCache
from ..chunks.sources import Sources
from ..clock import PhaseClock
from ..prompt.layout import Layout, Span
from ..types import FusionStats, Plan, Trace
from .base import Fused, State, wait_for

__all__ = ["Keeping", "Prefilled", "confidence", "prefill"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which part of a prompt's KV the prefix cache may keep for later prompts."""

    prefixes: PrefixCache
    max_tokens: int
    """If prompt and answer have more tokens than this, nothing is kept: the rotary frequencies may have changed."""
    num_plain: int | None = None
    """Leading tokens whose KV equals plain prefill's; None for all tokens."""

    def keep(self, ids: Sequence[int], state: Any) -> None:
        """Insert the exact part of the KV of ``ids`` (prompt and answer) into the prefix cache."""
        if len(ids) > self.max_tokens:
            return
        try:
            self.prefixes.insert(ids[: self.num_plain], state)
        except RuntimeError as error:  # for instance out of memory: the answer must not fail for this
            logger.warning("the KV of this prompt could not be kept in the prefix cache: %s", error)


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
    """Chunks computed as fresh text because their KV was not stored or was damaged."""
    keeping: Keeping | None = None
    """None if the prefix cache may keep nothing of this prompt."""
    trace: Trace | None = None

    def keep_prefix(self, cache: State, answer: Sequence[int] = ()) -> None:
        """Insert the KV of prompt and answer into the prefix cache. The answer's last token has no KV in ``cache``."""
        if self.keeping is not None:
            self.keeping.keep([*self.layout.token_ids, *answer][: cache.get_seq_length()], cache)


def prefill(plan: Plan, sources: Sources, *, params_tokens: int, clock: PhaseClock, trace: bool = False) -> Prefilled:
    """Carry out a plan.

    Args:
        params_tokens: answer tokens for which the cache gets room.
        clock: started when the request came in.
        trace: also record scores, recomputed tokens and seconds per layer.
    """
    capacity = plan.layout.num_tokens + params_tokens
    if plan.captures:
        return _capture(plan, sources, capacity, clock)
    if not plan.reused:
        return _plain(plan, sources, capacity, clock)
    fused = sources.primary.runtime.fuse(plan, sources, capacity=capacity, clock=clock, trace=trace)
    if fused is None:
        why = f"no chunk of {len(plan.layout.chunks)} could be read"
        return _plain(replace(plan.reusing(()), fallback=why), sources, capacity, clock)
    sure, done, charged = confidence(fused.logits), fused.plan, fused.charged_tokens
    if sure >= plan.method.min_confidence or done.exact == done.reused:
        return _fused(fused, sources, clock)
    del fused  # memory holds one prompt's KV at a time
    return _after(done, sure, charged, sources, capacity, clock)


def confidence(logits: torch.Tensor) -> float:
    """How sure a model is of its next token, from ``(vocab_size,)`` logits: probability of the likeliest token minus
    that of the second, 0 to 1."""
    first, second = logits.float().softmax(-1).topk(2).values
    return float(first - second)


def _after(
    plan: Plan, sure: float, charged: float, sources: Sources, capacity: int, clock: PhaseClock
) -> Prefilled:
    """Plain prefill because a fused one was not sure enough of the first token.

    Args:
        charged: chunk tokens that the fused prefill computed.
    """
    method = plan.method
    why = f"confidence {sure:.2f} at recompute ratio {method.nominal_ratio:.2g}, below {method.min_confidence:.2g}"
    found = _plain(replace(plan.reusing(()), fallback=why), sources, capacity, clock)
    stats = replace(
        found.stats,
        misses=len(plan.missing),
        missed_tokens=_chunk_tokens(plan.missing),
        charged_ratio=found.stats.charged_ratio + charged / plan.chunk_tokens,
    )
    return replace(found, stats=stats, missing=tuple(span.segment.text for span in plan.missing))


def _fused(fused: Fused, sources: Sources, clock: PhaseClock) -> Prefilled:
    plan = fused.plan
    stats = _stats(plan, clock, fused.recomputed_tokens, fused.charged_tokens)
    stats = replace(stats, confidence=confidence(fused.logits))
    keeping = None if fused.first_computed is None else _keeping(plan, sources, fused.first_computed)
    missing = tuple(span.segment.text for span in plan.missing)
    return Prefilled(plan.layout, fused.state, fused.logits, stats, missing, keeping, fused.trace)


def _keeping(plan: Plan, sources: Sources, first_computed: int) -> Keeping | None:
    """What the prefix cache may keep: all tokens before the first reused chunk whose KV differs from plain prefill's.
    Exact KV also differs if a codec coarser than the compute dtype stored it. None if the store holds those tokens
    already."""
    layout, is_lossy, runtime = plan.layout, sources.primary.is_lossy, sources.primary.runtime
    if not sources.shares_prefixes(plan) or is_lossy and layout.num_prefix > layout.num_cached:
        return None
    is_plain = layout.is_cached if is_lossy else layout.is_exact
    num_plain = min((span.start for span in plan.reused if not is_plain(span)), default=None)
    if num_plain is not None and num_plain <= first_computed:
        return None
    return Keeping(sources.prefixes, runtime.reuse_tokens, num_plain)


def _plain(plan: Plan, sources: Sources, capacity: int, clock: PhaseClock) -> Prefilled:
    """Plain prefill of the same token ids: the method asks for it, or nothing can be reused."""
    runtime, layout, method = sources.primary.runtime, plan.layout, plan.method
    with clock.phase("lookup"):
        match = sources.match(plan)
    with match:
        # the stored shared prefix is not read: a coarser codec would make its KV unfit for the prefix cache
        used = replace(plan, layout=replace(layout, num_prefix=0, num_cached=match.num_tokens))
        if match.num_tokens:
            state, logits = runtime.prefill_from(match, layout.ids, capacity, clock)
        else:
            with clock.phase("recompute"):
                state, logits = runtime.prefill(layout.ids, capacity)
                wait_for(logits)
    stats = replace(_stats(used, clock), misses=0, missed_tokens=0, confidence=confidence(logits))
    stats = replace(stats, charged_ratio=stats.effective_ratio)
    keeping = Keeping(sources.prefixes, runtime.reuse_tokens) if sources.shares_prefixes(plan) else None
    if not method.reuses_chunks:
        return Prefilled(layout, state, logits, stats, (), keeping)
    stats = replace(
        stats,
        method="prefix" if match.num_tokens else "full",
        misses=len(layout.chunks),
        missed_tokens=_chunk_tokens(layout.chunks),
        fallback=plan.fallback,
    )
    logger.info("answered by plain prefill: %s", plan.fallback)
    return Prefilled(layout, state, logits, stats, tuple(span.segment.text for span in layout.chunks), keeping)


def _capture(plan: Plan, sources: Sources, capacity: int, clock: PhaseClock) -> Prefilled:
    """Plain prefill that captures the prompt's chunk caches for later prompts."""
    assert sources.captured is not None, "a plan that captures needs sources.captured"
    layout = plan.layout
    with clock.phase("recompute"):
        state, logits, variants = capture(sources.primary.runtime, layout, capacity)  # type: ignore[arg-type]
        sources.captured.add(variants)
    stats = replace(_stats(plan, clock), method="full", charged_ratio=1.0, misses=len(layout.chunks))
    stats = replace(stats, prefix_tokens=0, fresh_tokens=layout.num_tokens, fallback=plan.fallback)
    return Prefilled(layout, state, logits, stats, ())


def _stats(plan: Plan, clock: PhaseClock, recomputed: int = 0, charged: float = 0.0) -> FusionStats:
    """``charged``: chunk tokens that got fresh KV, as in :class:`~cacheclip_rag.runtime.base.Fused`."""
    layout, reused = plan.layout, plan.reused
    chunk_tokens = plan.chunk_tokens
    prefix_tokens = layout.num_exact - _chunk_tokens([span for span in reused if layout.is_cached(span)])
    return FusionStats(
        method=plan.method.name,
        fallback=None,
        prompt_tokens=layout.num_tokens,
        prefix_tokens=prefix_tokens,
        fresh_tokens=layout.num_tokens - prefix_tokens - chunk_tokens,
        chunk_tokens=chunk_tokens,
        recomputed_tokens=recomputed,
        nominal_ratio=plan.method.nominal_ratio,
        hits=len(reused),
        exact_tokens=_chunk_tokens(plan.exact),
        misses=len(layout.chunks) - len(reused),
        missed_tokens=_chunk_tokens(layout.chunks) - chunk_tokens,
        phases_s=clock.seconds,
        ttft_s=clock.elapsed(),
        charged_ratio=charged / chunk_tokens if chunk_tokens else 0.0,
        cached_prefix_tokens=layout.num_cached,
    )


def _chunk_tokens(spans: Sequence[Span]) -> int:
    return sum(len(span.tokens) for span in spans)
