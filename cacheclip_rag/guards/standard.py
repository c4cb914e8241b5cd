"""The observers that every engine begins with."""

from __future__ import annotations

from collections.abc import Callable

from ..config import EngineConfig
from ..runtime.base import Runtime
from .base import Observer
from .certificate import CertificateGuard
from .metrics import Metrics
from .shadow import ShadowChecker

__all__ = ["standard_observers"]


def standard_observers(config: EngineConfig, metrics: Metrics, find_runtime: Callable[[], Runtime]) -> list[Observer]:
    """Certificates before, metrics and comparison with full prefill after.

    Args:
        find_runtime: gives the model that answers, once there is an answer.
    """
    shadow = ShadowChecker(find_runtime, metrics, rate=config.shadow_rate, mode=config.shadow_mode)
    return [CertificateGuard(config), metrics, shadow]
