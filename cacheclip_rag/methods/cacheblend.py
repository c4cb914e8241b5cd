"""CacheBlend recomputes the tokens whose KV changes most in context. The question does not influence the choice.

Source: CacheBlend (arXiv:2405.16444), section 4.3, and the released code: the first layers compute all tokens, the
change of KV at a check layer ranks them, and the best tokens continue. Departures: the mask is exact (in the released
code a token sees later tokens); the question is always computed and takes no budget; exact chunks are not run at all.
``schedule="gradual"`` filters layer by layer. The paper names no schedule; ours starts at 1.5 times the ratio, falls to
its lowest value after eight layers, and has the ratio as its mean. Every deviation counts, even the rounding error of a
codec coarser than the compute dtype (bfloat16 under float32: 0.2 %).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Self

import torch

from ..base.checks import check_choice, check_flag, check_share, check_whole_number
from ..base.errors import ConfigurationError
from ..runtime.transformers.model import ModelRuntime
from ..runtime.transformers.row_filter import RowFilter
from ..selection.budget import Budget
from ..selection.grouping import Tokens
from ..selection.views import CacheView, per_span, split_by_span
from .base import Method
from .correction import install_correction

logger = logging.getLogger(__name__)

_CHOICES = {"deviation": ("v", "k", "kv"), "schedule": ("single", "gradual")}
_GRADUAL_LAYERS = 8


@dataclass(frozen=True, slots=True)
class CacheBlend(Method):
    """Exact at ratio 1.0. At ratio 0.0 only the layers up to the check layer are fresh.

    Budget and correction apply at every choice, including grouping (single tokens by default), first tokens, a skipped
    first chunk, and the correction of tokens that left the pass.
    """

    name: str = field(default="cacheblend", kw_only=True)

    budget: Budget = field(default_factory=lambda: Budget(grouping=Tokens()))
    """How many tokens continue after the check layer, and how deviations become spans."""
    correction: float = 0.0
    """Share of the recomputed tokens' mean change that is added to the other tokens of the chunk, per layer."""
    check_layer: int = 1
    """Layer (from 0) whose fresh KV decides; at least one layer must follow. This layer and the layers below compute
    all tokens, which ``charged_ratio`` counts."""
    deviation: str = "v"
    """Which tensors are compared: ``values``, ``keys``, or ``kv`` (the sum of both norms, each divided by the mean norm
    of the layer's fresh values or keys)."""
    schedule: str = "single"
    """``single``: one choice at the check layer; ``gradual``: another choice at every later layer. If a layer's share
    exceeds the number of tokens, later layers get the surplus."""
    equal_charge: bool = False
    """True: the budget's ratio limits all computed (layer, chunk token) pairs, including the layers that compute all
    tokens. If those layers alone exceed the budget, nothing is recomputed (direct reuse; effective and charged ratio
    are 0) and a warning is logged."""

    def __post_init__(self) -> None:
        super(CacheBlend, self).__post_init__()
        if not isinstance(self.budget, Budget):
            raise ConfigurationError(f"budget must be a Budget, got {self.budget!r}.")
        check_share("correction", self.correction, "the mean change")
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
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
        skipped = self.budget.num_skipped(view)
        lengths = [len(span.tokens) for span in view.spans]
        budgets = self.budgets(view.runtime.num_layers, view.num_chunk_tokens, sum(lengths[skipped:]))
        if lengths[skipped:] and not budgets[0]:
            _warn_unaffordable(self.nominal_ratio, self.check_layer, view.runtime.num_layers)
        return [torch.full((n,), number >= skipped and budgets[0] > 0) for number, n in enumerate(lengths)]

    def row_filter(self, view: CacheView, rows: torch.Tensor) -> RowFilter | None:
        return None if self.budget.takes_all(view) else DeviationFilter(self, view, rows)

    def prepare(self, view: CacheView, masks: Sequence[torch.Tensor]) -> None:
        if self.correction:
            install_correction(view.runtime, view.cache, view.spans, self.correction)

    def budgets(self, num_layers: int, num_chunk_tokens: int, num_stale: int) -> list[int]:
        """Number of chunk tokens that run in each layer; it never increases from layer to layer.

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
            return [0] * num_layers
        shape = [1.0] * after
        if self.schedule == "gradual":
            shape = [1 + 0.5 * max(0.0, 1 - n / _GRADUAL_LAYERS) for n in range(after)]
        counts = [num_stale] * in_full
        for n, weight in enumerate(shape):
            share = min(float(num_stale), total * weight / sum(shape[n:]))
            total -= share
            counts.append(round(round(share, 6)))  # the inner round removes float error from halves
        return counts

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
    """Keeps all tokens up to the check layer, and then the tokens whose KV changed most."""

    def __init__(self, method: CacheBlend, view: CacheView, rows: torch.Tensor) -> None:
        super().__init__(view.cache, rows)
        self.method, self.view = method, view
        self.of_chunks = torch.zeros(len(rows), dtype=torch.bool)
        """``(num_rows,)`` bool: rows that may leave."""
        for span in view.spans:
            self.of_chunks |= (rows >= span.start) & (rows < span.stop)
        self.of_chunks[-1] = False  # the prompt's last row gives the first logits, even if it is a chunk's
        num_layers, num_stale = view.runtime.num_layers, int(self.of_chunks.sum())
        self.budgets = method.budgets(num_layers, view.num_chunk_tokens, num_stale)
        self.deviations: dict[int, torch.Tensor] = {}
        """By layer ``(num_alive,)`` float32, in the order of ``alive`` at that layer."""
        self._stale: tuple[torch.Tensor, torch.Tensor] | None = None

    def before_layer(self, layer: int) -> torch.Tensor | None:
        kept = self._filter(layer) if self._stale is not None else None
        alive = self.alive if kept is None else kept
        self.charged += int(self.of_chunks[alive].sum())
        self._stale = self._stored(layer, alive) if self._looks_at(layer) else None
        return kept

    def _looks_at(self, layer: int) -> bool:
        last = self.view.runtime.num_layers - 1
        if layer >= last:
            return False
        return (
            layer >= self.method.check_layer if self.method.schedule == "gradual" else layer == self.method.check_layer
        )

    def _stored(self, layer: int, alive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the rows in the cache, each ``(num_kv_heads, num_alive, head_dim)``; zeros if unfilled."""
        of_layer = self.cache.layers[layer]
        slots = self.slots[alive]
        known = int((slots < of_layer.length).sum())  # slots increase, so these are the first ones
        at = slots[:known].to(of_layer.device)
        found = []
        for stored in (of_layer.keys[0], of_layer.values[0]):
            rows = stored.new_zeros(stored.shape[0], len(slots), stored.shape[2])
            rows[:, :known] = stored.index_select(1, at)
            found.append(rows)
        return found[0], found[1]

    def _filter(self, layer: int) -> torch.Tensor:
        """Rows that run in ``layer``, chosen by the change of KV in the layer below."""
        deviation = self._deviation(layer - 1)
        self.deviations[layer - 1] = deviation
        spans, num_tokens = self.view.spans, self.view.layout.num_tokens
        mine, slots = self.of_chunks[self.alive], self.slots[self.alive]
        scores, among, chosen = torch.zeros(num_tokens), *torch.zeros(2, num_tokens, dtype=torch.bool)
        scores[slots], among[slots] = deviation, mine
        masks = self.method.budget.choose(
            self.view, split_by_span(scores, spans), self.budgets[layer], split_by_span(among, spans)
        )
        for span, mask in zip(spans, masks, strict=True):
            chosen[span.start : span.stop] = mask
        return self.alive[chosen[slots] | ~mine]

    def _deviation(self, layer: int) -> torch.Tensor:
        """``(num_alive,)`` float32: distance between fresh and stored KV of a layer."""
        assert self._stale is not None
        fresh = [part.float() for part in self._stored(layer, self.alive)]
        changes = {"k": slice(0, 1), "v": slice(1, 2), "kv": slice(0, 2)}[self.method.deviation]
        parts = list(zip(fresh, self._stale, strict=True))[changes]
        squares = [_squares(new - old.float()) for new, old in parts]
        if len(squares) == 1:
            return squares[0].cpu()
        shares = [change.sqrt() / _squares(new).sqrt().mean() for change, new in zip(squares, fresh, strict=True)]
        return (shares[0] + shares[1]).cpu()


def _squares(rows: torch.Tensor) -> torch.Tensor:
    """``(num_rows,)``: squared norm, over heads and dimensions, of ``(num_kv_heads, num_rows, head_dim)``."""
    return rows.square().sum((0, 2))
