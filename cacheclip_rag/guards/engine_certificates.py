"""All certificates of one engine: what they (:mod:`.certificate`) say about its methods."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from ..config import EngineConfig
from ..methods.base import Method
from ..plan.plan import KVSources
from .certificate import find_certificate, no_promise
from .identity import Identity, identity_of


class Certificates:
    """Certificates of one engine's models with its methods. Safe to share between threads."""

    def __init__(self, config: EngineConfig, kv_sources: Callable[[Method], KVSources]) -> None:
        """
        Args:
            kv_sources: the sources of a method's KV; loads the models that the method needs.
        """
        self._config, self._kv_sources = config, kv_sources
        self._lock = threading.Lock()
        self._promised: dict[tuple[str, bool, bool], Method] = {}

    def identity(self, method: Method) -> Identity:
        """Identity that a certificate needs to cover these models with this method."""
        kv_sources = self._kv_sources(method)
        return identity_of(
            self._config, method, kv_sources.prefix_caches, kv_sources.auxiliary, kv_sources.primary.context
        )

    def may_be(self, method: Method) -> Callable[[float], bool] | None:
        """Whether the method's certificate calls a recompute ratio exact or faithful, or promises its gate there; None
        without a certificate."""
        certificate, _ = find_certificate(self.identity(method))
        if certificate is None:
            return None
        least, guarantee = method.min_confidence, certificate.guarantee
        return lambda ratio: (
            certificate.at(ratio, least) != "not faithful" or (guarantee is not None and guarantee.covers(ratio, least))
        )

    def promised(self, method: Method, keeps_ratio: bool, *, any_ratio: bool = False) -> Method:
        """The method with ``min_confidence="auto"``: with the gate that its certificate promises, which is read once.

        Args:
            keeps_ratio: the gate of the method's ratio; otherwise ratio and gate are the cheapest promised ones.
            any_ratio: the strictest of the gates, for a ratio that is chosen later.

        Raises:
            CertificateError: no certificate of these models and this method promises it.
        """
        key = repr(method), keeps_ratio, any_ratio
        with self._lock:
            if key not in self._promised:
                certificate, why = find_certificate(self.identity(method))
                gates = certificate.guarantee.gates if certificate and certificate.guarantee else ()
                if keeps_ratio and not any_ratio and certificate and certificate.guarantee:
                    own = certificate.guarantee.gate_at(method.nominal_ratio)
                    gates = (own,) if own else ()
                if not gates:
                    raise no_promise(self._config, method, certificate, why)
                if not any_ratio and method.has_ratio:
                    method = method.at(gates[0].ratio)
                least = max(gate.min_confidence for gate in (gates if any_ratio else gates[:1]))
                self._promised[key] = replace(method, min_confidence=least)
            return self._promised[key]

    def forget(self) -> None:
        """Read certificates again: the head set changed."""
        with self._lock:
            self._promised.clear()
