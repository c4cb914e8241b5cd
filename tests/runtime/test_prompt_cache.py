"""Moved KV of the prompt cache: which runs are found, by brute force, and what is held of them. (Blocks, eviction and
exact KV: tests/fusion/test_blocks.py.)

KV of a token is its id, its position and the number of its prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from cacheclip_rag.runtime.base import KVMatch, KVPart, KVSource
from cacheclip_rag.runtime.kv_blocks import LEAST_PAST, LEAST_RUN
from cacheclip_rag.runtime.prompt_cache import PromptCache

BLOCK = 16


class Kept:
    """The KV of a prompt, for as many bytes as tokens."""

    token_bytes = 1

    def __init__(self, ids: Sequence[int], number: int = 0) -> None:
        self.kv = [(token, position, number) for position, token in enumerate(ids)]

    def get_seq_length(self) -> int:
        return len(self.kv)

    def blocks(self, start: int, stop: int, size: int) -> Iterator[Any]:
        yield from (self.kv[at : min(at + size, stop)] for at in range(start, stop, size))

    def write_blocks(self, part: KVPart) -> None:
        run, kv = part.run, [each for block in part.blocks for each in block][part.skip :]
        self.kv[run.start : run.stop] = kv[: run.stop - run.start]


def tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(50_000) for _ in range(count)]


def moved(match: KVMatch) -> list[tuple[int, int, int]]:
    """Start, stop and earlier start of each moved run."""
    return [(run.start, run.stop, run.source_start) for run in match.runs if run.source == KVSource.MOVED]


def holding(*prompts: Sequence[int], max_bytes: int = 10**6) -> PromptCache:
    cache = PromptCache(max_bytes, block_tokens=BLOCK)
    for number, ids in enumerate(prompts):
        cache.insert(ids, Kept(ids, number))
    return cache


def check(cache: PromptCache, ids: Sequence[int]) -> int:
    """Runs are in order and apart, their KV is that of the same tokens where they stood, and enough of what preceded
    them there precedes them. Returns the number of tokens that are found."""
    with cache.match(ids, "any method", moves=True) as match:
        state, end = Kept([-1] * len(ids)), 0
        match.write_to(state)
        for run in match.runs:
            assert run.start >= end and run.stop > run.start
            end = run.stop
            kv = state.kv[run.start : run.stop]
            assert [token for token, _, _ in kv] == [*ids[run.start : run.stop]]
            assert [position for _, position, _ in kv] == [*range(run.source_start, run.source_start + len(kv))]
            if run.source == KVSource.MOVED:
                assert len(kv) >= LEAST_RUN and run.past >= LEAST_PAST - 1e-9
        return sum(run.stop - run.start for run in match.runs)


class TestRuns:
    @pytest.mark.parametrize("shift", [1, 7, 16, 33])
    def test_behind_an_insertion(self, shift: int) -> None:
        """All but the end, whose block is not whole."""
        old = tokens(400, 1)
        new = [*old[:100], *tokens(shift, 2), *old[100:]]
        cache = holding(old)
        with cache.match(new, "any method", moves=True) as match:
            assert match.num_tokens == 96
            assert moved(match) == [(100 + shift, 400 + shift, 100)]
        check(cache, new)

    def test_behind_a_deletion_and_a_replacement(self) -> None:
        old = tokens(400, 1)
        new = [*old[:100], *old[140:300], *tokens(20, 3), *old[320:]]
        with holding(old).match(new, "any method", moves=True) as match:
            assert moved(match) == [(100, 260, 140), (280, 360, 320)]

    def test_of_several_prompts_the_longest(self) -> None:
        first, second = tokens(200, 1), tokens(300, 2)
        cache = holding([*tokens(32, 9), *first[:80], *tokens(32, 8)], [*tokens(48, 7), *first[:160]], second)
        new = [*tokens(10, 5), *first, *second]
        with cache.match(new, "any method", moves=True) as match:
            assert match.runs and moved(match)[-1][1] == len(new) - len(second) % BLOCK
            assert any(stop - start > 80 for start, stop, _ in moved(match)[:1])
        assert check(cache, new) >= 400

    def test_in_what_was_computed_before_the_first_token_that_is_asked_for(self) -> None:
        old = tokens(200, 1)
        new = [*tokens(5, 2), *old]
        with holding(old).match(new, "any method", moves=True, first=120) as match:
            assert [start for start, _, _ in moved(match)] == [120]

    def test_in_many_prompts_of_one_text(self) -> None:
        """Boilerplate has as many sources as there are prompts; only some are looked at."""
        text = tokens(96, 1)
        cache = holding(*([*tokens(20, seed), *text] for seed in range(100, 140)))
        assert check(cache, [*tokens(30, 3), *text]) >= 64

    @settings(max_examples=150, deadline=None)
    @given(seed=st.integers(0, 10**6), cuts=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 90)), max_size=6))
    def test_pieces_in_any_order(self, seed: int, cuts: list[tuple[int, int]]) -> None:
        old, other = tokens(320, seed), [number % 3 for number in tokens(320, seed + 1)]
        pieces = [(old if at % 2 else other)[at : at + count] for at, count in cuts]
        check(holding(old, other), [token for piece in pieces for token in piece])

    @pytest.mark.parametrize("length", [LEAST_RUN - 1, LEAST_RUN])
    def test_the_shortest(self, length: int) -> None:
        """Right behind the beginning, so that all of its past is left."""
        old = tokens(200, 1)
        cache = holding(old)
        for begin in range(64, 96):
            new = [*old[:64], *tokens(3, 4), *old[begin : begin + length], *tokens(9, 5)]
            with cache.match(new, "any method", moves=True) as match:
                assert bool(moved(match)) is (length == LEAST_RUN)


class TestPast:
    def test_what_has_lost_its_past_is_left_out(self) -> None:
        """Until half of what precedes a token there precedes it here: itself."""
        old = tokens(400, 1)
        with holding(old).match([*tokens(9, 2), *old[100:]], "any method", moves=True) as match:
            ((start, _, source_start),) = moved(match)
        assert abs(source_start - 200) <= 16 and source_start - start == 100 - 9

    def test_share_that_is_left(self) -> None:
        old = tokens(400, 1)
        with holding(old).match([*old[:96], *old[144:]], "any method", moves=True) as match:
            (run,) = (run for run in match.runs if run.source == KVSource.MOVED)
        assert abs(run.past - 96 / 144) < 0.1


class TestLimits:
    def test_what_is_held_stays_and_what_is_evicted_is_not_found(self) -> None:
        old = tokens(160, 1)
        cache = holding(old, max_bytes=160)
        new = [*tokens(5, 2), *old]
        with cache.match(new, "any method", moves=True) as match:
            assert moved(match)
            other = tokens(160, 3)
            assert cache.insert(other, Kept(other)) == 0, "all blocks are held"
        assert cache.insert(other, Kept(other)) == 10
        assert check(cache, new) == 0
        cache.clear()
        assert not cache._places.by_hash and cache.stats.bytes == 0

    def test_nothing_is_found_while_it_is_copied(self) -> None:
        class Slow(Kept):
            def blocks(self, start: int, stop: int, size: int) -> Iterator[Any]:
                for block in super().blocks(start, stop, size):
                    seen.append(check(cache, new))
                    yield block

        old, seen = tokens(64, 1), list[int]()
        new, cache = [*tokens(3, 2), *old], PromptCache(10**6)
        cache.insert(old, Slow(old))
        assert seen[0] == 0 and check(cache, new) == 64 and max(seen) <= 48
