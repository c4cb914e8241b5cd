"""Scorers give every chunk token a score. To add a scorer: a class here, and its name in :mod:`..selection`.

A :class:`PromptScorer` runs while the primary's KV is read. A :class:`CacheScorer` reads the assembled cache. Both have
one abstract method, ``score``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..base.checks import check_share, check_whole_number
from ..base.errors import ConfigurationError
from ..runtime.transformers.attention_pattern import Block, Probe
from ..runtime.transformers.cache import FusedCache
from ..runtime.transformers.model import ModelRuntime
from .heads import check_head_set_name
from .views import CacheView, PromptView, per_span, split_by_span


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


@dataclass(frozen=True, slots=True)
class ChunkStart(PromptScorer):
    """First tokens of all chunks before second ones, as EPIC scores.

    Source: EPIC, LegoLink (arXiv:2410.15332). A chunk encoded separately begins with a false attention sink; its first
    tokens lose it when they are recomputed in context. The score depends on positions only.
    """

    within: int = 0
    """First tokens of a chunk whose scores differ; all later tokens get the same score. 0: all scores differ. Use it in
    a :class:`RankMix`, in which another scorer ranks the later tokens."""

    def __post_init__(self) -> None:
        check_whole_number("within", self.within, of="tokens")

    def score(self, view: PromptView) -> list[torch.Tensor]:
        places: list[torch.Tensor] = []
        begin = 0
        for span in view.spans:
            begin = begin if span.continues else 0
            places.append(torch.arange(begin, begin + len(span.tokens), dtype=torch.float32))
            begin += len(span.tokens)
        return [-place.clamp(max=self.within) if self.within else -place for place in places]


@dataclass(frozen=True, slots=True)
class AuxiliaryAttention(PromptScorer):
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


@dataclass(frozen=True, slots=True)
class QueryAttention(CacheScorer):
    """Attention of the question's tokens, in the primary model, on each chunk token: mean over heads, question tokens
    and layers.

    Source: query-aware selectors such as ProphetKV (arXiv:2602.02579), QCFuse (arXiv:2606.05875), InfoFlow KV
    (arXiv:2603.05353) and FusionRAG (arXiv:2601.12904). The question's few rows run once over the stale cache, and
    compute no chunk tokens.
    """

    layers: str = "last"
    """Layers whose attention scores: ``all``, ``last``, ``upper`` (half), ``middle`` (third), or layer numbers joined
    by ``+``."""

    def __post_init__(self) -> None:
        pick_layers(self.layers, 1024)

    def score(self, view: CacheView) -> list[torch.Tensor]:
        layers = pick_layers(self.layers, view.runtime.num_layers, view.runtime.without_attention)
        scores = attention_to_tokens(view.runtime, view.cache, view.layout.ids, view.fresh, view.question, layers)
        return split_by_span(scores, view.spans)


@torch.inference_mode()
def attention_to_tokens(
    runtime: ModelRuntime,
    cache: FusedCache,
    ids: torch.Tensor,
    rows: torch.Tensor,
    question: torch.Tensor,
    layers: Iterable[int],
    *,
    per_layer: bool = False,
) -> torch.Tensor:
    """Run ``rows`` over ``cache`` and reduce the attention of the ``question`` rows to one score per token.

    The rows' KV stays in the cache until the recompute overwrites it.

    Args:
        ids: ``(num_tokens,)`` token ids of the whole prompt.
        rows: ``(num_rows,)`` slots to run, strictly increasing.
        question: ``(num_question_tokens,)`` slots among ``rows`` whose attention counts.

    Returns:
        ``(num_tokens,)`` float32, mean over heads, question rows and layers; with ``per_layer``
        ``(num_layers, num_tokens)``, mean over heads and question rows.
    """
    chosen = sorted(layers)
    num_tokens = len(ids)
    asking = torch.isin(rows, question).nonzero().flatten()
    is_run = int(asking[-1]) - int(asking[0]) + 1 == len(asking)
    blocks = [
        Block.of(slice(int(part[0]), int(part[-1]) + 1), slice(0, num_tokens), rows[part], runtime.device)
        for part in ([asking] if is_run else asking.split(1))
    ]
    weights_seen: list[list[torch.Tensor]] = [[] for _ in chosen]

    def record(layer: int, number: int, weights: torch.Tensor) -> None:
        weights_seen[chosen.index(layer)].append(weights.mean(0))  # (num_rows, num_tokens)

    probe = Probe(frozenset(chosen), blocks, record, stop=chosen[-1])
    runtime.run_slots(cache, ids[rows], rows, probe=probe, head=False)
    by_layer = [torch.cat(parts).mean(0).to(runtime.device) for parts in weights_seen]
    of_layers = torch.stack(by_layer).cpu()  # once: each copy to the CPU waits for the accelerator
    return of_layers if per_layer else of_layers.mean(0)


@dataclass(frozen=True, slots=True)
class RankMix(Scorer):
    """Weighted mean of two rankings, so that the scales of scores do not matter. Our own. It costs as much as both
    scorers together."""

    first: Scorer
    second: Scorer
    weight: float = 0.5
    """Weight of the first ranking, 0 to 1; the second ranking has the remaining weight."""

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            part = getattr(self, name)
            if not isinstance(part, Scorer) or isinstance(part, RankMix):
                raise ConfigurationError(f"{name} must be a scorer other than RankMix, got {part!r}.")
        check_share("weight", self.weight, "the ranking")

    @property
    def needs_auxiliary(self) -> bool:  # type: ignore[override]
        return self.first.needs_auxiliary or self.second.needs_auxiliary

    @property
    def reads_cache(self) -> bool:  # type: ignore[override]
        return self.first.reads_cache or self.second.reads_cache

    @property
    def head_sets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.first.head_sets, *self.second.head_sets)))

    def before_read(self, view: PromptView) -> list[torch.Tensor]:
        pairs = zip(self.first.before_read(view), self.second.before_read(view), strict=True)
        return [torch.stack(pair) for pair in pairs]  # (2, num_tokens) per span

    def after_read(self, view: CacheView, before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        lengths = [len(span.tokens) for span in view.spans]
        first, second = (
            _ranks(torch.cat(part.after_read(view, [pair[number] for pair in before])))
            for number, part in enumerate((self.first, self.second))
        )
        return list((self.weight * first + (1 - self.weight) * second).split(lengths))


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """``(num_tokens,)``, from 0 (lowest score) to 1; equal scores share the mean of their ranks."""
    _, number, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks: torch.Tensor = counts.cumsum(0) - (counts + 1) / 2
    return ranks[number] / max(1, len(scores) - 1)
