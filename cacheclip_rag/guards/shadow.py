"""Self-check in production: a share of the answers is compared with full prefill, which costs a full prefill each.

The comparison never changes an answer. In the background it runs after the answer, in one thread, and takes time from
whatever else the device computes; inline it runs before the call returns (before the last event of a stream).
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from ..runtime.decoding import is_greedy
from ..types import FusionStats
from .base import Answered, Observer
from .fidelity import kl_divergence, read_along
from .metrics import Metrics

if TYPE_CHECKING:
    from ..runtime.base import Runtime
    from ..runtime.transformers.model import ModelRuntime

__all__ = ["ShadowChecker", "ShadowRequest"]

logger = logging.getLogger(__name__)

_MAX_WAITING = 8
"""Comparisons that wait at most; more are skipped and counted, or a busy server would fall ever further behind."""
_ALARM_KL = 1.0
"""First-token KL above which the log says so as a warning, nats: the answer may well begin otherwise."""


@dataclass(frozen=True, slots=True)
class ShadowRequest:
    """An answer to compare."""

    ids: torch.Tensor
    """Prompt, ``(num_tokens,)`` int64."""
    logits: torch.Tensor
    """What the answer's first token was chosen from, ``(vocab_size,)``."""
    answer_ids: Sequence[int]
    is_greedy: bool
    """Whether each token was the likeliest: only then does agreement say anything."""
    stats: FusionStats


class ShadowChecker(Observer):
    """Draws answers at random and compares them."""

    def __init__(self, find_runtime: Callable[[], Runtime], metrics: Metrics, *, rate: float, mode: str) -> None:
        """``find_runtime``: gives the model that answers; called at the first answer, not before."""
        self._find_runtime = find_runtime
        self._metrics = metrics
        self._rate = rate
        self._inline = mode == "inline"
        self._random = random.Random()
        self._waiting: deque[ShadowRequest] = deque()
        self._worker: threading.Thread | None = None
        """Lives while there is something to compare."""
        self._changed = threading.Condition()

    def on_answer(self, answered: Answered) -> None:
        """Offer an answer that reused something."""
        stats = answered.answer.stats
        if not self._rate or answered.plan is None or answered.logits is None or stats.method == "full":
            return
        runtime = self._find_runtime()
        if runtime.can_reuse and runtime.can_score:  # the comparison reads along an answer in one pass
            ids, greedy = answered.plan.layout.ids, is_greedy(answered.params)
            self.offer(ShadowRequest(ids, answered.logits.clone(), answered.answer.token_ids, greedy, stats))

    def offer(self, request: ShadowRequest) -> None:
        """Take an answer for comparison, or let it pass: the draw decides."""
        if self._random.random() >= self._rate:
            return
        if self._inline:
            self._check(request)
            return
        with self._changed:
            if len(self._waiting) >= _MAX_WAITING:
                self._metrics.record_shadow_skipped()
                logger.info("shadow: skipped, %d comparisons are waiting already", _MAX_WAITING)
                return
            self._waiting.append(request)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="cacheclip-shadow", daemon=True)
                self._worker.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is waiting or running any more; False if it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._worker is None, timeout_s)

    def close(self) -> None:
        """Drop what waits and return after the comparison under way."""
        with self._changed:
            for _ in self._waiting:
                self._metrics.record_shadow_skipped()
            self._waiting.clear()
            worker = self._worker
        if worker is not None:
            worker.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._worker = None
                    self._changed.notify_all()
                    return
                request = self._waiting.popleft()
            self._check(request)

    def _check(self, request: ShadowRequest) -> None:
        try:
            kl, agreement = self._compare(request)
        except Exception:  # out of memory, say: the answer is out and right as it is
            self._metrics.record_shadow_skipped()
            logger.warning("shadow: comparison with full prefill failed", exc_info=True)
            return
        self._metrics.record_shadow(kl, agreement)
        logger.log(
            logging.WARNING if kl > _ALARM_KL else logging.INFO,
            "shadow: first-token KL to full prefill %.4f nats%s (%s, effective ratio %.3f)",
            kl,
            "" if agreement is None else f", {agreement:.0%} of {len(request.answer_ids)} tokens agree",
            request.stats.method,
            request.stats.effective_ratio,
        )

    @torch.inference_mode()
    def _compare(self, request: ShadowRequest) -> tuple[float, float | None]:
        """First-token KL, and for a greedy answer the share of its tokens that full prefill would have chosen too."""
        runtime, num_tokens = cast("ModelRuntime", self._find_runtime()), len(request.ids)
        cache, logits = runtime.prefill(request.ids, num_tokens + len(request.answer_ids))
        kl = float(kl_divergence(logits, request.logits.to(logits.device)))
        if not request.is_greedy:
            return kl, None
        answer_ids = request.answer_ids
        if runtime.pinned_rope:  # the answer went on with other rotary frequencies there
            answer_ids = answer_ids[: max(1, runtime.reuse_tokens - num_tokens)]
        along = read_along(runtime, cache, logits, answer_ids)
        answer = torch.tensor(answer_ids, device=along.device)
        return kl, float((along.argmax(-1) == answer).float().mean())
