"""From a plan to the first logits, on any runtime: fused prefill if the plan reuses chunks, else plain prefill."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple, cast

import torch

from ..base.clock import PhaseClock
from ..fusion.answer import Fused, FusionStats, Trace
from ..plan.plan import KVSources, Plan
from ..prompt.known_kv import known_kv
from ..prompt.layout import MOST_PARTIAL, Layout, Span, occurrences
from ..runtime.base import KVSource, State, wait_for
from ..runtime.prompt_cache import Approximate
from ..runtime.slices import Slices
from .trace import media_of, trace_of
from .turns import CALLER, Pause

logger = logging.getLogger(__name__)


_SLICE_TOKENS = {"cpu": 512}
"""Tokens of a slice, by type of device: running answers wait for one."""
_LARGE_SLICE = 2048
"""The same for others, which fewer tokens leave idle. vLLM's, too."""
_BEHIND = 4
"""Slices in the background are so many times smaller: users wait for one, and nobody for the background."""

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


class NextToken(NamedTuple):
    """What ``(vocab_size,)`` logits say of the next token."""

    confidence: float
    """How sure a model is of it: probability of the likeliest token minus that of the second, 0 to 1."""
    likeliest: int
    logit: float
    """Of the likeliest token."""

    @classmethod
    def of(cls, logits: torch.Tensor) -> NextToken:
        """All at once: each number that is read is a wait for an accelerator."""
        best = logits.float().softmax(-1).topk(2).values
        likeliest = logits.argmax(keepdim=True)
        # float32, which holds all numbers of tokens
        sure, token, logit = torch.cat((best[:1] - best[1:], likeliest, logits.gather(0, likeliest))).tolist()
        return cls(sure, int(token), logit)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefilled prompt, ready to decode."""

    layout: Layout
    cache: State
    """State of the runtime that prefilled it."""
    logits: torch.Tensor
    """Logits of the prompt's last token, ``(vocab_size,)``."""
    following: NextToken
    stats: FusionStats
    missing: tuple[str, ...]
    """Texts to store after the answer: chunks computed as fresh text because their KV was not stored or was damaged, if
    half or more of them stands in the prompt."""
    keeping: Keep | None = None
    """Takes exact KV into the prefix cache; None if it may keep nothing of this prompt."""
    continuing: Keep | None = None
    """Takes approximate KV, which later prompts continue; None: it is exact, or the method does not allow it."""
    trace: Callable[[], Trace] | None = None
    """Says what the KV was made of, which takes longer than a token; None: nobody asked."""
    is_exact: bool = True
    """Whether all KV equals plain prefill's."""
    min_confidence: float = 0.0
    """Below it, a token is chosen from exact KV."""

    def keep_prefix(self, cache: State, answer: Sequence[int] = ()) -> None:
        """Keep the KV of prompt and answer for later prompts. The answer's last token has no KV in ``cache``."""
        ids = [*self.layout.token_ids, *answer][: cache.get_seq_length()] if self.keeping or self.continuing else []
        if self.keeping is not None:
            self.keeping(ids, cache)
        if self.continuing is not None and answer:  # once, when the answer is there
            self.continuing(ids, cache)


_COUNTS = ("hits", "partial_hits", "partial_share", "misses", "missed_tokens")
"""Statistics of a reusing plan that stay although its prompt is prefilled in full."""


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Carries out the plan of one request."""

    kv_sources: KVSources
    clock: PhaseClock
    """Started when the request came in."""
    generation: int
    """That of the prefix cache when the request came in: once texts are released, none of its KV is kept."""
    answer_tokens: int
    """For which there is room after the prompt."""
    trace: bool = False
    """Whether it is recorded what the KV is made of."""
    call_confidence: float = 0.0
    """Least confidence of the first token, if it is more than the method's."""
    pause: Pause | None = None
    """Lets others go first between two slices; None: it is computed at once."""
    spent: int = 0
    """Tokens that an earlier pass over this prompt computed."""

    def run(self, plan: Plan) -> Prefilled:
        """Fused prefill if the plan reuses chunks, else plain prefill; plain, too, if no chunk can be read, or the
        fused prefill is unsure of the first token."""
        if not plan.reused and not plan.continues:
            return self._plain(plan)
        if plan.bypass is not None:
            planned = stats_of(plan, self.clock)  # hits and misses are those of the plan
            prefilled = self._plain_instead(plan, plan.bypass, planned)
            return replace(prefilled, stats=replace(prefilled.stats, bypassed=True))
        capacity = plan.layout.num_tokens + self.answer_tokens
        media = media_of(plan, self.kv_sources) if self.trace else {}
        runtime = self.kv_sources.primary.runtime
        slices = self._slices(plan.layout) if self.pause is not None else None
        fused = runtime.fuse(plan, self.kv_sources, capacity=capacity, clock=self.clock, slices=slices)
        if fused is None:
            why = f"no chunk of {len(plan.layout.chunks)} could be read, and no KV of earlier prompts"
            return self._plain(replace(plan.reusing(()), fallback=why))
        prefilled = self._fused(fused, media)
        sure, least = prefilled.stats.confidence, prefilled.min_confidence
        assert sure is not None, "every prefill has a confidence"
        if prefilled.is_exact or sure >= least:
            return prefilled
        plan, tried, seen, spent = fused.plan, prefilled.stats, prefilled.trace, fused.num_computed
        del fused, prefilled  # memory holds one prompt's KV at a time
        again = replace(self, spent=spent)
        if self.pause is not None:
            again._paused(0, plan.layout.num_tokens - self.kv_sources.prompt_cache.known(plan.layout.token_ids[:-1]))
        why = f"confidence {sure:.2f} at recompute ratio {plan.method.nominal_ratio:.2g}, below {least:.2g}"
        prefilled = again._plain_instead(plan, why, tried)
        charged = prefilled.stats.charged_ratio + tried.charged_ratio
        return replace(prefilled, stats=replace(prefilled.stats, gated=True, charged_ratio=charged), trace=seen)

    def _slices(self, layout: Layout) -> Slices | None:
        """How the prompt is computed for others; None: at once, also where frequencies depend on the length."""
        runtime, caller = self.kv_sources.primary.runtime, CALLER.get()
        if layout.num_tokens > runtime.reuse_tokens:
            return None
        most = _SLICE_TOKENS.get(runtime.device.type, _LARGE_SLICE)
        return Slices(most // _BEHIND if caller is not None and caller.in_background else most, self._paused)

    def _paused(self, done: int, work: int) -> None:
        assert self.pause is not None, "there are slices"
        began = self.clock.elapsed()
        self.pause(self.spent + done, self.spent + work)
        self.clock.queued_s += self.clock.elapsed() - began

    def keep_exact(self, num_plain: int | None = None) -> Keep:
        """Takes KV into the prefix cache: that of the first ``num_plain`` tokens, which equals plain prefill's."""
        insert = partial(self.kv_sources.prompt_cache.insert, generation=self.generation)
        return partial(keep, insert, max_tokens=self.kv_sources.primary.runtime.reuse_tokens, num_plain=num_plain)

    def _plain_instead(self, plan: Plan, why: str, planned: FusionStats) -> Prefilled:
        """Plain prefill of a plan that reuses chunks, which ``planned`` counts."""
        prefilled = self._plain(replace(plan.reusing(()), fallback=why))
        counts = {name: getattr(planned, name) for name in _COUNTS}
        return replace(prefilled, stats=replace(prefilled.stats, **counts), missing=plan.missing_texts)

    def _fused(self, fused: Fused, media: Mapping[str, str]) -> Prefilled:
        plan, recomputed, sources = fused.plan, fused.recomputed, self.kv_sources
        known, shares = plan.known, sources.shares_prefixes(plan.method, plan.layout)
        following = NextToken.of(fused.logits)
        stats = stats_of(plan, self.clock, following, len(recomputed))
        # exact KV differs from plain prefill's if a codec coarser than the compute dtype stored it
        other = known.source != KVSource.CACHED if sources.primary.is_lossy else ~known.exact
        keeping = continuing = None
        # the prefix cache may keep all tokens before the first one whose KV differs from plain prefill's; if they were
        # not computed, the store or the cache has them already
        of_source = other & (known.source != KVSource.COMPUTED)
        num_plain = int(of_source.argmax()) if of_source.any() else None
        if shares and fused.first_computed is not None and (num_plain is None or num_plain > fused.first_computed):
            keeping = self.keep_exact(num_plain)
        # all KV is plain prefill's if every reused chunk's was, or was computed again; what follows continued KV is not
        stale = int((known.chunk & other).sum())
        is_recomputed = plan.method.exact_at_one and len(recomputed) == stale
        is_exact = fused.first_computed is not None and not known.is_approximate and (not stale or is_recomputed)
        if not is_exact and fused.stale is not None and shares:
            past = known.past.copy()
            past[recomputed] = 1.0
            about = Approximate(plan.method, fused.stale, past, known.turns + 1)
            insert = partial(sources.prompt_cache.insert, approximate=about, generation=self.generation)
            continuing = partial(keep, insert)
        if known.is_approximate and fused.stale is not None:
            first = int(fused.stale.argmax()) if fused.stale.any() else None
            continued = known.count(KVSource.CACHED, KVSource.CONTINUED) if known.count(KVSource.CONTINUED) else 0
            stats = replace(
                stats,
                continued_tokens=continued,
                continued_turns=known.turns,
                stale_from=first,
                moved_tokens=known.count(KVSource.MOVED) - int((known.source[recomputed] == KVSource.MOVED).sum()),
                moved_past=known.moved_past,
            )
        seen = partial(trace_of, plan, sources, recomputed, fused.scores, media, is_exact) if self.trace else None
        least = max(plan.method.min_confidence, self.call_confidence)
        missing = plan.missing_texts
        return Prefilled(
            plan.layout,
            fused.state,
            fused.logits,
            following,
            stats,
            missing,
            keeping,
            continuing,
            seen,
            is_exact,
            least,
        )

    def _plain(self, plan: Plan) -> Prefilled:
        """Plain prefill of the same token ids: the method asks for it, or nothing can be reused."""
        runtime, layout, method = self.kv_sources.primary.runtime, plan.layout, plan.method
        capacity = layout.num_tokens + self.answer_tokens
        with self.clock.phase("lookup"):
            match = self.kv_sources.match(method, layout)
        with match:
            # the stored shared prefix is not read: a coarser codec would make its KV unfit for the prefix cache
            used = replace(plan, known=known_kv(replace(layout, num_prefix=0), (), match.runs))
            known, work = match.num_tokens, layout.num_tokens - match.num_tokens
            slices = self._slices(layout) if self.pause is not None and runtime.can_extend else None
            stops = [known + stop for stop in ([work] if slices is None else slices.stops(work))]
            if match.num_tokens:
                state, logits = runtime.prefill_from(match, layout.ids[: stops[0]], capacity, self.clock)
            else:
                with self.clock.phase("recompute"):
                    state, logits = runtime.prefill(layout.ids[: stops[0]], capacity)
                    wait_for(logits.device)
        for start, stop in pairwise(stops):
            assert slices is not None, "without them, there is one pass"
            slices.pause(start - known, work)
            with self.clock.phase("recompute"):
                logits = cast("torch.Tensor", runtime.extend(state, layout.ids[start:stop], start))
                wait_for(logits.device)
        stats = replace(stats_of(used, self.clock, following := NextToken.of(logits)), misses=0, missed_tokens=0)
        stats = replace(stats, charged_ratio=stats.effective_ratio)
        keeping = self.keep_exact() if self.kv_sources.shares_prefixes(method, layout) else None
        seen = partial(trace_of, used, self.kv_sources) if self.trace else None
        if not method.reuses_chunks:
            return Prefilled(layout, state, logits, following, stats, (), keeping, trace=seen)
        stats = replace(
            stats,
            method="prefix" if match.num_tokens else "full",
            misses=len(occurrences(layout.chunks)) + len(layout.altered),
            missed_tokens=_chunk_tokens(layout.chunks) + sum(layout.altered.values()),
            fallback=plan.fallback,
        )
        logger.info("answered by plain prefill: %s", plan.fallback)
        return Prefilled(layout, state, logits, following, stats, plan.missing_texts, keeping, trace=seen)


def stats_of(plan: Plan, clock: PhaseClock, following: NextToken | None = None, recomputed: int = 0) -> FusionStats:
    """Statistics of a plan that is carried out."""
    layout, known = plan.layout, plan.known
    chunk_tokens = plan.chunk_tokens
    hits = occurrences((*plan.reused, *plan.in_full))
    partial = [chunk.share for chunk in hits if chunk.share <= MOST_PARTIAL]
    prefix_tokens = int((~known.chunk & (known.source != KVSource.COMPUTED)).sum())
    return FusionStats(
        method=plan.method.name,
        fallback=None,
        prompt_tokens=layout.num_tokens,
        prefix_tokens=prefix_tokens,
        fresh_tokens=layout.num_tokens - prefix_tokens - chunk_tokens,
        chunk_tokens=chunk_tokens,
        recomputed_tokens=recomputed,
        nominal_ratio=plan.method.nominal_ratio,
        hits=len(hits),
        exact_tokens=_chunk_tokens(plan.exact),
        misses=len(occurrences(plan.missing)) + len(layout.altered),
        missed_tokens=_chunk_tokens(plan.missing) + sum(layout.altered.values()),
        phases_s=clock.seconds,
        left_to_read_s=clock.left_to_read_s,
        reading_s=clock.reading_s,
        ttft_s=clock.elapsed(),
        queued_s=clock.queued_s,
        charged_ratio=recomputed / chunk_tokens if chunk_tokens else 0.0,
        cached_prefix_tokens=known.count(KVSource.CACHED),
        confidence=None if following is None else following.confidence,
        unusable=plan.unusable,
        not_found=plan.not_found,
        partial_hits=len(partial),
        partial_share=fmean(partial) if partial else None,
    )


def confidence(logits: torch.Tensor) -> float:
    """:attr:`NextToken.confidence` of ``(vocab_size,)`` logits."""
    return NextToken.of(logits).confidence


def _chunk_tokens(spans: Sequence[Span]) -> int:
    return sum(len(span.tokens) for span in spans)
