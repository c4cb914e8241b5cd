"""What a method is: a recipe that places reused tokens and chooses those to recompute.

A method declares what it needs in class attributes and properties, and overrides the hooks that it has something to say
to, in the order in which they are called: what stands between the chunks (``arrange``), positions and attention of its
own, while decoding too (``positions``), scores (``score``), the tokens to recompute (``select``), rows that leave
between layers (``row_filter``), a correction (``prepare``). A method that answers by several prompts has ``compose``
instead. The engine reads attributes and calls hooks, and never asks which method it holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from ..chunks.context import CONTEXTS, ChunkContext, check_chunk_context
from ..errors import ConfigurationError
from ..prompt.layout import Layout, Span
from ..prompt.segments import Segment
from ..runtime.base import Runtime
from ..runtime.transformers.attention import Geometry
from ..runtime.transformers.row_filter import RowFilter
from ..selection.views import CacheView, PromptView
from ..types import Event

if TYPE_CHECKING:
    from .composition import Composition

__all__ = ["CacheView", "Method", "PromptView", "RowFilter", "recompute_nothing"]


@dataclass(frozen=True, slots=True)
class Method(ABC):
    """Base of all methods: frozen dataclasses, so that they can be compared, hashed and written down."""

    name: str = field(default="custom", kw_only=True)
    """Name in statistics and tables: a preset's, or one of your own."""
    chunk_context: str | None = field(default=None, kw_only=True)
    """What its chunks are precomputed behind: ``prefix`` or ``passages`` (:mod:`cacheclip_rag.chunks.context`). None:
    as the engine's setting of that name says."""

    reuses_chunks: ClassVar[bool] = True
    """False: the store is not asked."""
    reuses_prefixes: ClassVar[bool] = True
    """True: the start that this prompt shares with earlier ones is taken from the prefix cache, exactly. Methods with
    :meth:`positions` of their own use it in plain prefill only."""
    captures: ClassVar[bool] = False
    """True: chunk caches come from answered prompts, not from the store; a prompt with a chunk that was never captured
    is answered by plain prefill, which captures it."""
    learns: ClassVar[bool] = False
    """True if the method only helps once an earlier prompt has been answered; benchmarks answer one first."""
    exact_at_one: ClassVar[bool] = True
    """Whether recompute ratio 1.0 is full prefill."""
    composes: ClassVar[bool] = False
    """True: it answers by several prompts, each exactly, as :meth:`compose` says. There is no single prefill then, and
    the other hooks are not called."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"name must be a non-empty string, got {self.name!r}.")
        if self.chunk_context is not None:
            check_chunk_context(self.chunk_context)

    @property
    def needs_auxiliary(self) -> bool:
        """True: chunks must be stored for the auxiliary model too."""
        return False

    @property
    def head_sets(self) -> tuple[str, ...]:
        """Head sets of the auxiliary that it asks for by name or file, beside the engine's own."""
        return ()

    @property
    def has_ratio(self) -> bool:
        """Whether a recompute ratio decides how much is recomputed."""
        return False

    @property
    def nominal_ratio(self) -> float:
        """Share of chunk tokens that the user asked to recompute; 0.0 for a method without a ratio that reuses."""
        return 0.0

    def at(self, ratio: float) -> Self:
        """The same method at another recompute ratio.

        Raises:
            ConfigurationError: it has no ratio, or this one is not between 0 and 1.
        """
        raise ConfigurationError(f"method {self.name!r} has no recompute ratio, got {ratio!r}. Leave it out.")

    @property
    def context(self) -> ChunkContext | None:
        """What its chunks are computed behind and between; None: the engine's default."""
        return None if self.chunk_context is None else CONTEXTS[self.chunk_context]

    def arrange(self, segments: Sequence[Segment], runtime: Runtime) -> list[Segment]:
        """The prompt's segments with what the method puts between them."""
        return list(segments)

    def positions(self, layout: Layout, reused: Sequence[Span]) -> Geometry | None:
        """Positions and attention of its own, while decoding too; None for the tokens' places in the prompt and
        ordinary attention. ``reused``: the chunks that the store holds, at least one."""
        return None

    def score(self, view: PromptView) -> list[torch.Tensor]:
        """What can be said before the primary's KV is read (so that the KV of both models never lies side by side):
        one tensor per span, whose last dimension is its tokens."""
        return [torch.zeros(len(span.tokens)) for span in view.spans]

    @abstractmethod
    def select(self, view: CacheView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Per span a ``(num_tokens,)`` bool mask of the tokens to recompute (with a row filter: to begin with).
        ``scores``: what :meth:`score` gave for these spans."""

    def row_filter(self, view: CacheView, rows: torch.Tensor) -> RowFilter | None:
        """Which rows leave the recompute between its layers; None if all ``rows``, ``(num_rows,)`` int64 slots,
        stay."""
        return None

    def prepare(self, view: CacheView, masks: Sequence[torch.Tensor]) -> None:  # noqa: B027 (may stay empty)
        """Last look at the cache before the recompute: a correction is set up here."""

    def compose(self, parts: Composition) -> Iterator[Event]:
        """The answer to a prompt that has chunks, out of several; the last event carries it."""
        raise NotImplementedError(f"method {self.name!r} does not declare that it composes")


def recompute_nothing(view: CacheView) -> list[torch.Tensor]:
    """The selection of methods that take chunk caches as they are."""
    return [torch.zeros(len(span.tokens), dtype=torch.bool) for span in view.spans]
