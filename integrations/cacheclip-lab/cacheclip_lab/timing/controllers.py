"""All controllers of one engine, one (:mod:`.controller`) for each method that chooses its ratio by predicted time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from cacheclip_rag import CacheClipEngine, FusionStats, Plan
from cacheclip_rag.measuring import Certificates, KVSources, RatioChooser
from cacheclip_rag.methods import Method
from cacheclip_rag.runtime import Runtime

from ..certificates.identity import make_identity
from ..machine import unit_name
from .controller import Controller, Profile, find_profile

logger = logging.getLogger(__name__)


class Controllers(RatioChooser):
    """Controllers by method, each with the profile and the certificate of one engine's models."""

    def __init__(self, certificates: Certificates, runtimes: Callable[[], Sequence[Runtime]]) -> None:
        self._certificates, self._runtimes = certificates, runtimes
        self._lock = threading.Lock()
        self._controllers: dict[str, Controller | None] = {}

    def decide(self, method: Method, plan: Plan, kv_sources: KVSources, known: int, max_ttft_s: float | None) -> Plan:
        controller = self.of(method)
        if controller is None:
            return plan
        return controller.decide(plan, known, max_ttft_s, controller.profile.reading(plan, kv_sources, known))

    def observe(self, method: Method, plan: Plan, stats: FusionStats) -> None:
        controller = self.of(method)
        if controller is not None:
            controller.observe(plan, stats)

    def profile_machine(self, engine: CacheClipEngine, method: Method) -> Profile:
        from .profiling import measure_profile

        profile = measure_profile(engine, method, self.profile_identity(method))
        self.use_profile(method, profile)
        profile.save()
        return profile

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
            **asdict(make_identity(self._certificates.config, method, self._certificates.kv_sources(method))),
            "processors": [unit_name(each.device) for each in self._runtimes()],
            "threads": torch.get_num_threads(),
        }

    def _make(self, method: Method, profile: Profile) -> Controller:
        return Controller(profile, self._certificates.may_be(method))


def _without_ratio(method: Method) -> str:
    """Equal for a method at any ratio, also for methods that cannot be hashed."""
    return repr(method.at(0.0) if method.has_ratio else method)
