"""Prompts that were planned for another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..answering.prefill import stats_of
from ..base.clock import PhaseClock
from ..fusion.answer import FusionStats
from ..fusion.wire import FusionPlan
from ..plan.plan import Plan
from ..prompt.known_kv import known_kv
from ..runtime.base import KVSource


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt for the process that answers."""

    token_ids: tuple[int, ...]
    """What that process must be given: its own tokenisation may differ where text of users looks like control
    tokens."""
    plan: Plan
    stats: FusionStats
    """What is known before the prompt is prefilled: tokens, hits and misses, and the seconds of planning
    (``ttft_s``)."""
    fusion: FusionPlan | None = None
    """How the KV of the first tokens is made; None: ``reason`` says why it cannot."""
    reason: str | None = None
    """Why the prompt has no fusion plan; None if it has one, or its method reuses no chunks."""
    kept_about: str | None = None
    """What the names of the prompt's blocks say (:func:`~cacheclip_rag.planning.kept_keys`), if that process computes
    it plainly and keeps its KV; None: it keeps none."""

    @classmethod
    def fused(cls, plan: Plan, fusion: FusionPlan, clock: PhaseClock) -> PlannedPrompt:
        computed, known = _computed_of_chunks(plan, fusion), plan.known
        stats = stats_of(plan, clock, None, computed)
        moved = int(((known.source == KVSource.MOVED) & ~known.border).sum())
        stats = replace(stats, moved_tokens=moved, moved_past=known.moved_past)
        return cls(plan.layout.token_ids, plan, stats, fusion)

    @classmethod
    def plain(cls, plan: Plan, reason: str | None, clock: PhaseClock) -> PlannedPrompt:
        """A prompt that is prefilled in full. Hits are those of the plan, as if it were carried out."""
        hits = stats_of(plan, clock)
        nothing = known_kv(replace(plan.layout, num_prefix=0))
        stats = stats_of(replace(plan, known=nothing, keys=()), clock)
        reuses = plan.method.reuses_chunks
        stats = replace(
            stats,
            method="full" if reuses else stats.method,
            fallback=reason,
            hits=hits.hits,
            misses=hits.misses if reuses else 0,
            missed_tokens=hits.missed_tokens if reuses else 0,
            charged_ratio=1.0,
        )
        return cls(plan.layout.token_ids, plan, stats, None, reason)

    @property
    def effective_ratio(self) -> float:
        """Share of the reused chunks' tokens that are computed; 1.0 without any."""
        tokens = sum(span.stop - span.start for span in self.plan.reused)
        return 1.0 if self.fusion is None or not tokens else _computed_of_chunks(self.plan, self.fusion) / tokens

    def stats_of(self, told: Mapping[str, Any]) -> FusionStats:
        """The statistics of a fused answer, by the KV of an earlier prompt that it continued: ``continued_tokens``,
        ``continued_turns`` and ``stale_from``, as in :class:`FusionStats`."""
        known = told.get("continued_tokens", 0)
        if not known or self.fusion is None:
            return self.stats
        chunks = sum(max(0, min(span.stop, known) - span.start) for span in self.plan.reused)
        prefix = max(known - chunks, self.stats.prefix_tokens)
        computed = _computed_of_chunks(self.plan, self.fusion, known)
        return replace(
            self.stats,
            prefix_tokens=prefix,
            fresh_tokens=self.stats.prompt_tokens - prefix - self.stats.chunk_tokens,
            recomputed_tokens=computed,
            charged_ratio=computed / self.stats.chunk_tokens if self.stats.chunk_tokens else 0.0,
            continued_tokens=known,
            continued_turns=told.get("continued_turns", 0),
            stale_from=told.get("stale_from"),
        )


def _computed_of_chunks(plan: Plan, fusion: FusionPlan, known: int = 0) -> int:
    """Number of computed tokens in reused chunks, from position ``known`` on."""
    return sum(
        max(0, min(stop, span.stop) - max(start, span.start, known))
        for start, stop in fusion.computed
        for span in plan.reused
    )
