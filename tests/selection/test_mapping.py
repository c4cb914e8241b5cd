"""Mapping of scores between tokenizers by character offsets."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from cacheclip_rag.models.load import load_model
from cacheclip_rag.selection.auxiliary_pass import map_scores
from tests.conftest import CHUNKS, examples

TEXTS = [
    "The magic number is 7316042.",
    "Grüße aus Köln, 東京 und 🗼🇫🇷!",
    " leading and trailing  ",
    "e\u0301\u0302 combining",
    "x",
]


def mapped(scores: list[float], source: list[tuple[int, int]], target: list[tuple[int, int]]) -> list[float]:
    at = [np.array(offsets, np.int64).reshape(-1, 2) for offsets in (source, target)]
    return map_scores(np.array(scores), *at).tolist()


class TestExamples:
    def test_number_split_in_pieces_loses_none(self) -> None:
        """Seven digits: one token there, pieces here, and the other way round."""
        pieces, whole = [(0, 1), (1, 4), (4, 7)], [(0, 7)]
        assert mapped([0.1, 0.9, 0.2], pieces, whole) == [0.9]
        assert mapped([0.7], whole, pieces) == [0.7, 0.7, 0.7]

    def test_several_byte_tokens_of_one_character(self) -> None:
        """A byte-level tokenizer gives every byte token of an emoji the whole character's span."""
        assert mapped([0.1, 0.2, 0.6, 0.3], [(0, 1)] * 4, [(0, 1), (1, 2)]) == [0.6, 0.0]
        assert mapped([0.5], [(0, 1)], [(0, 1)] * 4) == [0.5] * 4

    def test_dtype_is_kept(self) -> None:
        assert map_scores(np.array([0.5], np.float32), np.array([[0, 1]]), np.array([[0, 1]])).dtype == np.float32


def cuts(length: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Offsets that cut ``length`` characters into tokens, with tokens of no width and shared characters between."""

    def build(points: set[int], extras: list[int]) -> list[tuple[int, int]]:
        borders = sorted({0, length} | points)
        offsets = [(a, b) for a, b in pairwise(borders)]
        for extra in extras:
            offsets.insert(extra % (len(offsets) + 1), offsets[extra % len(offsets)])
        return sorted(offsets)

    return st.builds(build, st.sets(st.integers(0, length)), st.lists(st.integers(0, 99), max_size=3))


def brute(scores: list[float], source: list[tuple[int, int]], target: list[tuple[int, int]]) -> list[float]:
    return [
        max((s for s, (a, b) in zip(scores, source, strict=True) if set(range(a, b)) & set(range(c, d))), default=0.0)
        for c, d in target
    ]


class TestProperties:
    @examples(200)
    @given(data=st.data(), length=st.integers(1, 25))
    def test_equals_brute_force(self, data: st.DataObject, length: int) -> None:
        source, target = data.draw(cuts(length)), data.draw(cuts(length))
        scores = data.draw(st.lists(st.floats(0, 1), min_size=len(source), max_size=len(source)))
        assert mapped(scores, source, target) == brute(scores, source, target)

    @examples(100)
    @given(data=st.data(), points=st.sets(st.integers(0, 25)))
    def test_identity_for_the_same_offsets(self, data: st.DataObject, points: set[int]) -> None:
        offsets = list(pairwise(sorted({0, 25} | points)))
        scores = data.draw(st.lists(st.floats(0, 1), min_size=len(offsets), max_size=len(offsets)))
        assert mapped(scores, offsets, offsets) == scores


class TestRealTokenizers:
    @staticmethod
    def offsets(tiny_models: dict[str, str], text: str) -> tuple[Any, Any]:
        """Of the auxiliary's tokens, and of the primary's."""
        return load_model(tiny_models["auxiliary"]).tokenize(text), load_model(tiny_models["llama"]).tokenize(text)

    @pytest.mark.parametrize("text", TEXTS)
    def test_offsets_of_real_tokenizers_cover_the_text(self, tiny_models: dict[str, str], text: str) -> None:
        """No character that both tokenizers cover is lost on the way: all ones stay all ones."""
        source, target = self.offsets(tiny_models, text)
        assert {c for a, b in target.offsets for c in range(a, b)} == set(range(len(text)))
        ones = map_scores(np.ones(len(source)), source.columns[1], target.columns[1])
        assert ones.tolist() == [1.0] * len(target)

    @examples(50)
    @given(text=st.text(max_size=30) | st.sampled_from(CHUNKS))
    @example(CHUNKS[0])
    @example(CHUNKS[3])
    def test_any_text(self, tiny_models: dict[str, str], text: str) -> None:
        source, target = self.offsets(tiny_models, text)
        assert text not in CHUNKS or len(source) > len(target), "real texts are cut differently"
        scores, offsets = [(i % 7) / 7 for i in range(len(source))], (list(source.offsets), list(target.offsets))
        assert mapped(scores, *offsets) == brute(scores, *offsets)
