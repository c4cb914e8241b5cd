"""Questions of RULER's eight needle tasks and its variable tracking, for any tokenizer and length.

    pip install wonderwords
    python benchmarks/ruler.py --tasks niah_multikey_2,niah_single_1 --length 4096 > needles.jsonl
    cacheclip eval --dataset needles.jsonl

Tasks that hide their needles in essays take a text with ``--haystack FILE``.

Source: NVIDIA/RULER (arXiv:2404.06654; Apache-2.0), ``scripts/data/synthetic/niah.py``, ``variable_tracking.py`` and
``constants.py``: strings, draws, insertion and fitting follow it; the code is ours. Where we depart from it:

- every sample has its own random generator, so that sample 7 does not depend on the count. The samples are not those of
  RULER's own files;
- essays that are too short are refused; RULER repeats them;
- the size of the haystack is interpolated, to within a twentieth of a step (see ``_fit``);
- the context is cut into chunks, as in the CacheClip paper (1000 tokens with an overlap of 50).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from cacheclip_rag import CacheClipEngine

Offsets = Callable[[str], Sequence[tuple[int, int]]]
"""Returns ``(start, end)`` in characters of every token of a text, without special tokens."""

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {type} for {key} is: {value}."
_TEMPLATE = (
    "Some special magic {type} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type} afterwards.\n",
    "\nWhat are all the special magic {type} for {query} mentioned in the provided text?",
    " The special magic {type} for {query} mentioned in the provided text are",
)
_TRACKING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
    "\nQuestion: Find all variables that are assigned the value {value} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: ",
)
_EXAMPLE_TOKENS = 500
"""Most tokens of the solved example before a prompt of variable tracking."""
_SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))
_DEPTHS = tuple(round(100 * n / 39) for n in range(40))
"""Percent of the sentences before an essay's needle."""
_SENTENCE_END = re.compile(r"""[.!?]["'”’)\]]* (?=["'“‘(\[]*[^\Wa-z_])""")
_ABBREVIATION = re.compile(r"(?<!\w)(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|cf|e\.g|i\.e)\.$")


@dataclass(frozen=True, slots=True)
class NeedleTask:
    """One row of RULER's table."""

    haystack: Literal["noise", "essay", "needle"]
    """Text around the needles: one repeated sentence, essays, or needles for other keys."""
    key_type: Literal["words", "uuids"]
    value_type: Literal["numbers", "uuids"]
    num_needle_k: int = 1
    """Keys with a needle in the text, at least as many as in the question."""
    num_needle_v: int = 1
    """Values per key, each in its own needle."""
    num_needle_q: int = 1
    """Keys asked for."""
    max_tokens: int = 128
    """Room for the answer, part of every length."""

    def step(self, num_tokens: int) -> int:
        """Words of essays, or lines, by which RULER makes a haystack longer."""
        return 500 if self.haystack == "essay" else 25 if num_tokens >= 4096 else 5

    def parts(self, query: str) -> tuple[str, str, str]:
        """Text before the context, text after the context, and the answer prefix; singular for one answer."""
        parts, kind = list(_TEMPLATE), str(self.value_type)
        if self.num_needle_q * self.num_needle_v == 1:
            kind = kind[:-1]
            for plural, singular in _SINGULAR:
                parts = [part.replace(plural, singular) for part in parts]
        opening, closing, prefix = (part.format(type=kind, query=query) for part in parts)
        return opening, closing, prefix

    def needle(self, key: str, value: str) -> str:
        """The needle's line in the context, always plural as in RULER."""
        return _NEEDLE.format(type=self.value_type, key=key, value=value)


@dataclass(frozen=True, slots=True)
class VariableTracking:
    """A chain of assignments, in order, between lines of noise: which variables have its value? A solved example with
    a chain of its own comes first."""

    num_hops: int = 4
    """Assignments after the chain's first one."""
    haystack: Literal["noise"] = "noise"
    max_tokens: int = 30
    """Room for the answer, part of every length."""

    def step(self, num_tokens: int) -> int:
        """Lines by which RULER makes a haystack longer."""
        return 10 if num_tokens >= 4096 else 5

    def sample(self, draw: random.Random, size: int, example: str = "", letters: int = 5) -> _Haystack:
        """A chain in ``size`` lines of noise.

        Args:
            example: text before the prompt.
            letters: letters of a variable's name.
        """
        names: list[str] = []
        while len(names) <= self.num_hops:
            name = "".join(draw.choices(string.ascii_uppercase, k=letters))
            names += [] if name in names else [name]
        value = str(draw.randint(10000, 99998))
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]  # RULER's lines end with a space
        lines = [_NOISE] * size
        for number, (position, assignment) in enumerate(
            zip(sorted(draw.sample(range(size), len(chain))), chain, strict=True)
        ):
            lines.insert(position + number, assignment)
        opening, closing, prefix = (part.format(value=value, count=len(names)) for part in _TRACKING)
        return _Haystack("\n".join(lines), example + opening, closing, prefix, tuple(names))

    def example(self, draw: random.Random, size: int) -> str:
        """A solved prompt in ``size`` lines of noise, and the line breaks after it."""
        sample = self.sample(draw, size, letters=3)
        return f"{sample.prompt} {' '.join(sample.answers)}\n\n"


TASKS: dict[str, NeedleTask | VariableTracking] = {
    "niah_single_1": NeedleTask("noise", "words", "numbers"),
    "niah_single_2": NeedleTask("essay", "words", "numbers"),
    "niah_single_3": NeedleTask("essay", "words", "uuids"),
    "niah_multikey_1": NeedleTask("essay", "words", "numbers", num_needle_k=4),
    "niah_multikey_2": NeedleTask("needle", "words", "numbers"),
    "niah_multikey_3": NeedleTask("needle", "uuids", "uuids"),
    "niah_multivalue": NeedleTask("essay", "words", "numbers", num_needle_v=4),
    "niah_multiquery": NeedleTask("essay", "words", "numbers", num_needle_q=4),
    "vt": VariableTracking(),
}


@dataclass(frozen=True, slots=True)
class _Haystack:
    context: str
    opening: str
    closing: str
    prefix: str
    answers: tuple[str, ...]

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
    haystack: str | None = None,
    chunk_tokens: int = 1000,
    overlap_tokens: int = 50,
) -> list[dict[str, Any]]:
    """``count`` records of ``task``, each of nearly ``num_tokens`` tokens and not more.

    The tokens include prompt, answer prefix and the task's room for the answer. They do not include a chat template and
    the overlaps of the chunks (5 % at 1000 / 50). ``haystack`` is the text of the essays, for tasks that need one.

    ``meta`` holds ``opening`` and ``closing``, each with the line break beside the context: opening + context + closing
    is RULER's prompt; ``answer_prefix``, which begins with a space and goes right after it, or opens the assistant's
    turn; ``length``, the tokens counted; and ``num_tokens``, ``metric``, ``max_tokens``.

    Raises:
        SystemExit: missing or too short essays, or too few tokens.
    """
    row = TASKS[task]
    words = (haystack or "").split() if row.haystack == "essay" else None
    step, room = row.step(num_tokens), row.max_tokens
    lines = 0 if isinstance(row, NeedleTask) else _example_lines(row, task, offsets)

    def make(index: int, size: int) -> tuple[_Haystack, Sequence[tuple[int, int]]]:
        draw = random.Random(f"{seed}/{task}/{index}")
        if isinstance(row, NeedleTask):
            sample = _sample(row, draw, seed, words, size)
        else:
            sample = row.sample(draw, size, row.example(draw, lines))
        return sample, offsets(sample.prompt)

    most = max(num_tokens, step) if words is None else len(words)
    fitted = _fit(task, lambda size: len(make(0, size)[1]) + room, num_tokens, step, most)
    records = []
    for index in range(count):
        sample, spans = make(index, size := fitted)
        while len(spans) + room > num_tokens:
            # RULER always removes a whole step, and does not end if no step is left
            sample, spans = make(index, size := max(size - step, size // 2))
        meta = {
            "opening": sample.opening,
            "closing": sample.closing,
            "answer_prefix": sample.prefix,
            "num_tokens": num_tokens,
            "length": len(spans) + room,
            "metric": "string_match_all",
            "max_tokens": room,
        }
        records.append(
            {
                "id": f"{task}-{num_tokens}-{index}",
                "task": task,
                "question": sample.closing.removeprefix("\n"),
                "answers": list(sample.answers),
                "chunks": [{"text": text} for text in _chunks(sample, spans, chunk_tokens, overlap_tokens)],
                "meta": meta,
            }
        )
    return records


def sentences(text: str) -> list[str]:
    """Sentences of a text with single spaces between words. Joined by a space, they equal the text.

    RULER uses NLTK's punkt, which needs a download. Another splitter moves needles by at most a part of a sentence.
    """
    found, start = [], 0
    for end in _SENTENCE_END.finditer(text):
        if not _ABBREVIATION.search(text, max(start, end.start() - 12), end.start() + 1):
            found.append(text[start : end.end() - 1])
            start = end.end()
    return [*found, text[start:]] if start < len(text) else found


def _example_lines(row: VariableTracking, task: str, offsets: Offsets) -> int:
    """Lines of noise in the solved example."""
    return _fit(
        task, lambda size: len(offsets(row.example(random.Random(task), size))), _EXAMPLE_TOKENS, 5, _EXAMPLE_TOKENS
    )


def _sample(row: NeedleTask, draw: random.Random, seed: int, words: list[str] | None, size: int) -> _Haystack:
    keys = [_draw(row.key_type, draw) for _ in range(max(row.num_needle_k, row.num_needle_q))]
    values = [[_draw(row.value_type, draw) for _ in range(row.num_needle_v)] for _ in keys]
    needles = [row.needle(key, value) for key, given in zip(keys, values, strict=True) for value in given]
    random.Random(seed).shuffle(needles)  # the same permutation in every sample, as in RULER
    asked = draw.sample(range(len(keys)), row.num_needle_q)
    query = ", ".join(keys[n] for n in asked[:-1]) + (", and " if asked[1:] else "") + keys[asked[-1]]
    context = _in_lines(row, size, needles, draw) if words is None else _in_essay(words[:size], needles, draw)
    return _Haystack(context, *row.parts(query), answers=tuple(value for n in asked for value in values[n]))


def _in_essay(words: Sequence[str], needles: Sequence[str], draw: random.Random) -> str:
    pieces = sentences(" ".join(words))
    positions = sorted(len(pieces) * depth // 100 for depth in draw.sample(_DEPTHS, len(needles)))
    for position, needle in reversed(list(zip(positions, needles, strict=True))):
        pieces.insert(position, needle)
    return " ".join(pieces)


def _in_lines(row: NeedleTask, size: int, needles: Sequence[str], draw: random.Random) -> str:
    lines = [_NOISE] * size
    if row.haystack == "needle":
        lines = [row.needle(_draw(row.key_type, draw), _draw(row.value_type, draw)) for _ in range(size)]
    for position, needle in zip(sorted(draw.sample(range(size), len(needles)), reverse=True), needles, strict=True):
        lines.insert(position, needle)
    return "\n".join(lines)


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


def _fit(task: str, length: Callable[[int], int], limit: int, step: int, most: int) -> int:
    """The largest haystack (words of essays, or lines) whose prompt fits, to within a twentieth of a step.

    RULER bisects, with about 18 tokenizations of up to three times the length. Length is nearly linear in size, so a
    few tokenizations suffice. The tolerance also keeps other samples, which differ by a few tokens, from losing a step.
    """
    short = length(step) if most >= step else 0
    if short > limit:
        raise SystemExit(f"{task} needs num_tokens of about {short + short // 20} or more, got {limit}.")
    slack = short // 20
    low, high, long = step, step, short
    while long <= limit:
        if high >= most:
            raise SystemExit(
                f"{task} needs essays longer than {limit} tokens as haystack, got {most} words. "
                "Pass more text (RULER's is the essays of Paul Graham), or ask for fewer tokens."
            )
        low, short = high, long
        high = min(most, high * limit // long + step)
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
    parser.add_argument("--haystack", type=Path)
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
            haystack=given.haystack.read_text(encoding="utf-8") if given.haystack else None,
            chunk_tokens=given.chunk_tokens,
            overlap_tokens=given.overlap_tokens,
        ):
            print(json.dumps(record, ensure_ascii=False))


if __name__ == "__main__":
    main()
