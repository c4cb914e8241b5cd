"""Synthetic questions: the evidence is where it is said to be, and a sample is the same whatever else is made."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest
from cacheclip_lab.training.families import FAMILIES, Sample, synthetic_samples

TEXTS: dict[str, Any] = json.loads(files("cacheclip_lab.training").joinpath("families.json").read_text())
PER_FAMILY = 12


def texts_of(sample: Sample, spans: Any) -> list[str]:
    return [sample.chunks[number][start:end] for number, start, end in spans]


@pytest.fixture(params=FAMILIES)
def samples(request: pytest.FixtureRequest) -> list[Sample]:
    order = list(FAMILIES)
    return synthetic_samples(PER_FAMILY * len(order))[order.index(request.param) :: len(order)]


class TestSamples:
    def test_evidence_is_whole_sentences_and_holds_the_answer(self, samples: list[Sample]) -> None:
        for sample in samples:
            evidence = texts_of(sample, sample.evidence)
            assert evidence and all(text[0].isupper() and text.endswith(".") for text in evidence)
            assert all(any(part in text for text in evidence) for part in sample.answer.split(", "))
            if sample.family == "comparison":
                earlier = min(evidence, key=lambda text: re.search(r"\d{4}", text)[0])  # type: ignore[index]
                assert len(evidence) == 2 and sample.answer in earlier and sample.answer in sample.question

    def test_the_answer_is_nowhere_else(self, samples: list[Sample]) -> None:
        """But for prizes and professions, of which there are few, and names that others share a part of."""
        few = {*TEXTS["jobs"], *TEXTS["prizes"]}
        for sample in samples:
            for value in set(sample.answer.split(", ")) - few if sample.family != "comparison" else ():
                assert sum(chunk.count(value) for chunk in sample.chunks) == 1, value

    @pytest.mark.some(3)
    def test_evidence_is_in_several_chunks_where_it_takes_several(self, samples: list[Sample]) -> None:
        for sample in samples:
            several = sample.family not in ("needle", "keys", "biography")
            assert (len({number for number, _, _ in sample.evidence}) > 1) == several


class TestMaking:
    def test_a_sample_is_the_same_whatever_the_count(self) -> None:
        assert synthetic_samples(20)[:9] == synthetic_samples(9)

    def test_families_come_in_turn(self) -> None:
        families = list(FAMILIES)
        assert [sample.family for sample in synthetic_samples(8)] == [*families, *families[:2]]
