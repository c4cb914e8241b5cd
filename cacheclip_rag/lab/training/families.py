"""Synthetic questions with known evidence, for fine-tuning of the auxiliary model.

Six families are for training: a needle; a needle among needles for other keys; several values of one key; a fact of one
of several lives; a comparison of two lives; the mayor of a person's town. Three are for tests: the values of two keys;
a value two hops away; a film and the life of its director. Training and test families share no word, name or sentence
template (``families.json``, our own texts), so that a model must learn to find evidence, not to know the questions.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from ...base.errors import ConfigurationError

__all__ = ["FAMILIES", "Sample", "Span", "Split", "synthetic_samples"]

Split = Literal["train", "test"]
Span = tuple[int, int, int]
"""Number of a chunk, and start and end (exclusive) of a part of its text, in characters."""

_YEARS = (1780, 1990)
_TRIES = 1000
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
    values: tuple[Span, ...]
    """The words of the answer within these sentences."""
    parts: tuple[str, ...]
    """Of a right answer."""

    def as_read(self) -> dict[str, Any]:
        """Everything that models read, for digests; without answers and evidence."""
        return {name: value for name, value in asdict(self).items() if name != "parts"}


@dataclass(frozen=True, slots=True)
class _Sentence:
    text: str
    value: str | None = None
    """Part of the text that belongs to the answer."""
    is_evidence: bool = False


_Documents = list[list[_Sentence]]
"""Required sentences per chunk; the rest of a chunk is filler."""
_Written = tuple[str, list[str], _Documents]
"""Question, parts of the answer and documents."""


def synthetic_samples(
    split: Split,
    count: int,
    *,
    seed: int = 0,
    families: Sequence[str] | None = None,
    num_chunks: int = 4,
    chunk_words: int = _CHUNK_WORDS,
) -> list[Sample]:
    """``count`` samples, families in turn. A sample does not depend on the count.

    Args:
        split: ``train`` or ``test``; no family, template, word or name is in both.
        families: names from :data:`FAMILIES` of that split; default all.
        num_chunks: chunks per sample, at least 2.
        chunk_words: least words of a chunk.

    Raises:
        ConfigurationError: an unknown split or family, fewer than two chunks, or too many chunks for the word lists.
    """
    if split not in FAMILIES:
        raise ConfigurationError(f"samples are of split {' or '.join(FAMILIES)}, got {split!r}.")
    known = FAMILIES[split]
    chosen = list(known if families is None else families)
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise ConfigurationError(
            f"families of split {split} are {', '.join(known)}; got {', '.join(unknown) or 'none'}."
        )
    if num_chunks < 2:
        raise ConfigurationError(f"a question over chunks needs at least 2 of them, got num_chunks={num_chunks}.")
    return [
        _sample(split, chosen[n % len(chosen)], f"{seed}/{split}/{n}", num_chunks, chunk_words) for n in range(count)
    ]


def _sample(split: Split, family: str, seed: str, num_chunks: int, chunk_words: int) -> Sample:
    world = _World(split, random.Random(seed))
    question, parts, documents = FAMILIES[split][family](world, num_chunks)
    chunks, evidence, values = [], [], []
    for number, sentences in enumerate(documents):
        text = ""
        for sentence in world.padded(sentences, chunk_words):
            start = len(text) + (1 if text else 0)
            text = f"{text} {sentence.text}" if text else sentence.text
            if sentence.is_evidence:
                evidence.append((number, start, len(text)))
            if sentence.value is not None:
                inside = start + sentence.text.index(sentence.value)
                values.append((number, inside, inside + len(sentence.value)))
        chunks.append(text)
    return Sample(family, tuple(chunks), question, ", ".join(parts), tuple(evidence), tuple(values), tuple(parts))


class _World:
    """Names, values and sentences of one sample. No name is used twice."""

    def __init__(self, split: Split, rng: random.Random) -> None:
        self.texts: dict[str, Any] = _texts()[split]
        self.rng = rng
        self._given: set[str] = set()

    def pick(self, options: Sequence[str]) -> str:
        return self.rng.choice(options)

    def new(self, make: Callable[[], str]) -> str:
        """A text that this sample does not contain yet."""
        for _ in range(_TRIES):
            if (made := make()) not in self._given:
                self._given.add(made)
                return made
        raise ConfigurationError("there are not enough words for so many chunks. Ask for fewer chunks.")

    def person(self) -> str:
        names = self.texts["names"]
        return self.new(lambda: f"{self.pick(names['first'])} {self.pick(names['starts'])}{self.pick(names['ends'])}")

    def town(self) -> str:
        names = self.texts["names"]
        return self.new(lambda: self.pick(names["towns"]) + self.pick(names["suffixes"]))

    def thing(self) -> str:
        return self.new(lambda: self.pick(self.texts["things"]))

    def title(self) -> str:
        return self.new(lambda: self.pick(self.texts["names"]["titles"]))

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
        return _Sentence(text[0].upper() + text[1:], value if is_evidence else None, is_evidence)

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
            sentences.append(_Sentence(text, known[name] if name in asked else None, name in asked))
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

    def scattered(self, sentences: Sequence[_Sentence], num_chunks: int) -> _Documents:
        """The sentences spread over the chunks, one per chunk if there are enough chunks."""
        documents: _Documents = [[] for _ in range(num_chunks)]
        order = self.rng.sample(range(num_chunks), num_chunks)
        for number, sentence in enumerate(sentences):
            documents[order[number % num_chunks]].append(sentence)
        return documents

    def shuffled(self, documents: _Documents) -> _Documents:
        return self.rng.sample(documents, len(documents))


def _needle(world: _World, num_chunks: int) -> _Written:
    name, thing, value = world.pick(list(world.texts["facts"])), world.thing(), world.value()
    question = world.pick(world.texts["ask"]["one"]).format(fact=name, thing=thing)
    return question, [value], world.scattered([world.fact(name, thing, value, is_evidence=True)], num_chunks)


def _keys(world: _World, num_chunks: int) -> _Written:
    name, thing, value = world.pick(list(world.texts["facts"])), world.thing(), world.value()
    others = [world.fact(name, world.thing(), world.value(), is_evidence=False) for _ in range(2 * num_chunks - 1)]
    question = world.pick(world.texts["ask"]["one"]).format(fact=name, thing=thing)
    return question, [value], world.scattered([world.fact(name, thing, value, is_evidence=True), *others], num_chunks)


def _values(world: _World, num_chunks: int) -> _Written:
    name, thing = world.pick(list(world.texts["facts"])), world.thing()
    values = [world.value() for _ in range(min(3, num_chunks))]
    asked = [world.fact(name, thing, value, is_evidence=True) for value in values]
    others = [world.fact(name, world.thing(), world.value(), is_evidence=False) for _ in range(num_chunks)]
    question = world.pick(world.texts["ask"]["all"]).format(fact=name, thing=thing)
    return question, values, world.scattered([*asked, *others], num_chunks)


def _two_hop(world: _World, num_chunks: int) -> _Written:
    name, person, thing, value = world.pick(list(world.texts["facts"])), world.person(), world.thing(), world.value()
    keeps = world.pick(world.texts["keeper"])
    alias = _Sentence(keeps.format(person=person, thing=thing), None, True)
    others = []
    for _ in range(num_chunks - 1):
        other = world.thing()
        others.append(_Sentence(keeps.format(person=world.person(), thing=other)))
        others.append(world.fact(name, other, world.value(), is_evidence=False))
    question = world.pick(world.texts["ask"]["hop"]).format(fact=name, person=person)
    asked = [alias, world.fact(name, thing, value, is_evidence=True)]
    return question, [value], world.scattered([*asked, *others], num_chunks)


def _biography(world: _World, num_chunks: int) -> _Written:
    person, name = world.person(), world.pick(list(world.texts["life"]))
    life, known = world.life(person, name)
    question = world.pick(world.texts["life"][name][1]).format(person=person)
    others = world.lives([world.person() for _ in range(num_chunks - 1)])
    return question, [known[name]], world.shuffled([life, *others])


def _comparison(world: _World, num_chunks: int) -> _Written:
    pair = [world.person(), world.person()]
    (first, one), (second, other) = (world.life(person, "birth year") for person in pair)
    question = world.pick(world.texts["compare"]).format(person=pair[0], other=pair[1])
    others = world.lives([world.person() for _ in range(num_chunks - 2)])
    answer = pair[0] if int(one["birth year"]) < int(other["birth year"]) else pair[1]
    return question, [answer], world.shuffled([first, second, *others])


def _works(world: _World, num_chunks: int) -> _Written:
    person, title = world.person(), world.title()
    statements, questions = world.texts["works"]
    credit = world.pick(statements)
    plots = world.rng.sample(world.texts["plots"], 3)
    film = [_Sentence(credit.format(title=title, person=person, year=world.year()), None, True), *map(_Sentence, plots)]
    life, known = world.life(person, "birthplace")
    others = world.lives([world.person() for _ in range(num_chunks - 2)])
    question = world.pick(questions).format(title=title)
    return question, [known["birthplace"]], world.shuffled([film, life, *others])


def _residence(world: _World, num_chunks: int) -> _Written:
    texts, person, town, mayor = world.texts["residence"], world.person(), world.town(), world.person()
    lives, office = world.pick(texts["lives"]), world.pick(texts["office"])
    asked = [
        _Sentence(lives.format(person=person, town=town), None, True),
        _Sentence(office.format(town=town, other=mayor), mayor, True),
    ]
    others = []
    for _ in range(num_chunks - 1):
        elsewhere = world.town()
        others.append(_Sentence(lives.format(person=world.person(), town=elsewhere)))
        others.append(_Sentence(office.format(town=elsewhere, other=world.person())))
    return world.pick(texts["ask"]).format(person=person), [mayor], world.scattered([*asked, *others], num_chunks)


def _multiquery(world: _World, num_chunks: int) -> _Written:
    name = world.pick(list(world.texts["facts"]))
    things, values = [world.thing(), world.thing()], [world.value(), world.value()]
    asked = [world.fact(name, *pair, is_evidence=True) for pair in zip(things, values, strict=True)]
    others = [world.fact(name, world.thing(), world.value(), is_evidence=False) for _ in range(num_chunks)]
    question = world.pick(world.texts["ask"]["pair"]).format(fact=name, thing=things[0], another=things[1])
    return question, values, world.scattered([*asked, *others], num_chunks)


FAMILIES: dict[Split, dict[str, Callable[[_World, int], _Written]]] = {
    "train": {
        "needle": _needle,
        "keys": _keys,
        "values": _values,
        "biography": _biography,
        "comparison": _comparison,
        "residence": _residence,
    },
    "test": {"multiquery": _multiquery, "two_hop": _two_hop, "works": _works},
}
"""How each family of a split writes a sample."""


@cache
def _texts() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files(__package__).joinpath("families.json").read_text(encoding="utf-8"))
    return found
