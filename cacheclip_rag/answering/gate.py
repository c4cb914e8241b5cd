"""The confidence gate beside an answer: from the first unsure token on, the answer is chosen from exact KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .beside import Beside, Continuation
from .sampler import confidence
from .verification import Verification


class Gate(Beside):
    """Has the exact KV completed before the first token of which the model is unsure."""

    def __init__(self, exact: Verification, min_confidence: float) -> None:
        """``exact`` completes the exact KV, and must not have been used."""
        self.asks_before = True
        self._exact = exact
        self._min_confidence = min_confidence
        self._completed_at: int | None = None

    def before(self, answer: Sequence[int], allowed: torch.Tensor) -> tuple[Continuation, torch.Tensor] | None:
        if confidence(allowed) >= self._min_confidence:
            return None
        self.asks_before = False
        found = self._exact.complete(answer)
        if found is not None:
            self._completed_at = len(answer)
        return found

    def end(self, answer: Sequence[int]) -> dict[str, Any]:
        return {"completed_at": self._completed_at, "verify_s": self._exact.seconds}
