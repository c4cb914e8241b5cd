"""Certificates: what ``cacheclip certify`` found out about a pair of models, and whether it covers an engine.

A certificate holds for exactly one combination of weights, tokenizers, method, dtype, kind of device and versions of
the libraries that compute. It lies in the cache folder, and is worth what that folder's permissions are worth: the
digest inside finds damage, not forgery.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..chunks.caches import ChunkCaches
from ..chunks.context import CONTEXTS
from ..chunks.sources import Sources
from ..config import EngineConfig
from ..errors import CertificateError
from ..methods import PRESET_NAMES, preset
from ..methods.base import Method
from ..methods.settings import describe
from ..paths import atomic_path, cache_home
from ..selection.scoring import AuxiliaryScorer
from ..types import Plan
from .base import Observer

__all__ = [
    "THRESHOLDS",
    "VERDICTS",
    "Certificate",
    "CertificateGuard",
    "Identity",
    "RatioFigures",
    "check_certificate",
    "check_writable",
    "find_certificate",
    "identity_of",
    "verdict_at",
]

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
VERDICTS = ("exact", "faithful", "not faithful")
THRESHOLDS = {"first_token_kl": 0.1, "answer_kl": 0.05, "agreement": 0.95, "needle_accuracy_of_full": 0.95}
"""``faithful`` means, over all prompts: mean KL of at most 0.1 nats at the first token, where an answer takes its
direction, and 0.05 along the answer; at least 95 % of full prefill's greedy tokens; 95 % as many needles, or more."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a certificate is about: it says nothing about anything else."""

    primary_sha256: str
    """Digest of the primary's config and weights."""
    primary_tokenizer_sha256: str
    """Digest of its tokenizer and chat template."""
    auxiliary_sha256: str | None
    """The same for the auxiliary; None for a method that needs none."""
    auxiliary_tokenizer_sha256: str | None
    method: str
    """Its name."""
    method_settings: str
    """JSON of the method's type and settings, at any recompute ratio, and the digests of what its chunks are computed
    behind and of the auxiliary's head sets, if any."""
    dtype: str
    device: str
    """Kind of device of both models, ``cpu`` or ``cuda+cpu``."""
    codec: str
    """How the primary's and the auxiliary's chunk caches are stored."""
    transformers: str
    torch: str
    cacheclip_rag: str

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class RatioFigures:
    """Fidelity to full prefill at one recompute ratio, over all prompts."""

    ratio: float
    """Nominal recompute ratio."""
    effective_ratio: float
    """Mean over prompts, as :class:`~cacheclip_rag.types.FusionStats` counts it."""
    first_token_kl: Mapping[str, float]
    """``mean``, ``median`` and ``max`` over prompts, nats."""
    answer_kl: Mapping[str, float]
    """The same of the mean KL along full prefill's answer."""
    agreement: float
    """Mean share of full prefill's greedy tokens that are also chosen here."""
    needle_accuracy: float
    """Share of needle prompts whose answer holds the needle."""
    verdict: str
    """One of :data:`VERDICTS`."""
    charged_ratio: float | None = None
    """Mean over prompts, as :class:`~cacheclip_rag.types.FusionStats` counts it; None: not recorded."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was measured, and the verdict at the ratio it was asked for."""

    primary: str
    """Names as they were given: for people, not part of the identity."""
    auxiliary: str | None
    identity: Identity
    verdict: str
    ratio: float
    """Recompute ratio of the verdict."""
    exactness: Mapping[str, Any]
    """Checks on this very model: each with its figure, its limit, and whether it passed."""
    needle_accuracy_of_full: float
    ratios: Sequence[RatioFigures]
    """Increasing ratios."""
    thresholds: Mapping[str, float]
    prompts: int
    quick: bool
    seconds: float
    created: str
    """UTC, ISO 8601."""

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Certificate:
        """Inverse of :meth:`to_dict`; raises KeyError, TypeError or ValueError on anything else."""
        if value["format"] != FORMAT_VERSION:
            raise ValueError(f"certificate format {value['format']!r}")
        fields = {key: value[key] for key in value if key not in ("format", "identity", "ratios")}
        certificate = cls(
            identity=Identity(**value["identity"]), ratios=[RatioFigures(**row) for row in value["ratios"]], **fields
        )
        if certificate.verdict not in VERDICTS or any(row.verdict not in VERDICTS for row in certificate.ratios):
            raise ValueError("unknown verdict")
        return certificate

    @property
    def path(self) -> Path:
        return _folder() / f"{self.identity.digest()}.json"

    def save(self) -> Path:
        """Write it where engines look.

        It replaces an older one of the same identity, whose other ratios it takes over if as much was measured for
        them. A quick one never replaces a thorough one: that is left as it is.

        Raises:
            CertificateError: the folder cannot be written.
        """
        older = _read(self.path)
        if older is not None and older.thresholds == self.thresholds and older.exactness["passed"]:
            if self.quick and not older.quick:
                logger.warning("the certificate %s is a thorough one and stays; this quick one is not saved", self.path)
                return self.path
            if self.quick == older.quick and self.exactness["passed"]:
                return replace(self, ratios=_merged(older.ratios, self.ratios))._write()
        return self._write()

    def _write(self) -> Path:
        content = self.to_dict()
        content["sha256"] = _digest(content)
        path = self.path
        try:
            with atomic_path(path) as temporary:
                temporary.write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise _not_writable(error) from error
        return path


def check_writable() -> None:
    """Raise CertificateError unless a certificate could be saved: asked before an hour of work, not after it."""
    try:
        with atomic_path(_folder() / "probe.txt") as temporary:
            temporary.write_text("")
        (_folder() / "probe.txt").unlink(missing_ok=True)
    except OSError as error:
        raise _not_writable(error) from error


def _not_writable(error: OSError) -> CertificateError:
    return CertificateError(
        f"the certificate cannot be written to {_folder()} ({error}). Make that folder writable, or set CACHECLIP_HOME "
        "to one that is."
    )


def _merged(older: Sequence[RatioFigures], newer: Sequence[RatioFigures]) -> list[RatioFigures]:
    rows = {row.ratio: row for row in (*older, *newer)}
    return [rows[ratio] for ratio in sorted(rows)]


def find_certificate(identity: Identity) -> tuple[Certificate | None, str]:
    """The certificate of this identity, or None and why there is none: the nearest one's differences, if any."""
    path = _folder() / f"{identity.digest()}.json"
    found = _read(path)
    if found is not None and found.identity == identity:
        if found.thresholds != THRESHOLDS:
            return None, "its certificate was judged by other thresholds"
        return found, ""
    if path.exists():
        return None, f"its certificate {path} is damaged"
    others = [c for p in sorted(_folder().glob("*.json")) if (c := _read(p)) is not None]
    same = [c.identity for c in others if c.identity.primary_sha256 == identity.primary_sha256]
    if not same:
        return None, _NEVER_CERTIFIED
    differences = min((_differences(identity, other) for other in same), key=len)
    return None, f"its certificate is of other {', '.join(differences)}"


def verdict_at(certificate: Certificate, ratio: float) -> str:
    """Verdict for a recompute ratio: that of the nearest certified ratio not above it.

    Ratio 1.0 was not measured on prompts unless asked for; the exactness checks then say that it is ``exact`` where
    64 greedy tokens were equal, and (half precision) ``faithful`` where noise chose another one.
    """
    if not certificate.exactness["passed"]:
        return "not faithful"
    below = [row for row in certificate.ratios if row.ratio <= ratio + 1e-9]
    if ratio >= 1.0 and not (below and below[-1].ratio >= 1.0):
        return "exact" if certificate.exactness["checks"]["greedy"]["figure"] == 1.0 else "faithful"
    return below[-1].verdict if below else "not faithful"


def identity_of(config: EngineConfig, method: Method, primary: ChunkCaches, scorer: AuxiliaryScorer | None) -> Identity:
    """What a certificate must be about to cover an engine of these settings, models and method."""
    auxiliary = scorer.caches if scorer else None
    caches = [primary] if auxiliary is None else [primary, auxiliary]
    context = method.context or CONTEXTS[config.chunk_context]
    settings = {**describe(_without_ratio(method)), "chunk_context_sha256": context.sha256}
    settings.pop("chunk_context")  # a name for what the digest says
    if scorer and scorer.heads:
        settings["heads_sha256"] = scorer.heads.digest()
    if scorer and scorer.named:
        settings["named_heads_sha256"] = {name: heads.digest() for name, heads in scorer.named.items()}
    return Identity(
        primary_sha256=primary.runtime.fingerprint,
        primary_tokenizer_sha256=primary.runtime.tokenizer_sha256,
        auxiliary_sha256=auxiliary.runtime.fingerprint if auxiliary else None,
        auxiliary_tokenizer_sha256=auxiliary.runtime.tokenizer_sha256 if auxiliary else None,
        method=method.name,
        method_settings=_as_text(settings),
        dtype=config.dtype,
        device="+".join(dict.fromkeys(each.runtime.device.type for each in caches)),
        codec="+".join(each.codec for each in caches),
        transformers=transformers.__version__,
        torch=torch.__version__,
        cacheclip_rag=__version__,
    )


class CertificateGuard(Observer):
    """Warns, or refuses where the settings require a certificate, before a plan that no certificate covers."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._covered: dict[str, Sources] = {}
        """Methods that were let through, as text, and the models that they were looked at with."""

    def on_plan(self, plan: Plan, sources: Sources) -> None:
        if not plan.reused or plan.method.composes:
            return
        method = _as_text(describe(plan.method))
        if self._covered.get(method) is sources:
            return
        identity = identity_of(self._config, plan.method, sources.prefix, sources.auxiliary)
        check_certificate(self._config, plan.method, identity)
        self._covered[method] = sources


def _as_text(settings: dict[str, Any]) -> str:
    """Equal for equal settings, also for those of a method that cannot be hashed or written as JSON."""
    return json.dumps(settings, sort_keys=True, default=repr)


def _without_ratio(method: Method) -> Method:
    """The same for every recompute ratio."""
    return method.at(0.0) if method.has_ratio else method


def check_certificate(config: EngineConfig, method: Method, identity: Identity) -> None:
    """Warn, once a process, unless a certificate covers this method at its ratio.

    Raises:
        CertificateError: instead of the warning, where the settings require a certificate.
    """
    certificate, why = find_certificate(identity)
    if certificate is not None:
        verdict = verdict_at(certificate, method.nominal_ratio)
        if verdict == "exact" or (verdict == "faithful" and not (certificate.quick and config.require_certificate)):
            return
        why = f"its certificate says {verdict!r} at recompute ratio {method.nominal_ratio}"
        if verdict == "faithful":
            why += ", but it is a quick one, and one is required"
    advice = f"Measure it: {_command(config, method)}"
    if method.captures:
        why = "none can cover chunk caches that differ from engine to engine"
        advice = "Have a share of its answers compared with full prefill (shadow_rate)"
    message = (
        f"model {config.primary!r} with method {method.name!r} has no valid certificate that it answers as with full "
        f"prefill: {why}. {advice}"
    )
    if config.require_certificate:
        raise CertificateError(f"{message}; or set require_certificate=False, or use method 'full'.")
    if why == _NEVER_CERTIFIED:
        _warn_once(_NOT_CERTIFIED, "how close answers come to full prefill's was not measured here: cacheclip certify")
        logger.info(message)
    else:
        _warn_once((identity, why), message)


_NEVER_CERTIFIED = "it has not been certified"
_NOT_CERTIFIED = "not certified"
_warned: set[object] = set()
"""What was said already: once a process, however many engines use the models."""


def _warn_once(what: object, message: str) -> None:
    if what not in _warned:
        _warned.add(what)
        logger.warning(message)


def _command(config: EngineConfig, method: Method) -> str:
    """What makes the certificate that is missing: a shell command, or Python for a method that is no preset."""
    own = preset(method.name) if method.name in PRESET_NAMES else None
    as_preset = own if own is None or own.chunk_context else replace(own, chunk_context=method.chunk_context)
    if as_preset is None or _without_ratio(method) != _without_ratio(as_preset):
        return f"cacheclip_rag.lab.evaluation.certify.certify(config, method={type(method).__name__}(...)).save()"
    defaults = EngineConfig()
    context = method.chunk_context or config.chunk_context
    from_preset = method.context is not None and as_preset == own
    options: dict[str, Any] = {
        "primary": config.primary,
        "auxiliary": config.auxiliary if method.needs_auxiliary else None,
        "method": method.name,
        "ratio": method.nominal_ratio if method.has_ratio else None,
        "chunk-context": None if from_preset or context == defaults.chunk_context else context,
        "dtype": config.dtype,
        "device": config.device,
        "auxiliary-device": config.auxiliary_device if method.needs_auxiliary else None,
        "codec": config.codec,
    }
    if method.needs_auxiliary and config.auxiliary_codec != defaults.auxiliary_codec:
        options["auxiliary-codec"] = config.auxiliary_codec
    if method.needs_auxiliary and config.heads != defaults.heads:
        options["heads"] = config.heads
    given = [f"--{name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    return " ".join(["cacheclip certify", *given])


def _differences(wanted: Identity, found: Identity) -> list[str]:
    left, right = asdict(wanted), asdict(found)
    return [name.replace("_sha256", "").replace("_", " ") for name in left if left[name] != right[name]]


def _read(path: Path) -> Certificate | None:
    """None for a file that is not there, damaged, or of another format."""
    try:
        content = json.loads(path.read_text())
        recorded = content.pop("sha256")
        if recorded != _digest(content):
            raise ValueError("digest")
        return Certificate.from_dict(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.debug("not a certificate: %s (%s)", path, error)
        return None


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _folder() -> Path:
    return cache_home() / "certificates"
