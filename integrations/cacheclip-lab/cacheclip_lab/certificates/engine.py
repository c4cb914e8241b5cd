"""All certificates of one engine: what they (:mod:`.verdicts`) say about its methods, obeyed before every plan."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cacheclip_rag import EngineConfig, Plan
from cacheclip_rag.measuring import Certificates, KVSources
from cacheclip_rag.methods import Method

from .identity import Identity, make_identity
from .promise import PromiseWatch
from .verdicts import Verdicts, certificate_path, check_certificate, find_certificate, no_promise


class EngineCertificates(Certificates):
    """Certificates of one engine's models with its methods. It warns before a plan that no certificate covers, or
    refuses it if the settings require a certificate. They also make it a plain prefill once comparisons contradict the
    promise of the certificate."""

    def __init__(self, config: EngineConfig, kv_sources: Callable[[Method], KVSources]) -> None:
        super().__init__(config, kv_sources)
        self._lock = threading.Lock()
        self._promised: dict[tuple[str, bool, bool], Method] = {}
        self._gated: dict[tuple[str, bool, bool], tuple[Method, Path | None]] = {}
        """What ``auto`` means; and without a certificate, where one would be."""
        self._covered: set[tuple[type, str]] = set()
        """Checked methods by type and settings."""
        self._watch = PromiseWatch()

    def identity(self, method: Method) -> Identity:
        """Identity that a certificate needs to cover these models with this method."""
        return make_identity(self.config, method, self.kv_sources(method))

    def may_be(self, method: Method) -> Callable[[float], bool] | None:
        certificate, _ = find_certificate(self.identity(method))
        if certificate is None:
            return None
        least, guarantee = method.min_confidence, certificate.guarantee
        return lambda ratio: (
            certificate.at(ratio, least) != "not faithful" or (guarantee is not None and guarantee.covers(ratio, least))
        )

    def promised(self, method: Method, keeps_ratio: bool, *, any_ratio: bool = False) -> Method:
        key = repr(method), keeps_ratio, any_ratio
        with self._lock:
            if key not in self._promised:
                certificate, why = find_certificate(self.identity(method))
                kept = _promised(certificate, method, keeps_ratio, any_ratio)
                if kept is None:
                    raise no_promise(self.config, method, certificate, why)
                self._promised[key] = kept
            return self._promised[key]

    def gated(self, method: Method, keeps_ratio: bool, *, any_ratio: bool = False) -> Method:
        key = repr(method), keeps_ratio, any_ratio
        with self._lock:
            _, awaited = self._gated.get(key, (None, None))
            if key not in self._gated or (awaited and awaited.exists()):
                identity = self.identity(method)
                path = certificate_path(identity)
                awaited = None if path.exists() else path  # before the look: then none that is made now is missed
                certificate, _ = find_certificate(identity)
                kept = _promised(certificate, method, keeps_ratio, any_ratio)
                is_faithful = certificate and not any_ratio and certificate.at(method.nominal_ratio) != "not faithful"
                kept = kept or (method if is_faithful else super().gated(method, keeps_ratio))
                self._gated[key] = kept, awaited
            return self._gated[key][0]

    def check(self, method: Method) -> None:
        key = type(method), repr(method)
        if key not in self._covered:
            certificate = check_certificate(self.config, method, self.identity(method))
            if certificate is not None:
                self._watch.begin(method, certificate.guarantee)
            self._covered.add(key)

    def on_plan(self, plan: Plan, kv_sources: KVSources) -> Plan | None:
        super().on_plan(plan, kv_sources)
        is_asked = plan.reused and plan.bypass is None
        if is_asked and self.config.require_certificate and self._watch.is_broken(plan.method):
            return replace(plan, bypass="comparisons with full prefill contradict the promise of the certificate")
        return None

    def record(self, method: Method, differs: bool) -> bool | None:
        return self._watch.record(method, differs)

    def forget(self) -> None:
        with self._lock:
            self._promised.clear()
            self._gated.clear()
            self._covered.clear()


def _promised(certificate: Verdicts | None, method: Method, keeps_ratio: bool, any_ratio: bool) -> Method | None:
    """The method with the gate that its certificate promises; None: it promises none."""
    if certificate is None or certificate.guarantee is None:
        return None
    gates = certificate.guarantee.gates
    if keeps_ratio and not any_ratio:
        own = certificate.guarantee.gate_at(method.nominal_ratio)
        gates = (own,) if own else ()
    if not gates:
        return None
    if not any_ratio and method.has_ratio:
        method = method.at(gates[0].ratio)
    return replace(method, min_confidence=max(gate.min_confidence for gate in (gates if any_ratio else gates[:1])))
