"""Says once that a store with chunks was of no use to a prompt, and why."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .base import Observer

if TYPE_CHECKING:
    from ..chunks.sources import Sources
    from ..types import Plan

__all__ = ["MissWarning"]

logger = logging.getLogger(__name__)


class MissWarning(Observer):
    """Warns at the first prompt that reuses nothing although the store has chunks. Later ones are logged at INFO."""

    def __init__(self) -> None:
        self._warned = False

    def on_plan(self, plan: Plan, sources: Sources) -> None:
        if self._warned or plan.reused or plan.fallback is None or plan.obstructed or sources.captured is not None:
            return
        if not sources.primary.has_texts:
            return
        self._warned = True
        given = f", and {plan.not_found} given documents are not in it" if plan.not_found else ""
        logger.warning(
            "a prompt reuses nothing of this store, and is answered by plain prefill: %s%s. 'cacheclip explain-miss' "
            "compares a prompt with the stored texts. This is said once.",
            plan.fallback,
            given,
        )
