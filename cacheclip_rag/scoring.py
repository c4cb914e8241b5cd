"""Scores of the auxiliary model for the chunks of one prompt: from its stored chunk caches to the primary's tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .chunks import ChunkCaches
from .fusion.layout import Span
from .models.text import TokenizedText
from .selection.auxiliary import Scoring, score_chunks
from .selection.heads import HeadSet
from .selection.mapping import map_scores
from .selection.question import pick_layers
from .selection.sentences import sentence_numbers
from .stats import PhaseClock

__all__ = ["AuxiliaryScorer"]

logger = logging.getLogger(__name__)

_MAX_QUESTION_TOKENS = 96
"""Of a longer question, the last tokens score the chunks: one row each in the auxiliary model."""
_LEAST_QUESTION_TOKENS = 16
"""A chunk that leaves the auxiliary model less room is not scored; the others are, by the whole question."""


@dataclass(frozen=True, slots=True)
class AuxiliaryScorer:
    """An auxiliary model, its chunk caches, and what is known of its heads."""

    caches: ChunkCaches
    heads: HeadSet | None = None
    """Heads to ask where a method does not name layers of its own."""

    def score(self, spans: Sequence[Span], question: str, scoring: Scoring, clock: PhaseClock) -> list[torch.Tensor]:
        """Per span ``(num_tokens,)`` in the primary's tokens; reading is counted as such on the clock, which is within
        its phase ``select``."""
        runtime, caches = self.caches.kv_runtime, self.caches
        asked = _Question.of(runtime.tokenize(question), question)
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
            best = self._best_sentence(texts, raw)
            longer = _Question.of(runtime.tokenize(f"{best} {question}"), f"{best} {question}")
            longer = longer.last(min(room[span] for span in scorable))
            again = self._scores(texts, longer, scoring, clock)
            raw = [torch.maximum(one, other) for one, other in zip(raw, again, strict=True)]
        scores = {
            span: map_scores(score, caches.tokenize(text).offsets, span.tokens.offsets)
            for score, text, span in zip(raw, texts, scorable, strict=True)
        }
        return [scores[span] if span in scores else torch.zeros(len(span.tokens)) for span in spans]

    def _scores(
        self, texts: Sequence[str], asked: _Question, scoring: Scoring, clock: PhaseClock
    ) -> list[torch.Tensor]:
        """Per text ``(num_tokens,)`` in the auxiliary's tokens."""
        runtime, caches = self.caches.kv_runtime, self.caches

        def chunks() -> Iterator[torch.Tensor]:
            for text in texts:
                with clock.phase_within("read", "select"):
                    kv = caches.read(text)
                # Damaged or evicted since the look-up: the auxiliary is small, compute it here.
                yield runtime.encode(caches.tokenize(text).ids, caches.prefix) if kv is None else kv

        heads: str | HeadSet = "mean"
        layers = "last" if scoring.layers == "tuned" else scoring.layers
        if scoring.layers == "tuned" and self.heads is not None:
            heads = self.heads
        return score_chunks(
            runtime,
            caches.prefix,
            chunks(),
            asked.ids,
            [len(caches.tokenize(text)) for text in texts],
            layers=pick_layers(layers, runtime.num_layers),
            heads=heads,
            pooled=scoring.pooled,
            sinks=scoring.sinks,
            counted=asked.words if scoring.words and bool(asked.words.any()) else None,
        )

    def _best_sentence(self, texts: Sequence[str], scores: Sequence[torch.Tensor]) -> str:
        """The sentence of highest mean score."""
        best, found = -1.0, ""
        for text, score in zip(texts, scores, strict=True):
            offsets = self.caches.tokenize(text).offsets
            numbers = sentence_numbers(text, offsets)
            for number in numbers.unique().tolist():
                inside = (numbers == number).nonzero().flatten()
                mean = float(score[inside].mean())
                if mean > best:
                    best, found = mean, text[offsets[int(inside[0])][0] : offsets[int(inside[-1])][1]]
        return found.strip()


@dataclass(frozen=True, slots=True)
class _Question:
    """What the chunks are asked."""

    ids: tuple[int, ...]
    words: torch.Tensor
    """``(num_tokens,)`` bool: tokens with a letter or a digit."""

    @classmethod
    def of(cls, tokens: TokenizedText, text: str) -> _Question:
        words = [any(letter.isalnum() for letter in text[start:end]) for start, end in tokens.offsets]
        return cls(tokens.ids, torch.tensor(words or [True] * len(tokens.ids), dtype=torch.bool)).last(
            _MAX_QUESTION_TOKENS
        )

    def last(self, count: int) -> _Question:
        return _Question(self.ids[-count:], self.words[-count:])
