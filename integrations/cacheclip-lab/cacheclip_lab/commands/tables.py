"""Tables of a settings file for the laboratory's commands."""

from __future__ import annotations

from dataclasses import dataclass

from cacheclip_rag.plugins import Table


@dataclass(frozen=True, slots=True)
class CertifyTable(Table):
    """``[certify]``"""

    answers: str | None = None
    """Folder of ``cacheclip eval --out`` whose answers show what ``--max-differ`` asks; None: prompts of ours do."""


@dataclass(frozen=True, slots=True)
class FinetuneTable(Table):
    """``[finetune]``"""

    samples: int = 96
    """Synthetic questions for training."""
    targets: int = 36
    """Training questions for which the primary computes targets."""
    seed: int = 0
    """Seed of the synthetic questions."""
