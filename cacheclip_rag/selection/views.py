"""The view of a prompt that scorers, budgets and methods choose tokens by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..prompt.known_kv import KnownKV
from ..prompt.layout import Layout, Span


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
    auxiliary_scores: Callable[[Any], list[torch.Tensor]] | None
    """Asks the auxiliary model for scores (``AuxiliaryPass.score``): per span ``(num_tokens,)`` of the primary's
    tokens. Costs a forward pass. None: the method does not need the auxiliary model."""


def per_span(spans: Sequence[Span], value: float) -> list[torch.Tensor]:
    """Per span ``(num_tokens,)`` of one value, bool or float."""
    lengths = [len(span.tokens) for span in spans]
    return list(torch.full((sum(lengths),), value).split(lengths))
