"""What a method is: a named recipe for placing reused tokens and choosing those to recompute.

A method declares what it needs in class attributes, and the engine reads these; it never asks which method it holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..fusion.layout import Layout, Span
from ..models.attention import Geometry
from ..models.cache import FusedCache
from ..models.runtime import ModelRuntime
from ..models.walk import RowWalk

__all__ = ["ChunkWalk", "Method", "SelectionRequest", "split_by_span"]


@dataclass(frozen=True, slots=True)
class SelectionRequest:
    """What a method may look at when it chooses."""

    layout: Layout
    runtime: ModelRuntime
    """The primary model."""
    spans: Sequence[Span]
    """Reused chunks in prompt order, those that are exact already left out."""
    num_chunk_tokens: int
    """Tokens of all reused chunks, exact ones included: what a recompute ratio is a share of."""
    question: torch.Tensor
    """``(num_question_tokens,)`` int64 slots of the tokens that ask."""
    fresh: torch.Tensor
    """``(num_rows,)`` int64 slots that are computed whatever is chosen: glue, question, chunks that were not stored."""
    auxiliary_scores: Callable[[], list[torch.Tensor]]
    """Scores per span from the auxiliary model, ``(num_tokens,)`` in the primary's tokens. Costs a forward pass."""
    cache: FusedCache | None = None
    """The assembled KV at true positions, nothing recomputed yet; None while scoring comes before reading."""
    recompute: Callable[[list[torch.Tensor]], None] | None = None
    """Recompute chosen tokens (masks per span) now, to look again afterwards: for methods that choose in rounds."""


class ChunkWalk(RowWalk):
    """A walk that counts what it costs, in (layer, chunk token) pairs given fresh KV."""

    charged: int = 0


@dataclass(frozen=True, slots=True)
class Method(ABC):
    """Base of all methods."""

    name: ClassVar[str]
    reuses_chunks: ClassVar[bool] = True
    """False: the store is not asked."""
    reuses_prefixes: ClassVar[bool] = True
    """True: what earlier prompts share with the start of this one is taken from the prefix cache, exactly."""
    needs_auxiliary: ClassVar[bool] = False
    """True: chunks must be stored for the auxiliary model too."""
    walks_layers: ClassVar[bool] = False
    """True: rows leave the pass between layers, as :meth:`walk` decides."""
    needs_reference: ClassVar[bool] = False
    """True: it runs a full prefill of its own (a ceiling to measure against, not a method to serve with)."""
    own_positions: ClassVar[bool] = False
    """True: :meth:`place` gives tokens other positions than their places in the prompt."""
    own_attention: ClassVar[bool] = False
    """True: it attends in its own way, also while decoding."""
    isolated: ClassVar[bool] = False
    """True: chunks are encoded without the shared prefix before them, for checkpoints trained that way."""
    exact_at_one: ClassVar[bool] = True
    """Whether recompute ratio 1.0 is full prefill."""

    @property
    def nominal_ratio(self) -> float:
        """Share of chunk tokens that the user asked to recompute."""
        return 0.0

    def place(self, layout: Layout, reused: Sequence[Span]) -> Geometry | None:
        """Positions and attention of its own; None for the places in the prompt and ordinary attention."""
        return None

    def score(self, request: SelectionRequest) -> list[torch.Tensor]:
        """Scores per span, taken before the primary's KV is read (so that both models' KV never lie side by side)."""
        return [torch.zeros(len(span.tokens)) for span in request.spans]

    @abstractmethod
    def select(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Per span a ``(num_tokens,)`` bool mask of the tokens to recompute (with a walk: to begin with)."""

    def walk(self, request: SelectionRequest, rows: torch.Tensor) -> ChunkWalk | None:
        """Who leaves the recompute between its layers; None if all ``rows`` stay."""
        return None

    def prepare(self, request: SelectionRequest, masks: Sequence[torch.Tensor]) -> None:  # noqa: B027 (may stay empty)
        """Last look at the cache before the recompute: a correction may be set up here."""


def split_by_span(values: torch.Tensor, spans: Sequence[Span]) -> list[torch.Tensor]:
    """``(num_slots, ...)`` values of the whole prompt, cut into one tensor a span."""
    return [values[span.start : span.stop] for span in spans]
