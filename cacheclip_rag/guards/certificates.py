"""What was measured of an engine's models with a method. ``cacheclip-lab`` makes certificates, and reads them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from ..base.errors import CertificateError, MissingExtraError
from ..config import EngineConfig
from ..methods.base import Method
from ..plan.plan import KVSources, Plan
from .base import Observer

logger = logging.getLogger(__name__)

UNMEASURED_CONFIDENCE = 0.1
"""Gate of the method ``auto`` without a certificate: the least at which, with 95 % confidence, at most 10 % of the
answers score lower than full prefill's, with the worst model that was measured (1.5B, 210 questions, ratio 0.2)."""

_WHO_READS = "cacheclip-lab (needed to make certificates, and to read them)"


class Certificates(Observer):
    """Certificates of one engine's models with its methods. This one has none to read; what is installed as
    ``certificates`` (group ``cacheclip.measurements``) is a subclass. Safe to share between threads."""

    def __init__(self, config: EngineConfig, kv_sources: Callable[[Method], KVSources]) -> None:
        """
        Args:
            kv_sources: the sources of a method's KV; loads the models that the method needs.
        """
        self.config, self.kv_sources = config, kv_sources

    def may_be(self, method: Method) -> Callable[[float], bool] | None:
        """Whether the method's certificate calls a recompute ratio exact or faithful, or promises its gate there; None
        without a certificate."""
        return None

    def promised(self, method: Method, keeps_ratio: bool, *, any_ratio: bool = False) -> Method:
        """The method with ``min_confidence="auto"``: with the gate that its certificate promises.

        Args:
            keeps_ratio: the gate of the method's ratio; otherwise ratio and gate are the cheapest promised ones.
            any_ratio: the strictest of the gates, for a ratio that is chosen later.

        Raises:
            CertificateError: no certificate of these models and this method promises it.
        """
        raise MissingExtraError(_WHO_READS, "lab")

    def gated(self, method: Method, keeps_ratio: bool, *, any_ratio: bool = False) -> Method:
        """The method that ``auto`` means, with the gate, and unless ``keeps_ratio`` the ratio, that its certificate
        promises; with none where the certificate calls the ratio faithful without one (not with ``any_ratio``); else
        with :data:`UNMEASURED_CONFIDENCE`."""
        return replace(method, min_confidence=UNMEASURED_CONFIDENCE)

    def check(self, method: Method) -> None:
        """Warn once per process if no certificate covers the method at its ratio. Raises CertificateError: the settings
        require one."""
        if self.config.require_certificate:
            missing = MissingExtraError(_WHO_READS, "lab")
            raise CertificateError(f"{missing}; or set require_certificate=False, or use method 'full'.") from missing
        _warn_once()

    def on_plan(self, plan: Plan, kv_sources: KVSources) -> Plan | None:
        if plan.reused and plan.bypass is None:
            self.check(plan.method)
        return None

    def record(self, method: Method, differs: bool) -> bool | None:
        """Count an answer, chosen whatever it says: whether it is not full prefill's. Returns whether this one breaks
        the promise of the method's certificate; None: there is no promise."""
        return None

    def forget(self) -> None:
        """Read certificates again: models or the head set changed."""


@cache
def _warn_once() -> None:
    logger.warning("how close answers are to full prefill was not measured here: cacheclip certify, of cacheclip-lab")
