"""Self-check in production: compares a share of the answers with full prefill. Each comparison costs a full prefill.
An answer that was verified (``finish``) is always compared: its exact KV is there already.

The comparison never changes an answer. It is made after the answer, in one thread, and shares the device with other
work.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from ..base.sampling import is_greedy
from ..fusion.answer import FusionStats
from .base import ObservedAnswer, Observer
from .certificates import Certificates
from .fidelity import kl_divergence, read_along
from .metrics import Metrics

if TYPE_CHECKING:
    from ..methods.base import Method
    from ..runtime.base import Runtime
    from ..runtime.transformers.model import ModelRuntime
    from .base import Verified

logger = logging.getLogger(__name__)

_MAX_WAITING = 8
"""Most waiting comparisons. Further comparisons are skipped and counted, because a busy server could never catch up."""
_ALARM_KL = 1.0
"""First-token KL in nats above which a warning is logged: the answer may begin differently."""


@dataclass(frozen=True, slots=True)
class ShadowRequest:
    """An answer to compare."""

    ids: torch.Tensor
    """Prompt, ``(num_tokens,)`` int64."""
    logits: torch.Tensor
    """Logits of the answer's first token, ``(vocab_size,)``."""
    answer_ids: Sequence[int]
    is_greedy: bool
    """Whether the answer was decoded greedily; only then is there an agreement."""
    stats: FusionStats
    method: Method
    """The requested one."""


class ShadowChecker(Observer):
    """Chooses answers at random and compares them with full prefill."""

    def __init__(
        self,
        find_runtime: Callable[[], Runtime],
        metrics: Metrics,
        certificates: Certificates,
        *,
        rate: float,
        others: Sequence[Observer] = (),
    ) -> None:
        """
        Args:
            find_runtime: returns the primary model's runtime; first called after the first answer.
            certificates: count whole greedy answers that differ. Answers of ``finish`` do not count: they are
                corrected, or marked where they differ.
            others: told what full prefill chooses along an answer (:meth:`Observer.on_compared`).
        """
        self._find_runtime = find_runtime
        self._metrics, self._certificates, self._others = metrics, certificates, others
        self._rate = rate
        self._random = random.Random()
        self._pending: set[Future[None]] = set()
        """The comparison that is running, and those that wait for it."""
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def on_answer(self, answered: ObservedAnswer) -> None:
        """Record every answer that ``finish`` verified, and offer every other answer that reused KV. An answer below
        the confidence gate is full prefill's already, or from a later token on: the rate chooses those, too."""
        stats = answered.answer.stats
        if stats.gated and not answered.params.json_schema and self._random.random() < self._rate:
            if is_greedy(answered.params):
                self._count(answered.plan.method, differs=False)
            return
        if stats.gated or stats.method == "full":
            return
        if answered.verified is not None:
            if stats.completed_at is None or self._random.random() < self._rate:
                self._record_verified(answered, answered.verified)
            return
        if not self._rate or answered.params.json_schema:  # full prefill's choices would be free ones
            return
        runtime = self._find_runtime()
        if runtime.can_score:  # the comparison needs logits at all tokens of an answer
            plan, greedy = answered.plan, is_greedy(answered.params)
            answer_ids = answered.answer.token_ids
            self.offer(ShadowRequest(plan.layout.ids, answered.logits.clone(), answer_ids, greedy, stats, plan.method))

    def offer(self, request: ShadowRequest) -> None:
        """Compare an answer with probability ``rate``."""
        if self._random.random() >= self._rate:
            return
        with self._lock:
            self._pending = {each for each in self._pending if not each.done()}
            if len(self._pending) > _MAX_WAITING:
                self._metrics.record_shadow_skipped()
                logger.info("shadow: skipped, %d comparisons are waiting already", _MAX_WAITING)
                return
            self._executor = self._executor or ThreadPoolExecutor(1, "cacheclip-shadow")
            self._pending.add(self._executor.submit(self._check, request))

    def wait(self, timeout_s: float) -> bool:
        """Wait for all comparisons; False after ``timeout_s`` seconds."""
        return not wait(self._pending, timeout_s).not_done

    def close(self) -> None:
        """Drop waiting comparisons, and return after the running comparison."""
        with self._lock:
            executor, self._executor = self._executor, None
            pending, self._pending = self._pending, set()
        if executor is not None:
            executor.shutdown(cancel_futures=True)
        for _ in filter(Future.cancelled, pending):
            self._metrics.record_shadow_skipped()

    def _check(self, request: ShadowRequest) -> None:
        try:
            kl, agreement = self._compare(request)
        except Exception:  # for instance out of memory: the answer itself is not affected
            self._metrics.record_shadow_skipped()
            logger.warning("shadow: comparison with full prefill failed", exc_info=True)
            return
        self._record(kl, agreement, len(request.answer_ids), request.stats)
        if agreement is not None:
            self._count(request.method, differs=agreement < 1.0)

    def _count(self, method: Method, *, differs: bool) -> None:
        """For the promise of the method's certificate, if there is one."""
        breaks = self._certificates.record(method, differs)
        if breaks is not None:
            self._metrics.record_promise(differs, breaks)

    def _record_verified(self, answered: ObservedAnswer, verified: Verified) -> None:
        """Compare the tokens that were chosen from approximate KV. Later tokens are exact, and say nothing about it."""
        kl = float(kl_divergence(verified.logits, answered.logits.to(verified.logits.device)))
        equal = [token == choice for token, choice in zip(verified.given, verified.choices, strict=True)]
        agreement = sum(equal) / len(equal) if is_greedy(answered.params) else None
        self._record(kl, agreement, len(equal), answered.answer.stats)
        if verified.given == answered.answer.token_ids[: len(verified.given)]:  # else it was revised
            self._tell(answered.answer.token_ids, verified.choices)

    def _record(self, kl: float, agreement: float | None, num_tokens: int, stats: FusionStats) -> None:
        self._metrics.record_shadow(kl, agreement)
        logger.log(
            logging.WARNING if kl > _ALARM_KL else logging.INFO,
            "shadow: first-token KL to full prefill %.4f nats%s (%s, effective ratio %.3f)",
            kl,
            "" if agreement is None else f", {agreement:.0%} of {num_tokens} tokens agree",
            stats.method,
            stats.effective_ratio,
        )

    @torch.inference_mode()
    def _compare(self, request: ShadowRequest) -> tuple[float, float | None]:
        """First-token KL, and for a greedy answer the share of its tokens that full prefill chooses too (else None)."""
        runtime, num_tokens = cast("ModelRuntime", self._find_runtime()), len(request.ids)
        cache, logits = runtime.prefill(request.ids, num_tokens + len(request.answer_ids))
        kl = float(kl_divergence(logits, request.logits.to(logits.device)))
        if not request.is_greedy:
            return kl, None
        answer_ids = request.answer_ids
        if runtime.pinned_rope:  # above this length the answer used other rotary frequencies
            answer_ids = answer_ids[: max(1, runtime.reuse_tokens - num_tokens)]
        choices = read_along(runtime, cache, logits, answer_ids).argmax(-1)
        self._tell(request.answer_ids, choices.tolist())
        answer = torch.tensor(answer_ids, device=choices.device)
        return kl, float((choices == answer).float().mean())

    def _tell(self, token_ids: Sequence[int], choices: Sequence[int]) -> None:
        for each in self._others:
            each.on_compared(token_ids, choices)
