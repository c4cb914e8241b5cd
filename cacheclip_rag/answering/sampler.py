"""Chooses the next token from logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..base.errors import ModelError
from ..base.sampling import SamplingParams, is_greedy

if TYPE_CHECKING:
    from ..runtime.base import Constraint

__all__ = ["Sampler", "confidence", "room_for"]


def confidence(logits: torch.Tensor) -> float:
    """How sure a model is of its next token, from ``(vocab_size,)`` logits: probability of the likeliest token minus
    that of the second, 0 to 1."""
    first, second = logits.float().softmax(-1).topk(2).values
    return float(first - second)


class Sampler:
    """Picks the next token from logits."""

    def __init__(
        self,
        params: SamplingParams,
        device: torch.device,
        constraint: Constraint | None = None,
    ) -> None:
        from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

        self._constraint = constraint
        self._greedy = is_greedy(params)
        self._warpers = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(params.top_p))
        self._generator = torch.Generator(device=device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of tokens that may come next; others are at minus infinity."""
        return logits if self._constraint is None else self._constraint.allowed(logits)

    def pick(self, logits: torch.Tensor) -> int:
        """Token id chosen from ``(vocab_size,)`` logits."""
        allowed = self.allowed(logits)
        likeliest = allowed.argmax()
        if not torch.isfinite(allowed[likeliest]):  # the maximum of numbers of which one is none is none
            raise ModelError(
                "the model's logits are no numbers, or none is finite: weights or stored KV are damaged, or overflow "
                "in this dtype. Fetch the model again, run cacheclip store verify, or use dtype='float32'."
            )
        if self._greedy:
            token = int(likeliest)
        else:
            scores = self._warpers(None, allowed.float()[None])
            token = int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))
        if self._constraint is not None:
            self._constraint.accept(token)
        return token


_RESERVED_TOKENS = 512
"""Answer tokens for which a new cache has room. The cache grows if the answer gets longer."""


def room_for(params: SamplingParams) -> int:
    """Answer tokens for which a new cache gets room."""
    return min(params.max_tokens, _RESERVED_TOKENS)
