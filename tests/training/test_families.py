"""Synthetic questions: the evidence is where it is said to be, and test data share nothing with training data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from cacheclip_rag.lab.training.families import FAMILIES, Sample, Split, synthetic_samples

TEXTS: dict[str, Any] = json.loads(files("cacheclip_rag.lab.training").joinpath("families.json").read_text())
PER_FAMILY = 12


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    else:
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings(each)


def texts_of(sample: Sample, spans: Any) -> list[str]:
    return [sample.chunks[number][start:end] for number, start, end in spans]


@pytest.fixture(params=[(split, family) for split, families in FAMILIES.items() for family in families], ids=str)
def samples(request: pytest.FixtureRequest) -> list[Sample]:
    split, family = request.param
    order = list(FAMILIES[split])
    return synthetic_samples(split, PER_FAMILY * len(order))[order.index(family) :: len(order)]


class TestSamples:
    def test_evidence_is_whole_sentences_and_holds_the_answer(self, samples: list[Sample]) -> None:
        for sample in samples:
            evidence = texts_of(sample, sample.evidence)
            assert evidence and all(text[0].isupper() and text.endswith(".") for text in evidence)
            assert all(any(part in text for text in evidence) for part in sample.parts)
            assert ", ".join(sample.parts) == sample.answer
            if sample.family == "comparison":
                earlier = min(evidence, key=lambda text: re.search(r"\d{4}", text)[0])  # type: ignore[index]
                assert len(evidence) == 2 and sample.answer in earlier and sample.answer in sample.question

    def test_the_answer_is_nowhere_else(self, samples: list[Sample]) -> None:
        """But for prizes and professions, of which there are few, and names that others share a part of."""
        few = {word for split in TEXTS.values() for word in (*split["jobs"], *split["prizes"])}
        for sample in samples:
            for value in set(sample.parts) - few if sample.family != "comparison" else ():
                assert sum(chunk.count(value) for chunk in sample.chunks) == 1, value

    def test_evidence_is_in_several_chunks_where_it_takes_several(self, samples: list[Sample]) -> None:
        for sample in samples:
            several = sample.family not in ("needle", "keys", "biography")
            assert (len({number for number, _, _ in sample.evidence}) > 1) == several


class TestSplits:
    def test_no_family_is_in_both(self) -> None:
        assert not set(FAMILIES["train"]) & set(FAMILIES["test"])

    def test_no_template_word_or_name_is_in_both(self) -> None:
        train, test = (set(strings(TEXTS[split])) for split in ("train", "test"))
        assert not train & test

    def test_no_question_and_no_sentence_of_the_test_split_is_in_the_train_split(self) -> None:
        sentences: dict[Split, set[str]] = {"train": set(), "test": set()}
        for split, found in sentences.items():
            for sample in synthetic_samples(split, 60):
                text = " ".join([*sample.chunks, sample.question])
                found.update(re.split(r"(?<=[.?]) ", text))
        assert len(sentences["train"]) > 1000 and not sentences["train"] & sentences["test"]


class TestMaking:
    def test_a_sample_is_the_same_whatever_the_count(self) -> None:
        assert synthetic_samples("train", 20)[:9] == synthetic_samples("train", 9)

    def test_families_come_in_turn(self) -> None:
        families = list(FAMILIES["train"])
        assert [sample.family for sample in synthetic_samples("train", 8)] == [*families, *families[:2]]
