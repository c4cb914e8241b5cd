"""Scorers give every chunk token a score. To add a scorer: a class here, and its name in :mod:`..selection`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..base.errors import ConfigurationError
from .heads import check_head_set_name
from .views import PromptView


@dataclass(frozen=True, slots=True)
class Scorer(ABC):
    """Gives every token of every span a score, while the primary's KV is read; tokens with higher scores are recomputed
    first. Scorers are frozen, so that they can be compared, hashed and serialised."""

    needs_auxiliary: ClassVar[bool] = False
    """Whether chunks must be stored for the auxiliary model too."""

    @property
    def head_sets(self) -> tuple[str, ...]:
        """Names or files of auxiliary head sets that the scorer needs, besides the engine's own head set."""
        return ()

    @abstractmethod
    def score(self, view: PromptView) -> list[torch.Tensor]:
        """Per span ``(num_tokens,)`` float scores."""


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


@dataclass(frozen=True, slots=True)
class ChunkStart(Scorer):
    """First tokens of all chunks before second ones, as EPIC scores.

    Source: EPIC, LegoLink (arXiv:2410.15332). A chunk encoded separately begins with a false attention sink; its first
    tokens lose it when they are recomputed in context. The score depends on positions only.
    """

    def score(self, view: PromptView) -> list[torch.Tensor]:
        places: list[torch.Tensor] = []
        begin = 0
        for span in view.spans:
            begin = begin if span.continues else 0
            places.append(torch.arange(begin, begin + len(span.tokens), dtype=torch.float32))
            begin += len(span.tokens)
        return [-place for place in places]


@dataclass(frozen=True, slots=True)
class AuxiliaryAttention(Scorer):
    """Attention of the question's tokens, in the auxiliary model, on each chunk token. This is the setting of
    CacheClip's scores; :mod:`.auxiliary_pass` computes them.

    Source: CacheClip (arXiv:2510.10129v1), section 3.2. The paper fine-tunes the auxiliary model and does not say how.
    Here a head set chooses heads and weighs them (:mod:`cacheclip_lab.training`); without one, the last layer scores.
    Departures: scores are mapped to the primary's tokens before grouping, so that the ratio counts the primary's
    tokens; only the last 96 tokens of a long question score.
    """

    needs_auxiliary: ClassVar[bool] = True

    layers: str = "tuned"
    """Layers of the auxiliary whose attention scores: ``tuned`` (the heads of a head set; ``last`` without a head set),
    ``last`` (the paper), ``all``, ``upper`` (half), ``middle`` (third), or layer numbers joined
    by ``+``."""
    heads: str = "auto"
    """Head set for ``tuned``: ``auto`` (the one of these models that ``cacheclip finetune`` wrote, else the one in the
    package), ``none`` (the last layer unchanged), a name (the file ``$CACHECLIP_HOME/heads/NAME.safetensors``), or a
    path with a slash."""

    def __post_init__(self) -> None:
        if self.layers != "tuned":
            pick_layers(self.layers, 1024)
        check_head_set_name(self.heads)
        if self.heads != "auto" and self.layers != "tuned":
            raise ConfigurationError(
                f"heads={self.heads} names a head set, which only layers=tuned uses, but layers={self.layers} is set. "
                "Leave one of the two out."
            )

    @property
    def head_sets(self) -> tuple[str, ...]:
        return () if self.heads in ("auto", "none") else (self.heads,)

    def score(self, view: PromptView) -> list[torch.Tensor]:
        assert view.auxiliary_scores is not None, (
            "a method that asks for the auxiliary's scores declares needs_auxiliary"
        )
        return view.auxiliary_scores(self)
