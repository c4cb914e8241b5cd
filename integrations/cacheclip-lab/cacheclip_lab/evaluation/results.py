"""Answers of several runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .records import Record, SkippedRecord


@dataclass(frozen=True, slots=True)
class Run:
    """A method at a recompute ratio."""

    label: str
    """Name in tables, different for each run."""
    method: str
    """Method of the run. Plots connect runs of one method by a line. The others are compared with ``full``."""
    ratio: float | None
    """Nominal recompute ratio; None for a method without one."""
    learns: bool = False
    """Whether it was measured after an earlier prompt (the same question with its chunks in reverse order)."""


@dataclass(frozen=True, slots=True)
class ItemResult:
    """One run's answer to one question."""

    id: str
    """Of the question."""
    label: str
    """Of the run."""
    answer: str
    scores: dict[str, float]
    """Scores (0 to 1) by metric. The dataset's own metric comes first."""
    fidelity: dict[str, float]
    """``first_token_kl``, ``answer_kl`` (nats), ``agreement`` (0 to 1), ``first_token_agreement`` and ``equal_answer``
    (0 or 1), as far as known."""
    nominal_ratio: float
    effective_ratio: float
    charged_ratio: float
    """As :class:`~cacheclip_rag.fusion.answer.FusionStats` counts them, this and the two before."""
    ttft_s: float
    phases_s: dict[str, float]
    fallback: str | None = None
    """Why plain prefill was used instead; None if it was not."""
    measured_on: str = ""
    """Machine, threads and library version of the times; empty: not recorded."""
    effective_ratio_of_stale: float | None = None
    """Recomputed tokens divided by chunk tokens that are not exact; None: not recorded."""
    confidence: float | None = None
    """How sure the prefill was of the first token, as :class:`~cacheclip_rag.fusion.answer.FusionStats` says it; None
    if a confidence gate would not look at it, because the prompt was prefilled in full or all its chunks are exact."""
    later_confidence: float | None = None
    """Least confidence of the answer's tokens after the first; None without one."""
    confidence_to_difference: float | None = None
    """The same up to the first token that is not full prefill's; None if there is none, or it is the first."""
    prompt_tokens: int | None = None
    """None: not recorded, as the two below."""
    chunks: int | None = None
    answer_tokens: int | None = None

    @property
    def own(self) -> str | None:
        """Name of the dataset's own metric; None if nothing was scored."""
        return next(iter(self.scores), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that was measured."""

    dataset: str
    primary: str
    auxiliary: str | None
    runs: list[Run]
    questions: list[Record]
    """Questions that every run was asked."""
    items: list[ItemResult]
    """Answers. A run may lack answers to some questions."""
    settings: dict[str, Any]
    """For the reader, JSON values only."""
    skipped: list[SkippedRecord]
    """Records of the dataset that were left out for all runs."""
