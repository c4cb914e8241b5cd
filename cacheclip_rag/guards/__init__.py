"""Observers of answers: certificates, comparison with full prefill, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.names import late_names

if TYPE_CHECKING:
    from .base import ObservedAnswer as ObservedAnswer, Observer as Observer
    from .metrics import Metrics as Metrics
    from .tracing import record_spans as record_spans


__getattr__, __all__ = late_names(
    __name__,
    {
        "base": "ObservedAnswer Observer",
        "metrics": "Metrics",
        "tracing": "record_spans",
    },
)
