"""All certificates of one engine: what they (:mod:`.certificate`) say about its methods."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..config import EngineConfig
from ..methods.base import Method
from ..plan.sources import Sources
from .certificate import Identity, confidence_at, find_certificate, identity_of, no_confidence, verdict_at

__all__ = ["Certificates"]


class Certificates:
    """Certificates of one engine's models with its methods. Safe to share between threads."""

    def __init__(self, config: EngineConfig, sources: Callable[[Method], Sources]) -> None:
        """
        Args:
            sources: the sources of a method's KV; loads the models that the method needs.
        """
        self._config, self._sources = config, sources
        self._lock = threading.Lock()
        self._confidences: dict[tuple[str, bool], float] = {}

    def identity(self, method: Method) -> Identity:
        """Identity that a certificate needs to cover these models with this method."""
        sources = self._sources(method)
        return identity_of(self._config, method, sources.prefix, sources.auxiliary, sources.primary.context)

    def may_be(self, method: Method) -> Callable[[float], bool] | None:
        """Whether the method's certificate calls a recompute ratio exact or faithful; None without a certificate."""
        certificate, _ = find_certificate(self.identity(method))
        if certificate is None:
            return None
        return lambda ratio: verdict_at(certificate, ratio, method.min_confidence) != "not faithful"

    def confidence(self, method: Method, *, any_ratio: bool = False) -> float:
        """The value of ``min_confidence="auto"``: of the method's ratio, by its certificate, which is read once.

        Args:
            any_ratio: the largest value of all ratios that may be chosen.

        Raises:
            CertificateError: no certificate of these models and this method says it.
        """
        key = repr(method), any_ratio
        with self._lock:
            if key not in self._confidences:
                identity = self.identity(method)
                certificate, why = find_certificate(identity)
                if certificate is not None and certificate.quick:
                    certificate = None  # four prompts say too little
                ratios = [method.nominal_ratio]
                if certificate is not None and any_ratio:
                    ratios += [row.ratio for row in certificate.ratios if row.verdict == "faithful"]
                found = [confidence_at(certificate, ratio) if certificate else None for ratio in ratios]
                known = [each for each in found if each is not None]
                if len(known) < len(found):
                    raise no_confidence(self._config, method, why)
                self._confidences[key] = max(known)
            return self._confidences[key]

    def forget(self) -> None:
        """Read certificates again: the head set changed."""
        with self._lock:
            self._confidences.clear()
