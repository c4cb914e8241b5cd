"""Observers of answers: certificates, comparison with full prefill, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from .base import ObservedAnswer, Observer
    from .certificate import CertificateGuard
    from .metrics import Metrics

__all__ = ["CertificateGuard", "Metrics", "ObservedAnswer", "Observer"]

__getattr__ = late_names(
    __name__,
    {
        "CertificateGuard": "certificate",
        "Metrics": "metrics",
        "ObservedAnswer": "base",
        "Observer": "base",
    },
)
