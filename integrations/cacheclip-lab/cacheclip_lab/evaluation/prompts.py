"""The prompts of ``cacheclip certify``, the same for every model.

Half of them ask about the passages, some of them about two passages. The other half hide a number in one passage, among
numbers for other places. Passages and questions are original texts about invented places.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

_PASSAGES_PER_PROMPT = 5
_DISTRACTORS = 2
"""Numbers for other places in the other passages of a needle prompt."""


@dataclass(frozen=True, slots=True)
class EvaluationPrompt:
    """Passages and a question."""

    chunks: tuple[str, ...]
    question: str
    needle: str | None
    """Text that a right answer contains; None for questions without a single right wording."""

    @property
    def text(self) -> str:
        """The prompt's text, chunks first."""
        return "\n\n".join(self.chunks) + f"\n\nQuestion: {self.question}"

    def finds(self, answer: str) -> bool | None:
        """Whether an answer contains the needle, with any grouping of its digits; None for a prompt without one."""
        return None if self.needle is None else self.needle in answer.replace(",", "").replace(" ", "")


def bundled_prompts(count: int) -> list[EvaluationPrompt]:
    """The first ``count`` prompts, alternating questions and needles. From the 25th on, the same questions stand after
    other passages, or after the same ones in another order."""
    data = _data()
    made = []
    for number in range((count + 1) // 2):
        made += [_question(number, data), _needle(number, data)]
    return made[:count]


def _question(number: int, data: dict[str, Any]) -> EvaluationPrompt:
    generator, questions = random.Random(number), data["questions"]
    asked = questions[number % len(questions)]
    needed = asked["passages"]
    others = [index for index in range(len(data["passages"])) if index not in needed]
    order = generator.sample(others, _PASSAGES_PER_PROMPT - len(needed))
    for index in needed:
        # not in the first chunk, which may be exact and would make the question too easy
        order.insert(generator.randrange(1, len(order) + 1), index)
    return EvaluationPrompt(tuple(_passage(data, index) for index in order), asked["question"], None)


def _needle(number: int, data: dict[str, Any]) -> EvaluationPrompt:
    generator, places = random.Random(1000 + number), data["places"]
    place = places[number % len(places)]
    order = generator.sample(range(len(data["passages"])), _PASSAGES_PER_PROMPT)
    hidden = generator.sample(range(1, _PASSAGES_PER_PROMPT), _DISTRACTORS + 1)
    others = generator.sample([other for other in places if other != place], _DISTRACTORS)
    numbers = [str(generator.randrange(10**6, 10**7)) for _ in hidden]
    chunks = [_passage(data, index) for index in order]
    for position, where, value in zip(hidden, [place, *others], numbers, strict=True):
        title, _, body = chunks[position].partition("\n")
        sentences = body.split(". ")
        sentences.insert(generator.randrange(1, len(sentences)), f"The access number of the {where} is {value}")
        chunks[position] = f"{title}\n{'. '.join(sentences)}"
    question = f"What is the access number of the {place}? Answer with the number only."
    return EvaluationPrompt(tuple(chunks), question, numbers[0])


def _passage(data: dict[str, Any], index: int) -> str:
    passage = data["passages"][index]
    return f"{passage['title']}\n{passage['text']}"


@cache
def _data() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(files(__package__).joinpath("prompts.json").read_text(encoding="utf-8"))
    return loaded
