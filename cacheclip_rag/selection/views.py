"""Views of a prompt for scorers, budgets and methods, before and after the primary's KV is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..prompt.known_kv import KnownKV, choose_rows
from ..prompt.layout import Layout, Span, question_slots
from ..runtime.transformers.cache import FusedCache
from ..runtime.transformers.model import ModelRuntime


@dataclass(frozen=True, kw_only=True)
class PromptView:
    """A prompt whose stored chunks are known but not read yet."""

    layout: Layout
    known: KnownKV
    """The source of each token's KV."""
    spans: Sequence[Span]
    """Reused chunks in prompt order, without exact chunks."""
    num_chunk_tokens: int
    """Tokens of all reused chunks, including exact chunks; in continued KV, the share of them that each question
    recomputes anew. A recompute ratio is a share of this number."""
    candidates: Sequence[torch.Tensor] | None = None
    """Per span a ``(num_tokens,)`` bool mask of the tokens that may be chosen; None: all. In continued KV, what earlier
    questions recomputed may not."""
    asked: str | None
    """The question, if the caller gave one."""
    auxiliary_scores: Callable[[Any], list[torch.Tensor]] | None
    """Asks the auxiliary model for scores (``AuxiliaryPass.score``): per span ``(num_tokens,)`` of the primary's
    tokens. Costs a forward pass. None: the method does not need the auxiliary model."""

    @property
    def question(self) -> torch.Tensor:
        """``(num_question_tokens,)`` int64, slots of the question's tokens."""
        return question_slots(self.layout, self.asked, self.known.held if self.known.is_approximate else None)

    @property
    def fresh(self) -> torch.Tensor:
        """``(num_rows,)`` int64, slots that are always computed: text between chunks, question, missing chunks."""
        return choose_rows(self.known, [])


@dataclass(frozen=True, kw_only=True)
class CacheView(PromptView):
    """The same prompt with its stored KV assembled at true positions. Nothing is recomputed yet."""

    runtime: ModelRuntime
    """The primary model."""
    cache: FusedCache
    rated: list[torch.Tensor] = field(default_factory=list)
    """Takes the final scores of a method that rates tokens, per span ``(num_tokens,)``, for the answer's trace."""


def per_span(spans: Sequence[Span], value: float) -> list[torch.Tensor]:
    """Per span ``(num_tokens,)`` of one value, bool or float."""
    lengths = [len(span.tokens) for span in spans]
    return list(torch.full((sum(lengths),), value).split(lengths))


def split_by_span(values: torch.Tensor, spans: Sequence[Span]) -> list[torch.Tensor]:
    """Cut values of the whole prompt, ``(num_slots, ...)``, into one tensor per span."""
    return [values[span.start : span.stop] for span in spans]
