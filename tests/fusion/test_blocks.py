"""Prefix blocks: what is found, what is evicted and when, and that what is found is what a plain prefill computes.

KV in the bookkeeping tests is a function of all tokens up to its slot, so that any wrong block shows in its numbers.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st

from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.base import KVMatch
from cacheclip_rag.runtime.prompt_cache import PromptCache
from cacheclip_rag.runtime.transformers.cache import FusedCache, FusedLayer
from tests.conftest import CHUNKS, QUESTION, examples
from tests.fusion.cases import BROKEN, EXACT, gap, reference_logits

SIZE = 2
"""Tokens of a block."""
SHAPES = ((2, 4, torch.float32), (1, 8, torch.float32), (2, 4, torch.float32), (2, 4, torch.bfloat16))
"""Heads, head_dim and dtype of each layer; layers 0 and 2 are alike."""
BLOCK_BYTES = SIZE * 2 * (2 * 4 * 4 + 1 * 8 * 4 + 2 * 4 * 4 + 2 * 4 * 2)


def empty(capacity: int) -> FusedCache:
    cache = FusedCache(layers=[FusedLayer((h, d, d), capacity, dtype, torch.device("cpu")) for h, d, dtype in SHAPES])
    cache.token_bytes = sum(2 * h * d * dtype.itemsize for h, d, dtype in SHAPES)
    return cache


def filled(ids: Sequence[int]) -> FusedCache:
    """The cache of a prompt: the numbers of a slot depend on its layer and on all tokens up to it."""
    cache = empty(len(ids) + 3)
    for index, (layer, (heads, head_dim, dtype)) in enumerate(zip(cache.layers, SHAPES, strict=True)):
        for slot in range(len(ids)):
            generator = torch.Generator().manual_seed(hash((index, *ids[: slot + 1])) % 2**40)
            keys, values = torch.randn(2, heads, 1, head_dim, generator=generator).to(dtype)
            layer.write(slot, keys, values)
    return cache


def assert_right(hit: KVMatch, ids: Sequence[int]) -> None:
    """What a match writes is what the prompt's own cache holds."""
    cache, expected = empty(max(hit.num_tokens, 1)), filled(ids[: hit.num_tokens])
    hit.write_to(cache)
    assert cache.get_seq_length() == hit.num_tokens
    for got, right in zip(cache.layers, expected.layers, strict=True):
        assert torch.equal(got.keys, right.keys) and torch.equal(got.values, right.values)


def found(cache: PromptCache, ids: Sequence[int]) -> int:
    """Tokens that a match finds, after a look at their KV."""
    with cache.match(ids) as hit:
        assert_right(hit, ids)
        return hit.num_tokens


def put(cache: PromptCache, ids: Sequence[int]) -> int:
    return cache.insert(ids, filled(ids))


def room(num_blocks: int, **options: Any) -> PromptCache:
    return PromptCache(num_blocks * BLOCK_BYTES, block_tokens=SIZE, **options)


def blocks_of(cache: PromptCache) -> dict[tuple[int, ...], Any]:
    """The stored blocks, by all tokens up to their ends."""
    kept, ahead = dict[tuple[int, ...], Any](), [((), cache._root)]
    while ahead:
        before, block = ahead.pop()
        for child in block.children.values():
            kept[*before, *child.ids.tolist()] = child
            ahead.append(((*before, *child.ids.tolist()), child))
    return kept


def refs(cache: PromptCache) -> list[int]:
    return [block.refs for block in blocks_of(cache).values()]


class TestMatch:
    def test_stored_kv_is_a_copy(self) -> None:
        cache, source = room(99), filled([1, 2, 3, 4])
        cache.insert([1, 2, 3, 4], source)
        for layer in source.layers:
            layer.keys.zero_()
            layer.values.zero_()
        assert found(cache, [1, 2, 3, 4]) == 4

    def test_written_behind_a_longer_cache(self) -> None:
        """Slots after the match stay as they are."""
        cache, target = room(99), filled([7, 7, 7])
        put(cache, [1, 2])
        with cache.match([1, 2]) as hit:
            hit.write_to(target)
        assert target.get_seq_length() == 3
        for got, last, first in zip(target.layers, filled([7, 7, 7]).layers, filled([1, 2]).layers, strict=True):
            assert torch.equal(got.keys, torch.cat((first.keys, last.keys[:, :, 2:]), dim=2))

    def test_more_ids_than_the_cache_holds(self) -> None:
        with pytest.raises(AssertionError, match="all 4 tokens, it holds 2"):
            room(99).insert([1, 2, 3, 4], filled([1, 2]))

    @pytest.mark.parametrize(("max_bytes", "block_tokens"), [(-1, 16), (0, 0), (0, -3)])
    def test_settings_out_of_range(self, max_bytes: int, block_tokens: int) -> None:
        with pytest.raises(ConfigurationError, match="must be"):
            PromptCache(max_bytes, block_tokens=block_tokens)


class TestOneLimit:
    def test_one_limit_of_several_tenants(self) -> None:
        """The largest gives way, its oldest prompt first; none finds a block of another."""
        first, second, third = (room(6) for _ in range(3))
        second.share_limit(first)
        third.share_limit(second)
        put(first, [1, 2])
        put(first, [3, 4, 5, 6, 7, 8])
        put(second, [1, 2, 3, 4])
        assert put(third, [9, 9, 8, 8]) == 2
        assert [each.stats.blocks for each in (first, second, third)] == [2, 2, 2]
        assert found(first, [1, 2]) == 0 and found(first, [3, 4, 5, 6, 7, 8]) == 4
        assert found(second, [1, 2, 3, 4]) == found(third, [9, 9, 8, 8]) == 4
        with second.match([1, 2, 3, 4]), first.match([3, 4, 5, 6]):
            assert put(third, [7, 7]) == 1, "those in use stay: it is its own"
            assert [each.stats.blocks for each in (first, second, third)] == [2, 2, 2]
        assert sum(each.stats.bytes for each in (first, second, third)) == 6 * BLOCK_BYTES
        second.clear()
        assert put(first, [5, 5, 6, 6]) == 2 and third.stats.blocks == 2


class TestFailures:
    def test_released_match_writes_nothing(self) -> None:
        cache = room(99)
        put(cache, [1, 2])
        with cache.match([1, 2]) as hit:
            pass
        with pytest.raises(AssertionError, match="released"):
            hit.write_to(empty(2))

    def test_copy_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Blocks copied before stay, the others leave no trace."""
        cut = FusedCache.blocks

        def fails(*arguments: Any) -> Iterator[Any]:
            yield next(cut(*arguments))
            raise MemoryError

        cache = room(99)
        put(cache, [1, 2])
        monkeypatch.setattr(FusedCache, "blocks", fails)
        with pytest.raises(MemoryError):
            put(cache, [1, 2, 3, 4, 5, 6, 7, 8])
        assert {*blocks_of(cache)} == {(1, 2), (1, 2, 3, 4)} and refs(cache) == [0, 0]
        assert cache.stats.bytes == 2 * BLOCK_BYTES
        monkeypatch.undo()
        assert put(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == 2
        assert found(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == 8

    @pytest.mark.parametrize("cleared", [False, True])
    def test_others_while_a_chain_is_copied(self, monkeypatch: pytest.MonkeyPatch, cleared: bool) -> None:
        """Copying goes on outside the lock: unfinished blocks are not found, not stored again and not evicted."""
        cut, seen = FusedCache.blocks, list[int]()

        def copies(*arguments: Any) -> Iterator[Any]:
            for number, kv in enumerate(cut(*arguments)):
                if not seen and number == 1:
                    assert not cache._lock.locked()
                    seen.append(found(cache, [1, 2, 3, 4]))
                    seen.append(put(cache, [1, 2, 3, 4, 5, 6]))
                    seen.append(put(cache, [7, 7]))
                    if cleared:
                        cache.clear()
                yield kv

        cache = room(2)
        monkeypatch.setattr(FusedCache, "blocks", copies)
        assert put(cache, [1, 2, 3, 4]) == 2
        assert seen == [2, 0, 0]
        assert cache.stats.bytes == (0 if cleared else 2 * BLOCK_BYTES)
        assert found(cache, [1, 2, 3, 4]) == (0 if cleared else 4)
        assert sorted(refs(cache)) == ([] if cleared else [0, 0])


@dataclass
class Whole:
    """A block of the reference: all tokens up to its end."""

    start: tuple[int, ...]
    refs: int = 1
    freed_at: int = 0


class Reference:
    """The same promises by brute force: nothing is hashed or linked, and every eviction looks at all blocks."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.blocks: dict[tuple[int, ...], Whole] = {}
        self.cleared: list[Whole] = []
        self.now = self.evictions = 0

    @property
    def taken(self) -> int:
        """Blocks that take room: those stored and those still held after a clear."""
        return len(self.blocks) + sum(block.refs > 0 for block in self.cleared)

    def starts(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[:stop]) for stop in range(SIZE, len(ids) + 1, SIZE)]

    def hold(self, ids: Sequence[int]) -> list[Whole]:
        held = [self.blocks[s] for s in takewhile(self.blocks.__contains__, self.starts(ids))]
        for block in held:
            block.refs += 1
        return held

    def release(self, held: Sequence[Whole]) -> None:
        self.now += 1
        for block in held:
            block.refs -= 1
            block.freed_at = self.now

    def insert(self, ids: Sequence[int]) -> int:
        held = self.hold(ids)
        known = len(held)
        for start in self.starts(ids)[known:]:
            unheld = [block for block in self.blocks.values() if not block.refs]
            if self.taken >= self.max_blocks and unheld:
                oldest = min(unheld, key=lambda block: (block.freed_at, -len(block.start)))
                del self.blocks[oldest.start]
                self.evictions += 1
            if self.taken >= self.max_blocks:
                break
            self.blocks[start] = Whole(start)
            held.append(self.blocks[start])
        self.release(held)
        return len(held) - known

    def clear(self) -> None:
        self.cleared += self.blocks.values()
        self.blocks.clear()


ids = st.lists(st.integers(0, 1), max_size=9)
operations = st.lists(
    st.tuples(st.sampled_from(["insert", "match", "hold"]), ids)
    | st.tuples(st.just("release"), st.integers(0, 3))
    | st.tuples(st.just("clear")),
    max_size=30,
)


class TestRandomTraces:
    @examples(300)
    @given(max_blocks=st.integers(0, 7), spare=st.integers(0, BLOCK_BYTES - 1), trace=operations)
    @example(3, 0, [("insert", [0] * 6), ("hold", [0] * 6), ("insert", [1] * 4), ("release", 0), ("insert", [1])])
    def test_equal_to_brute_force(self, max_blocks: int, spare: int, trace: list[Any]) -> None:
        """Same hits, blocks, holders and evictions; no child without its parent; the limit never exceeded."""
        cache = PromptCache(max_blocks * BLOCK_BYTES + spare, block_tokens=SIZE)
        reference = Reference(max_blocks)
        held: list[tuple[KVMatch, list[Whole]]] = []

        def let_go(number: int) -> None:
            hit, blocks_held = held.pop(number)
            hit.release()
            reference.release(blocks_held)

        for name, *arguments in trace:
            if name == "insert":
                assert put(cache, *arguments) == reference.insert(*arguments)
            elif name == "clear":
                cache.clear()
                reference.clear()
            elif name == "release" and held:
                let_go(arguments[0] % len(held))
            elif name in ("match", "hold"):
                hit = cache.match(*arguments)
                held.append((hit, reference.hold(*arguments)))
                assert hit.num_tokens == SIZE * len(held[-1][1])
                if name == "match":
                    let_go(-1)
            for hit, blocks_held in held:
                assert_right(hit, blocks_held[-1].start if blocks_held else ())
            kept = {start: block.refs for start, block in blocks_of(cache).items()}
            assert kept == {start: block.refs for start, block in reference.blocks.items()}
            assert all(start[:-SIZE] in kept for start in kept if len(start) > SIZE)
            assert cache.stats.bytes == BLOCK_BYTES * reference.taken <= cache.stats.max_bytes
            assert cache.stats.evictions == reference.evictions
        while held:
            let_go(0)
        assert not any(refs(cache)) and set(cache._free) == {*blocks_of(cache).values()}
        assert cache.stats.bytes == BLOCK_BYTES * cache.stats.blocks


class TestThreads:
    def test_many_at_once(self) -> None:
        """Inserts, matches and clears in a small room, switched often: never wrong KV, nothing held in the end."""
        prompts = [[*map(int, f"{number:04b}")] for number in range(16)]
        caches = [filled(prompt) for prompt in prompts]
        shared, interval = room(5), sys.getswitchinterval()

        def work(seed: int) -> None:
            choice = random.Random(seed)
            for _ in range(60):
                number = choice.randrange(len(prompts))
                with shared.match(prompts[number]) as hit:
                    assert shared.stats.bytes <= shared.stats.max_bytes
                    shared.insert(prompts[number], caches[number])
                    assert_right(hit, prompts[number])
                if choice.random() < 0.05:
                    shared.clear()

        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(6) as pool:
                [*pool.map(work, range(6))]
        finally:
            sys.setswitchinterval(interval)
        assert not any(refs(shared)) and set(shared._free) == {*blocks_of(shared).values()}
        assert shared.stats.bytes == BLOCK_BYTES * shared.stats.blocks
        assert all(block.kv for block in blocks_of(shared).values())


class TestWithModel:
    """Every architecture: a start taken from blocks is the start a plain prefill computes."""

    @staticmethod
    def prompts(runtime: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Two of one start, longer than the shorter sliding windows, with tails of their own."""
        start = runtime.tokenize(CHUNKS[0] + "\n\n" + CHUNKS[1]).ids
        one, other = (runtime.tokenize(tail).ids for tail in ("\n\n" + CHUNKS[2], "\n\n" + QUESTION))
        return torch.tensor([*start, *one]), torch.tensor([*start, *other])

    @staticmethod
    def answered(runtime: Any, cache: PromptCache, ids: torch.Tensor) -> tuple[int, FusedCache, torch.Tensor]:
        """Tokens reused, the prompt's cache and its last logits."""
        fused = runtime.new_cache(len(ids))
        with cache.match(ids.tolist()[:-1]) as hit:
            hit.write_to(fused)
        logits = runtime.extend(fused, ids[hit.num_tokens :], hit.num_tokens)
        assert logits is not None
        return hit.num_tokens, fused, logits

    def test_equals_plain_transformers(self, primary: str) -> None:
        runtime, cache = load_model(primary), PromptCache(2**26)
        first, second = self.prompts(runtime)
        cache.insert(first.tolist(), runtime.prefill(first, len(first))[0])
        reused, fused, logits = self.answered(runtime, cache, second)
        assert reused >= 48 and gap(logits, reference_logits(primary, second)) < EXACT
        # what reuse has computed may be stored and reused in turn
        assert cache.insert(second.tolist(), fused) == len(second) // 16 - reused // 16
        again, _, logits = self.answered(runtime, cache, second)
        assert again == (len(second) - 1) // 16 * 16 > reused
        assert gap(logits, reference_logits(primary, second)) < EXACT

    def test_twin_two_blocks_swapped(self, primary: str) -> None:
        """Blocks of two prompts, at the same positions. Two of one prompt would not do: a key after RoPE carries its
        position along, so attention without a window does not see in which slot it stands."""
        runtime, cache = load_model(primary), PromptCache(2**26)
        first, second = self.prompts(runtime)
        for ids in (first, first.flip(0)):
            cache.insert(ids.tolist(), runtime.prefill(ids, len(ids))[0])
        expected = reference_logits(primary, second)
        reused, _, logits = self.answered(runtime, cache, second)
        assert gap(logits, expected) < EXACT
        kept = blocks_of(cache)
        one, other = (kept[tuple(ids.tolist()[:reused])] for ids in (first, first.flip(0)))
        one.kv, other.kv = other.kv, one.kv
        assert gap(self.answered(runtime, cache, second)[2], expected) > BROKEN

    def test_whole_prompt_stored_leaves_a_token_to_compute(self, tiny_models: dict[str, str]) -> None:
        runtime, cache = load_model(tiny_models["llama"]), PromptCache(2**26)
        ids = self.prompts(runtime)[0][:64]
        cache.insert(ids.tolist(), runtime.prefill(ids, 64)[0])
        reused, _, logits = self.answered(runtime, cache, ids)
        assert reused == 48 and gap(logits, reference_logits(tiny_models["llama"], ids)) < EXACT
