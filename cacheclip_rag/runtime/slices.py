"""Prefill in slices, between which others go first."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Slices(NamedTuple):
    """How a long prefill is computed for which others need not wait: between two passes they go first."""

    most: int
    """Tokens of a pass, about."""
    pause: Callable[[int, int], None]
    """Called between two passes, with the tokens computed so far and all that the prompt computes. May raise an error,
    which ends the prefill."""

    def stops(self, count: int) -> list[int]:
        """Where passes over ``count`` tokens end, in order: at least one, of about as many tokens each."""
        slices = max(1, round(count / self.most))
        return [count * number // slices for number in range(1, slices + 1)]
