"""Counters and sums over all answers of an engine, for dashboards and alarms."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from ..fusion.answer import FusionStats
from ..store import TierStats
from .base import ObservedAnswer, Observer

_HELP = {
    "answers_total": "Answers, by the method that produced them.",
    "bypassed_total": "Answers by plain prefill because it computes less, was predicted to be soon enough, or the "
    "certificate's promise is contradicted.",
    "fallbacks_total": "Answers by plain prefill although another method was asked for, without the two others.",
    "gated_total": "Answers by plain prefill because a reusing pass was below min_confidence.",
    "completed_total": "Answers that went on from exact KV because a later token was below min_confidence.",
    "chunk_hits_total": "Chunks of prompts found in the store.",
    "chunk_misses_total": "Chunks of prompts not found in the store.",
    "learned_texts_total": "Texts stored because they recurred in prompts, or were marked as retrieved.",
    "prompt_tokens_total": "Tokens of prompts, by the source of their KV.",
    "ttft_seconds_sum": "Seconds to the first token, summed over answers.",
    "shadow_checks_total": "Answers compared with full prefill afterwards.",
    "shadow_skipped_total": "Comparisons skipped because too many were waiting, or failed.",
    "shadow_first_token_kl_sum": "KL to full prefill at the first token in nats, summed over comparisons.",
    "shadow_first_token_kl_max": "Largest KL to full prefill at the first token, nats.",
    "shadow_other_first_token_total": "Comparisons by tokens alone whose first token is not full prefill's.",
    "shadow_greedy_checks_total": "Comparisons of greedy answers; only these have an agreement.",
    "shadow_agreement_sum": "Share of a greedy answer's tokens that full prefill chooses too, summed.",
    "promise_checks_total": "Answers that count for a certificate's promise; those below the gate need no comparison.",
    "promise_differing_total": "Those of them that are not full prefill's.",
    "promise_broken_total": "Methods whose promise is contradicted by them.",
    "store_hits_total": "Chunk caches found, by tier of the store.",
    "store_misses_total": "Chunk caches not found, by tier of the store.",
    "store_damaged_total": "Chunk caches that did not match their checksums, by tier of the store.",
    "store_evictions_total": "Chunk caches evicted to stay within limits, by tier of the store.",
    "store_bytes": "Bytes held, by tier of the store.",
    "store_read_seconds_total": "Seconds spent reading chunk caches, by tier of the store.",
}


class Metrics(Observer):
    """Counters and sums. A sum divided by its count is a mean, for instance ``shadow_agreement_sum /
    shadow_greedy_checks_total``. Safe to share between threads."""

    def __init__(self, tiers: Callable[[], Iterable[TierStats]] = tuple) -> None:
        """``tiers``: counters of the store's tiers, read when the metrics are."""
        self._tiers = tiers
        self._lock = threading.Lock()
        self._values: defaultdict[tuple[str, str], float] = defaultdict(float)

    @classmethod
    def together(cls, several: Sequence[Metrics]) -> Metrics:
        """The sums of several engines' metrics. The engines share one store, whose tiers are counted once."""
        whole = cls(several[0]._tiers if several else tuple)
        for each in several:
            with each._lock:
                values = dict(each._values)
            for (name, label), value in values.items():
                known = whole._values[name, label]
                whole._values[name, label] = max(known, value) if name.endswith("_max") else known + value
        return whole

    def on_answer(self, answered: ObservedAnswer) -> None:
        self.record_answer(answered.answer.stats)

    def record_answer(self, stats: FusionStats) -> None:
        """Count one answer."""
        with self._lock:
            self._values["answers_total", f'method="{stats.method}"'] += 1
            self._values["fallbacks_total", ""] += stats.fallback is not None and not (stats.gated or stats.bypassed)
            self._values["bypassed_total", ""] += stats.bypassed
            self._values["gated_total", ""] += stats.gated
            self._values["completed_total", ""] += stats.completed_at is not None
            self._values["chunk_hits_total", ""] += stats.hits
            self._values["chunk_misses_total", ""] += stats.misses
            computed = stats.prompt_tokens - stats.reused_tokens
            cached = stats.cached_prefix_tokens
            self._values["prompt_tokens_total", 'source="store"'] += stats.reused_tokens - cached - stats.moved_tokens
            self._values["prompt_tokens_total", 'source="moved"'] += stats.moved_tokens
            self._values["prompt_tokens_total", 'source="prefix_cache"'] += cached
            self._values["prompt_tokens_total", 'source="computed"'] += computed
            self._values["ttft_seconds_sum", ""] += stats.ttft_s

    def record_shadow(
        self, first_token_kl: float | None, agreement: float | None, *, first_agrees: bool | None = None
    ) -> None:
        """Count one comparison with full prefill; a sampled answer has no agreement.

        Args:
            first_agrees: whether the first tokens are equal, for a comparison without logits, which has no KL.
        """
        with self._lock:
            self._values["shadow_checks_total", ""] += 1
            if agreement is not None:
                self._values["shadow_greedy_checks_total", ""] += 1
                self._values["shadow_agreement_sum", ""] += agreement
            if first_agrees is not None:
                self._values["shadow_other_first_token_total", ""] += not first_agrees
            if first_token_kl is None:
                return
            self._values["shadow_first_token_kl_sum", ""] += first_token_kl
            highest = self._values["shadow_first_token_kl_max", ""]
            self._values["shadow_first_token_kl_max", ""] = max(highest, first_token_kl)

    def record_promise(self, differs: bool, breaks: bool) -> None:
        """Count an answer of a method with a promise, and whether the promise is contradicted by now."""
        with self._lock:
            self._values["promise_checks_total", ""] += 1
            self._values["promise_differing_total", ""] += differs
            self._values["promise_broken_total", ""] += breaks

    def record_learned(self) -> None:
        """Count a text that was stored because it recurred."""
        with self._lock:
            self._values["learned_texts_total", ""] += 1

    def record_shadow_skipped(self) -> None:
        """Count an answer that was chosen for comparison but not compared."""
        with self._lock:
            self._values["shadow_skipped_total", ""] += 1

    def snapshot(self) -> dict[str, float]:
        """All values. Keys are as in the Prometheus text, without the prefix: ``answers_total{method="full"}``."""
        return {name + (f"{{{label}}}" if label else ""): value for (name, label), value in self._all().items()}

    def to_prometheus(self) -> str:
        """The values in Prometheus' text format, names prefixed with ``cacheclip_``."""
        values = self._all()
        lines = []
        for name, text in _HELP.items():
            labelled = [(label, value) for (known, label), value in values.items() if known == name]
            if labelled:
                kind = "gauge" if name.endswith(("_max", "_bytes")) else "counter"
                lines += [f"# HELP cacheclip_{name} {text}", f"# TYPE cacheclip_{name} {kind}"]
                lines += [
                    f"cacheclip_{name}{f'{{{label}}}' if label else ''} {_exact(value)}" for label, value in labelled
                ]
        return "\n".join(lines) + "\n" if lines else ""

    def _all(self) -> dict[tuple[str, str], float]:
        with self._lock:
            values = dict(self._values)
        for tier in self._tiers():
            label = f'tier="{tier.name}"'
            for name in ("hits", "misses", "damaged", "evictions"):
                values[f"store_{name}_total", label] = getattr(tier, name)
            values["store_bytes", label] = tier.bytes
            values["store_read_seconds_total", label] = tier.read_s
        return values


def _exact(value: float) -> str:
    """All digits: a rounded counter would stand still, and then jump."""
    return f"{value:.0f}" if float(value).is_integer() else repr(float(value))
