"""What earlier prompts chose to compute, for prompts that begin like them.

vLLM has the KV of their chunks, or makes it again in the same way. So the next question on the same documents, or the
next turn of a chat, need not be scored.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from ..fusion.wire import FusionPlan, StoredPiece

__all__ = ["FollowUps"]

_MOST = 128
"""Prompts that are remembered: their token ids are some ten kilobytes each."""


class FollowUps:
    """The plans of earlier prompts of one planner; the least recently used one is dropped."""

    def __init__(self) -> None:
        self._plans: OrderedDict[FusionPlan, None] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, method: str, token_ids: tuple[int, ...], pieces: tuple[StoredPiece, ...]) -> FusionPlan | None:
        """The plan of an earlier prompt of a method that begins with the same tokens, up to the end of ``pieces``, and
        has all of them."""
        stop = pieces[-1].stop
        with self._lock:
            for plan in reversed(self._plans):
                is_same = plan.method == method and plan.pieces[: len(pieces)] == pieces
                if is_same and plan.token_ids[:stop] == token_ids[:stop]:
                    self._plans.move_to_end(plan)
                    return plan
        return None

    def clear(self) -> None:
        """Forget all plans."""
        with self._lock:
            self._plans.clear()

    def keep(self, plan: FusionPlan) -> None:
        """Remember a plan."""
        with self._lock:
            self._plans[plan] = None
            self._plans.move_to_end(plan)
            while len(self._plans) > _MOST:
                self._plans.popitem(last=False)
