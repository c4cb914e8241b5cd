"""From a plan to the first logits, by whatever runtime: fused where chunks are reused, plain where they are not."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..chunks.captured import capture
from ..chunks.prefix_cache import Match, PrefixCache
from ..chunks.sources import Sources
from ..clock import PhaseClock
from ..prompt.layout import Layout, Span
from ..types import FusionStats, Plan, Trace
from .base import Fused, Runtime

__all__ = ["Keeping", "Prefilled", "prefill"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where KV may be kept for prompts that begin alike, and how much of it is what plain prefill computes."""

    prefixes: PrefixCache
    max_tokens: int
    """Most tokens of prompt and answer: beyond, the model's rotary frequencies may be others, and nothing is kept."""
    num_plain: int | None = None
    """Leading tokens that are plain, if not all: behind them comes reused KV."""

    def keep(self, ids: Sequence[int], state: Any) -> None:
        """Put what is plain of a prompt and its answer, ``ids``, into the prefix cache."""
        if len(ids) > self.max_tokens:
            return
        try:
            self.prefixes.insert(ids[: self.num_plain], state)
        except RuntimeError as error:  # out of memory, say: the answer comes first
            logger.warning("the start of this prompt could not be kept: %s", error)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt in the cache, ready to decode."""

    layout: Layout
    cache: Any
    """State of the runtime that prefilled it."""
    logits: torch.Tensor
    """Of the prompt's last token, ``(vocab_size,)``."""
    stats: FusionStats
    missing: tuple[str, ...]
    """Chunks that were not stored (or damaged) and were computed as fresh text."""
    keeping: Keeping | None = None
    """None if none of it may be kept for other prompts."""
    trace: Trace | None = None

    def keep_prefix(self, cache: Any, answer: Sequence[int] = ()) -> None:
        """Put the prompt and what was answered into the prefix cache, as far as ``cache`` has its KV: of the last
        token it has not."""
        if self.keeping is not None:
            self.keeping.keep([*self.layout.token_ids, *answer][: cache.get_seq_length()], cache)


def prefill(plan: Plan, sources: Sources, *, params_tokens: int, clock: PhaseClock, trace: bool = False) -> Prefilled:
    """Carry out a plan.

    Args:
        params_tokens: tokens to make room for behind the prompt.
        clock: started when the request came in.
        trace: also record scores, recomputed tokens and seconds per layer.
    """
    capacity = plan.layout.num_tokens + params_tokens
    if plan.captures:
        return _capture(plan, sources, capacity, clock)
    if plan.reused:
        fused = sources.primary.runtime.fuse(plan, sources, capacity=capacity, clock=clock, trace=trace)
        if fused is not None:
            return _fused(fused, sources, clock)
        plan = replace(plan, reused=(), keys=(), fallback=f"no chunk of {len(plan.layout.chunks)} could be read")
    return _plain(plan, sources, capacity, clock)


def _fused(fused: Fused, sources: Sources, clock: PhaseClock) -> Prefilled:
    plan = fused.plan
    stats = _stats(plan, clock, fused.recomputed_tokens, fused.charged_tokens)
    keeping = None if fused.first_computed is None else _keeping(plan, sources, fused.first_computed)
    missing = tuple(span.segment.text for span in plan.missing)
    return Prefilled(plan.layout, fused.state, fused.logits, stats, missing, keeping, fused.trace)


def _keeping(plan: Plan, sources: Sources, first_computed: int) -> Keeping | None:
    """What of this prompt may be kept: up to the first reused chunk whose KV is not what plain prefill computes, or
    was but has been through a coarser codec. None if it is nothing that the store does not hold already."""
    layout, is_lossy, runtime = plan.layout, sources.primary.is_lossy, sources.primary.runtime
    if not _uses_prefixes(plan, runtime) or is_lossy and layout.num_prefix > layout.num_cached:
        return None
    is_plain = layout.is_cached if is_lossy else layout.is_exact
    num_plain = min((span.start for span in plan.reused if not is_plain(span)), default=None)
    if num_plain is not None and num_plain <= first_computed:
        return None
    return Keeping(sources.prefixes, runtime.reuse_tokens, num_plain)


def _uses_prefixes(plan: Plan, runtime: Runtime) -> bool:
    """Whether KV computed here is the same in every prompt that begins alike, and the method wants to share it."""
    is_same = runtime.keeps_prefixes and plan.layout.num_tokens <= runtime.reuse_tokens
    return is_same and plan.method.reuses_prefixes


def match_start(plan: Plan, sources: Sources, clock: PhaseClock, *, usable: bool = True) -> Match:
    """The longest start of the prompt that the prefix cache holds."""
    with clock.phase("lookup"):
        usable = usable and _uses_prefixes(plan, sources.primary.runtime)
        return sources.match(plan.layout.token_ids, usable=usable)


def _plain(plan: Plan, sources: Sources, capacity: int, clock: PhaseClock) -> Prefilled:
    """Ordinary prefill of the same token ids: asked for, or the only correct way."""
    runtime, layout, method = sources.primary.runtime, plan.layout, plan.method
    with match_start(plan, sources, clock) as match:
        # the stored shared prefix is not read: through a coarser codec it would not be fit to keep for others
        used = replace(plan, layout=replace(layout, num_prefix=0, num_cached=match.num_tokens))
        if match.num_tokens:
            state, logits = runtime.prefill_behind(match, layout.ids, capacity, clock)
        else:
            with clock.phase("recompute"):
                state, logits = runtime.prefill(layout.ids, capacity)
                wait_for(logits)
    stats = replace(_stats(used, clock), misses=0, missed_tokens=0)
    stats = replace(stats, charged_ratio=stats.effective_ratio)
    keeping = Keeping(sources.prefixes, runtime.reuse_tokens) if _uses_prefixes(plan, runtime) else None
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
    """Plain prefill whose chunks are kept for later prompts."""
    assert sources.captured is not None, "a plan that captures has somewhere to put it"
    layout = plan.layout
    with clock.phase("recompute"):
        state, logits, variants = capture(sources.primary.runtime, layout, capacity)  # type: ignore[arg-type]
        sources.captured.add(variants)
    stats = replace(_stats(plan, clock), method="full", charged_ratio=1.0, misses=len(layout.chunks))
    stats = replace(stats, prefix_tokens=0, fresh_tokens=layout.num_tokens, fallback=plan.fallback)
    return Prefilled(layout, state, logits, stats, ())


def _stats(plan: Plan, clock: PhaseClock, recomputed: int = 0, charged: float = 0.0) -> FusionStats:
    """``charged``: chunk tokens given fresh KV, a token that only some layers computed counted by their share."""
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


def wait_for(logits: torch.Tensor) -> None:
    """Until an accelerator has computed them: seconds are stated of work done, not of work queued."""
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
