"""Conversations of ``cacheclip certify``: the history grows by the method's own answers, and every turn is compared
with full prefill of the same history.

Later turns continue the KV of the turns before, which is approximate: an answer in the history is exact relative to the
KV that it was decoded from, and to no other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, zip_longest

from cacheclip_rag import CacheClipEngine, FusionStats, SamplingParams
from cacheclip_rag.methods import Method, preset

from .fidelity import Fidelity
from .prompts import EvaluationPrompt
from .reference import Reference


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """One turn of one conversation."""

    fidelity: Fidelity
    stats: FusionStats
    """Of the method's answer."""
    finds_needle: bool | None
    full_finds_needle: bool | None


def questions_of(prompt: EvaluationPrompt, turns: int, first: int) -> list[EvaluationPrompt]:
    """Questions about the passages of one prompt: in turn for a number that is hidden in them, and for what one of them
    says. Conversations begin with different ones (``first``), so that every turn asks for numbers."""
    hidden = re.findall(r"access number of the (.+?) is (\d+)", "\n".join(prompt.chunks))
    asked = [(f"What is the access number of the {place}? Answer with the number only.", n) for place, n in hidden]
    numbers = [(prompt.question, prompt.needle), *(each for each in asked if each[1] != prompt.needle)]
    titles = [chunk.partition("\n")[0] for chunk in prompt.chunks]
    told = [(f'What does the passage "{title}" say? Answer in one sentence.', None) for title in titles]
    mixed = [each for pair in zip_longest(numbers, told) for each in pair if each]
    chosen = islice(cycle(mixed[:5]), first, first + turns)
    return [replace(prompt, question=question, needle=needle) for question, needle in chosen]


def converse(
    engine: CacheClipEngine, turns: Sequence[EvaluationPrompt], method: Method, max_tokens: int
) -> list[TurnOutcome]:
    """One outcome a turn. The chunks are precomputed; they stand in the first message, and later ones are questions
    alone."""
    engine.prefixes.clear()
    messages: list[dict[str, str]] = []
    found = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.question if messages else turn.text})
        reference = Reference.of(engine, engine.prefill(messages, method=preset("full")), max_tokens)
        fidelity = reference.follow(engine.prefill(messages, method=method), answers=False).fidelity
        answer = engine.generate(messages, SamplingParams(max_tokens=max_tokens), method=method)  # its KV stays
        found.append(TurnOutcome(fidelity, answer.stats, turn.finds(answer.text), turn.finds(reference.answer)))
        messages.append({"role": "assistant", "content": answer.text})
    engine.prefixes.clear()
    return found
