"""Moved KV of the prompt cache: which runs are found, by brute force, and what is held of them. (Blocks, eviction and
exact KV: tests/fusion/test_blocks.py.)

KV of a token is its id, its position and the number of its prompt.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cacheclip_rag.runtime.base import KVMatch, KVPart, KVSource
from cacheclip_rag.runtime.kv_blocks import LEAST_PAST, LEAST_RUN
from cacheclip_rag.runtime.prompt_cache import Approximate, PromptCache
from tests.conftest import examples

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
    with cache.match(ids, "any method", moves=range(10**6)) as match:
        state, end = Kept([-1] * len(ids)), 0
        match.write_to(state)
        for run in match.runs:
            assert run.start >= end and run.stop > run.start
            end = run.stop
            kv = state.kv[run.start : run.stop]
            assert [token for token, _, _ in kv] == [*ids[run.start : run.stop]]
            assert [position for _, position, _ in kv] == [*range(run.source_start, run.source_start + len(kv))]
            if run.source == KVSource.MOVED:
                assert len(kv) >= LEAST_RUN and (run.past is None or run.past.min() >= LEAST_PAST)
        return sum(run.stop - run.start for run in match.runs)


class TestRuns:
    @pytest.mark.parametrize("shift", [1, 7, 16, 33])
    def test_behind_an_insertion(self, shift: int) -> None:
        """All but the end, whose block is not whole."""
        old = tokens(800, 1)
        new = [*old[:500], *tokens(shift, 2), *old[500:]]
        cache = holding(old)
        with cache.match(new, "any method", moves=range(10**6)) as match:
            assert match.num_tokens == 496 and moved(match) == [(500 + shift, 800 + shift, 500)]
        check(cache, new)

    def test_behind_a_deletion_and_a_replacement(self) -> None:
        old = tokens(800, 1)
        new = [*old[:400], *old[440:600], *tokens(20, 3), *old[620:]]
        with holding(old).match(new, "any method", moves=range(10**6)) as match:
            assert moved(match) == [(400, 560, 440), (580, 760, 620)]

    def test_of_several_prompts_the_longest(self) -> None:
        first, second = tokens(500, 1), tokens(300, 2)
        cache = holding([*tokens(32, 9), *first[:200]], [*tokens(48, 7), *first[:400]], [*first, *second])
        with cache.match([*tokens(10, 5), *first[:416]], "any method", moves=range(10**6)) as match:
            assert moved(match)[-1][1] == 426
        new = [*tokens(10, 5), *first[:400], *tokens(9, 4), *second]
        with cache.match(new, "any method", moves=range(10**6)) as match:
            assert [stop for _, stop, _ in moved(match)] == [410, len(new)]
        assert check(cache, new) >= 500

    def test_in_what_was_computed_before_the_first_token_that_is_asked_for(self) -> None:
        old = tokens(200, 1)
        new = [*tokens(5, 2), *old]
        with holding(old).match(new, "any method", moves=range(120, 10**6)) as match:
            assert [start for start, _, _ in moved(match)] == [120]

    def test_in_many_prompts_of_one_text(self) -> None:
        """Boilerplate has as many sources as there are prompts; only some are looked at."""
        text = tokens(96, 1)
        cache = holding(*([*tokens(2, seed), *text] for seed in range(100, 140)))
        assert check(cache, [*tokens(3, 3), *text]) >= 64

    def test_a_token_that_is_repeated_is_known_in_few_places(self) -> None:
        """Each place of thousands would be looked for when one is evicted."""
        old = [5] * 3000
        cache = holding(old)
        assert max(map(len, cache._places.by_hash.values())) <= 8
        assert check(cache, [6, *old]) >= LEAST_RUN

    def test_a_shared_beginning_notes_nothing_of_what_follows_it(self) -> None:
        head, new = tokens(160, 1), [*tokens(160, 1), *tokens(9, 3), *tokens(400, 2)]
        cache = holding(*([*head, *tokens(100, seed)] for seed in range(100, 160)), [*head, *tokens(400, 2)])
        (block,) = (block for block in cache._root.walk(np.array(head), None, BLOCK) if block.stop == len(head))
        assert len(block.hashes) <= BLOCK
        with cache.match(new, "any method", moves=range(10**6)) as match:
            assert [start for start, _, _ in moved(match)] == [169], "conversations beside it are not its past"

    @examples(150)
    @given(seed=st.integers(0, 10**6), cuts=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 90)), max_size=6))
    def test_pieces_in_any_order(self, seed: int, cuts: list[tuple[int, int]]) -> None:
        old, other = tokens(320, seed), [number % 3 for number in tokens(320, seed + 1)]
        pieces = [(old if at % 2 else other)[at : at + count] for at, count in cuts]
        check(holding(old, other), [token for piece in pieces for token in piece])

    @pytest.mark.parametrize("length", [LEAST_RUN - 1, LEAST_RUN])
    def test_the_shortest(self, length: int) -> None:
        """Near its place behind a long beginning, so that nearly all of its past is left."""
        old = tokens(400, 1)
        cache = holding(old)
        for begin in range(256, 288):
            new = [*old[:256], *tokens(3, 4), *old[begin : begin + length], *tokens(9, 5)]
            with cache.match(new, "any method", moves=range(10**6)) as match:
                assert bool(moved(match)) is (length == LEAST_RUN)


class TestPast:
    @pytest.mark.parametrize("is_deletion", [True, False])
    def test_what_has_too_little_past_in_both_prompts_is_left_out(self, is_deletion: bool) -> None:
        """Until enough of what precedes a token in one prompt precedes it in the other: tokens of the run itself."""
        lost = 100
        new = [*tokens(9, 2), *tokens(800, 1)]
        old = [*tokens(lost + 9, 3), *new[9:]]
        if not is_deletion:
            old, new = new, old
        with holding(old).match(new, "any method", moves=range(10**6)) as match:
            ((start, _, source_start),) = moved(match)
        assert abs(source_start - start) == lost
        before = max(source_start, start)
        assert abs((before - lost - 9) / before - LEAST_PAST) < 0.05

    def test_what_is_far_before_a_token_does_not_count(self) -> None:
        """Behind a deletion of 3,000 tokens, few are computed; far behind an insertion, none."""
        old = tokens(9000, 1)
        with holding(old, max_bytes=10**5).match(old[3000:], "any method", moves=range(10**6)) as match:
            assert len(match.runs) == 1 and 500 < match.runs[0].start <= 1024
        with holding(old, max_bytes=10**5).match([7, *old], "any method", moves=range(3000, 10**6)) as match:
            assert [(run.start, run.past) for run in match.runs] == [(3000, None)]

    def test_passages_in_another_order_behind_a_long_head(self) -> None:
        """The head is not what they have read last."""
        head, parts = tokens(4000, 1), [tokens(400, seed) for seed in range(2, 10)]
        cache = holding([*head, *itertools.chain(*parts)], max_bytes=10**5)
        new = [*head, *itertools.chain(*parts[:3:-1], *parts[3::-1])]
        with cache.match(new, "any method", moves=range(10**6)) as match:
            assert match.num_exact == 4000 and sum(stop - start for start, stop, _ in moved(match)) < 800

    def test_share_that_is_left(self) -> None:
        old = tokens(400, 1)
        with holding(old).match([*old[:288], *old[320:]], "any method", moves=range(10**6)) as match:
            (run,) = (run for run in match.runs if run.source == KVSource.MOVED)
        assert run.past is not None and abs(run.past[0] - 288 / 320) < 0.05

    def test_what_was_moved_before_has_lost_some_of_it(self) -> None:
        """Ten turns, each with more before the text; the KV of each token is that of the prompt that computed it."""
        ids, prompts = tokens(700, 1), list[list[int]]()
        cache, method = PromptCache(10**6, block_tokens=BLOCK), "any method"
        numbers = set[int]()
        for turn in range(10):
            ids = [*tokens(30, 50 + turn), *ids]
            prompts.append(ids)
            state, past = Kept(ids, turn), np.ones(len(ids), np.float32)
            with cache.match(ids, method, moves=range(10**6)) as match:
                match.write_to(state)
                for run in match.runs:
                    past[run.start : run.stop] = 1 if run.past is None else run.past
            for now, (token, then, number) in enumerate(state.kv):
                read, still = {*prompts[number][:then]}, {*ids[:now]}
                share = len(read & still) / max(then, now, 1)
                assert ids[now] == token and (number == turn or share >= LEAST_PAST - 0.05), (turn, now)
                numbers.add(turn - number)
            cache.insert(ids, state, Approximate(method, np.zeros(len(ids), np.bool_), past, turn))
        assert max(numbers) > 2, "some of it was moved more than once"

    def test_of_equally_long_sources_the_latest(self) -> None:
        text = tokens(300, 1)
        cache = holding(*([*tokens(3, seed), *text] for seed in range(2, 6)))
        with cache.match([*tokens(5, 9), *text], "any method", moves=range(10**6)) as match:
            state = Kept([-1] * 305, -1)
            match.write_to(state)
        assert {number for _, _, number in state.kv} == {-1, 3}


class TestEnds:
    """Of a model that has more than KV, from which a prompt goes on at the ends of earlier ones alone."""

    class State(Kept):
        state_bytes = 100

        @property
        def ends_at(self) -> int:
            return len(self.kv)

    def test_the_longest_earlier_prompt_that_it_begins_with(self) -> None:
        generator, cache, asked = random.Random(3), PromptCache(10**6, block_tokens=4), list[list[int]]()
        for number in range(300):
            begin = generator.choice([[], *asked])[: generator.randrange(30)]
            ids = [*begin, *(generator.randrange(2) for _ in range(generator.randrange(1, 12)))]
            expected = max((len(each) for each in asked if ids[: len(each)] == each), default=0)
            assert cache.known(ids) <= expected
            with cache.match(ids) as match:
                if match.num_tokens < expected:  # it went, as three came after it
                    longer = [each for each in asked if len(each) > expected and each[:expected] == ids[:expected]]
                    assert len(longer) >= 3
                state = self.State([-1] * len(ids))
                match.write_to(state)
                assert [token for token, _, _ in state.kv[: match.num_tokens]] == ids[: match.num_tokens]
                cache.insert(ids, self.State(ids, number))
            if ids not in asked:
                asked.append(ids)
        cache.clear()
        assert cache.stats.bytes == 0

    def test_three_of_a_conversation_are_kept_and_count(self) -> None:
        ids, cache = tokens(200, 1), PromptCache(10**6, block_tokens=BLOCK)
        for stop in (20, 48, 70, 100, 200):
            assert cache.insert(ids[:stop], self.State(ids[:stop])) and not cache.insert(ids[:10], self.State(ids))
            assert cache.known(ids) == stop
        assert [cache.known(ids[:stop]) for stop in (199, 99, 69, 47)] == [100, 70, 0, 0]
        assert cache.stats.bytes == 192 + 8 + 4 + 6 + 3 * 100 and not cache.stats.continued_bytes


class TestLimits:
    def test_what_is_held_stays_and_what_is_evicted_is_not_found(self) -> None:
        old = tokens(160, 1)
        cache = holding(old, max_bytes=160)
        new = [*tokens(5, 2), *old]
        with cache.match(new, "any method", moves=range(10**6)) as match:
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
        assert seen[0] == 0 and check(cache, new) > max(seen)
