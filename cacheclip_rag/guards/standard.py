"""The default observers of an engine."""

from __future__ import annotations

from collections.abc import Callable

from ..config import EngineConfig
from ..runtime.base import Runtime
from .base import Observer
from .certificate import CertificateGuard
from .metrics import Metrics
from .misses import MissWarning
from .promise import PromiseWatch
from .shadow import ShadowChecker
from .tracing import Tracing, is_traced


def standard_observers(config: EngineConfig, metrics: Metrics, find_runtime: Callable[[], Runtime]) -> list[Observer]:
    """Certificate checks, a warning where nothing is reused, metrics, OpenTelemetry spans and
    comparison with full prefill.

    Args:
        find_runtime: returns the primary model's runtime; first called after the first answer.
    """
    watch = PromiseWatch(metrics)
    shadow = ShadowChecker(find_runtime, metrics, watch, rate=config.shadow_rate)
    traces = [Tracing(config.primary)] if is_traced() else []
    return [CertificateGuard(config, watch), MissWarning(), metrics, *traces, shadow]
