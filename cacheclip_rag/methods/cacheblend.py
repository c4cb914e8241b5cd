"""CacheBlend recomputes the tokens whose KV changes most in context. The question does not influence the choice.

Source: CacheBlend (arXiv:2405.16444), section 4.3, and the released code: the first layers compute all tokens, the
change of values at a check layer ranks them, and the best tokens continue. Departures: the mask is exact (in the
released code a token sees later tokens); the question is always computed and takes no budget; exact chunks are not run
at all. The paper filters layer by layer, and names no schedule. Every deviation counts, even the rounding error of a
codec coarser than the compute dtype (bfloat16 under float32: 0.2 %).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Self

import torch

from ..base.checks import check_flag, check_whole_number
from ..base.errors import ConfigurationError
from ..runtime.transformers.attention_pattern import RowFilter
from ..runtime.transformers.model import ModelRuntime
from ..selection.budget import Budget, Tokens
from ..selection.views import CacheView, per_span, split_by_span
from .base import Method

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheBlend(Method):
    """Exact at ratio 1.0. At ratio 0.0 only the layers up to the check layer are fresh."""

    name: str = field(default="cacheblend", kw_only=True)

    budget: Budget = field(default_factory=lambda: Budget(grouping=Tokens()))
    """How many tokens continue after the check layer, and how deviations become spans."""
    check_layer: int = 1
    """Layer (from 0) whose fresh values decide; at least one layer must follow. This layer and the layers below compute
    all tokens, which ``charged_ratio`` counts."""
    equal_charge: bool = False
    """True: the budget's ratio limits all computed (layer, chunk token) pairs, including the layers that compute all
    tokens. If those layers alone exceed the budget, nothing is recomputed (direct reuse; effective and charged ratio
    are 0) and a warning is logged."""

    def __post_init__(self) -> None:
        super(CacheBlend, self).__post_init__()
        if not isinstance(self.budget, Budget):
            raise ConfigurationError(f"budget must be a Budget, got {self.budget!r}.")
        check_whole_number("check_layer", self.check_layer)
        check_flag("equal_charge", self.equal_charge)

    @property
    def has_ratio(self) -> bool:
        return True

    @property
    def nominal_ratio(self) -> float:
        return self.budget.ratio

    def at(self, ratio: float) -> Self:
        return replace(self, budget=replace(self.budget, ratio=ratio))

    def select(self, view: CacheView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tokens that run in the first layers."""
        self._check_depth(view.runtime)
        if self.budget.takes_all(view):
            return per_span(view.spans, True)
        num_stale = sum(len(span.tokens) for span in view.spans)
        at_first, _ = self.counts(view.runtime.num_layers, view.num_chunk_tokens, num_stale)
        if view.spans and not at_first:
            _warn_unaffordable(self.nominal_ratio, self.check_layer, view.runtime.num_layers)
        return per_span(view.spans, at_first > 0)

    def row_filter(self, view: CacheView, rows: torch.Tensor) -> RowFilter | None:
        return None if self.budget.takes_all(view) else DeviationFilter(self, view, rows)

    def counts(self, num_layers: int, num_chunk_tokens: int, num_stale: int) -> tuple[int, int]:
        """Numbers of chunk tokens that run in each layer up to the check layer, and in each layer after it.

        Args:
            num_chunk_tokens: all chunk tokens; the ratio is a share of them.
            num_stale: chunk tokens that may run.
        """
        in_full = self.check_layer + 1
        after = num_layers - in_full
        total = self.budget.ratio * num_chunk_tokens * after
        if self.equal_charge:
            total = self.budget.ratio * num_chunk_tokens * num_layers - num_stale * in_full
        if total < 0:
            return 0, 0
        return num_stale, round(round(min(float(num_stale), total / after), 6))  # the inner round: 2.4999999 is 2.5

    def _check_depth(self, runtime: ModelRuntime) -> None:
        last = runtime.num_layers - 2
        if self.check_layer > last:
            expected = f"a layer from 0 to {last}" if last >= 0 else "a model of two layers or more"
            raise ConfigurationError(
                f"no layer follows check_layer={self.check_layer}: model {runtime.name!r} has "
                f"{runtime.num_layers} layers, so everything would be recomputed. Expected {expected}."
            )


@cache
def _warn_unaffordable(ratio: float, check_layer: int, num_layers: int) -> None:
    logger.warning(
        "cacheblend with equal_charge: at ratio %g, layers 0 to %d compute all tokens and cost more than "
        "the whole budget (%d of %d layers), so nothing is recomputed. Raise the ratio or lower check_layer.",
        ratio,
        check_layer,
        check_layer + 1,
        num_layers,
    )


class DeviationFilter(RowFilter):
    """Keeps all tokens up to the check layer, and then the tokens whose values changed most there."""

    def __init__(self, method: CacheBlend, view: CacheView, rows: torch.Tensor) -> None:
        super().__init__(view.cache, rows)
        self.method, self.view = method, view
        self.of_chunks = torch.zeros(len(rows), dtype=torch.bool)
        """``(num_rows,)`` bool: rows that may leave."""
        for span in view.spans:
            self.of_chunks |= (rows >= span.start) & (rows < span.stop)
        self.of_chunks[-1] = False  # the prompt's last row gives the first logits, even if it is a chunk's
        num_layers, num_stale = view.runtime.num_layers, int(self.of_chunks.sum())
        _, self.count = method.counts(num_layers, view.num_chunk_tokens, num_stale)
        """Chunk tokens that stay after the check layer."""
        self.deviation = torch.empty(0)
        """``(num_rows,)`` float32: squared distance between fresh and stored values of the check layer."""
        self._stored = torch.empty(0)

    def before_layer(self, layer: int) -> torch.Tensor | None:
        kept = None
        if layer == self.method.check_layer:
            self._stored = self._values(layer)
        elif layer == self.method.check_layer + 1:
            change = self._values(layer - 1).float() - self._stored.float()
            self.deviation = change.square().sum((0, 2)).cpu()
            kept = self._chosen()
        self.charged += int(self.of_chunks[self.alive if kept is None else kept].sum())
        return kept

    def _values(self, layer: int) -> torch.Tensor:
        """Values of the rows in the cache, ``(num_kv_heads, num_rows, head_dim)``; zeros if unfilled."""
        of_layer = self.cache.layers[layer]
        known = int((self.slots < of_layer.length).sum())  # slots increase, so these are the first ones
        stored: torch.Tensor = of_layer.values[0]
        rows = stored.new_zeros(stored.shape[0], len(self.slots), stored.shape[2])
        rows[:, :known] = stored.index_select(1, self.slots[:known].to(of_layer.device))
        return rows

    def _chosen(self) -> torch.Tensor:
        """Rows that run after the check layer."""
        spans, num_tokens = self.view.spans, self.view.layout.num_tokens
        scores, (among, chosen) = torch.zeros(num_tokens), torch.zeros(2, num_tokens, dtype=torch.bool)
        scores[self.slots], among[self.slots] = self.deviation, self.of_chunks
        masks = self.method.budget.choose(
            self.view, split_by_span(scores, spans), self.count, split_by_span(among, spans)
        )
        for span, mask in zip(spans, masks, strict=True):
            chosen[span.start : span.stop] = mask
        rows: torch.Tensor = (chosen[self.slots] | ~self.of_chunks).nonzero().flatten()
        return rows
