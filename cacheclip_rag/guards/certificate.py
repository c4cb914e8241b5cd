"""One certificate: results of ``cacheclip certify`` for a pair of models, its file, and whether it covers an engine.

A certificate is valid for one identity (:mod:`.identity`). It is a file in the cache folder. Its digest detects damage,
not forgery, so protect the folder by permissions.
"""

from __future__ import annotations

import json
import logging
import shlex
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..base.errors import CertificateError
from ..base.keys import json_digest
from ..base.paths import atomic_path, cache_home, write_json
from ..config import EngineConfig
from ..methods import PRESET_NAMES, preset
from ..methods.base import Method
from ..models.load import concrete
from ..plan.plan import KVSources, Plan
from .base import Observer
from .identity import Identity, differences, identity_of
from .promise import Guarantee, PromiseWatch

logger = logging.getLogger(__name__)

FORMAT_VERSION = 5
VERDICTS = ("exact", "faithful", "not faithful")
THRESHOLDS = {"first_token_kl": 0.1, "answer_kl": 0.05, "agreement": 0.95, "needle_accuracy_of_full": 0.95}
"""Limits for ``faithful``, over all prompts: mean KL at the first token at most 0.1 nats, mean KL along the answer at
most 0.05 nats, at least 95 % of full prefill's greedy tokens, and at least 95 % of the needles that it finds."""


@dataclass(frozen=True, slots=True)
class GateFigures:
    """What a confidence gate does on the prompts, after a pass at one recompute ratio."""

    min_confidence: float
    first_token_agreement: float
    """Share of prompts whose first token is full prefill's."""
    charged_ratio: float
    """Mean over prompts, both passes counted; 1.0 is the cost of full prefill."""
    full_prefills: float
    """Share of prompts that are prefilled in full after all."""
    verdict: str
    """One of :data:`VERDICTS`, of the method with this gate."""


@dataclass(frozen=True, slots=True)
class RatioFigures:
    """Fidelity to full prefill at one recompute ratio, over all prompts."""

    ratio: float
    """Nominal recompute ratio."""
    effective_ratio: float
    """Mean over prompts, as :class:`~cacheclip_rag.fusion.answer.FusionStats` counts it."""
    first_token_kl: Mapping[str, float]
    """``mean``, ``median`` and ``max`` over prompts, nats."""
    answer_kl: Mapping[str, float]
    """``mean``, ``median`` and ``max`` over prompts of the mean KL along full prefill's answer, nats."""
    agreement: float
    """Mean share of full prefill's greedy tokens that the method chooses too."""
    needle_accuracy: float
    """Share of needle prompts whose answer contains the needle."""
    verdict: str
    """One of :data:`VERDICTS`."""
    charged_ratio: float | None = None
    """Mean over prompts, as :class:`~cacheclip_rag.fusion.answer.FusionStats` counts it; None: not recorded."""
    gate: Sequence[GateFigures] = ()
    """What a confidence gate would have done, by increasing confidence; empty where there can be none. All other
    figures are of the method without a gate."""

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> RatioFigures:
        return cls(**{**value, "gate": tuple(GateFigures(**row) for row in value["gate"])})


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """Fidelity to full prefill at one turn of conversations, whose history grows by the method's own answers."""

    turn: int
    """From 1."""
    prompt_tokens: float
    """These three: means over conversations, as :class:`~cacheclip_rag.fusion.answer.FusionStats` counts them."""
    continued_tokens: float
    computed_tokens: float
    first_token_kl: Mapping[str, float]
    """These three: as in :class:`RatioFigures`."""
    answer_kl: Mapping[str, float]
    agreement: float
    needle_accuracy: float
    """Share of the numbers asked for at this turn that the answers contain."""
    needle_accuracy_of_full: float
    verdict: str
    """One of :data:`VERDICTS`."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Measured figures, and the verdict at the requested recompute ratio."""

    primary: str
    """The names as they were given, for people; they are not part of the identity."""
    auxiliary: str | None
    identity: Identity
    verdict: str
    ratio: float
    """Recompute ratio of the verdict."""
    exactness: Mapping[str, Any]
    """Exactness checks on this model, each with its figure, its limit, and whether it passed."""
    needle_accuracy_of_full: float
    ratios: Sequence[RatioFigures]
    """Increasing ratios."""
    thresholds: Mapping[str, float]
    prompts: int
    quick: bool
    seconds: float
    created: str
    """UTC, ISO 8601."""
    turns: Sequence[TurnFigures] = ()
    """Of conversations, at ``ratio`` and without a gate; empty if none were measured."""
    guarantee: Guarantee | None = None
    """What was asked for with ``--max-differ``."""

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Certificate:
        """Inverse of :meth:`to_dict`; raises KeyError, TypeError or ValueError on anything else."""
        if value["format"] != FORMAT_VERSION:
            raise ValueError(f"certificate format {value['format']!r}")
        taken = ("format", "identity", "ratios", "guarantee", "turns")
        promised = value.get("guarantee")
        certificate = cls(
            identity=Identity(**value["identity"]),
            ratios=[RatioFigures.from_dict(row) for row in value["ratios"]],
            turns=tuple(TurnFigures(**row) for row in value.get("turns", ())),
            guarantee=promised and Guarantee.from_dict(promised),
            **{key: value[key] for key in value if key not in taken},
        )
        verdicts = {certificate.verdict, *(row.verdict for row in certificate.ratios)}
        verdicts |= {turn.verdict for turn in certificate.turns}
        if not verdicts | {gate.verdict for row in certificate.ratios for gate in row.gate} <= {*VERDICTS}:
            raise ValueError("unknown verdict")
        return certificate

    @property
    def path(self) -> Path:
        return _folder() / f"{self.identity.digest()}.json"

    def save(self) -> Path:
        """Write the certificate to the folder in which engines look.

        It replaces an older certificate of the same identity. Ratios that only the older one has are taken over if they
        were measured on as many prompts, and so is its guarantee if this one was asked for none. A quick certificate
        never replaces a thorough certificate.

        Raises:
            CertificateError: the folder cannot be written.
        """
        older = _read(self.path)
        if older is not None and older.thresholds == self.thresholds and older.exactness["passed"]:
            if self.quick and not older.quick:
                logger.warning("%s holds a thorough certificate and stays; this quick one is not saved", self.path)
                return self.path
            if self.quick == older.quick and self.exactness["passed"]:
                turns = self.turns or (older.turns if older.ratio == self.ratio else ())
                merged = replace(
                    self,
                    ratios=_merged(older.ratios, self.ratios),
                    turns=turns,
                    guarantee=self.guarantee or older.guarantee,
                )
                return replace(merged, verdict=verdict_at(merged, merged.ratio))._write()
        return self._write()

    def _write(self) -> Path:
        content = self.to_dict()
        content["sha256"] = json_digest(content)
        path = self.path
        try:
            write_json(path, content)
        except OSError as error:
            raise _not_writable(error) from error
        return path


def check_writable() -> None:
    """Raise CertificateError unless a certificate can be saved. Called before the long measurement, not after it."""
    try:
        with atomic_path(_folder() / "probe.txt") as temporary:
            temporary.write_text("")
        (_folder() / "probe.txt").unlink(missing_ok=True)
    except OSError as error:
        raise _not_writable(error) from error


def _not_writable(error: OSError) -> CertificateError:
    return CertificateError(
        f"the certificate cannot be written to {_folder()} ({error}). Make that folder writable, or set CACHECLIP_HOME "
        "to a writable folder."
    )


def _merged(older: Sequence[RatioFigures], newer: Sequence[RatioFigures]) -> list[RatioFigures]:
    rows = {row.ratio: row for row in (*older, *newer)}
    return [rows[ratio] for ratio in sorted(rows)]


def find_certificate(identity: Identity) -> tuple[Certificate | None, str]:
    """The certificate of this identity and an empty string, or None and the reason. The reason names the differences to
    the most similar certificate, if there is one."""
    path = _folder() / f"{identity.digest()}.json"
    found = _read(path)
    if found is not None and found.identity == identity:
        if found.thresholds != THRESHOLDS:
            return None, "its certificate was judged by other thresholds"
        return found, ""
    if path.exists():
        return None, f"its certificate {path} is damaged"
    recorded = [each for other in sorted(_folder().glob("*.json")) if (each := _identity_in(other))]
    same = [each for each in recorded if each.get("primary_sha256") == identity.primary_sha256]
    if not same:
        return None, _NEVER_CERTIFIED
    names = min((differences(each, asdict(identity)) for each in same), key=len)
    other = dict.fromkeys(name.removeprefix("settings.").partition(".")[0] for name in names)
    return None, f"its certificate is for other {', '.join(map(_spoken, other))}"


def verdict_at(certificate: Certificate, ratio: float, min_confidence: float = 0.0) -> str:
    """Verdict for a recompute ratio: the verdict of the nearest certified ratio that is not larger, or that of the
    worst turn of conversations, if they were measured at that ratio.

    Ratio 1.0 is measured on prompts only on request. Otherwise the exactness checks decide: ``exact`` if 64 greedy
    tokens were equal, ``faithful`` if (in half precision) noise changed a token.

    Args:
        min_confidence: the method's confidence gate. The verdict is that of the nearest measured gate that is not
            larger.
    """
    if not certificate.exactness["passed"]:
        return "not faithful"
    row = _row_at(certificate, ratio)
    if ratio >= 1.0 and not (row and row.ratio >= 1.0):
        return "exact" if certificate.exactness["checks"]["greedy"]["figure"] == 1.0 else "faithful"
    if row is None:
        return "not faithful"
    gates = [each for each in row.gate if 0.0 < each.min_confidence <= min_confidence]
    if gates:
        return gates[-1].verdict
    turns = certificate.turns if row == _row_at(certificate, certificate.ratio) else ()
    return max((row.verdict, *(turn.verdict for turn in turns)), key=VERDICTS.index)


def _row_at(certificate: Certificate, ratio: float) -> RatioFigures | None:
    """Figures of the nearest certified ratio that is not larger; None if all are larger."""
    below = [row for row in certificate.ratios if row.ratio <= ratio + 1e-9]
    return below[-1] if below else None


class CertificateGuard(Observer):
    """Warns before a plan that no certificate covers, or refuses it if the settings require a certificate. They also
    make it a plain prefill once comparisons contradict the promise of the certificate."""

    def __init__(self, config: EngineConfig, watch: PromiseWatch | None = None) -> None:
        """``watch`` is told what certificates promise."""
        self._config, self._watch = config, watch
        self._covered: dict[tuple[type, str], weakref.ref[KVSources]] = {}
        """Checked methods by type and settings, each with the models of the check, whose weights it does not keep."""

    def on_plan(self, plan: Plan, kv_sources: KVSources) -> Plan | None:
        if not plan.reused or plan.bypass is not None:
            return None
        method = type(plan.method), repr(plan.method)
        covered = self._covered.get(method)
        if covered is None or covered() is not kv_sources:
            context = kv_sources.primary.context
            identity = identity_of(self._config, plan.method, kv_sources.prefix_caches, kv_sources.auxiliary, context)
            certificate = check_certificate(self._config, plan.method, identity)
            if self._watch is not None and certificate is not None:
                self._watch.begin(plan.method, certificate.guarantee)
            self._covered[method] = weakref.ref(kv_sources)
        if self._config.require_certificate and self._watch is not None and self._watch.is_broken(plan.method):
            return replace(plan, bypass="comparisons with full prefill contradict the promise of the certificate")
        return None


def check_certificate(config: EngineConfig, method: Method, identity: Identity) -> Certificate | None:
    """The certificate that covers this method at its ratio, by its verdict or its promise; without one, warn once per
    process.

    Raises:
        CertificateError: no certificate covers it, and the settings require a certificate.
    """
    certificate, why = find_certificate(identity)
    if certificate is not None:
        verdict = verdict_at(certificate, method.nominal_ratio, method.min_confidence)
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


def no_promise(config: EngineConfig, method: Method, certificate: Certificate | None, why: str) -> CertificateError:
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
    given = [f"--{name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    return " ".join(["cacheclip certify", *given, "(and --settings FILE, if this engine has other settings)"])


def _read(path: Path) -> Certificate | None:
    """The certificate in a file; None if the file is missing, damaged or of another format."""
    try:
        content = json.loads(path.read_text())
        recorded = content.pop("sha256")
        if recorded != json_digest(content):
            raise ValueError("digest")
        return Certificate.from_dict(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.debug("not a certificate: %s (%s)", path, error)
        return None


def _identity_in(path: Path) -> dict[str, Any] | None:
    """The identity in a file, of whatever format."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text())["identity"]
        return found if isinstance(found, dict) else None
    return None


def _spoken(name: str) -> str:
    return name.replace("_sha256", "").replace("_", " ")


def _folder() -> Path:
    return cache_home() / "certificates"
