"""What a scorer, a budget or a method may look at, before and after the primary's KV is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..chunks.captured import Variant
from ..prompt.layout import Layout, Span
from ..runtime.transformers.cache import FusedCache

if TYPE_CHECKING:
    from ..runtime.transformers.model import ModelRuntime
    from .scorers.auxiliary_attention import AuxiliaryAttention

__all__ = ["CacheView", "PromptView", "split_by_span"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptView:
    """A prompt whose stored chunks are known and not read yet."""

    layout: Layout
    spans: Sequence[Span]
    """Reused chunks in prompt order; chunks that are exact already are left out."""
    num_chunk_tokens: int
    """Tokens of all reused chunks, exact ones included: what a recompute ratio is a share of."""
    question: torch.Tensor
    """``(num_question_tokens,)`` int64 slots of the tokens that ask."""
    fresh: torch.Tensor
    """``(num_rows,)`` int64 slots that are computed in any case: text between chunks, question, missing chunks."""
    auxiliary_scores: Callable[[AuxiliaryAttention], list[torch.Tensor]]
    """Scores per span from the auxiliary model, ``(num_tokens,)`` in the primary's tokens. Costs a forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheView(PromptView):
    """The same prompt with its stored KV assembled at true positions, and nothing recomputed yet."""

    runtime: ModelRuntime
    """The primary model."""
    cache: FusedCache
    captured: Mapping[int, Variant]
    """By start of span: chunk caches captured from answered prompts, for the method that uses them; else empty."""
    full_prefill: Callable[[], FusedCache]
    """Compute the prompt's KV by plain prefill, which is charged to the method: for ceilings to measure against."""


def split_by_span(values: torch.Tensor, spans: Sequence[Span]) -> list[torch.Tensor]:
    """``(num_slots, ...)`` values of the whole prompt, cut into one tensor per span."""
    return [values[span.start : span.stop] for span in spans]
