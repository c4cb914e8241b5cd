"""Prompts that are gathered from chunk caches in the memory of a GPU, which is pretended, are those of the CPU."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.models.load import load_model, unload_models
from cacheclip_rag.runtime.transformers import cache as caches
from cacheclip_rag.store import Arena, ReadAhead, StoredKV, decode_frame, encode_frame, join, part_of
from cacheclip_rag.store.arena import Resident
from tests.conftest import SENTENCES, Models, Patch, rag_prompt
from tests.models.pretend import CUDA, Pretended, move, pretended

CPU = torch.device("cpu")
TEXTS = [f"{n}. " + " ".join(SENTENCES[(n + k) % 8] for k in range(1 + n % 4)) for n in range(12)]
KV_BYTES = 3 * 2 * 2 * 16 * 2
"""Of a token of the tiny primary in bfloat16."""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    unload_models()
    yield
    unload_models()


def payload(name: str, num_tokens: int, codec: str = "float32", shape: tuple[int, ...] = (3, 2, 2)) -> StoredKV:
    kv = torch.randn(*shape, num_tokens, 16, generator=torch.Generator().manual_seed(num_tokens))
    key = name * 64
    return decode_frame(encode_frame(kv, codec, key, namespace="t"), key)


def answers(models: dict[str, str], count: int, there: bool, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Logits of random prompts, and the engine."""
    engine = CacheClipEngine(
        primary=models["llama"], auxiliary=models["auxiliary"], prefix_cache_bytes=0, chunk_context="prefix", **options
    )
    engine.precompute(TEXTS)
    for runtime in (engine.primary, engine.auxiliary) if there else ():
        move(runtime)
    choice, logits = random.Random(0), []
    for _ in range(count):
        chosen, method = choice.sample(TEXTS, choice.randint(1, 4)), choice.choice(["direct", "cacheclip", "epic"])
        result = engine.prefill(rag_prompt(chosen), SamplingParams(max_tokens=1), method=engine.make_method(method))
        assert result.stats.fallback is None and result.stats.hits == len(chosen)
        logits.append(result.logits.inner if isinstance(result.logits, Pretended) else result.logits)
    return logits, engine


class TestPrompts:
    def test_equal_the_cpu_s_in_an_arena_of_any_size(self, tiny_models: Models, monkeypatch: Patch) -> None:
        """Some are evicted, and some have no room beside those that the prompt holds."""
        monkeypatch.setattr(caches, "_TOGETHER", 40_000)  # fewer layers together than there are
        expected, _ = answers(tiny_models, 5, False, dtype="bfloat16")
        longest, evictions = 100 * KV_BYTES, []
        for size in (5 * longest, 2 * longest):
            unload_models()
            with pretended(monkeypatch):
                monkeypatch.setattr("cacheclip_rag.store.arena.free_bytes", lambda device, size=size: 4 * size)
                logits, engine = answers(tiny_models, 5, True, dtype="bfloat16")
                arena = engine.store.chunk_store.tiers.arena(CUDA)
                assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True)), size
                evictions.append(arena.evictions)
                assert arena.hits and arena.loads
                of_gpu = engine.store.chunk_store.stats().tiers[0]
                assert of_gpu.name == "cuda:0" and of_gpu.hits == arena.hits and of_gpu.misses
                assert 0 < of_gpu.bytes <= size and of_gpu.evictions == arena.evictions
                held = [arena.take(key, 0) for key in arena.list()]
                assert sum(each.users > 1 for each in held if each) <= 2, "shared prefixes alone stay for good"
        assert min(evictions) > 0

    def test_what_is_released_leaves(self, tiny_models: Models, monkeypatch: Patch) -> None:
        with pretended(monkeypatch) as queue:
            _, engine = answers(tiny_models, 3, True)
            arena = engine.store.chunk_store.tiers.arena(CUDA)
            before = queue.copies.total()
            before_release = len([*arena.list()])
            engine.release(TEXTS)
            assert before_release > 2 >= len([*arena.list()]) and queue.copies.total() == before

    def test_damage_is_seen_before_layers_are_copied(
        self, tiny_models: Models, monkeypatch: Patch, tmp_path: Any
    ) -> None:
        with pretended(monkeypatch):
            _, engine = answers(tiny_models, 0, True, store=tmp_path)
            tiers, key = engine.store.chunk_store.tiers, engine.chunk_caches()[0].key(TEXTS[0])
            data = bytearray(tiers.last.get_many([key])[key])
            data[-1] ^= 1
            tiers.last.put(key, data)
            result = engine.prefill(
                rag_prompt(TEXTS[:2]), SamplingParams(max_tokens=1), method=engine.make_method("direct")
            )
            assert result.stats.hits == 1 and tiers.arena(CUDA).take(key, 1) is None

    def test_layers_are_waited_for_before_they_are_gathered(self, tiny_models: Models, monkeypatch: Patch) -> None:
        kv, waited = payload("a", 20), list[int]()
        monkeypatch.setattr(caches, "_TOGETHER", 2 * kv.frame.layer_size)
        expected = load_model(tiny_models["llama"]).new_cache(40)
        expected.fill_all([(4, kv)])
        with pretended(monkeypatch):
            runtime: Any = load_model(tiny_models["llama"])
            move(runtime)
            frame = replace(kv.frame, data=memoryview(bytearray(kv.frame.num_bytes)))

            def wait(layer: int) -> None:
                frame.data[: frame.bounds[layer + 1]] = kv.frame.data[: frame.bounds[layer + 1]]
                waited.append(layer)

            cache = runtime.new_cache(40)
            write = cache.filling([(4, StoredKV(frame, resident=Arena(CUDA).place(frame)))], wait)
            for number in range(3):
                write(number)
            assert waited == [1, 2]
            for ours, theirs in zip(cache.arrays, expected.arrays, strict=True):
                assert torch.equal(ours.inner[:, :, 4:], theirs[:, :, 4:])

    @pytest.mark.parametrize("codec", ["float32", "int8"])
    def test_the_auxiliary_s_chunks_are_one_group(self, tiny_models: Models, monkeypatch: Patch, codec: str) -> None:
        """Also where the shared prefix alone is in the arena."""
        groups: list[list[int]] = []

        def counted(pieces: Any, runs: Any = ()) -> list[Any]:
            joined = join(pieces, runs)
            groups.append([len(each.pieces) for each in joined])
            return joined

        with pretended(monkeypatch):
            _, engine = answers(tiny_models, 0, True, codec=codec)
            monkeypatch.setattr(caches, "join", counted)
            method = engine.make_method("cacheclip")
            engine.prefill(rag_prompt(TEXTS[:6]), SamplingParams(max_tokens=1), method=method)
        assert [max(each) >= 5 for each in groups] == [True, True] and max(map(len, groups)) <= 2, groups

    def test_what_is_read_again_is_copied_again(self, tiny_models: Models, monkeypatch: Patch) -> None:
        waits = list[Any]()
        with pretended(monkeypatch):
            _, engine = answers(tiny_models, 0, True)
            monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
            tenant, key = engine.store, engine.chunk_caches()[0].key(TEXTS[0])
            arena, right = tenant.chunk_store.tiers.arena(CUDA), tenant.get(key)
            assert right is not None
            wrong = replace(right, frame=replace(right.frame, data=memoryview(bytearray(right.frame.num_bytes))))

            def work(reading: ReadAhead) -> torch.Tensor:
                kv = reading.kv(0)
                assert kv is not None and isinstance(kv.resident, Resident)
                arena.load(kv.resident, kv.frame, 1)
                if not waits:
                    reading._settle(key, right)
                reading.wait(0)
                arena.load(kv.resident, kv.frame, 2)
                memory: Any = arena.memory
                return memory.inner[kv.resident.start :][: right.frame.layer_size]

            with ReadAhead(tenant, [key], arena=arena) as reading:
                reading._settle(key, wrong)
                assert torch.equal(reading.until_whole(work), right.frame.layer_bytes(0)) and waits == [CUDA]


class TestArena:
    def test_gives_what_it_got(self) -> None:
        arena = Arena(CPU, 1 << 20)
        pieces, expected = list[tuple[int, Any]](), {}
        for slot, name, first, stop in ((3, "a", 0, 7), (10, "b", 2, 5), (20, "a", 1, 2)):
            kv = payload(name, 7)
            held = StoredKV(kv.frame, resident=arena.place(kv.frame))
            pieces.append((slot, part_of(held, first, stop)))
            expected[slot] = kv.tensor()[:, :, :, first:stop]
        [joined] = join(pieces)
        assert joined.gather is not None and (joined.gather.first, joined.gather.stop) == (3, 21)
        for layers in ((0, 2), (2, 3)):
            kv = joined.gather.layers(*layers)
            for slot, want in expected.items():
                assert torch.equal(kv[:, :, :, slot - 3 : slot - 3 + want.shape[3]], want[slice(*layers)])

    def test_only_layers_that_were_copied_count(self) -> None:
        arena, kv = Arena(CPU, 1 << 20), payload("a", 5)
        resident = arena.place(kv.frame)
        assert resident is not None and arena.take("a" * 64, 1) is None
        arena.load(resident, kv.frame, 2)
        assert arena.take("a" * 64, 2) is resident and arena.take("a" * 64, 3) is None
        arena.load(resident, kv.frame, 3)
        assert arena.take("a" * 64, 1 << 30) is resident and resident.users == 3
        for integers_or_too_large in (payload("a", 5, "int8"), payload("a", 900)):
            assert Arena(CPU, 1 << 16).place(integers_or_too_large.frame) is None

    def test_the_least_recently_used_leave_and_none_that_is_held(self) -> None:
        kv = {name: payload(name, 40) for name in "abcd"}
        arena = Arena(CPU, 3 * (kv["a"].frame.num_bytes // 4096 + 1) * 4096)
        held = {name: arena.place(kv[name].frame) for name in "abc"}
        assert all(held.values()) and arena.place(kv["d"].frame) is None and arena.evictions == 0
        arena.release([held["b"], held["a"]])  # type: ignore[list-item]
        arena.load(held["a"], kv["a"].frame, 3)  # type: ignore[arg-type]
        arena.release([arena.take("a" * 64, 3)])  # type: ignore[list-item]
        assert arena.place(kv["d"].frame) is not None
        assert [key[0] for key in arena.list()] == ["c", "a", "d"] and arena.evictions == 1

    def test_what_is_deleted_while_it_is_held_keeps_its_bytes(self) -> None:
        kv = payload("a", 40)
        arena = Arena(CPU, (kv.frame.num_bytes // 4096 + 1) * 4096)
        resident = arena.place(kv.frame)
        arena.delete(["a" * 64])
        assert arena.take("a" * 64, 0) is None and arena.place(kv.frame) is None
        arena.release([resident])  # type: ignore[list-item]
        assert arena.place(kv.frame) is not None

    def test_rows_of_any_width(self) -> None:
        """Payloads of two models, whose rows are of different lengths, lie in one memory."""
        arena = Arena(CPU, 1 << 16)
        for name, width in (("a", 16), ("b", 20), ("c", 12)):
            kv = torch.randn(2, 2, 3, 4, width)
            key = name * 64
            stored = decode_frame(encode_frame(kv, "bfloat16", key, namespace="t"), key)
            resident = arena.place(stored.frame)
            assert resident is not None and resident.start % (2 * width) == 0 and resident.start >= resident.begin
            arena.load(resident, stored.frame, 2)
            end = resident.start + stored.frame.num_bytes - stored.frame.start
            expected = torch.cat([stored.frame.layer_bytes(number) for number in range(2)])
            assert end <= resident.end and torch.equal(arena.memory[resident.start : end], expected)
