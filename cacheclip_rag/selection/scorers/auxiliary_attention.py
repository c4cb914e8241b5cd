"""The setting of CacheClip's scores: which of the auxiliary model's heads score. :mod:`..auxiliary_pass` computes them.

Source: CacheClip (arXiv:2510.10129v1), section 3.2. The paper fine-tunes the auxiliary model and does not say how. Here
a head set chooses heads and weighs them (:mod:`cacheclip_lab.training`); without one, the last layer scores.
Departures: scores are mapped to the primary's tokens before grouping, so that the ratio counts the primary's tokens;
only the last 96 tokens of a long question score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...base.errors import ConfigurationError
from ..heads import check_head_set_name
from ..views import PromptView
from .base import PromptScorer, pick_layers


@dataclass(frozen=True, slots=True)
class AuxiliaryAttention(PromptScorer):
    """Attention of the question's tokens, in the auxiliary model, on each chunk token."""

    needs_auxiliary: ClassVar[bool] = True

    layers: str = "tuned"
    """Layers of the auxiliary whose attention scores: ``tuned`` (the heads of a head set; ``last`` without a head set),
    ``last`` (the paper), ``all``, ``upper`` (half), ``middle`` (third), or layer numbers joined
    by ``+``."""
    heads: str = "auto"
    """Head set for ``tuned``: ``auto`` (the one of these models that ``cacheclip finetune`` wrote, else the one in the
    package), ``none`` (the last layer unchanged), a name (the file ``$CACHECLIP_HOME/heads/NAME.safetensors``), or a
    path with a slash."""

    def __post_init__(self) -> None:
        if self.layers != "tuned":
            pick_layers(self.layers, 1024)
        check_head_set_name(self.heads)
        if self.heads != "auto" and self.layers != "tuned":
            raise ConfigurationError(
                f"heads={self.heads} names a head set, which only layers=tuned uses, but layers={self.layers} is set. "
                "Leave one of the two out."
            )

    @property
    def head_sets(self) -> tuple[str, ...]:
        return () if self.heads in ("auto", "none") else (self.heads,)

    def score(self, view: PromptView) -> list[torch.Tensor]:
        assert view.auxiliary_scores is not None, (
            "a method that asks for the auxiliary's scores declares needs_auxiliary"
        )
        return view.auxiliary_scores(self)
