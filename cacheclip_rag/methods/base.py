"""What a method is: a named recipe for placing reused tokens and choosing those to recompute.

A method declares what it needs in class attributes, and overrides the hooks that it has something to say to, in the
order in which they are called: what stands between the chunks (``arrange``), positions and attention of its own, while
decoding too (``place``), scores (``score``), the tokens to recompute (``select``), rows that leave between layers
(``walk``), a correction (``prepare``). One that answers by several prompts has ``compose`` instead. The engine reads
attributes and calls hooks, and never asks which method it holds.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch

from ..chunks.caches import Encoding
from ..chunks.context import LEADS
from ..errors import ConfigurationError
from ..fusion.capture import Variant
from ..prompt.layout import Layout, Span
from ..prompt.segments import Segment
from ..runtime.base import Runtime
from ..runtime.transformers.attention import Geometry
from ..runtime.transformers.cache import FusedCache
from ..runtime.transformers.walk import RowWalk
from ..selection.auxiliary import Scoring
from ..types import Event

if TYPE_CHECKING:
    from ..runtime.transformers.model import ModelRuntime
    from .composition import Composition

__all__ = [
    "ChunkWalk",
    "Method",
    "ReusingMethod",
    "SelectionRequest",
    "recompute_nothing",
    "split_by_span",
    "warn_untuned",
]

logger = logging.getLogger(__name__)


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
    auxiliary_scores: Callable[[Scoring], list[torch.Tensor]]
    """Scores per span from the auxiliary model, ``(num_tokens,)`` in the primary's tokens. Costs a forward pass."""
    cache: FusedCache | None = None
    """The assembled KV at true positions, nothing recomputed yet; None while scoring comes before reading."""
    captured: Mapping[int, Variant] = field(default_factory=dict)
    """By start of span, where chunk caches were captured from answered prompts."""
    recompute: Callable[[list[torch.Tensor]], None] | None = None
    """Recompute chosen tokens (masks per span) now, to look again afterwards: for methods that choose in rounds."""
    full_prefill: Callable[[], FusedCache] | None = None
    """The prompt's KV as plain prefill computes it, charged as such: for ceilings to measure against."""
    computed: torch.Tensor | None = None
    """``(num_tokens,)`` bool: what was recomputed so far."""
    probes: torch.Tensor | None = None
    """``(num_tokens,)`` bool, for the method to fill: tokens it chose for no score, as a sample of those left alone."""


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
    """True: what earlier prompts share with the start of this one is taken from the prefix cache, exactly. Methods that
    :meth:`place` tokens elsewhere do so in plain prefill only."""
    captures: ClassVar[bool] = False
    """True: chunk caches come from answered prompts, not from the store; a prompt with one that was never captured is
    answered by plain prefill, which captures."""
    learns: ClassVar[bool] = False
    """True: what it saves, it saves by what earlier prompts left behind. Whoever measures it asks one before."""
    exact_at_one: ClassVar[bool] = True
    """Whether recompute ratio 1.0 is full prefill."""
    composes: ClassVar[bool] = False
    """True: it answers by several prompts, each exactly, as :meth:`compose` says. There is no single prefill then, and
    the other hooks are not called."""

    @property
    def needs_auxiliary(self) -> bool:
        """True: chunks must be stored for the auxiliary model too. A class attribute where no setting decides."""
        return False

    @property
    def head_sets(self) -> tuple[str, ...]:
        """Head sets of the auxiliary that it asks for by name or file, beside the one of the engine's settings."""
        return ()

    @property
    def nominal_ratio(self) -> float:
        """Share of chunk tokens that the user asked to recompute."""
        return 0.0

    @property
    def encoding(self) -> Encoding:
        """What chunks are computed behind and between."""
        return Encoding()

    def arrange(self, segments: Sequence[Segment], runtime: Runtime) -> list[Segment]:
        """The prompt's segments with what the method puts between them."""
        return list(segments)

    def place(self, layout: Layout, reused: Sequence[Span]) -> Geometry | None:
        """Positions and attention of its own, while decoding too; None for the places in the prompt and ordinary
        attention. ``reused``: the chunks that the store holds, one at least."""
        return None

    def score(self, request: SelectionRequest) -> list[torch.Tensor]:
        """Scores per span, taken before the primary's KV is read (so that both models' KV never lie side by side)."""
        return [torch.zeros(len(span.tokens)) for span in request.spans]

    @abstractmethod
    def select(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Per span a ``(num_tokens,)`` bool mask of the tokens to recompute (with a walk: to begin with)."""

    def walk(self, request: SelectionRequest, rows: torch.Tensor) -> ChunkWalk | None:
        """Who leaves the recompute between its layers; None if all ``rows``, ``(num_rows,)`` int64 slots, stay."""
        return None

    def compose(self, parts: Composition) -> Iterator[Event]:
        """The answer to a prompt that has chunks, out of several; the last event carries it."""
        raise NotImplementedError(f"method {self.name!r} does not declare that it composes")

    def prepare(self, request: SelectionRequest, masks: Sequence[torch.Tensor]) -> None:  # noqa: B027 (may stay empty)
        """Last look at the cache before the recompute: a correction may be set up here."""


@dataclass(frozen=True, slots=True)
class ReusingMethod(Method):
    """Base of the methods that take chunk caches from the store."""

    behind: str = field(default="prefix", kw_only=True)
    """What chunks are computed behind when they are stored: the shared ``prefix``, or ``passages``, the prefix and a
    few paragraphs of no importance. Behind these, a chunk's KV is nearer to what it is in the middle of a prompt; right
    behind the prefix, where it would have been exact, it is not. Ours; the paragraphs cost time at ingestion alone."""

    def __post_init__(self) -> None:
        if self.behind not in LEADS:
            raise ConfigurationError(f"behind must be one of {', '.join(LEADS)}, got {self.behind!r}.")

    @property
    def encoding(self) -> Encoding:
        return Encoding(lead=LEADS[self.behind])


def recompute_nothing(request: SelectionRequest) -> list[torch.Tensor]:
    """The selection of methods that take chunk caches as they are."""
    return [torch.zeros(len(span.tokens), dtype=torch.bool) for span in request.spans]


def split_by_span(values: torch.Tensor, spans: Sequence[Span]) -> list[torch.Tensor]:
    """``(num_slots, ...)`` values of the whole prompt, cut into one tensor a span."""
    return [values[span.start : span.stop] for span in spans]


@cache
def warn_untuned(method: str, how: str) -> None:
    """Say, once a process, that a method's answers are only as good as a checkpoint trained for it."""
    logger.warning(
        "method %r is made for checkpoints trained %s; with any other, answers suffer. Set tuned=true for one that is.",
        method,
        how,
    )
