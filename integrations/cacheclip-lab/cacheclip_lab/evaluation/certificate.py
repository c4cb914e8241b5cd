"""One certificate: all that ``cacheclip certify`` measured of a pair of models, and its file.

Engines read of it what they obey (:class:`~cacheclip_lab.certificates.Verdicts`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cacheclip_rag import CertificateError
from cacheclip_rag.plugins import atomic_path, cache_home, json_digest, write_json

from ..certificates import FORMAT_VERSION, Guarantee, Verdicts, certificate_path, read_certificate
from ..certificates.identity import Identity

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryFigures:
    """Fidelity to full prefill of prompts that take KV from earlier ones."""

    prompt_tokens: float
    """These two: means over prompts, as :class:`~cacheclip_rag.fusion.answer.FusionStats` counts them."""
    computed_tokens: float
    first_token_kl: Mapping[str, float]
    """These three: as in :class:`RatioFigures`."""
    answer_kl: Mapping[str, float]
    agreement: float
    verdict: str
    """One of :data:`VERDICTS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFigures(HistoryFigures):
    """One turn of conversations, whose history grows by the method's own answers."""

    turn: int
    """From 1."""
    continued_tokens: float
    """Mean over conversations."""
    needle_accuracy: float
    """Share of the numbers asked for at this turn that the answers contain."""
    needle_accuracy_of_full: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EditFigures(HistoryFigures):
    """Prompts that are earlier prompts with an edit. Their verdicts do not change the certificate's: engines that
    require one use no moved KV."""

    edit: str
    """One of :func:`~cacheclip_lab.evaluation.edits.edits`."""
    moved_tokens: float
    """Mean over prompts."""


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
    edits: Sequence[EditFigures] = ()
    """Of edited prompts, at ``ratio`` and without a gate; empty if none were measured."""

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Certificate:
        """Inverse of :meth:`to_dict`; raises KeyError, TypeError or ValueError on anything else."""
        verdicts = Verdicts.of(value)
        taken = ("format", "identity", "ratios", "guarantee", "turns", "edits")
        return cls(
            identity=verdicts.identity,
            ratios=[RatioFigures.from_dict(row) for row in value["ratios"]],
            turns=tuple(TurnFigures(**row) for row in value.get("turns", ())),
            edits=tuple(EditFigures(**row) for row in value.get("edits", ())),
            guarantee=verdicts.guarantee,
            **{key: value[key] for key in value if key not in taken},
        )

    @property
    def verdicts(self) -> Verdicts:
        """What engines read of it."""
        return Verdicts.of(self.to_dict())

    @property
    def path(self) -> Path:
        return certificate_path(self.identity)

    def save(self) -> Path:
        """Write the certificate to the folder in which engines look.

        It replaces an older certificate of the same identity. Ratios that only the older one has are taken over if they
        were measured on as many prompts, and so is its guarantee if this one was asked for none. A quick certificate
        never replaces a thorough certificate.

        Raises:
            CertificateError: the folder cannot be written.
        """
        older = saved_certificate(self.identity)
        if older is not None and older.thresholds == self.thresholds and older.exactness["passed"]:
            if self.quick and not older.quick:
                logger.warning("%s holds a thorough certificate and stays; this quick one is not saved", self.path)
                return self.path
            if self.quick == older.quick and self.exactness["passed"]:
                same = older if older.ratio == self.ratio else self
                merged = replace(
                    self,
                    ratios=_merged(older.ratios, self.ratios),
                    turns=self.turns or same.turns,
                    edits=self.edits or same.edits,
                    guarantee=self.guarantee or older.guarantee,
                )
                return replace(merged, verdict=merged.verdicts.at(merged.ratio))._write()
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


def saved_certificate(identity: Identity) -> Certificate | None:
    """The certificate that was saved for this identity; None if there is none, or it is damaged or of another
    format."""
    content = read_certificate(certificate_path(identity))
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        return None if content is None else Certificate.from_dict(content)
    return None


def check_writable() -> None:
    """Raise CertificateError unless a certificate can be saved. Called before the long measurement, not after it."""
    folder = _folder()
    try:
        with atomic_path(folder / "probe.txt") as temporary:
            temporary.write_text("")
        (folder / "probe.txt").unlink(missing_ok=True)
    except OSError as error:
        raise _not_writable(error) from error


def _folder() -> Path:
    return cache_home() / "certificates"


def _not_writable(error: OSError) -> CertificateError:
    return CertificateError(
        f"the certificate cannot be written to {_folder()} ({error}). Make that folder writable, or set CACHECLIP_HOME "
        "to a writable folder."
    )


def _merged(older: Sequence[RatioFigures], newer: Sequence[RatioFigures]) -> list[RatioFigures]:
    rows = {row.ratio: row for row in (*older, *newer)}
    return [rows[ratio] for ratio in sorted(rows)]
