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
from ..runtime.base import Runtime, TokenizedText
from .auxiliary import Scoring, score_chunks
from .heads import HeadSet
from .mapping import map_scores
from .question import pick_layers
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
    """Those that the method asks for, by the names it has for them."""

    @property
    def runtime(self) -> ModelRuntime:
        """The model, whose attention can be looked at."""
        assert self.caches.runtime.can_score, "an auxiliary model must show its attention"
        return cast("ModelRuntime", self.caches.runtime)

    def score(self, spans: Sequence[Span], question: str, scoring: Scoring, clock: PhaseClock) -> list[torch.Tensor]:
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
        raw = self._scores(texts, asked, scoring, clock)
        if scoring.passes > 1:
            between = Question.of(runtime, "\n")
            longer = asked.behind(between.behind(self._best_sentence(texts, raw)))
            longer = longer.last(min(room[span] for span in scorable))
            if len(longer.ids) > len(asked.ids):  # else there is no room for the sentence, and nothing new to ask
                again = self._scores(texts, longer, scoring, clock)
                raw = [torch.maximum(one, other) for one, other in zip(raw, again, strict=True)]
        scores = {
            span: map_scores(score, caches.tokenize(text).offsets, span.tokens.offsets)
            for score, text, span in zip(raw, texts, scorable, strict=True)
        }
        return [scores[span] if span in scores else torch.zeros(len(span.tokens)) for span in spans]

    def _scores(self, texts: Sequence[str], asked: Question, scoring: Scoring, clock: PhaseClock) -> list[torch.Tensor]:
        """Per text ``(num_tokens,)`` in the auxiliary's tokens."""
        runtime, caches = self.runtime, self.caches

        def chunks() -> Iterator[torch.Tensor]:
            for text in texts:
                with clock.phase_within("read", "select"):
                    kv = caches.read(text)
                # Damaged or evicted since the look-up: the auxiliary is small, compute it here.
                yield runtime.encode(caches.tokenize(text).ids, caches.prefix) if kv is None else kv

        layers = "last" if scoring.layers == "tuned" else scoring.layers
        return score_chunks(
            runtime,
            caches.prefix,
            chunks(),
            asked.ids,
            [len(caches.tokenize(text)) for text in texts],
            layers=pick_layers(layers, runtime.num_layers),
            heads=self._head_set(scoring) or "mean",
            pooled=scoring.pooled,
            sinks=scoring.sinks,
            counted=asked.words if scoring.words and bool(asked.words.any()) else None,
        )

    def _head_set(self, scoring: Scoring) -> HeadSet | None:
        if scoring.layers != "tuned" or scoring.heads == "none":
            return None
        return self.heads if scoring.heads == "auto" else self.named[scoring.heads]

    def _best_sentence(self, texts: Sequence[str], scores: Sequence[torch.Tensor]) -> Question:
        """The sentence of highest mean score, as the chunk's own tokens; of one too long the best stretch.

        A mean: as the model comes, single tokens score high because every question attends to them."""
        best, found = -1.0, Question((), torch.zeros(0, dtype=torch.bool))
        for text, score in zip(texts, scores, strict=True):
            tokens = self.caches.tokenize(text)
            numbers = sentence_numbers(text, tokens.offsets)
            whole = Question.of_tokens(tokens, text)
            for number in numbers.unique().tolist():
                inside = (numbers == number).nonzero().flatten()
                mean = float(score[inside].mean())
                if mean > best:
                    means = score[inside].unfold(0, min(len(inside), _MAX_SENTENCE_TOKENS), 1).mean(-1)
                    start = int(inside[0]) + int(means.argmax())
                    stop = min(int(inside[-1]) + 1, start + _MAX_SENTENCE_TOKENS)
                    best, found = mean, Question(whole.ids[start:stop], whole.words[start:stop])
        return found


@dataclass(frozen=True, slots=True)
class Question:
    """What the chunks are asked."""

    ids: tuple[int, ...]
    words: torch.Tensor
    """``(num_tokens,)`` bool: tokens with a letter or a digit."""

    @classmethod
    def of(cls, auxiliary: Runtime, text: str) -> Question:
        """A question as every look asks it: of a long one its last :data:`MAX_QUESTION_TOKENS` tokens."""
        return cls.of_tokens(auxiliary.tokenize(text), text).last(MAX_QUESTION_TOKENS)

    @classmethod
    def of_tokens(cls, tokens: TokenizedText, text: str) -> Question:
        words = [any(letter.isalnum() for letter in text[start:end]) for start, end in tokens.offsets]
        return cls(tokens.ids, torch.tensor(words or [True] * len(tokens.ids), dtype=torch.bool))

    def last(self, count: int) -> Question:
        return Question(self.ids[-count:], self.words[-count:])

    def behind(self, other: Question) -> Question:
        """Both, this one last; tokenised apart, so that this one asks as it does alone."""
        return Question(other.ids + self.ids, torch.cat((other.words, self.words)))
