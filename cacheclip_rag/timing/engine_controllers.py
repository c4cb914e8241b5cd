"""All controllers of one engine, one (:mod:`.controller`) for each method that chooses its ratio by predicted time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..base.machine import unit_name
from ..guards.engine_certificates import Certificates
from ..methods.base import Method
from ..runtime.base import Runtime
from .controller import Controller, Profile, find_profile

logger = logging.getLogger(__name__)


class Controllers:
    """Controllers by method, each with the profile and the certificate of one engine's models. Safe to share between
    threads."""

    def __init__(self, certificates: Certificates, runtimes: Callable[[], Sequence[Runtime]]) -> None:
        """``runtimes`` loads the models whose processors count: the primary, and the auxiliary if it can score."""
        self._certificates, self._runtimes = certificates, runtimes
        self._lock = threading.Lock()
        self._controllers: dict[str, Controller | None] = {}

    def of(self, method: Method) -> Controller | None:
        """Chooses ratios of this method by predicted time; None without a profile of these models on this machine, with
        a warning at first. The profile and the certificate are read once."""
        key = _without_ratio(method)
        with self._lock:
            if key not in self._controllers:
                profile = find_profile(self.profile_identity(method))
                if profile is None:
                    logger.warning(
                        "the recompute ratio cannot be chosen by predicted time, because these models were not "
                        "profiled on this machine; method %r keeps its own ratio. Run cacheclip profile, or call "
                        "engine.profile_machine().",
                        method.name,
                    )
                self._controllers[key] = None if profile is None else self._make(method, profile)
            return self._controllers[key]

    def use_profile(self, method: Method, profile: Profile) -> None:
        """Choose this method's ratios by ``profile`` from now on."""
        with self._lock:
            self._controllers[_without_ratio(method)] = self._make(method, profile)

    def profile_identity(self, method: Method) -> dict[str, Any]:
        """What a profile needs to hold for these models with this method: weights, settings, versions, processors."""
        return {
            **asdict(self._certificates.identity(method)),
            "processors": [unit_name(each.device) for each in self._runtimes()],
            "threads": torch.get_num_threads(),
        }

    def forget(self) -> None:
        """Read profiles and certificates again: the head set changed."""
        with self._lock:
            self._controllers.clear()

    def _make(self, method: Method, profile: Profile) -> Controller:
        return Controller(profile, self._certificates.may_be(method))


def _without_ratio(method: Method) -> str:
    """Equal for a method at any ratio, also for methods that cannot be hashed."""
    return repr(method.at(0.0) if method.has_ratio else method)
