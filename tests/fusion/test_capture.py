"""Captured chunks: the statistics by hand, the registry by its rules."""

from __future__ import annotations

import math

import pytest
import torch

from cacheclip_rag.chunks.captured import CapturedChunks, Variant, capture, context_overlap, order_distance
from cacheclip_rag.errors import ConfigurationError
from tests.fusion.cases import EXACT, Case, gap, reference_logits, reference_model


def variant(*before: str, size: int = 4, impact: float = 0.8, start: bytes | None = None) -> Variant:
    """Captured behind the chunks ``before``; behind the same tokens as others of the same ``start``."""
    owed = {text: 1.0 + n for n, text in enumerate(before)}
    digest = start if start is not None else repr(before).encode()
    return Variant(torch.zeros(1, 2, 1, size, 2), before, digest, owed, torch.zeros(size), impact)


def find(chunks: CapturedChunks, text: str, *before: str) -> Variant | None:
    return chunks.find(text, before, repr(before).encode())


class TestStatistics:
    def test_order_distance(self) -> None:
        assert order_distance("abc", "abc") == 0.0 and order_distance("abc", "cba") == 1.0
        assert order_distance("abc", "bac") == pytest.approx(1 / 3)
        assert order_distance("ab", "xy") == 0.0 and order_distance("ab", "bxa") == 1.0

    def test_overlap(self) -> None:
        owed = {"a": 1.0, "b": 3.0}
        assert context_overlap(owed, "ab", "ab") == 1.0
        assert context_overlap(owed, "ab", "ba") == 0.0
        assert context_overlap(owed, "ab", "bx") == 0.75
        assert context_overlap(owed, "ab", "xy") == 0.0
        assert context_overlap({}, "", "") == 1.0 and context_overlap({}, "", "a") == 0.0

    def test_overhead(self) -> None:
        one = variant("a", "b")
        assert one.overhead("ab", b"", 1.0) == 0.0
        assert (
            one.overhead("xy", b"", 1.0) == 0.8
            and one.overhead("xy", b"", 0.5) == 0.4
            and one.overhead("xy", b"", 9.0) == 1.0
        )
        assert one.overhead("b", b"", 1.0) == pytest.approx(0.8 * (1 - 2 / 3))
        assert variant("a", start=b"s").overhead("xy", b"s", 1.0) == 0.0, "behind the very same tokens"

    @pytest.mark.parametrize("primary", ["llama", "gemma3", "qwen3"], indirect=True)
    def test_captured_from_the_attention_of_a_plain_prefill(self, case: Case) -> None:
        cache, logits, found = capture(case.runtime, case.layout, case.layout.num_tokens)
        assert gap(logits, reference_logits(case.folder, case.layout.ids)) < EXACT
        with torch.inference_mode():
            weights = reference_model(case.folder)(input_ids=case.layout.ids[None], output_attentions=True).attentions
        mean = torch.stack([layer[0].mean(0) for layer in weights]).mean(0)
        first, second, third = case.layout.chunks

        def mass(rows: object, keys: object) -> float:
            return float(mean[rows.start : rows.stop, keys.start : keys.stop].sum())  # type: ignore[attr-defined]

        of_chunk = dict(found)
        last = of_chunk[third.segment.text]
        assert last.before == (first.segment.text, second.segment.text)
        assert last.attention_by_text[first.segment.text] == pytest.approx(mass(third, first), rel=1e-3)
        expected = mean[third.start : third.stop, first.start : first.stop].sum(1)
        expected = expected + mean[third.start : third.stop, second.start : second.stop].sum(1)
        assert gap(last.token_attention, expected) < 1e-4
        size = len(third.tokens)
        inter = sum(mass(third, other) / (size * len(other.tokens)) for other in (first, second))
        assert last.impact == pytest.approx(1 / (1 + math.exp(-inter / (mass(third, third) / size**2))), rel=1e-3)
        assert of_chunk[first.segment.text].impact == 0.5 and of_chunk[first.segment.text].before == ()
        again = case.runtime.new_cache(case.layout.num_tokens)
        case.runtime.fill(again, last.kv, slot=third.start, position=third.start)
        for layer, other in zip(again.layers, cache.layers, strict=True):
            assert gap(layer.keys[:, :, third.start : third.stop], other.keys[:, :, third.start : third.stop]) < EXACT


class TestRegistry:
    def test_the_nearest_variant(self) -> None:
        chunks = CapturedChunks()
        behind_a, behind_b = variant("a"), variant("b")
        chunks.add([("t", behind_a)])
        chunks.add([("t", behind_b)])
        assert find(chunks, "t", "b") is behind_b and find(chunks, "t", "a") is behind_a
        assert find(chunks, "unknown") is None
        assert chunks.remove("t") and not chunks.remove("t") and find(chunks, "t") is None

    def test_the_same_surroundings_replace(self) -> None:
        chunks = CapturedChunks()
        chunks.add([("t", variant("a"))])
        newer = variant("a")
        chunks.add([("t", newer)])
        assert find(chunks, "t", "a") is newer and chunks.num_bytes == newer.num_bytes

    def test_other_text_before_the_same_chunks_is_another_variant(self) -> None:
        chunks = CapturedChunks()
        one, other = variant("a", start=b"1"), variant("a", start=b"2")
        chunks.add([("t", one), ("t", other)])
        assert chunks.find("t", ["a"], b"1") is one and chunks.find("t", ["a"], b"2") is other

    def test_a_forgotten_chunk_is_forgotten_by_those_behind_it(self) -> None:
        chunks = CapturedChunks()
        chunks.add([("t", variant("a")), ("t", variant("b")), ("u", variant("a", "b"))])
        assert chunks.remove("a") and not chunks.remove("a")
        assert find(chunks, "t", "a") is find(chunks, "t", "b") and find(chunks, "u") is None

    def test_the_least_used_goes(self) -> None:
        chunks = CapturedChunks(max_variants=2)
        kept = variant("a")
        chunks.add([("t", kept)])
        for _ in range(3):
            find(chunks, "t", "a")
        chunks.add([("t", variant("b"))])
        chunks.add([("t", variant("c"))])
        assert find(chunks, "t", "a") is kept
        best = find(chunks, "t", "b")
        assert best is not None and best.before != ("b",)

    def test_never_above_its_bytes(self) -> None:
        size = variant("a").num_bytes
        chunks = CapturedChunks(max_bytes=3 * size)
        for n in range(10):
            chunks.add([(str(n), variant("a"))])
            assert chunks.num_bytes <= 3 * size
        assert find(chunks, "9") is not None and find(chunks, "0") is None

    def test_senseless_limits(self) -> None:
        with pytest.raises(ConfigurationError, match="max_variants >= 1"):
            CapturedChunks(max_variants=0)
