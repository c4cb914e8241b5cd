"""Reads the auxiliary model's chunk caches, has :mod:`.packed_chunks` score them, and maps the scores to the primary's
tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from ..base.clock import PhaseClock
from ..chunks.caches import ChunkCaches
from ..prompt.layout import Span
from ..runtime.base import Runtime, TokenizedText
from ..runtime.transformers.model import ModelRuntime
from ..store import KV, ReadAhead, part_of
from .heads import HeadSet
from .packed_chunks import score_chunks
from .scorers.auxiliary_attention import AuxiliaryAttention
from .scorers.base import pick_layers

logger = logging.getLogger(__name__)

MAX_QUESTION_TOKENS = 96
"""If the question is longer, only its last tokens score the chunks. Each token is one row in the auxiliary model."""
_LEAST_QUESTION_TOKENS = 16
"""Least room for the question, in tokens. Chunks that leave the auxiliary model less room are not scored."""


@dataclass(frozen=True, slots=True)
class AuxiliaryPass:
    """An auxiliary model with its chunk caches and head sets."""

    caches: ChunkCaches
    heads: HeadSet | None = None
    """The engine's head set, for methods that name neither layers nor a head set."""
    named: Mapping[str, HeadSet] = field(default_factory=dict)
    """Head sets that the method's scorer names, by name."""

    @property
    def runtime(self) -> ModelRuntime:
        assert self.caches.runtime.can_score, "an auxiliary model must have can_score"
        return cast("ModelRuntime", self.caches.runtime)

    def score(
        self,
        spans: Sequence[Span],
        question: str,
        scorer: AuxiliaryAttention,
        clock: PhaseClock,
        when_read: Callable[[], None] | None = None,
    ) -> list[torch.Tensor]:
        """Per span ``(num_tokens,)`` scores of the primary's tokens. Called within the clock's phase ``select``; time
        spent on waiting for the store counts for ``read``. ``when_read``: called when all KV is read, while it is still
        being scored."""
        runtime, caches = self.runtime, self.caches
        asked = question_ids(runtime, question)
        least = min(len(asked), _LEAST_QUESTION_TOKENS)
        pieces = self._pieces(spans)
        room = {s: runtime.reuse_tokens - len(caches.prefix_ids) - len(pieces[s.whole].tokens) for s in spans}
        scorable = [span for span in spans if room[span] >= least]
        if len(scorable) < len(spans):
            logger.warning(
                "%d of %d chunks leave the auxiliary model %r no room for the question and get no scores",
                len(spans) - len(scorable),
                len(spans),
                runtime.name,
            )
        if not scorable or not asked:
            return [torch.zeros(len(span.tokens)) for span in spans]
        asked = asked[-min(room[span] for span in scorable) :]
        # shortest first, because chunks of similar length are computed together
        texts = sorted(dict.fromkeys(span.whole for span in scorable), key=lambda text: len(pieces[text].tokens))
        heads = self.heads if scorer.heads == "auto" else self.named.get(scorer.heads)
        heads = heads if scorer.layers == "tuned" else None
        unset = "last" if scorer.layers == "tuned" else scorer.layers
        layers = pick_layers(unset, runtime.num_layers) if heads is None else heads.layers
        chosen = [pieces[text] for text in texts]
        with caches.read_ahead(texts, num_layers=max(layers) + 1, once=True, when_read=when_read) as reading:
            raw = reading.until_whole(partial(self._scores, chosen, asked, heads, layers, clock))
            clock.reading_s += reading.busy_s()
        return _mapped(spans, dict(zip(texts, raw, strict=True)), pieces)

    def _pieces(self, spans: Sequence[Span]) -> dict[str, _Piece]:
        """By whole text, what the auxiliary reads of it: its tokens from the first span's characters to the last's."""
        edges: dict[str, tuple[int, int]] = {}
        for span in spans:
            start, stop = edges.get(span.whole, (span.at, 0))
            edges[span.whole] = min(start, span.at), max(stop, span.at + len(span.segment.text))
        found = {}
        for text, (start, stop) in edges.items():
            tokens = self.caches.tokenize(text)
            first, last = 0, len(tokens)
            if (start, stop) != (0, len(text)):  # those that share a character with it
                offsets = tokens.columns[1]
                inside = ((offsets[:, 0] < stop) & (offsets[:, 1] > start)).nonzero()[0]
                first, last = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (first, last)
            found[text] = _Piece(text, tokens.part(first, last), first)
        return found

    def _scores(
        self,
        pieces: Sequence[_Piece],
        asked: Sequence[int],
        heads: HeadSet | None,
        layers: Sequence[int],
        clock: PhaseClock,
        reading: ReadAhead,
    ) -> list[torch.Tensor]:
        """Per piece ``(num_tokens,)`` scores of the auxiliary's tokens in these layers: of the head set, if there is
        one."""
        runtime, caches = self.runtime, self.caches

        def chunks() -> Iterator[KV]:
            for number, piece in enumerate(pieces):
                with clock.phase_within("read", "select"):
                    kv: KV | None = reading.kv(number)
                if kv is None:  # damaged or evicted since the look-up: the auxiliary is small, so compute it here
                    kv = runtime.encode(caches.tokenize(piece.text).ids, caches.prefix_kv)
                yield part_of(kv, piece.first, piece.first + len(piece.tokens))

        def before_layer(layer: int) -> None:
            with clock.phase_within("read", "select"):
                reading.wait(layer)

        return score_chunks(
            runtime,
            caches.prefix_kv,
            chunks(),
            asked,
            [len(piece.tokens) for piece in pieces],
            layers=layers,
            heads=heads,
            before_layer=before_layer,
            after_layer=reading.done,
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring tokens of a text."""

    text: str
    tokens: TokenizedText
    """Offsets are those in the whole text."""
    first: int
    """Number of the first token."""


def question_ids(auxiliary: Runtime, text: str) -> tuple[int, ...]:
    """A question's last :data:`MAX_QUESTION_TOKENS` tokens, as the auxiliary model reads them."""
    return auxiliary.tokenize(text).ids[-MAX_QUESTION_TOKENS:]


def _mapped(
    spans: Sequence[Span], scores: Mapping[str, torch.Tensor], pieces: Mapping[str, _Piece]
) -> list[torch.Tensor]:
    """Scores of the tokens of all spans, from those of the pieces by whole text; zeros for a span whose text has no
    scores."""
    sources, targets, end = [], [], 0  # as if the texts were one text
    at: dict[str, int] = {}
    for text in scores:
        at[text] = end
        sources.append(pieces[text].tokens.columns[1] + end)
        end += len(text)
    if not sources:
        return [torch.zeros(len(span.tokens)) for span in spans]
    for span in spans:
        offsets = span.tokens.columns[1]
        targets.append(offsets + (at[span.whole] + span.at) if span.whole in at else np.zeros_like(offsets))
    values = torch.cat([*scores.values()]).numpy()
    joined = map_scores(values, np.concatenate(sources), np.concatenate(targets))
    return list(torch.from_numpy(joined).split([len(span.tokens) for span in spans]))


def map_scores(
    scores: np.ndarray[Any, Any], source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Score of each target token: the largest score among the source tokens that share a character with it.

    The largest, not the mean: a long number must not lose the piece that one tokenizer splits off. The paper does not
    state its rule. With identical tokenizers the mapping is the identity.

    Args:
        scores: ``(num_source_tokens,)`` float, 0 or more.
        source, target: ``(num_tokens, 2)`` start and end in characters of the same text; the source in order.

    Returns:
        ``(num_target_tokens,)``; 0, the lowest possible attention, for tokens that share no character.
    """
    wide = source[:, 1] > source[:, 0]
    scores, source = scores[wide], source[wide]
    found = np.zeros(len(target), scores.dtype)
    if not len(scores):
        return found
    # those that end after the target's start, and begin before its end
    first = np.searchsorted(np.maximum.accumulate(source[:, 1]), target[:, 0], side="right")
    stop = np.searchsorted(np.minimum.accumulate(source[::-1, 0])[::-1], target[:, 1], side="left")
    shared = (first < stop) & (target[:, 1] > target[:, 0])
    bounds = np.stack((first[shared], stop[shared]), 1).flatten()
    if len(bounds):
        padded = np.append(scores, scores.dtype.type(0))  # a bound may be the end
        found[shared] = np.maximum(np.maximum.reduceat(padded, bounds)[::2], 0)
    return found
