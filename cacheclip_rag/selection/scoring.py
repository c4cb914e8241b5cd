"""Scores of the auxiliary model for the chunks of one prompt: from its stored chunk caches to the primary's tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from ..chunks.caches import ChunkCaches
from ..clock import PhaseClock
from ..prompt.layout import Span
from ..runtime.base import Runtime
from .auxiliary import score_chunks
from .heads import HeadSet
from .mapping import map_scores
from .question import pick_layers
from .scorers.auxiliary_attention import AuxiliaryAttention
from .sentences import sentence_numbers

if TYPE_CHECKING:
    from ..runtime.transformers.model import ModelRuntime

__all__ = ["MAX_QUESTION_TOKENS", "AuxiliaryScorer", "Question"]

logger = logging.getLogger(__name__)

MAX_QUESTION_TOKENS = 96
"""Of a longer question, the last tokens score the chunks: one row each in the auxiliary model."""
_MAX_SENTENCE_TOKENS = 64
"""Of a longer sentence put before the question, the stretch that scores best. It takes no room from the question."""
_LEAST_QUESTION_TOKENS = 16
"""A chunk that leaves the auxiliary model less room is not scored; the others are, by the whole question."""


@dataclass(frozen=True, slots=True)
class AuxiliaryScorer:
    """An auxiliary model, its chunk caches, and what is known of its heads."""

    caches: ChunkCaches
    heads: HeadSet | None = None
    """Heads to ask where a method names neither layers nor a head set of its own."""
    named: Mapping[str, HeadSet] = field(default_factory=dict)
    """Those that the method scorer for, by the names it has for them."""

    @property
    def runtime(self) -> ModelRuntime:
        """The model, whose attention can be looked at."""
        assert self.caches.runtime.can_score, "an auxiliary model must show its attention"
        return cast("ModelRuntime", self.caches.runtime)

    def score(
        self, spans: Sequence[Span], question: str, scorer: AuxiliaryAttention, clock: PhaseClock
    ) -> list[torch.Tensor]:
        """Per span ``(num_tokens,)`` in the primary's tokens; reading is counted as such on the clock, which is within
        its phase ``select``."""
        runtime, caches = self.runtime, self.caches
        asked = Question.of(runtime, question)
        least = min(len(asked.ids), _LEAST_QUESTION_TOKENS)
        room = {s: runtime.reuse_tokens - len(caches.prefix_ids) - len(caches.tokenize(s.segment.text)) for s in spans}
        scorable = [span for span in spans if room[span] >= least]
        if len(scorable) < len(spans):
            logger.warning(
                "%d of %d chunks leave the auxiliary model %r no room for the question: none of their tokens is chosen",
                len(spans) - len(scorable),
                len(spans),
                runtime.name,
            )
        if not scorable or not asked.ids:
            return [torch.zeros(len(span.tokens)) for span in spans]
        asked = asked.last(min(room[span] for span in scorable))
        texts = [span.segment.text for span in scorable]
        raw = self._scores(texts, asked, scorer, clock)
        if scorer.passes > 1:
            between = Question.of(runtime, "\n")
            longer = asked.after(between.after(self._best_sentence(texts, raw)))
            longer = longer.last(min(room[span] for span in scorable))
            if len(longer.ids) > len(asked.ids):  # else there is no room for the sentence, and nothing new to ask
                again = self._scores(texts, longer, scorer, clock)
                raw = [torch.maximum(one, other) for one, other in zip(raw, again, strict=True)]
        scores = {
            span: map_scores(score, caches.tokenize(text).offsets, span.tokens.offsets)
            for score, text, span in zip(raw, texts, scorable, strict=True)
        }
        return [scores[span] if span in scores else torch.zeros(len(span.tokens)) for span in spans]

    def _scores(
        self, texts: Sequence[str], asked: Question, scorer: AuxiliaryAttention, clock: PhaseClock
    ) -> list[torch.Tensor]:
        """Per text ``(num_tokens,)`` in the auxiliary's tokens."""
        runtime, caches = self.runtime, self.caches

        def chunks() -> Iterator[torch.Tensor]:
            for text in texts:
                with clock.phase_within("read", "select"):
                    kv = caches.read(text)
                # Damaged or evicted since the look-up: the auxiliary is small, compute it here.
                yield runtime.encode(caches.tokenize(text).ids, caches.prefix) if kv is None else kv

        layers = "last" if scorer.layers == "tuned" else scorer.layers
        return score_chunks(
            runtime,
            caches.prefix,
            chunks(),
            asked.ids,
            [len(caches.tokenize(text)) for text in texts],
            layers=pick_layers(layers, runtime.num_layers),
            heads=self._head_set(scorer) or "mean",
            pooled=scorer.pooled,
            sinks=scorer.sinks,
        )

    def _head_set(self, scorer: AuxiliaryAttention) -> HeadSet | None:
        if scorer.layers != "tuned" or scorer.heads == "none":
            return None
        return self.heads if scorer.heads == "auto" else self.named[scorer.heads]

    def _best_sentence(self, texts: Sequence[str], scores: Sequence[torch.Tensor]) -> Question:
        """The sentence of highest mean score, as the chunk's own tokens; of one too long the best stretch.

        A mean: as the model comes, single tokens score high because every question attends to them."""
        best, found = -1.0, Question(())
        for text, score in zip(texts, scores, strict=True):
            tokens = self.caches.tokenize(text)
            numbers = sentence_numbers(text, tokens.offsets)
            for number in numbers.unique().tolist():
                inside = (numbers == number).nonzero().flatten()
                mean = float(score[inside].mean())
                if mean > best:
                    means = score[inside].unfold(0, min(len(inside), _MAX_SENTENCE_TOKENS), 1).mean(-1)
                    start = int(inside[0]) + int(means.argmax())
                    stop = min(int(inside[-1]) + 1, start + _MAX_SENTENCE_TOKENS)
                    best, found = mean, Question(tokens.ids[start:stop])
        return found


@dataclass(frozen=True, slots=True)
class Question:
    """What the chunks are asked, as token ids of the auxiliary."""

    ids: tuple[int, ...]

    @classmethod
    def of(cls, auxiliary: Runtime, text: str) -> Question:
        """A question as it is asked: of a long one its last :data:`MAX_QUESTION_TOKENS` tokens."""
        return cls(auxiliary.tokenize(text).ids).last(MAX_QUESTION_TOKENS)

    def last(self, count: int) -> Question:
        return Question(self.ids[-count:])

    def after(self, other: Question) -> Question:
        """Both, this one last; tokenised apart, so that this one scorer as it does by itself."""
        return Question(other.ids + self.ids)
