"""Two selectors mixed by rank: a token is good if both put it high, whatever their scores are worth.

Ours. Each part is a method that scores tokens, with settings of its own behind slashes, since ``:`` and ``,`` part
methods and settings already: ``mixed:first=cacheclip/layers=0.5+3/pooled=true:second=epic:weight=0.7``. What says how
tokens are chosen (ratio, grouping, floors, anchor, rounds) is set once, on ``mixed``, whatever a part does by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from ..errors import ConfigurationError
from . import METHODS, create, method_class
from .base import Method, SelectionRequest
from .selective import Selective

__all__ = ["Anchored", "Mixed"]


@dataclass(frozen=True, slots=True)
class Mixed(Selective):
    """Exact at ``recompute_ratio`` 1.0; at 0.0 it equals direct reuse. It costs what both parts cost."""

    name: ClassVar[str] = "mixed"

    first: str = "cacheclip"
    """A method that scores tokens, and its settings: ``qcfuse/digest=0.2``."""
    second: str = "query_attention"
    """Another, or the same with other settings."""
    weight: float = 0.5
    """Weight of the first; the second has the rest."""

    def __post_init__(self) -> None:
        super(Mixed, self).__post_init__()
        for which in ("first", "second"):
            _check_part(which, getattr(self, which))
        self._parts()
        if not 0.0 <= self.weight <= 1.0:
            raise ConfigurationError(f"weight must be between 0 and 1, got {self.weight!r}.")

    @property
    def needs_auxiliary(self) -> bool:
        return any(part.needs_auxiliary for part in self._parts())

    @property
    def head_sets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self._parts() for name in part.head_sets))

    def _parts(self) -> list[Selective]:
        return [_part(spec, self.recompute_ratio) for spec in (self.first, self.second)]

    def score(self, request: SelectionRequest) -> list[torch.Tensor]:
        if not self.is_open(request):
            return [torch.zeros(2, len(span.tokens)) for span in request.spans]
        scored = [part.score(request) for part in self._parts()]
        return [torch.stack(pair) for pair in zip(*scored, strict=True)]  # (2, num_tokens) a span

    def rate(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        lengths = [len(span.tokens) for span in request.spans]
        rated = [part.rate(request, [s[number] for s in scores]) for number, part in enumerate(self._parts())]
        first, second = (_ranks(torch.cat(each)) for each in rated)
        return list((self.weight * first + (1 - self.weight) * second).split(lengths))


@dataclass(frozen=True, slots=True)
class Anchored(Mixed):
    """Ours: what the upper half of the model attends to from the question, the nearer to the start of its chunk the
    better. What a chunk lacked when it was computed alone, its first tokens lacked most (EPIC): attention says what is
    needed, the place says how stale it is. Beyond the first 64 tokens of a chunk it says nothing, and attention alone
    decides: were it to count to the end of a long chunk, nothing there would ever be chosen.

    Tokens that are not recomputed follow those that are (``correction``). ``anchored:first=cacheclip`` asks the
    auxiliary model instead.
    """

    name: ClassVar[str] = "anchored"

    first: str = "query_attention/layers=upper"
    second: str = "epic/reach=64"
    correction: float = 0.5
    """Tokens that are not recomputed follow the mean change of those that are, half of the way."""


def _part(spec: str, recompute_ratio: float) -> Selective:
    part = create(spec.replace("/", ":"), {"recompute_ratio": recompute_ratio})
    assert isinstance(part, Selective), "checked when the method was made"
    return part


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """``(num_tokens,)`` from 0, the lowest score, to 1; equal scores share the mean of their ranks."""
    _, number, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks: torch.Tensor = counts.cumsum(0) - (counts + 1) / 2
    return ranks[number] / max(1, len(scores) - 1)


def _check_part(which: str, spec: str) -> None:
    """Raise ConfigurationError unless ``spec`` is a method that scores, with settings that say how it scores."""
    name, *settings = spec.split("/")
    scoring = [each for each in METHODS if _scores(method_class(each))]
    if name not in scoring:
        raise ConfigurationError(
            f"{which} must be a method that scores tokens, one of {', '.join(scoring)}, with its settings behind "
            f"slashes ({scoring[0]}/name=value); got {spec!r}."
        )
    cls = method_class(name)
    assert issubclass(cls, Selective)
    choosing = {each.name for each in fields(Selective)} | set(cls.chooses_by)
    for setting in settings:
        key, separator, _ = setting.partition("=")
        if not separator:
            raise ConfigurationError(
                "settings behind slashes are written name=value, with no slash in the value (a head set goes by its "
                f"name, not its path); got {setting!r} in {spec!r}."
            )
        if key in choosing:
            raise ConfigurationError(
                f"{key} of {spec!r} says how tokens are chosen, and a part of 'mixed' only scores them: leave it out"
                + (f", or set {key} of 'mixed'." if key in Mixed.__dataclass_fields__ else ".")
            )


def _scores(cls: type[Method]) -> bool:
    scores = issubclass(cls, Selective) and (cls.rate is not Selective.rate or cls.score is not Selective.score)
    return scores and not issubclass(cls, Mixed)
