"""Base classes of scorers, and the layers that they may name.

A :class:`PromptScorer` runs while the primary's KV is read. A :class:`CacheScorer` reads the assembled cache. Both have
one abstract method, ``score``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ...base.errors import ConfigurationError
from ..views import CacheView, PromptView, per_span


@dataclass(frozen=True, slots=True)
class Scorer(ABC):
    """Gives every token of every span a score; tokens with higher scores are recomputed first. Scorers are frozen, so
    that they can be compared, hashed and serialised."""

    needs_auxiliary: ClassVar[bool] = False
    """Whether chunks must be stored for the auxiliary model too."""
    reads_cache: ClassVar[bool] = True
    """Whether :meth:`after_read` looks at the KV in the assembled cache."""

    @property
    def head_sets(self) -> tuple[str, ...]:
        """Names or files of auxiliary head sets that the scorer needs, besides the engine's own head set."""
        return ()

    @abstractmethod
    def before_read(self, view: PromptView) -> list[torch.Tensor]:
        """Scores that need no KV of the primary: one tensor per span; the last dimension is the span's tokens."""

    @abstractmethod
    def after_read(self, view: CacheView, before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Final scores, ``(num_tokens,)`` float per span; ``before`` holds the results of :meth:`before_read`."""


@dataclass(frozen=True, slots=True)
class PromptScorer(Scorer):
    """Base of scorers that need no KV of the primary."""

    reads_cache: ClassVar[bool] = False

    @abstractmethod
    def score(self, view: PromptView) -> list[torch.Tensor]:
        """Per span ``(num_tokens,)`` float scores."""

    def before_read(self, view: PromptView) -> list[torch.Tensor]:
        return self.score(view)

    def after_read(self, view: CacheView, before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(before)


@dataclass(frozen=True, slots=True)
class CacheScorer(Scorer):
    """Base of scorers that read the primary's assembled cache."""

    @abstractmethod
    def score(self, view: CacheView) -> list[torch.Tensor]:
        """Per span ``(num_tokens,)`` float scores."""

    def before_read(self, view: PromptView) -> list[torch.Tensor]:
        return per_span(view.spans, 0.0)

    def after_read(self, view: CacheView, before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.score(view)


def pick_layers(spec: str, num_layers: int, without: Collection[int] = ()) -> list[int]:
    """Layer numbers for a specification, among those that attend.

    Args:
        spec: ``all``, ``last``, ``upper`` (half), ``middle`` (third), or layer numbers joined by ``+`` (``14+13+17``).
        without: layers without attention (:attr:`~cacheclip_rag.runtime.base.Runtime.without_attention`).

    Raises:
        ConfigurationError: an invalid specification, or a layer that the model does not have.
    """
    attending = [layer for layer in range(num_layers) if layer not in without]
    count = len(attending)
    try:
        first, stop = {
            "all": (0, count),
            "upper": (count // 2, count),
            "middle": (count // 3, max(count // 3 + 1, round(2 / 3 * count))),
            "last": (count - 1, count),
        }.get(spec, (0, 0))
        if stop:
            return attending[first:stop]
        layers = sorted({int(part) for part in spec.split("+")})
    except (AttributeError, TypeError, ValueError):  # not a string, or not numbers
        layers = []
    if not layers or not {*attending} >= {*layers}:
        others = f", of layers that attend (not {', '.join(map(str, sorted(without)))})" if without else ""
        raise ConfigurationError(
            f"layers must be all, last, upper, middle, or numbers below {num_layers} joined by +{others}, got {spec!r}."
        )
    return layers
