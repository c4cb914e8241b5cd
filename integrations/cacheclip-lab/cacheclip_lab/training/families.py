"""Synthetic questions with known evidence, for fine-tuning of the auxiliary model.

Six families: a needle; a needle among needles for other keys; several values of one key; a fact of one of several
lives; a comparison of two lives; the mayor of a person's town. The texts (``families.json``) are our own.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

Span = tuple[int, int, int]
"""Number of a chunk, and start and end (exclusive) of a part of its text, in characters."""

_YEARS = (1780, 1990)
_NUM_CHUNKS = 4
_CHUNK_WORDS = 90
"""About 128 tokens."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A question about chunks of text, with its evidence."""

    family: str
    chunks: tuple[str, ...]
    question: str
    answer: str
    evidence: tuple[Span, ...]
    """Whole sentences from which the answer follows."""


@dataclass(frozen=True, slots=True)
class _Sentence:
    text: str
    is_evidence: bool = False


_Documents = list[list[_Sentence]]
"""Required sentences per chunk; the rest of a chunk is filler."""
_Written = tuple[str, list[str], _Documents]
"""Question, parts of the answer and documents."""


def synthetic_samples(count: int, *, seed: int = 0, chunk_words: int = _CHUNK_WORDS) -> list[Sample]:
    """``count`` samples, families in turn. A sample does not depend on the count. ``chunk_words``: least words of a
    chunk."""
    families = list(FAMILIES)
    return [_sample(families[n % len(families)], f"{seed}/train/{n}", chunk_words) for n in range(count)]


def _sample(family: str, seed: str, chunk_words: int) -> Sample:
    world = _World(random.Random(seed))
    question, parts, documents = FAMILIES[family](world)
    chunks, evidence = [], []
    for number, sentences in enumerate(documents):
        text = ""
        for sentence in world.padded(sentences, chunk_words):
            start = len(text) + (1 if text else 0)
            text = f"{text} {sentence.text}" if text else sentence.text
            if sentence.is_evidence:
                evidence.append((number, start, len(text)))
        chunks.append(text)
    return Sample(family, tuple(chunks), question, ", ".join(parts), tuple(evidence))


class _World:
    """Names, values and sentences of one sample. No name is used twice."""

    def __init__(self, rng: random.Random) -> None:
        self.texts: dict[str, Any] = _texts()
        self.rng = rng
        self._given: set[str] = set()

    def pick(self, options: Sequence[str]) -> str:
        return self.rng.choice(options)

    def new(self, make: Callable[[], str]) -> str:
        """A text that this sample does not contain yet."""
        while (made := make()) in self._given:
            pass
        self._given.add(made)
        return made

    def person(self) -> str:
        names = self.texts["names"]
        return self.new(lambda: f"{self.pick(names['first'])} {self.pick(names['starts'])}{self.pick(names['ends'])}")

    def town(self) -> str:
        names = self.texts["names"]
        return self.new(lambda: self.pick(names["towns"]) + self.pick(names["suffixes"]))

    def thing(self) -> str:
        return self.new(lambda: self.pick(self.texts["things"]))

    def year(self) -> str:
        return self.new(lambda: str(self.rng.randrange(*_YEARS)))

    def value(self) -> str:
        """A number of 5 to 9 digits, a UUID, or a code of letters and digits."""
        kind = self.rng.randrange(4)
        if kind < 2:
            digits = self.rng.randint(5, 9)
            return self.new(lambda: str(self.rng.randrange(10 ** (digits - 1), 10**digits)))
        if kind == 2:
            return self.new(lambda: str(uuid.UUID(int=self.rng.getrandbits(128), version=4)))
        letters = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
        return self.new(lambda: "-".join("".join(self.rng.choices(letters, k=4)) for _ in range(2)))

    def fact(self, name: str, thing: str, value: str, *, is_evidence: bool) -> _Sentence:
        text = self.pick(self.texts["facts"][name]).format(thing=thing, value=value)
        return _Sentence(text[0].upper() + text[1:], is_evidence)

    def life(self, person: str, *asked: str) -> tuple[list[_Sentence], dict[str, str]]:
        """Facts of a life in random order, with those in ``asked`` marked as evidence; and the values of the facts."""
        known = {
            "birth year": self.year(),
            "birthplace": self.town(),
            "profession": self.pick(self.texts["jobs"]),
            "school": self.town(),
            "prize": self.pick(self.texts["prizes"]),
            "spouse": self.person(),
        }
        slots = {"birth year": "year", "birthplace": "town", "profession": "job", "school": "town", "spouse": "other"}
        sentences = []
        for name, (templates, *_) in self.texts["life"].items():
            filled = {slots.get(name, name): known[name], "person": person}
            text = self.pick(templates).format(**{"year": self.year(), **filled})
            sentences.append(_Sentence(text, name in asked))
        self.rng.shuffle(sentences)
        return sentences, known

    def lives(self, people: Sequence[str]) -> _Documents:
        """Lives of people who are not asked about."""
        return [self.life(person)[0] for person in people]

    def padded(self, sentences: Sequence[_Sentence], words: int) -> Iterator[_Sentence]:
        """The sentences in order, with filler at random positions."""
        filler, missing = [], words - sum(len(sentence.text.split()) for sentence in sentences)
        options = self.texts["filler"]
        for text in self.rng.sample(options, len(options)):
            if missing <= 0:
                break
            filler.append(text.format(town=self.town(), year=self.year(), person=self.person()))
            missing -= len(filler[-1].split())
        slots = sorted(self.rng.randint(0, len(sentences)) for _ in filler)
        for number in range(len(sentences) + 1):
            for text, slot in zip(filler, slots, strict=True):
                if slot == number:
                    yield _Sentence(text)
            if number < len(sentences):
                yield sentences[number]

    def scattered(self, sentences: Sequence[_Sentence]) -> _Documents:
        """The sentences spread over the chunks, one per chunk if there are enough chunks."""
        documents: _Documents = [[] for _ in range(_NUM_CHUNKS)]
        order = self.rng.sample(range(_NUM_CHUNKS), _NUM_CHUNKS)
        for number, sentence in enumerate(sentences):
            documents[order[number % _NUM_CHUNKS]].append(sentence)
        return documents

    def shuffled(self, documents: _Documents) -> _Documents:
        return self.rng.sample(documents, len(documents))


def _needle(world: _World) -> _Written:
    name, thing, value = world.pick(list(world.texts["facts"])), world.thing(), world.value()
    question = world.pick(world.texts["ask"]["one"]).format(fact=name, thing=thing)
    return question, [value], world.scattered([world.fact(name, thing, value, is_evidence=True)])


def _keys(world: _World) -> _Written:
    name, thing, value = world.pick(list(world.texts["facts"])), world.thing(), world.value()
    others = [world.fact(name, world.thing(), world.value(), is_evidence=False) for _ in range(2 * _NUM_CHUNKS - 1)]
    question = world.pick(world.texts["ask"]["one"]).format(fact=name, thing=thing)
    return question, [value], world.scattered([world.fact(name, thing, value, is_evidence=True), *others])


def _values(world: _World) -> _Written:
    name, thing = world.pick(list(world.texts["facts"])), world.thing()
    values = [world.value() for _ in range(min(3, _NUM_CHUNKS))]
    asked = [world.fact(name, thing, value, is_evidence=True) for value in values]
    others = [world.fact(name, world.thing(), world.value(), is_evidence=False) for _ in range(_NUM_CHUNKS)]
    question = world.pick(world.texts["ask"]["all"]).format(fact=name, thing=thing)
    return question, values, world.scattered([*asked, *others])


def _biography(world: _World) -> _Written:
    person, name = world.person(), world.pick(list(world.texts["life"]))
    life, known = world.life(person, name)
    question = world.pick(world.texts["life"][name][1]).format(person=person)
    others = world.lives([world.person() for _ in range(_NUM_CHUNKS - 1)])
    return question, [known[name]], world.shuffled([life, *others])


def _comparison(world: _World) -> _Written:
    pair = [world.person(), world.person()]
    (first, one), (second, other) = (world.life(person, "birth year") for person in pair)
    question = world.pick(world.texts["compare"]).format(person=pair[0], other=pair[1])
    others = world.lives([world.person() for _ in range(_NUM_CHUNKS - 2)])
    answer = pair[0] if int(one["birth year"]) < int(other["birth year"]) else pair[1]
    return question, [answer], world.shuffled([first, second, *others])


def _residence(world: _World) -> _Written:
    texts, person, town, mayor = world.texts["residence"], world.person(), world.town(), world.person()
    lives, office = world.pick(texts["lives"]), world.pick(texts["office"])
    asked = [
        _Sentence(lives.format(person=person, town=town), True),
        _Sentence(office.format(town=town, other=mayor), True),
    ]
    others = []
    for _ in range(_NUM_CHUNKS - 1):
        elsewhere = world.town()
        others.append(_Sentence(lives.format(person=world.person(), town=elsewhere)))
        others.append(_Sentence(office.format(town=elsewhere, other=world.person())))
    return world.pick(texts["ask"]).format(person=person), [mayor], world.scattered([*asked, *others])


FAMILIES: dict[str, Callable[[_World], _Written]] = {
    "needle": _needle,
    "keys": _keys,
    "values": _values,
    "biography": _biography,
    "comparison": _comparison,
    "residence": _residence,
}
"""How each family writes a sample."""


@cache
def _texts() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files(__package__).joinpath("families.json").read_text(encoding="utf-8"))
    return found
