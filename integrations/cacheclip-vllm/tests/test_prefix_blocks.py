"""What is known of vLLM's prefix cache, without vLLM: a cache and requests with hashes as vLLM makes them."""

from __future__ import annotations

import hashlib
import random

import pytest
from cacheclip_vllm.passes import computed_rows
from cacheclip_vllm.prefix_blocks import Continued, PrefixBlocks

from cacheclip_rag.fusion.wire import StoredPiece
from cacheclip_rag.plan.plan import ROWS_FOR_EXACT_KV
from cacheclip_rag.planning import FusionPlan

BLOCK = 16
ROOM = {"max_runs": 100, "max_rows": 10_000}
PREFIX, CHUNK = 32, 160
"""Tokens before the chunks, and of each of two chunks."""


class Request:
    """In place of vLLM's: the hash of a block is that of all tokens up to its end."""

    def __init__(self, tokens: list[int], name: str = "a", salt: str | None = None) -> None:
        self.tokens, self.request_id, self.cache_salt = tokens, name, salt
        self.block_hashes: list[bytes] = []
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        while (len(self.block_hashes) + 1) * BLOCK <= len(self.tokens):
            before = self.block_hashes[-1] if self.block_hashes else (self.cache_salt or "").encode()
            start = len(self.block_hashes) * BLOCK
            block = repr(self.tokens[start : start + BLOCK]).encode()
            self.block_hashes.append(hashlib.sha256(before + block).digest())


class Cache:
    """In place of vLLM's manager of blocks."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()

    def get_computed_blocks(self, request: Request) -> tuple[None, int]:
        count = 0
        for each in request.block_hashes[: (len(request.tokens) - 1) // BLOCK]:
            if each not in self.held:
                break
            count += 1
        return None, count * BLOCK

    def has(self, request: Request) -> int:
        return self.get_computed_blocks(request)[1]


def prompt(question: int, tokens: int = 40, chunks: int = 0) -> list[int]:
    """Two chunks behind a prefix, and a question."""
    texts = range(50_000 * chunks + PREFIX, 50_000 * chunks + PREFIX + 2 * CHUNK)
    asked = range(10_000 + 100 * question, 10_000 + 100 * question + tokens)
    return [*range(PREFIX), *texts, *asked]


def plan_of(tokens: list[int], every: int = 4) -> FusionPlan:
    """Computes the prefix and every fourth token of the chunks, or none of them."""
    runs = [(0, PREFIX), *((at, at + 1) for at in range(PREFIX, PREFIX + 2 * CHUNK, every) if every > 0)]
    pieces = [StoredPiece(PREFIX + n * CHUNK, "ab"[n] * 64, 0, CHUNK) for n in range(2)]
    return FusionPlan(tuple(tokens), tuple(pieces), tuple(joined(runs)))


def joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


class Engine:
    """What vLLM's scheduler does with requests, as far as hashes go."""

    def __init__(self, num_blocks: int = 1000) -> None:
        self.cache = Cache()
        self.blocks = PrefixBlocks(BLOCK, num_blocks, lambda: self.cache)

    def plain(self, tokens: list[int]) -> None:
        self.cache.held.update(Request(tokens).block_hashes)

    def fused(self, tokens: list[int], answer: int = 0, every: int = 4) -> Continued | None:
        """Answer a question; None if plain prefill computes less."""
        request = Request([*tokens])
        if not self.blocks.choose(request, plan_of(tokens, every), **ROOM):
            return None
        self.begin(request)
        request.tokens += [20_000 + n for n in range(answer)]
        request.update_block_hashes()
        self.cache.held.update(request.block_hashes)
        return self.blocks.finish(request)

    def begin(self, request: Request) -> None:
        self.blocks.see(request, self.cache.has(request))
        self.blocks.place(request)
        self.cache.held.update(request.block_hashes)


@pytest.mark.parametrize("held", range(0, PREFIX + 2 * CHUNK + 40, BLOCK))
def test_the_fewest_rows(held: int) -> None:
    """By brute force, over exact KV of every length."""
    engine, tokens = Engine(), prompt(1)
    engine.cache.held.update(Request(tokens).block_hashes[: held // BLOCK])
    request, plan = Request(tokens), plan_of(tokens)
    own = [*request.block_hashes]
    plain = len(tokens) - held
    starts = {PREFIX, max(PREFIX, held)}
    rows = min(computed_rows(plan, min(held, start), **ROOM) for start in starts)
    least = rows + ROWS_FOR_EXACT_KV if plain < computed_rows(plan, min(held, PREFIX), **ROOM) else 0
    wanted = rows <= plain and plain > least
    assert engine.blocks.choose(request, plan, **ROOM) is wanted
    if not wanted:
        assert request.block_hashes == own and request.cache_salt is None
    else:
        assert engine.blocks.known(request) in {min(held, PREFIX), held}


class TestContinued:
    def test_the_next_questions(self) -> None:
        engine = Engine()
        assert engine.fused(prompt(1), 20) == Continued(0, 0, PREFIX + 1)
        chunks = (PREFIX + 2 * CHUNK) // BLOCK * BLOCK
        for question in (2, 3):
            request = Request(prompt(question))
            assert engine.blocks.is_exact(request), "by its own hashes"
            assert engine.blocks.choose(request, plan_of(prompt(question)), **ROOM)
            assert not engine.blocks.is_exact(request)
            engine.cache.held.difference_update(gone := request.block_hashes[PREFIX // BLOCK :])
            assert engine.blocks.is_exact(request), "the approximate KV is gone"
            engine.cache.held.update(gone[: chunks // BLOCK - PREFIX // BLOCK])
            engine.blocks.finish(request)
            assert engine.fused(prompt(question), 20) == Continued(chunks, 1, PREFIX + 1), "the first one's KV"

    def test_a_conversation(self) -> None:
        engine, tokens, before = Engine(), prompt(1), 0
        for turn in range(5):
            found = engine.fused(tokens, 20)
            assert found is not None and found.turns == turn
            assert found.num_tokens == (before // BLOCK * BLOCK if turn else 0)
            tokens = [*tokens, *(20_000 + n for n in range(20))]
            before = len(tokens)
            tokens += [30_000 + 100 * turn + n for n in range(30)]

    def test_stale_tokens_are_those_that_are_left(self) -> None:
        """Where all tokens of the chunks are computed, none is."""
        engine = Engine()
        assert engine.fused(prompt(1), every=1) == Continued(0, 0, None)
        again = engine.fused(prompt(2), every=1)
        assert again is None or again.stale_from is None

    def test_the_oldest_are_forgotten(self) -> None:
        engine = Engine(num_blocks=30)
        for question in range(9):
            engine.fused([*(n + 1000 * question for n in prompt(question))])
        assert len(engine.blocks._made) == 30 and not engine.blocks._salted

    @pytest.mark.parametrize("found", [0, PREFIX, PREFIX + 2 * BLOCK])
    def test_a_failed_load(self, found: int) -> None:
        """What vLLM computes then is everybody's, unless approximate KV comes before it."""
        engine = Engine()
        engine.fused(prompt(1))
        request = Request(prompt(2), "b")
        own, is_exact = [*request.block_hashes], found <= PREFIX
        assert engine.blocks.choose(request, plan_of(prompt(2)), **ROOM)
        engine.blocks.see(request, found)
        engine.blocks.fail(request, found)
        assert (request.block_hashes == own) is is_exact
        told = engine.blocks.finish(request)
        assert (told.num_tokens, told.turns) == ((0, 0) if is_exact else (found, 1))

    def test_what_is_told(self) -> None:
        assert Continued().to_dict() == {}
        told = {"continued_tokens": 48, "continued_turns": 2, "stale_from": None}
        assert Continued(48, 2).to_dict() == told


class TestWaiting:
    def test_exact_kv_that_comes_meanwhile(self) -> None:
        engine, request = Engine(), Request(prompt(1))
        own = [*request.block_hashes]
        assert engine.blocks.choose(request, plan_of(prompt(1)), **ROOM)
        assert not engine.blocks.is_better_plain(request, 0, **ROOM)
        assert request.block_hashes != own
        engine.plain(prompt(1))
        assert engine.blocks.is_better_plain(request, PREFIX, **ROOM)
        assert request.block_hashes == own and engine.blocks.finish(request) == Continued()

    def test_exact_kv_that_is_gone(self) -> None:
        """Blocks whose KV the plan makes get hashes of the request's own."""
        engine, request = Engine(), Request(prompt(1))
        exact = PREFIX + CHUNK
        engine.cache.held.update(request.block_hashes[: exact // BLOCK])
        own = [*request.block_hashes]
        assert engine.blocks.choose(request, plan_of(prompt(1)), **ROOM)
        assert request.block_hashes[: exact // BLOCK] == own[: exact // BLOCK]
        engine.cache.held.clear()
        engine.blocks.see(request, 0)
        assert request.block_hashes[: PREFIX // BLOCK] == own[: PREFIX // BLOCK]
        assert not set(request.block_hashes[PREFIX // BLOCK :]) & set(own)

    def test_requests_that_are_not_planned(self) -> None:
        engine, request = Engine(), Request(prompt(1))
        own = [*request.block_hashes]
        engine.begin(request)
        engine.blocks.fail(request, 0)
        assert not engine.blocks.is_better_plain(request, 0, **ROOM)
        assert engine.blocks.finish(request) == Continued() and request.block_hashes == own


@pytest.mark.parametrize("planted", [False, True])
def test_approximate_kv_is_never_found_as_exact(monkeypatch: pytest.MonkeyPatch, planted: bool) -> None:
    """Random histories. Planted: hashes are a request's own from one block too late."""
    if planted:
        monkeypatch.setattr("cacheclip_rag.fusion.wire.FusionPlan.num_exact", property(lambda plan: PREFIX + BLOCK))
    generator, engine, exact, wrong = random.Random(3), Engine(), set[bytes](), 0
    asked = [(question, chunks) for question in range(4) for chunks in range(6)]
    everybodys = {each for question, chunks in asked for each in Request(prompt(question, 80, chunks)).block_hashes}
    for _ in range(40):
        tokens = prompt(generator.randint(0, 3), generator.randint(10, 80), generator.randint(0, 5))
        if generator.random() < 0.3:
            exact.update(Request(tokens).block_hashes)
            engine.plain(tokens)
        else:
            exact.update(Request(tokens).block_hashes[: PREFIX // BLOCK])
            engine.fused(tokens, generator.randint(0, 40), generator.choice([2, 4, 5]))
        wrong += len(everybodys & engine.cache.held - exact)
    assert (wrong > 0) is planted
