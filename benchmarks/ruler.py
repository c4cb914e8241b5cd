"""Questions of three of RULER's needle tasks, which need no essays, for any tokenizer and length.

    pip install wonderwords
    python benchmarks/ruler.py --tasks niah_multikey_2,niah_single_1 --length 4096 > needles.jsonl
    cacheclip eval --dataset needles.jsonl

All of RULER is in lm-eval, which asks a server (``lm_harness.py``).

Source: NVIDIA/RULER (arXiv:2404.06654; Apache-2.0), ``scripts/data/synthetic/niah.py`` and ``constants.py``: strings,
draws, insertion and fitting follow it; the code is ours. Where we depart from it:

- every sample has its own random generator, so that sample 7 does not depend on the count. The samples are not those of
  RULER's own files;
- the size of the haystack is interpolated, to within a twentieth of a step (see ``_fit``);
- the context is cut into chunks, as in the CacheClip paper (1000 tokens with an overlap of 50).
"""

from __future__ import annotations

import argparse
import json
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from cacheclip_rag import CacheClipEngine

Offsets = Callable[[str], Sequence[tuple[int, int]]]
"""Returns ``(start, end)`` in characters of every token of a text, without special tokens."""

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {type} for {key} is: {value}."
_TEMPLATE = (
    "A special magic {type} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type} afterwards.\n",
    "\nWhat is the special magic {type} for {query} mentioned in the provided text?",
    " The special magic {type} for {query} mentioned in the provided text is",
)
_ROOM = 128
"""Tokens for the answer, part of every length."""


@dataclass(frozen=True, slots=True)
class NeedleTask:
    """One row of RULER's table."""

    haystack: Literal["noise", "needle"]
    """Text around the needle: one repeated sentence, or needles for other keys."""
    key_type: Literal["words", "uuids"]
    value_type: Literal["numbers", "uuids"]

    def parts(self, query: str) -> tuple[str, str, str]:
        """Text before the context, text after the context, and the answer prefix."""
        opening, closing, prefix = (part.format(type=self.value_type[:-1], query=query) for part in _TEMPLATE)
        return opening, closing, prefix

    def needle(self, key: str, value: str) -> str:
        """The needle's line in the context, always plural as in RULER."""
        return _NEEDLE.format(type=self.value_type, key=key, value=value)


TASKS = {
    "niah_single_1": NeedleTask("noise", "words", "numbers"),
    "niah_multikey_2": NeedleTask("needle", "words", "numbers"),
    "niah_multikey_3": NeedleTask("needle", "uuids", "uuids"),
}


@dataclass(frozen=True, slots=True)
class _Haystack:
    context: str
    opening: str
    closing: str
    prefix: str
    answer: str

    @property
    def prompt(self) -> str:
        return self.opening + self.context + self.closing + self.prefix


def generate(
    task: str,
    *,
    num_tokens: int,
    count: int,
    offsets: Offsets,
    seed: int = 42,
    chunk_tokens: int = 1000,
    overlap_tokens: int = 50,
) -> list[dict[str, Any]]:
    """``count`` records of ``task``, each of nearly ``num_tokens`` tokens and not more.

    The tokens include prompt, answer prefix and the task's room for the answer. They do not include a chat template and
    the overlaps of the chunks (5 % at 1000 / 50).

    ``meta`` holds ``opening`` and ``closing``, each with the line break beside the context: opening + context + closing
    is RULER's prompt; ``answer_prefix``, which begins with a space and goes right after it, or opens the assistant's
    turn; ``length``, the tokens counted; and ``num_tokens``, ``metric``, ``max_tokens``.

    Raises:
        SystemExit: too few tokens.
    """
    step = 25 if num_tokens >= 4096 else 5  # lines by which RULER makes a haystack longer

    def make(index: int, size: int) -> tuple[_Haystack, Sequence[tuple[int, int]]]:
        sample = _sample(TASKS[task], random.Random(f"{seed}/{task}/{index}"), size)
        return sample, offsets(sample.prompt)

    fitted = _fit(task, lambda size: len(make(0, size)[1]) + _ROOM, num_tokens, step)
    records = []
    for index in range(count):
        sample, spans = make(index, size := fitted)
        while len(spans) + _ROOM > num_tokens:
            # RULER always removes a whole step, and does not end if no step is left
            sample, spans = make(index, size := max(size - step, size // 2))
        meta = {
            "opening": sample.opening,
            "closing": sample.closing,
            "answer_prefix": sample.prefix,
            "num_tokens": num_tokens,
            "length": len(spans) + _ROOM,
            "metric": "string_match_all",
            "max_tokens": _ROOM,
        }
        records.append(
            {
                "id": f"{task}-{num_tokens}-{index}",
                "task": task,
                "question": sample.closing.removeprefix("\n"),
                "answers": [sample.answer],
                "chunks": [{"text": text} for text in _chunks(sample, spans, chunk_tokens, overlap_tokens)],
                "meta": meta,
            }
        )
    return records


def _sample(row: NeedleTask, draw: random.Random, size: int) -> _Haystack:
    key, value = (_draw(kind, draw) for kind in (row.key_type, row.value_type))
    draw.sample(range(1), 1)  # the key that is asked for, of one: as in RULER
    lines = [_NOISE] * size
    if row.haystack == "needle":
        lines = [row.needle(_draw(row.key_type, draw), _draw(row.value_type, draw)) for _ in range(size)]
    lines.insert(draw.randrange(size), row.needle(key, value))
    return _Haystack("\n".join(lines), *row.parts(key), value)


def _draw(kind: str, draw: random.Random) -> str:
    """One key or value. Like RULER, this does not avoid duplicates."""
    if kind == "numbers":
        return str(draw.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))
    adjectives, nouns = _word_lists()
    return f"{draw.choice(adjectives)}-{draw.choice(nouns)}"


@cache
def _word_lists() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Adjectives and nouns, each once, so that drawing both is uniform over RULER's set of six million combinations."""
    assets = files("wonderwords").joinpath("assets")
    lists = [assets.joinpath(f"{name}list.txt").read_text(encoding="utf-8") for name in ("adjective", "noun")]
    adjectives, nouns = (tuple(sorted({word.strip() for word in text.split("\n")} - {""})) for text in lists)
    return adjectives, nouns


def _chunks(sample: _Haystack, spans: Sequence[tuple[int, int]], size: int, overlap: int) -> Iterator[str]:
    """The context in pieces of ``size`` tokens."""
    begin = len(sample.opening)
    end = begin + len(sample.context)
    inside = [(start, stop) for start, stop in spans if start < end and stop > begin]
    inside[0] = (begin, inside[0][1])  # a token may cross the border, such as full stop and line break in one token
    inside[-1] = (inside[-1][0], end)
    for first in range(0, max(1, len(inside) - overlap), size - overlap):  # no chunk that is only overlap
        yield sample.prompt[inside[first][0] : inside[min(first + size, len(inside)) - 1][1]]


def _fit(task: str, length: Callable[[int], int], limit: int, step: int) -> int:
    """The largest haystack (lines) whose prompt fits, to within a twentieth of a step.

    RULER bisects, with about 18 tokenizations of up to three times the length. Length is nearly linear in size, so a
    few tokenizations suffice. The tolerance also keeps other samples, which differ by a few tokens, from losing a step.
    """
    short = length(step)
    if short > limit:
        raise SystemExit(f"{task} needs num_tokens of about {short + short // 20} or more, got {limit}.")
    slack = short // 20
    low, high, long = step, step, short
    while long <= limit:
        low, short = high, long
        high = high * limit // long + step
        long = length(high)
    while high - low > 1 and limit - short > slack:
        guess = low + (high - low) * (limit - slack // 2 - short) // (long - short)
        guess = min(max(guess, low + 1), high - 1)
        if (tokens := length(guess)) <= limit:
            low, short = guess, tokens
        else:
            high, long = guess, tokens
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b", help="whose tokens are counted")
    parser.add_argument("--tasks", default="niah_multikey_2,niah_single_1", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--limit", type=int, default=20, help="questions of a task")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--chunk-tokens", type=int, default=1000)
    parser.add_argument("--overlap-tokens", type=int, default=50)
    given = parser.parse_args()

    runtime = CacheClipEngine(primary=given.primary, auxiliary=None).primary
    for task in given.tasks.split(","):
        for record in generate(
            task,
            num_tokens=given.length,
            count=given.limit,
            offsets=lambda text: runtime.tokenize(text).offsets,
            seed=given.seed,
            chunk_tokens=given.chunk_tokens,
            overlap_tokens=given.overlap_tokens,
        ):
            print(json.dumps(record, ensure_ascii=False))


if __name__ == "__main__":
    main()
