"""Observers of answers: certificates, comparison with full prefill, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from .base import ObservedAnswer, Observer

__all__ = ["ObservedAnswer", "Observer"]

__getattr__ = late_names(
    __name__,
    {
        "ObservedAnswer": "base",
        "Observer": "base",
    },
)
