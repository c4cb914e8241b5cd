"""Base of the methods that score tokens and recompute the best: budget, grouping, and the parts they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import check_whole_number
from ..errors import ConfigurationError
from ..fusion.correction import ResidualCorrection
from ..selection.grouping import group, spread
from ..selection.modes import check_grouping
from ..selection.sentences import sentence_numbers
from . import check_ratio
from .base import ReusingMethod, SelectionRequest

__all__ = ["Selective"]

_ANCHOR_TOKENS = 16
"""Of each chunk no more than these are anchors: beyond them a token's place says little."""


@dataclass(frozen=True, slots=True)
class Selective(ReusingMethod):
    """Scores in, exactly the budget out. Exact at ``recompute_ratio`` 1.0; at 0.0 it equals direct reuse."""

    chooses_by: ClassVar[tuple[str, ...]] = ()
    """Settings of its own that act, like those below, on the choice alone and not on the scores."""

    recompute_ratio: float = 0.2
    """Share of all reused chunk tokens to recompute."""
    grouping: str = "window_score"
    """``window_score``, ``vote_sliding``, ``v1_literal`` or ``sentence``: :mod:`cacheclip_rag.selection.grouping`."""
    window: int = 8
    """Tokens in a window (not used by ``sentence``)."""
    threshold: int = 5
    """A window counts if more than this many of its tokens are selected (not used by ``window_score`` and
    ``sentence``)."""
    skip_first_chunk: bool = False
    """True spends nothing on the prompt's first chunk, whatever stands before it (but at ratio 1.0)."""
    always_include_first: int = 0
    """Tokens at the start of every chunk that are recomputed before all others, within the budget: each is a false
    attention sink (EPIC, arXiv:2410.15332)."""
    anchor: float = 0.0
    """Share of the budget that goes, before all else, to the starts of chunks: as many first tokens of each, 16 at
    most. ``v1_literal`` has none."""
    correction: float = 0.0
    """Above 0, tokens that are not recomputed get this share of the mean change of those that are, per chunk and
    layer (AgentKVShift, arXiv:2607.21604). Not with ``v1_literal``."""
    probes: float = 0.0
    """Share of the budget that is spread evenly over each chunk, whatever the scores. The correction then follows these
    tokens alone: tokens chosen for a score change more than others do."""
    rounds: int = 1
    """Choose in so many rounds, each recomputed before the next looks: tokens that only make sense together. Worth its
    passes where the primary's own attention scores; what an auxiliary model says is the same in every round."""

    def __post_init__(self) -> None:
        super(Selective, self).__post_init__()
        check_ratio(self.recompute_ratio)
        check_grouping(self.grouping, self.window, self.threshold)
        check_whole_number("always_include_first", self.always_include_first, of="tokens")
        check_whole_number("rounds", self.rounds, least=1, most=8)
        if not 0.0 <= self.anchor <= 1.0:
            raise ConfigurationError(f"anchor must be a share of the budget, 0 to 1, got {self.anchor!r}.")
        if not 0.0 <= self.correction <= 1.0:
            raise ConfigurationError(f"correction must be between 0 (none) and 1, got {self.correction!r}.")
        if not 0.0 <= self.probes <= 1.0:
            raise ConfigurationError(f"probes must be a share of the budget, 0 to 1, got {self.probes!r}.")
        if self.anchor + self.probes > 1.0:
            raise ConfigurationError(
                f"anchor={self.anchor} and probes={self.probes} are shares of one budget: together 1 at most."
            )

    @property
    def nominal_ratio(self) -> float:
        return self.recompute_ratio

    def rate(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Final scores per span, now that the primary's KV is there; ``scores`` are those of :meth:`score`."""
        return list(scores)

    def is_open(self, request: SelectionRequest) -> bool:
        """Whether there is anything to choose; if not, scoring is spared."""
        return self.budget(request) > 0 and not self.takes_all(request)

    def takes_all(self, request: SelectionRequest) -> bool:
        """Whether the budget is enough for every token that may be chosen, those of a skipped chunk included."""
        return self.budget(request) >= sum(len(span.tokens) for span in request.spans)

    def budget(self, request: SelectionRequest) -> int:
        """Tokens to recompute."""
        return round(self.recompute_ratio * request.num_chunk_tokens)

    def select(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self.is_open(request):
            everything = self.takes_all(request)
            return [torch.full((len(s.tokens),), everything) for s in request.spans]
        budget, num_rounds = self.budget(request), self.rounds
        left = [torch.ones(len(span.tokens), dtype=torch.bool) for span in request.spans]
        for number in range(num_rounds):
            share = budget * (number + 1) // num_rounds - budget * number // num_rounds
            picked = self.choose(request, self.rate(request, scores), share, left)
            if number < num_rounds - 1:
                assert request.recompute is not None
                request.recompute(picked)
                left = [f & ~p for f, p in zip(left, picked, strict=True)]
        return picked

    def choose(
        self,
        request: SelectionRequest,
        scores: Sequence[torch.Tensor],
        budget: int,
        among: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """The best ``budget`` tokens of all spans, or as many as there are ``among`` the candidates (masks per span,
        default every token). Nothing of a skipped chunk is a candidate."""
        skipped = self.num_skipped(request)
        if among is None:
            among = [torch.ones(len(s), dtype=torch.bool) for s in scores]
        among = [a & (number >= skipped) for number, a in enumerate(among)]
        budget = min(budget, sum(int(a.sum()) for a in among))
        num_probes = round(self.probes * budget)
        num_first = max(self.always_include_first, self._num_anchors(request, len(scores) - skipped))
        masks = group(
            scores,
            budget - num_probes,
            mode=self.grouping,
            window=self.window,
            threshold=self.threshold,
            first=[torch.arange(len(s)) < num_first for s in scores],
            among=among,
            sentences=_sentences(request) if self.grouping == "sentence" else None,
        )
        if not num_probes:
            return masks
        probes = spread([a & ~m for a, m in zip(among, masks, strict=True)], num_probes)
        assert request.probes is not None
        request.probes.zero_()
        for span, probe in zip(request.spans, probes, strict=True):
            request.probes[span.start : span.stop] = probe
        return [m | p for m, p in zip(masks, probes, strict=True)]

    def _num_anchors(self, request: SelectionRequest, num_chunks: int) -> int:
        """First tokens of each chunk that the anchor's share of the whole budget pays for, whatever the round."""
        if self.grouping == "v1_literal":
            return 0
        return min(_ANCHOR_TOKENS, int(self.anchor * self.budget(request) / max(1, num_chunks)))

    def num_skipped(self, request: SelectionRequest) -> int:
        """Spans, from the first on, on which nothing is spent: 1 where the prompt's first chunk is to be skipped and
        is among them (an exact one is not)."""
        return int(self.skip_first_chunk and request.layout.chunks[0] in request.spans[:1])

    def prepare(self, request: SelectionRequest, masks: Sequence[torch.Tensor]) -> None:
        if self.correction and self.grouping != "v1_literal" and request.cache is not None:
            assert request.computed is not None
            correction = ResidualCorrection(request.runtime, request.cache, self.correction)
            correction.install(request.spans, request.computed, request.probes if self.probes else None)


def _sentences(request: SelectionRequest) -> list[torch.Tensor]:
    """Per span ``(num_tokens,)``: number of each token's sentence."""
    return [sentence_numbers(span.segment.text, span.tokens.offsets) for span in request.spans]
