"""Recompute ratios by predicted time (``recompute_ratio="auto"``). ``cacheclip-lab`` measures machines and chooses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..base.errors import MissingExtraError
from ..fusion.answer import FusionStats
from ..guards.certificates import Certificates
from ..methods.base import Method
from ..plan.plan import KVSources, Plan
from ..runtime.base import Runtime

logger = logging.getLogger(__name__)


class RatioChooser:
    """Chooses the ratios of one engine. This one knows no times, so that each method keeps its own ratio; what is
    installed as ``ratios`` (group ``cacheclip.measurements``) is a subclass. Safe to share between threads."""

    def __init__(self, certificates: Certificates, runtimes: Callable[[], Sequence[Runtime]]) -> None:
        """
        Args:
            certificates: say which ratios may be chosen, and what the engine is.
            runtimes: loads the models whose processors count: the primary, and the auxiliary if it can score.
        """
        self._warned = False
        self._missing = MissingExtraError("cacheclip-lab (needed to measure a profile)", "lab")

    def decide(self, method: Method, plan: Plan, kv_sources: KVSources, known: int, max_ttft_s: float | None) -> Plan:
        """The plan at the ratio that is chosen for it, or with the reason why it is plain prefill, and its prediction;
        as it is, if nothing is known about times.

        Args:
            method: the requested one.
            known: leading tokens of the prompt in the prefix cache.
        """
        if not self._warned:
            self._warned = True
            logger.warning(
                "the recompute ratio cannot be chosen by predicted time; method %r keeps its own ratio. %s",
                method.name,
                self._missing,
            )
        return plan

    def observe(self, method: Method, plan: Plan, stats: FusionStats) -> None:
        """Learn from what an answer took whose plan has a prediction."""

    def profile_machine(self, engine: Any, method: Method) -> Any:
        """Measure, and choose by it from now on; see :meth:`~cacheclip_rag.engine.CacheClipEngine.profile_machine`."""
        raise self._missing
