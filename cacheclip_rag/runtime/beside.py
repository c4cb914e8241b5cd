"""What goes on beside an answer while it is decoded: nothing, a confidence gate, or verified finishing.

:func:`~cacheclip_rag.runtime.decoding.decode` asks it before and after every token, and knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .sampler import confidence

if TYPE_CHECKING:
    from .verification import Resumed, Verification

__all__ = ["Beside", "Gate"]


class Beside:
    """Nothing. Base of what goes on beside one answer."""

    is_settled = True
    """False: :meth:`after` is still to be asked, also after the last token."""
    may_withdraw = False
    """Whether text given so far may still be withdrawn."""

    def after(self, answer: Sequence[int], *, completely: bool) -> Resumed | None:
        """Asked after every token until it is settled. Returns how to go on; None: as before.

        Args:
            completely: finish now, because no token waits for it.
        """
        return None

    def before(self, answer: Sequence[int], allowed: Callable[[], torch.Tensor]) -> tuple[Resumed, torch.Tensor] | None:
        """Asked before every token but the first; ``allowed`` gives the logits of tokens that may come next.

        Returns:
            How to go on, and other logits to choose from; None: as before.
        """
        return None

    def end(self, answer: Sequence[int]) -> dict[str, Any]:
        """Fields of :class:`~cacheclip_rag.types.FusionStats` for the whole answer. Called once, at its end."""
        return {}


class Gate(Beside):
    """Has the exact KV completed before the first token of which the model is unsure; from then on it is open."""

    def __init__(self, exact: Verification, min_confidence: float) -> None:
        """
        Args:
            exact: completes the exact KV. Must not have been used.
            min_confidence: as in :class:`~cacheclip_rag.methods.base.Method`.
        """
        self._exact = exact
        self._least = min_confidence
        self._is_open = False
        self._completed_at: int | None = None

    def before(self, answer: Sequence[int], allowed: Callable[[], torch.Tensor]) -> tuple[Resumed, torch.Tensor] | None:
        if self._is_open or confidence(allowed()) >= self._least:
            return None
        self._is_open = True
        found = self._exact.complete(answer)
        if found is not None:
            self._completed_at = len(answer)
        return found

    def end(self, answer: Sequence[int]) -> dict[str, Any]:
        return {"completed_at": self._completed_at, "verify_s": self._exact.seconds}
