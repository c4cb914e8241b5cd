"""Full prefill's answer to a prompt, and the distance of another prefill of this prompt from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.measuring import Prefilled, confidence, greedy, read_along
from cacheclip_rag.runtime import Runtime

from ..models import extending_model
from .fidelity import Fidelity, compare, own_answer


@dataclass(frozen=True, slots=True)
class ReferenceComparison:
    """A prefilled prompt compared with the reference."""

    fidelity: Fidelity
    answer: str | None
    """Its own greedy answer, if requested."""
    confidences: tuple[float, ...] = ()
    """Of each token of its own answer; empty if that was not requested."""
    differs_at: int | None = None
    """Number of the first token of its own answer that is not the reference's; None if there is none."""

    @property
    def later_confidence(self) -> float | None:
        """Least confidence of the tokens after the first; None without one."""
        return min(self.confidences[1:], default=None)

    @property
    def confidence_to_difference(self) -> float | None:
        """The same up to the first token that differs; None without a difference, or if the first token differs."""
        return None if self.differs_at is None else min(self.confidences[1 : self.differs_at + 1], default=None)


@dataclass(frozen=True, slots=True)
class Reference:
    """Full prefill's answer."""

    runtime: Runtime
    ids: list[int]
    """Greedy answer, including the end of turn."""
    logits: torch.Tensor
    """``(num_answer_tokens, vocab_size)``."""
    max_tokens: int
    """Most tokens of an answer, for the reference and for compared prefills."""

    @classmethod
    def of(cls, engine: CacheClipEngine, prefilled: Prefilled, max_tokens: int) -> Reference:
        """Answer a prompt prefilled by ``full``, with at most ``max_tokens`` and no more than the model's context has
        room for; its cache ends with the prompt again, so that it can be followed itself."""
        runtime = extending_model(engine.primary)
        cache, end = prefilled.cache, prefilled.layout.num_tokens
        max_tokens = min(max_tokens, runtime.context_tokens - end)
        ids, logits = greedy(runtime, cache, prefilled.logits, max_tokens)
        runtime.cut(cache, end)
        return cls(runtime, ids, logits, max_tokens)

    @property
    def answer(self) -> str:
        return self.runtime.decode_ids(self.ids)

    def follow(self, prefilled: Prefilled, *, answers: bool = True) -> ReferenceComparison:
        """Have ``prefilled`` read along the reference's answer; its cache is used up."""
        runtime, cache, end = self.runtime, prefilled.cache, prefilled.layout.num_tokens
        along = read_along(runtime, cache, prefilled.logits, self.ids)
        answer = differs_at = None
        sure: tuple[float, ...] = ()
        if answers:
            ids, logits = own_answer(runtime, cache, end, along, self.ids, self.max_tokens)
            answer, sure = runtime.decode_ids(ids), tuple(map(confidence, logits))
            # an answer that differs does so at a token that both have
            pairs = zip(ids, self.ids, strict=False)
            differs_at = next((number for number, (own, other) in enumerate(pairs) if own != other), None)
        return ReferenceComparison(compare(self.logits, along), answer, sure, differs_at)
