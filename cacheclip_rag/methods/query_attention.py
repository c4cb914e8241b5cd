"""Query attention: the primary's own attention from the question, over the stale cache, picks what to recompute.

One scorer; the published methods are settings of it, each a class below with its source. The question runs through
the model once more than in other methods: its rows are few, and nothing of the chunks is computed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ConfigurationError
from ..selection.auxiliary import score_chunks
from ..selection.question import attention_to_tokens, pick_layers
from .base import SelectionRequest, split_by_span
from .selective import Selective

__all__ = ["InfoFlow", "ProphetKV", "QCFuse", "QueryAttention"]

_CHOICES = {"heads": ("mean", "max"), "queries": ("mean", "max"), "softmax": ("row", "chunks")}
_REPEAT = "\n\nRepeat the previous context exactly."
"""The prompt of KVzip (arXiv:2505.23416), as QCFuse shortens it: what it attends to is what the chunk says."""
_SINK_TOKENS = 4
"""First tokens of each chunk that always belong to its digest."""


@dataclass(frozen=True, slots=True)
class QueryAttention(Selective):
    """Exact at ``recompute_ratio`` 1.0; at 0.0 it equals direct reuse.

    Our own default, apart from the published settings: the last layer, whole spans.
    """

    name: ClassVar[str] = "query_attention"

    layers: str = "last"
    """``all``, ``last``, ``upper``, ``middle``, a range of depth (``0.6-0.7``), a depth and how many layers from there
    on (``0.6+4``) or numbers joined by ``+``."""
    heads: str = "mean"
    """``mean`` or ``max`` over heads."""
    queries: str = "mean"
    """``mean`` (the same ranking as a sum) or ``max`` over question tokens."""
    softmax: str = "row"
    """``row``: over all that a question token sees; ``chunks``: over the tokens of reused chunks alone."""
    digest: float = 1.0
    """Share of each chunk that the question attends to on its way; 1.0 all of it, 0.0 nothing."""
    alone: bool = False
    """True: the question is read by itself, at its place in the prompt, and sees nothing before it on its way."""

    def __post_init__(self) -> None:
        super(QueryAttention, self).__post_init__()
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        pick_layers(self.layers, 1024)
        if not 0.0 <= self.digest <= 1.0:
            raise ConfigurationError(f"digest must be between 0 (nothing) and 1 (all), got {self.digest!r}.")
        if self.alone and self.digest < 1.0:
            raise ConfigurationError(
                f"a question that is read alone sees no digest: got alone=True and digest={self.digest}. Leave one out."
            )

    def rate(self, request: SelectionRequest, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert request.cache is not None, "attention is looked at after the caches are read"
        layers = pick_layers(self.layers, request.runtime.num_layers)
        found = attention_to_tokens(
            request.runtime,
            request.cache,
            request.layout.ids,
            request.fresh,
            request.question,
            layers,
            heads=self.heads,
            queries=self.queries,
            among=self._chunk_slots(request) if self.softmax == "chunks" else None,
            visible=self._visible(request),
        )
        return split_by_span(found, request.spans)

    def _chunk_slots(self, request: SelectionRequest) -> torch.Tensor:
        """``(num_tokens,)`` bool: reused chunks, those that are exact and will not be chosen from included."""
        among = torch.zeros(request.layout.num_tokens, dtype=torch.bool)
        for span in request.layout.chunks:
            among[span.start : span.stop] = True
        among[request.fresh] = False
        return among

    def _visible(self, request: SelectionRequest) -> torch.Tensor | None:
        """``(num_tokens,)`` bool: what the question may see on its way; None for all of it."""
        if self.digest < 1.0:
            return self._digest(request)
        if not self.alone:
            return None
        visible = torch.zeros(request.layout.num_tokens, dtype=torch.bool)
        visible[int(request.question[0]) : int(request.question[-1]) + 1] = True
        return visible

    def _digest(self, request: SelectionRequest) -> torch.Tensor:
        """``(num_tokens,)`` bool: everything but the chunks, and of each chunk its sinks and what says most."""
        assert request.cache is not None
        visible = torch.ones(request.layout.num_tokens, dtype=torch.bool)
        for span, score in zip(request.spans, self._digest_scores(request), strict=True):
            keep = round(self.digest * len(span.tokens))
            inside = torch.zeros(len(span.tokens), dtype=torch.bool)
            inside[score.argsort(descending=True, stable=True)[:keep]] = True
            inside[: _SINK_TOKENS if self.digest else 0] = True
            visible[span.start : span.stop] = inside
        return visible

    def _digest_scores(self, request: SelectionRequest) -> list[torch.Tensor]:
        """What a request to repeat each chunk attends to. Computed when asked (a few rows a chunk), not stored."""
        cache, runtime = request.cache, request.runtime
        assert cache is not None
        num_prefix = request.layout.num_prefix
        prefix = runtime.extract(cache, 0, num_prefix)
        chunks = [runtime.extract(cache, span.start, span.stop) for span in request.spans]
        ids = runtime.tokenize(_REPEAT).ids
        return score_chunks(runtime, prefix, chunks, ids, layers=range(runtime.num_layers), heads="max", queries="max")


@dataclass(frozen=True, slots=True)
class ProphetKV(QueryAttention):
    """ProphetKV (arXiv:2602.02579): mean over all layers, heads and question tokens, single tokens.

    The question sees the whole stale context on its way (the reading of QCFuse's benchmark). The other reading of the
    paper, a question by itself and a softmax over the chunks' tokens, is ``prophetkv:alone=true:softmax=chunks``.
    """

    name: ClassVar[str] = "prophetkv"

    window: int = 1
    threshold: int = 0
    layers: str = "all"


@dataclass(frozen=True, slots=True)
class QCFuse(QueryAttention):
    """QCFuse (arXiv:2606.05875): the question reads a tenth of each chunk, and three layers in the middle decide.

    The paper profiles three layers per model, between 0.41 and 0.78 of the depth; here they are the three from the
    middle on. Departures: the digest is computed with the answer, not stored; it is one a chunk, by scores averaged
    over all layers, where the paper keeps one for each layer by that layer's own; and the four first tokens come on top
    of the tenth where they are not among its best.
    """

    name: ClassVar[str] = "qcfuse"

    window: int = 1
    threshold: int = 0
    layers: str = "0.5+3"
    digest: float = 0.1


@dataclass(frozen=True, slots=True)
class InfoFlow(QueryAttention):
    """InfoFlow KV (arXiv:2603.05353): four layers from 0.6 of the depth on, single tokens, no reordering of chunks.

    The paper takes layers 22 to 25 of models with 32 to 40: 0.69 to 0.55 of the depth.
    """

    name: ClassVar[str] = "infoflow"

    window: int = 1
    threshold: int = 0
    layers: str = "0.6+4"
