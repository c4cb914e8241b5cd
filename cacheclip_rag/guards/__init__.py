"""Observers of answers: certificates, comparison with full prefill, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from .base import ObservedAnswer as ObservedAnswer, Observer as Observer
    from .certificate import (
        THRESHOLDS as THRESHOLDS,
        Certificate as Certificate,
        GateFigures as GateFigures,
        RatioFigures as RatioFigures,
        TurnFigures as TurnFigures,
        check_writable as check_writable,
        verdict_at as verdict_at,
    )
    from .metrics import Metrics as Metrics
    from .promise import Guarantee as Guarantee, PromisedGate as PromisedGate
    from .tracing import record_spans as record_spans


__getattr__, __all__ = late_names(
    __name__,
    {
        "base": "ObservedAnswer Observer",
        "certificate": "THRESHOLDS Certificate GateFigures RatioFigures TurnFigures check_writable verdict_at",
        "metrics": "Metrics",
        "promise": "Guarantee PromisedGate",
        "tracing": "record_spans",
    },
)
