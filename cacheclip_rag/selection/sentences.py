"""Finds sentences, so that whole sentences can be chosen."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import torch

__all__ = ["Offsets", "sentence_numbers", "sentence_spans"]

Offsets = Sequence[tuple[int, int]]
"""Per token of a text the characters that it covers, ``(start, end)``."""

_END = re.compile(
    r"""
    [.!?…]+ ["'”’»)\]]* \s+         # Latin: a space must follow, or 3.14 and example.org would end one
    | [。！？｡．…]+ ["'”’」』》）】]* \s*  # Chinese and Japanese: none need follow
    | \s* \n \s*                    # titles, list items, lines of a table
    """,
    re.VERBOSE,
)


def sentence_numbers(text: str, offsets: Offsets) -> torch.Tensor:
    """``(num_tokens,)`` int64: number (from 0) of the sentence to which each token of ``text`` belongs.

    A token that crosses a border belongs to the sentence of its last character, so that a word keeps its leading space.
    The rules are simple: an abbreviation followed by a space (``Dr. Hall``) also ends a sentence.

    Args:
        offsets: character offsets ``(start, end)`` per token, in order.
    """
    ends = _ends(text)
    return torch.tensor([bisect_right(ends, max(start, end - 1)) for start, end in offsets], dtype=torch.int64)


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Start and end (exclusive) of each sentence in characters, without surrounding white space."""
    ends = [0, *_ends(text), len(text)]
    spans = []
    for start, end in pairwise(ends):
        sentence = text[start:end]
        if sentence.strip():
            spans.append((start + len(sentence) - len(sentence.lstrip()), start + len(sentence.rstrip())))
    return spans


def _ends(text: str) -> list[int]:
    return [found.end() for found in _END.finditer(text) if found.end() < len(text)]
