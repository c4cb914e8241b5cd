"""The auxiliary model's attention from the question: CacheClip's scores.

Source: CacheClip (arXiv:2510.10129v1), section 3.2. The paper fine-tunes the auxiliary and does not say how; here a
head set says which heads score and what was learned for them (:mod:`cacheclip_rag.lab.training`); without one the model
is used as it comes. Departures: scores are mapped to the primary's tokens before grouping, so that the ratio counts
what costs time; the paper scores while the primary's KV is read, here scoring comes first; of a long question the last
96 tokens score.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...checks import check_flag, check_whole_number
from ...errors import ConfigurationError
from ..heads import check_head_set_name
from ..question import pick_layers
from ..views import PromptView
from .base import PromptScorer

__all__ = ["AuxiliaryAttention"]


@dataclass(frozen=True, slots=True)
class AuxiliaryAttention(PromptScorer):
    """Attention of the question's tokens, in the auxiliary model, on each chunk token."""

    layers: str = "tuned"
    """Layers of the auxiliary whose attention scores: ``tuned`` (the heads of a head set; ``last`` where there is
    none), ``last`` (the paper), ``all``, ``upper``, ``middle``, a range of depth (``0.3-0.6``), a depth and a
    count (``0.3+4``) or numbers joined by ``+``."""
    pooled: bool = False
    """True takes one softmax over the tokens of all chunks, so that chunks compare (a head set always does); False (the
    paper) takes one per chunk."""
    sinks: int = 0
    """Tokens at the start of each chunk that score 0: every question attends to them. A head set may ask for more."""
    passes: int = 1
    """2: the sentence that scores best is put before the question, which then asks again; a token's score is the larger
    of the two. It finds evidence that shares no word with the question, at the cost of a second look."""
    heads: str = "auto"
    """Which head set ``tuned`` means: ``auto``, the engine's; ``none``, the last layer as it is; the name of one, for
    ``$CACHECLIP_HOME/heads/NAME.safetensors``; or a file, with a slash in its path."""

    def __post_init__(self) -> None:
        if self.layers != "tuned":
            pick_layers(self.layers, 1024)
        check_head_set_name(self.heads)
        if self.heads != "auto" and self.layers != "tuned":
            raise ConfigurationError(
                f"heads={self.heads} says which head set layers=tuned means, and layers={self.layers} asks for none. "
                "Leave one out."
            )
        check_flag("pooled", self.pooled)
        check_whole_number("sinks", self.sinks, of="tokens")
        check_whole_number("passes", self.passes, least=1, most=2)

    @property
    def needs_auxiliary(self) -> bool:
        return True

    @property
    def head_sets(self) -> tuple[str, ...]:
        return () if self.heads in ("auto", "none") else (self.heads,)

    def score(self, view: PromptView) -> list[torch.Tensor]:
        return view.auxiliary_scores(self)
