"""A selector without a model: finds the question's words in the text. Every trained selector must be better."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import torch

from ...selection.sentences import Offsets, sentence_numbers

__all__ = ["lexical_scores"]

_WORD = re.compile(r"\w+")
_SATURATION, _LENGTH = 1.2, 0.75
"""k1 and b of BM25."""


def lexical_scores(chunks: Sequence[str], offsets: Sequence[Offsets], question: str) -> torch.Tensor:
    """BM25 of each sentence for the question; every token has the score of its sentence.

    Source: Robertson and Zaragoza, The Probabilistic Relevance Framework (2009), sentences as documents.

    Args:
        offsets: per chunk the character offsets of its tokens.

    Returns:
        ``(num_tokens,)`` over all chunks.
    """
    sentences: list[list[str]] = []
    numbers: list[torch.Tensor] = []
    for chunk, of_chunk in zip(chunks, offsets, strict=True):
        within = sentence_numbers(chunk, of_chunk)
        numbers.append(within + len(sentences))
        for number in range(int(within.max()) + 1 if len(within) else 0):
            inside = [span for span, n in zip(of_chunk, within.tolist(), strict=True) if n == number]
            text = chunk[inside[0][0] : inside[-1][1]] if inside else ""
            sentences.append(_words(text))
    asked = set(_words(question))
    holding = Counter(word for sentence in sentences for word in asked & set(sentence))
    mean_length = sum(map(len, sentences)) / max(1, len(sentences))
    scores = []
    for sentence in sentences:
        counts = Counter(sentence)
        score = 0.0
        for word in asked & set(sentence):
            rarity = math.log(1 + (len(sentences) - holding[word] + 0.5) / (holding[word] + 0.5))
            damping = _SATURATION * (1 - _LENGTH + _LENGTH * len(sentence) / mean_length)
            score += rarity * counts[word] * (_SATURATION + 1) / (counts[word] + damping)
        scores.append(score)
    return torch.tensor(scores)[torch.cat(numbers)]


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]
