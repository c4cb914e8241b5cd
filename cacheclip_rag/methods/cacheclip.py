"""CacheClip: a small auxiliary model picks the tokens that restore attention between chunks; these are recomputed.

Source: CacheClip (arXiv:2510.10129v1). The paper fine-tunes the auxiliary and does not say how; here a head set says
which heads score, and what was learned for them (:mod:`cacheclip_rag.lab.training`); without one the model is used as it
comes. Departures: scores are mapped to the primary's tokens before grouping, so that the ratio counts what costs time;
the default grouping fills its budget, half of it with the starts of chunks (``anchor``), whatever they score: what a
chunk lacked when it was computed alone its first tokens lacked most (EPIC, arXiv:2410.15332), and a question seldom
asks for them; tokens that are not recomputed follow those that are, half of the way (``correction``, AgentKVShift,
arXiv:2607.21604); nothing is spent on a chunk that is exact already; of a long question the last 96 tokens score.
``grouping="v1_literal"`` is the paper's own rule. The paper scores while the primary's KV is read; here scoring comes
first, and the time to the first token holds both. Of version 2 (arXiv:2510.10129v2) only the abstract could be checked:
window, stride and threshold of its sliding grouping, whether its auxiliary is tuned, and how it shares the work between
processors are not known, so nothing here is claimed to be it; ``grouping="vote_sliding"`` is our reading of the name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import check_whole_number
from ..errors import ConfigurationError
from ..selection.auxiliary import Scoring
from ..selection.heads import check_head_set_name
from ..selection.question import pick_layers
from .base import SelectionRequest
from .selective import Selective

__all__ = ["CacheClip"]


@dataclass(frozen=True, slots=True)
class CacheClip(Selective):
    """Exact at ``recompute_ratio`` 1.0; at 0.0 it equals direct reuse."""

    name: ClassVar[str] = "cacheclip"
    needs_auxiliary: ClassVar[bool] = True

    layers: str = "tuned"
    """Layers of the auxiliary whose attention scores: ``tuned`` (the heads of a head set; ``last`` where there is
    none), ``last`` (the paper), ``all``, ``upper``, ``middle``, a range of depth (``0.3-0.6``), a depth and a
    count (``0.3+4``) or numbers joined by ``+``."""
    pooled: bool = False
    """True takes one softmax over the tokens of all chunks, so that chunks compare (a head set always does); False (the
    paper) one a chunk."""
    sinks: int = 0
    """Tokens at the start of each chunk that score nothing: every question attends to them. A head set may ask for
    more."""
    words: bool = False
    """True: only those tokens of the question count that have a letter or a digit."""
    passes: int = 1
    """2 asks again with the best sentence before the question: evidence that shares no word with the question itself.
    It costs the second look."""
    heads: str = "auto"
    """Which head set ``tuned`` means: ``auto``, that of the engine; ``none``, the last layer as it is; the name of one,
    for ``$CACHECLIP_HOME/heads/NAME.safetensors``; or a file, with a slash in its path (a name only in a part of
    :class:`~cacheclip_rag.methods.mixed.Mixed`, where slashes part settings)."""
    anchor: float = 0.5
    """Share of the budget that goes to the starts of chunks first. 0.0 for scores alone, as in the paper."""
    correction: float = 0.5
    """Share of the mean change of recomputed tokens that the others of their chunk are given. 0.0 as in the paper, and
    with ``v1_literal``."""

    def __post_init__(self) -> None:
        super(CacheClip, self).__post_init__()
        if self.layers != "tuned":
            pick_layers(self.layers, 1024)
        check_head_set_name(self.heads)
        if self.heads != "auto" and self.layers != "tuned":
            raise ConfigurationError(
                f"heads={self.heads} says which head set layers=tuned means, and layers={self.layers} asks for none. "
                "Leave one out."
            )
        check_whole_number("sinks", self.sinks, of="tokens")
        check_whole_number("passes", self.passes, least=1, most=2)

    @property
    def head_sets(self) -> tuple[str, ...]:
        return () if self.heads in ("auto", "none") else (self.heads,)

    def score(self, request: SelectionRequest) -> list[torch.Tensor]:
        if not self.is_open(request):
            return [torch.zeros(len(span.tokens)) for span in request.spans]
        scoring = Scoring(self.layers, self.pooled, self.sinks, self.words, self.passes, self.heads)
        return request.auxiliary_scores(scoring)
