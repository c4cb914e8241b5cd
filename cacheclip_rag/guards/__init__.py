"""Observers of answers: certificates, comparison with full prefill, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.names import late_names

if TYPE_CHECKING:
    from .base import ObservedAnswer as ObservedAnswer, Observer as Observer
    from .certificate import (
        FORMAT_VERSION as FORMAT_VERSION,
        THRESHOLDS as THRESHOLDS,
        Verdicts as Verdicts,
        certificate_path as certificate_path,
        read_certificate as read_certificate,
    )
    from .metrics import Metrics as Metrics
    from .promise import Guarantee as Guarantee, PromisedGate as PromisedGate
    from .tracing import record_spans as record_spans


__getattr__, __all__ = late_names(
    __name__,
    {
        "base": "ObservedAnswer Observer",
        "certificate": "FORMAT_VERSION THRESHOLDS Verdicts certificate_path read_certificate",
        "metrics": "Metrics",
        "promise": "Guarantee PromisedGate",
        "tracing": "record_spans",
    },
)
