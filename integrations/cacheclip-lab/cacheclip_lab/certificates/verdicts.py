"""Reads a certificate, the result of ``cacheclip certify`` for a pair of models.

A certificate is valid for one :class:`~.identity.Identity`. It is a file in the cache folder. Its digest
detects damage, not forgery, so protect the folder by permissions.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cacheclip_rag import CertificateError, EngineConfig
from cacheclip_rag.methods import PRESET_NAMES, Method, preset
from cacheclip_rag.models import concrete
from cacheclip_rag.plugins import cache_home, json_digest

from .identity import Identity, differences
from .promise import Guarantee

logger = logging.getLogger(__name__)

FORMAT_VERSION = 5
VERDICTS = ("exact", "faithful", "not faithful")
THRESHOLDS = {"first_token_kl": 0.1, "answer_kl": 0.05, "agreement": 0.95, "needle_accuracy_of_full": 0.95}
"""Limits for ``faithful``, over all prompts: mean KL at the first token at most 0.1 nats, mean KL along the answer at
most 0.05 nats, at least 95 % of full prefill's greedy tokens, and at least 95 % of the needles that it finds."""


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """What is said of a confidence gate at one recompute ratio."""

    min_confidence: float
    verdict: str
    """One of :data:`VERDICTS`, of the method with this gate."""


@dataclass(frozen=True, slots=True)
class RatioVerdict:
    """What is said of one recompute ratio."""

    ratio: float
    """Nominal recompute ratio."""
    verdict: str
    """One of :data:`VERDICTS`, of the method without a gate."""
    gate: tuple[GateVerdict, ...] = ()
    """By increasing confidence; empty where there can be none."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What an engine needs of a certificate. The laboratory writes and shows all of it."""

    identity: Identity
    ratio: float
    """For which it was asked."""
    exactness: Mapping[str, Any]
    """Exactness checks on this model, each with its figure, its limit, and whether it passed."""
    ratios: tuple[RatioVerdict, ...]
    """Increasing ratios."""
    thresholds: Mapping[str, float]
    quick: bool
    turns: tuple[str, ...] = ()
    """The verdict of each turn of conversations, at ``ratio``; empty if none were measured."""
    guarantee: Guarantee | None = None
    """What was asked for with ``--max-differ``."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Verdicts:
        """Those of a certificate's file. Raises KeyError, TypeError or ValueError on anything else."""
        if content["format"] != FORMAT_VERSION:
            raise ValueError(f"certificate format {content['format']!r}")
        rows = [
            RatioVerdict(
                row["ratio"],
                row["verdict"],
                tuple(GateVerdict(gate["min_confidence"], gate["verdict"]) for gate in row["gate"]),
            )
            for row in content["ratios"]
        ]
        turns = tuple(turn["verdict"] for turn in content.get("turns", ()))
        said = {content["verdict"], *turns, *(row.verdict for row in rows)}
        if not said | {gate.verdict for row in rows for gate in row.gate} <= {*VERDICTS}:
            raise ValueError("unknown verdict")
        promised = content.get("guarantee")
        return cls(
            identity=Identity(**content["identity"]),
            ratio=content["ratio"],
            exactness=content["exactness"],
            ratios=tuple(rows),
            thresholds=content["thresholds"],
            quick=content["quick"],
            turns=turns,
            guarantee=promised and Guarantee.from_dict(promised),
        )

    def at(self, ratio: float, min_confidence: float = 0.0) -> str:
        """Verdict for a recompute ratio: the verdict of the nearest certified ratio that is not larger, or that of the
        worst turn of conversations, if they were measured at that ratio.

        Ratio 1.0 is measured on prompts only on request. Otherwise the exactness checks decide: ``exact`` if 64 greedy
        tokens were equal, ``faithful`` if (in half precision) noise changed a token.

        Args:
            min_confidence: the method's confidence gate. The verdict is that of the nearest measured gate that is not
                larger.
        """
        if not self.exactness["passed"]:
            return "not faithful"
        row = self._row_at(ratio)
        if ratio >= 1.0 and not (row and row.ratio >= 1.0):
            return "exact" if self.exactness["checks"]["greedy"]["figure"] == 1.0 else "faithful"
        if row is None:
            return "not faithful"
        gates = [each for each in row.gate if 0.0 < each.min_confidence <= min_confidence]
        if gates:
            return gates[-1].verdict
        turns = self.turns if row == self._row_at(self.ratio) else ()
        return max((row.verdict, *turns), key=VERDICTS.index)

    def _row_at(self, ratio: float) -> RatioVerdict | None:
        """What is said of the nearest certified ratio that is not larger; None if all are larger."""
        below = [row for row in self.ratios if row.ratio <= ratio + 1e-9]
        return below[-1] if below else None


def find_certificate(identity: Identity) -> tuple[Verdicts | None, str]:
    """What the certificate of this identity says and an empty string, or None and the reason. The reason names the
    differences to the most similar certificate, if there is one."""
    path = certificate_path(identity)
    verdicts = _read(path)
    if verdicts is not None and verdicts.identity == identity:
        if verdicts.thresholds != THRESHOLDS:
            return None, "its certificate was judged by other thresholds"
        return verdicts, ""
    if path.exists():
        return None, f"its certificate {path} is damaged"
    recorded = [each for other in sorted(_folder().glob("*.json")) if (each := _identity_in(other))]
    same = [each for each in recorded if each.get("primary_sha256") == identity.primary_sha256]
    if not same:
        return None, _NEVER_CERTIFIED
    names = min((differences(each, asdict(identity)) for each in same), key=len)
    other = dict.fromkeys(name.removeprefix("settings.").partition(".")[0] for name in names)
    return None, f"its certificate is for other {', '.join(other).replace('_sha256', '').replace('_', ' ')}"


def check_certificate(config: EngineConfig, method: Method, identity: Identity) -> Verdicts | None:
    """What the certificate says that covers this method at its ratio, by its verdict or its promise; without one, warn
    once per process.

    Raises:
        CertificateError: no certificate covers it, and the settings require a certificate.
    """
    certificate, why = find_certificate(identity)
    if certificate is not None:
        verdict = certificate.at(method.nominal_ratio, method.min_confidence)
        if verdict == "exact" or (verdict == "faithful" and not (certificate.quick and config.require_certificate)):
            return certificate
        if certificate.guarantee and certificate.guarantee.covers(method.nominal_ratio, method.min_confidence):
            return certificate
        gate = f" with min_confidence {method.min_confidence:g}" if method.min_confidence else ""
        why = f"its certificate says {verdict!r} at recompute ratio {method.nominal_ratio}{gate}"
        if verdict == "faithful":
            why += ", but it is a quick certificate, and require_certificate needs a thorough one"
    advice = f"Measure it: {_command(config, method, identity.backend)}"
    message = f"model {config.primary!r} with method {method.name!r} has no valid certificate: {why}. {advice}"
    if config.require_certificate:
        raise CertificateError(f"{message}; or set require_certificate=False, or use method 'full'.")
    if why == _NEVER_CERTIFIED:
        _warn_once(_NOT_CERTIFIED, "how close answers are to full prefill was not measured here: run cacheclip certify")
        logger.info(message)
    else:
        _warn_once((identity.digest(), why), message)
    return None


def no_promise(config: EngineConfig, method: Method, certificate: Verdicts | None, why: str) -> CertificateError:
    """The error for ``min_confidence="auto"`` without a promise.

    Args:
        why: there is no certificate; else it has no gate for the method's ratio.
    """
    promised = certificate and certificate.guarantee
    if certificate and not promised:
        why = "its certificate promises nothing, because it was made without --max-differ"
    elif promised and promised.gates:
        ratios = ", ".join(f"{gate.ratio:g}" for gate in sorted(promised.gates, key=lambda gate: gate.ratio))
        why = f"its certificate promises nothing at recompute ratio {method.nominal_ratio:g}, only at {ratios}"
    elif promised:
        why = (
            f"its {promised.n} prompts do not show of any gate cheaper than full prefill that at most "
            f"{promised.most:.0%} of the answers differ"
        )
    return CertificateError(
        "min_confidence='auto' expects a promise in the certificate of "
        f"model {config.primary!r} with method {method.name!r}, and {why}. Measure it: "
        f"{_command(config, method, '', max_differ=0.1)}; or set a number, such as 0.2."
    )


_NEVER_CERTIFIED = "it has not been certified"
_NOT_CERTIFIED = "not certified"
_warned: set[object] = set()
"""Warnings logged already: each is logged once per process, for all engines."""


def _warn_once(what: object, message: str) -> None:
    if what not in _warned:
        _warned.add(what)
        logger.warning(message)


def _command(config: EngineConfig, method: Method, backend: str, max_differ: float | None = None) -> str:
    """What makes the missing certificate: a shell command, or Python if the method is not a preset."""
    if method.name not in PRESET_NAMES or type(method) is not type(preset(method.name)):
        run = "served.certify_vllm" if backend.startswith("vllm") else "certify.certify"
        return f"cacheclip_lab.evaluation.{run}(config, method={type(method).__name__}(...)).save()"
    config = concrete(config)
    options: dict[str, Any] = {
        "backend": "vllm" if backend.startswith("vllm") else None,
        "primary": config.primary,
        "auxiliary": config.auxiliary if method.needs_auxiliary else None,
        "method": method.name,
        "ratio": method.nominal_ratio if method.has_ratio else None,
        "dtype": config.dtype,
        "device": config.device,
        "max-differ": max_differ,
    }
    flags = [f"--{name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    return " ".join(["cacheclip certify", *flags, "(and --settings FILE, if this engine has other settings)"])


def certificate_path(identity: Identity) -> Path:
    """Where engines look for the certificate of an identity."""
    return _folder() / f"{identity.digest()}.json"


def read_certificate(path: Path) -> dict[str, Any] | None:
    """The content of a certificate's file; None if the file is missing or damaged."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        recorded = content.pop("sha256")
        if recorded != json_digest(content):
            raise ValueError("digest")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.debug("not a certificate: %s (%s)", path, error)
        return None
    return content


def _read(path: Path) -> Verdicts | None:
    """What a file says; None if it is missing, damaged or of another format."""
    content = read_certificate(path)
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        return None if content is None else Verdicts.of(content)
    return None


def _identity_in(path: Path) -> dict[str, Any] | None:
    """The identity in a file, of whatever format."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        identity = json.loads(path.read_text())["identity"]
        return identity if isinstance(identity, dict) else None
    return None


def _folder() -> Path:
    return cache_home() / "certificates"
