"""Chooses the next token from logits."""

from __future__ import annotations

import torch

from ..base.errors import ModelError
from ..base.sampling import GREEDY_BELOW, NO_PENALTIES, SamplingParams
from ..runtime.base import Constraint


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
        prompt_ids: torch.Tensor | None = None,
        logprobs: int | None = None,
    ) -> None:
        """``prompt_ids``, ``(num_tokens,)``, count for ``repetition_penalty``. ``logprobs``: as in a call's options."""
        from transformers import (
            LogitsProcessorList,
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self._constraint, self._logprobs = constraint, logprobs
        self.recorded: list[list[tuple[int, float]]] = []
        """Of each token that was picked, if ``logprobs`` is set: the token and the likeliest ones, with logarithms of
        their probabilities."""
        self._greedy = params.temperature < GREEDY_BELOW or params.top_p == 0
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._params, self._has_penalty = params, penalties != NO_PENALTIES
        self._of_repetition = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
        self._read = torch.empty(0, dtype=torch.int64) if prompt_ids is None else prompt_ids
        self._num_prompt = len(self._read)
        self._warpers = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k:
            self._warpers.append(TopKLogitsWarper(params.top_k))
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
        if self._has_penalty:
            allowed = self._penalised(allowed.float())
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
        if self._logprobs is not None:
            self._record(logits, token, self._logprobs)
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._has_penalty:
            self._read = torch.cat((self._read, torch.tensor([token])))
        return token

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        """As vLLM does it: of the penalties, only that for repetition counts the prompt, and it is the first."""
        read = self._read.to(logits.device)
        logits = self._of_repetition(read[None], logits[None])[0]
        tokens, counts = read[self._num_prompt :].unique(return_counts=True)
        given = self._params.frequency_penalty * counts + self._params.presence_penalty
        return logits.index_add(0, tokens, -given.to(logits.dtype))

    def _record(self, logits: torch.Tensor, token: int, count: int) -> None:
        row = logits.float().log_softmax(-1).clamp(min=_LEAST_LOGPROB)
        likeliest = row.topk(min(count, len(row)))
        others = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        self.recorded.append([(token, float(row[token])), *others])


_LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which is no number in JSON."""
_RESERVED_TOKENS = 512
"""Answer tokens for which a new cache has room. The cache grows if the answer gets longer."""


def room_for(params: SamplingParams) -> int:
    return min(params.max_tokens, _RESERVED_TOKENS)
