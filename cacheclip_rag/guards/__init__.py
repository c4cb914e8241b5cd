"""Observers of answers: certificates, comparison with full prefill, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from .base import ObservedAnswer, Observer
    from .certificate import THRESHOLDS, Certificate, GateFigures, RatioFigures, TurnFigures, check_writable, verdict_at
    from .metrics import Metrics
    from .promise import Guarantee, PromisedGate
    from .tracing import record_spans

__all__ = [
    "THRESHOLDS",
    "Certificate",
    "GateFigures",
    "Guarantee",
    "Metrics",
    "ObservedAnswer",
    "Observer",
    "PromisedGate",
    "RatioFigures",
    "TurnFigures",
    "check_writable",
    "record_spans",
    "verdict_at",
]

__getattr__ = late_names(
    __name__,
    {
        "THRESHOLDS": "certificate",
        "Certificate": "certificate",
        "GateFigures": "certificate",
        "Guarantee": "promise",
        "Metrics": "metrics",
        "ObservedAnswer": "base",
        "Observer": "base",
        "PromisedGate": "promise",
        "RatioFigures": "certificate",
        "TurnFigures": "certificate",
        "check_writable": "certificate",
        "record_spans": "tracing",
        "verdict_at": "certificate",
    },
)
