"""Texts and a question without meaning, for measuring how long prompts take."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

QUESTION = "Which harbour does the northern ferry reach before the winter timetable begins?"
"""Asked of texts of :func:`make_texts`."""
SECOND_QUESTION = "Who wrote the letter about the new railway that the captain kept on the mountain?"
"""Asked of the same texts afterwards."""
_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "harbour ferry island station engine winter timetable captain signal northern bridge letter market river garden "
    "window morning company number history question answer reason record measure mountain railway village library"
).split()


def make_texts(tokenize: Callable[[str], Any], count: int, num_tokens: int, seed: int = 0) -> list[str]:
    """``count`` different texts of about ``num_tokens`` tokens each: English words, deterministic, without meaning.
    They end in a full stop, as people's do: some tokenizers join it with a blank line after it."""
    generator = random.Random(seed)
    texts = []
    for _ in range(count):
        words = [generator.choice(_WORDS) for _ in range(num_tokens)]
        text = " ".join(word.capitalize() + "." if n % 12 == 0 else word for n, word in enumerate(words))
        offsets = tokenize(text).offsets
        texts.append(text[: offsets[min(num_tokens, len(offsets)) - 1][1]].strip(" .") + ".")
    return texts
