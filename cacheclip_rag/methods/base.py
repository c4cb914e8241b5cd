"""The base of all methods. A method decides how chunk KV is reused and which tokens are recomputed.

A method declares its needs in class attributes and properties, and overrides two hooks, which the engine calls in this
order: ``score`` and ``select`` (tokens to recompute). Neither sees KV of the primary, so that every method runs
wherever the primary runs. The engine never asks for a method's class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch

from ..base.checks import check_probability
from ..base.errors import ConfigurationError
from ..chunks.context import CONTEXTS, ChunkContext, check_chunk_context
from ..selection.views import PromptView


@dataclass(frozen=True, slots=True)
class Method(ABC):
    """Base of all methods. Methods are frozen dataclasses, so that they can be compared, hashed and serialised."""

    name: str = field(default="custom", kw_only=True)
    """Name in statistics and tables."""
    chunk_context: str | None = field(default=None, kw_only=True)
    """Chunk context, a name in :data:`~cacheclip_rag.chunks.context.CONTEXTS`. None: the engine's setting
    ``chunk_context``."""
    min_confidence: float = field(default=0.0, kw_only=True)
    """Least difference between the probabilities of the two likeliest next tokens, 0 to 1: reuse changes answers mostly
    where full prefill itself hardly prefers one token. If the first token is below it, the prompt is prefilled in full
    after all. If a later one is, the exact KV is completed before it is chosen, and the answer goes on from that. 0:
    never."""

    reuses_chunks: ClassVar[bool] = True
    """Whether the method uses stored chunk KV; if not, the store is not read."""
    reuses_prefixes: ClassVar[bool] = True
    """Whether the method takes the prompt's longest known prefix from the prefix cache, which is exact."""
    learns: ClassVar[bool] = False
    """True if the method only helps once an earlier prompt has been answered; benchmarks answer one first."""
    exact_at_one: ClassVar[bool] = True
    """Whether recompute ratio 1.0 equals full prefill."""

    def __init_subclass__(cls) -> None:
        super(Method, cls).__init_subclass__()
        if gone := [name for name in ("positions", "row_filter", "prepare", "reads_cache") if name in vars(cls)]:
            raise ConfigurationError(
                f"{cls.__name__} has {' and '.join(gone)}, which engines do not call any more. Choose tokens in "
                "select, without the primary's KV, and leave each in its place."
            )

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"name must be a non-empty string, got {self.name!r}.")
        if self.chunk_context is not None:
            check_chunk_context(self.chunk_context)
        check_probability("min_confidence", self.min_confidence)

    @property
    def needs_auxiliary(self) -> bool:
        """Whether chunks must be stored for the auxiliary model too."""
        return False

    @property
    def mean_change(self) -> float:
        """Share of the recomputed tokens' mean change that is added to the chunk's other tokens; 0: no correction."""
        return 0.0

    @property
    def head_sets(self) -> tuple[str, ...]:
        """Names or files of auxiliary head sets that the method needs, besides the engine's own head set."""
        return ()

    @property
    def has_ratio(self) -> bool:
        """Whether the method has a recompute ratio."""
        return False

    @property
    def nominal_ratio(self) -> float:
        """Share of chunk tokens that the user asked to recompute; 0.0 for reusing methods without a ratio."""
        return 0.0

    def at(self, ratio: float) -> Self:
        """The same method at another recompute ratio.

        Raises:
            ConfigurationError: the method has no ratio, or ``ratio`` is not between 0 and 1.
        """
        raise ConfigurationError(f"method {self.name!r} has no recompute ratio, got {ratio!r}. Leave it out.")

    @property
    def context(self) -> ChunkContext | None:
        """The chunk context of the method's chunks; None: the engine's setting."""
        return None if self.chunk_context is None else CONTEXTS[self.chunk_context]

    def score(self, view: PromptView) -> list[torch.Tensor]:
        """Scores, ``(num_tokens,)`` per span; empty if the method rates no tokens of this prompt. The engine calls this
        while it reads the primary's KV."""
        return []

    @abstractmethod
    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Per span a ``(num_tokens,)`` bool mask of the tokens to recompute.

        Args:
            scores: results of :meth:`score` for these spans.
        """
