"""KV that prompts leave behind: a release while it is copied, a copy that fails, and KV that is cut back."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine, StoreError
from cacheclip_rag.chunks.texts import ChunkTexts
from cacheclip_rag.measuring import FusedCache
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.prompt_cache import PromptCache
from tests.conftest import CACHECLIP, SENTENCES, Logs, Models, Patch, raising
from tests.engine.asking import SHORT, rag
from tests.fusion.test_blocks import BLOCK_BYTES, SIZE, filled, found, refs, room

PASSAGES = [" ".join(random.Random(seed).sample(SENTENCES, 5)) for seed in range(4)]


@pytest.fixture
def engine(tiny_models: Models, monkeypatch: Patch) -> Iterator[CacheClipEngine]:
    monkeypatch.setattr(load_model(tiny_models["llama"]), "eos_ids", frozenset())
    models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"], "store": None}
    engine = CacheClipEngine(**{**models, **CACHECLIP, "recompute_ratio": 0.1, "min_confidence": 0.0})
    engine.precompute(PASSAGES)
    yield engine
    engine.close()


def when_copied(monkeypatch: Patch, number: int, act: Callable[[], object]) -> list[int]:
    """Do something once, when a block of KV was copied as the ``number``-th one. Returns how many were copied."""
    copied, blocks = [0], FusedCache.blocks

    def copies(*arguments: Any) -> Iterator[Any]:
        for block in blocks(*arguments):
            copied[0] += 1
            if copied[0] == number:
                act()
            yield block

    monkeypatch.setattr(FusedCache, "blocks", copies)
    return copied


fail, fail_in_python = raising(RuntimeError("out of memory")), raising(MemoryError())


def holds_nothing(cache: PromptCache) -> bool:
    return cache.stats.bytes == 0 == cache.stats.continued_bytes and cache.stats.blocks == 0


class TestRelease:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("method", ["cacheclip", "prefix"])
    @pytest.mark.parametrize("number", [1, 2, -1], ids=["first copy", "second copy", "last copy"])
    def test_while_kv_is_copied(self, engine: CacheClipEngine, method: str, number: int, monkeypatch: Patch) -> None:
        """Into the continued KV, and into the prefix cache."""
        with monkeypatch.context() as patch:
            copied = when_copied(patch, 0, fail)
            engine.generate(rag(PASSAGES), SHORT, method=method)
        assert copied[0] and not holds_nothing(engine.prefixes)
        engine.prefixes.clear()
        when = copied[0] if number < 0 else min(number, copied[0])
        when_copied(monkeypatch, when, lambda: engine.release(PASSAGES[:1]))
        engine.generate(rag(PASSAGES), SHORT, method=method)
        assert not engine.is_stored(PASSAGES[0]) and holds_nothing(engine.prefixes)

    @pytest.mark.parametrize("fails", [False, True])
    def test_of_what_an_answer_uses_meanwhile(self, engine: CacheClipEngine, fails: bool, monkeypatch: Patch) -> None:
        """An answer begins and ends while texts are released, the second of which may fail."""
        release, answers = ChunkTexts.release, []

        def releasing(texts: ChunkTexts, chunks: list[str]) -> int:
            answers.append(engine.generate(rag(PASSAGES), SHORT))
            if fails and len(answers) == 2:
                raise StoreError("the disk is full")
            return release(texts, chunks)

        with monkeypatch.context() as patch:
            patch.setattr(ChunkTexts, "release", releasing)
            if fails:
                with pytest.raises(StoreError, match="the disk is full"):
                    engine.release(PASSAGES[:2])
            else:
                engine.release(PASSAGES[:2])
        assert len(answers) == 2 and answers[0].stats.hits == 4 and holds_nothing(engine.prefixes)
        engine.release(PASSAGES[:2])
        assert not any(map(engine.is_stored, PASSAGES[:2]))


class TestCopiesThatFail:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("error", [fail, fail_in_python])
    @pytest.mark.parametrize("method", ["cacheclip", "prefix"])
    def test_cost_no_answer(
        self, engine: CacheClipEngine, method: str, error: Callable[[], None], monkeypatch: Patch, caplog: Logs
    ) -> None:
        with monkeypatch.context() as patch:
            copied = when_copied(patch, 0, fail)
            expected = engine.generate(rag(PASSAGES), SHORT, method=method).token_ids
        engine.prefixes.clear()
        with monkeypatch.context() as patch:
            when_copied(patch, copied[0], error)  # the last one: of cacheclip's, the continued KV
            assert engine.generate(rag(PASSAGES), SHORT, method=method).token_ids == expected
        assert "could not be kept" in caplog.text
        engine.prefixes.clear()
        assert holds_nothing(engine.prefixes), "bytes were not given back"
        engine.generate(rag(PASSAGES), SHORT, method=method)
        again = engine.generate(rag(PASSAGES), SHORT, method=method)
        assert again.stats.fresh_tokens < 20 and not holds_nothing(engine.prefixes)

    @pytest.mark.parametrize("number", range(1, 5))
    @pytest.mark.parametrize("cleared", [False, True])
    def test_growth_ends_before_the_block_that_fails(self, number: int, cleared: bool, monkeypatch: Patch) -> None:
        cache, ids = room(9), [*range(12)]
        cache.insert(ids[: 2 * SIZE], filled(ids))
        held = cache.match(ids)

        def act() -> None:
            if cleared:
                cache.clear()
            fail()

        with monkeypatch.context() as patch:
            when_copied(patch, number, act)
            with pytest.raises(RuntimeError, match="out of memory"):
                cache.insert(ids, filled(ids))
        whole = 0 if cleared else 2 + number - 1
        assert found(cache, ids) == whole * SIZE and cache.stats.blocks == whole
        assert cache.stats.bytes == (whole + 2 * cleared) * BLOCK_BYTES, "a match holds what was cleared"
        held.release()
        assert cache.stats.bytes == whole * BLOCK_BYTES and not any(refs(cache))
        assert cache.insert(ids, filled(ids)) == 6 - whole and found(cache, ids) == len(ids)


class TestCutBack:
    def test_an_answer_after_it_is_a_first_one(self, engine: CacheClipEngine, monkeypatch: Patch) -> None:
        """The KV that an earlier prompt left ends inside a chunk of this one, and so do exact blocks. Neither is used
        beyond the chunk's start, so that nothing of it is approximate."""
        first, second, third, _ = PASSAGES
        other = f"{third[: len(third) // 2]} Nobody knows where the keeper went after the war, or why he left."
        engine.precompute([other])
        engine.generate(rag([first, second, third]), SHORT)
        engine.generate(rag([first, second, third]), SHORT, method="prefix")
        prompt = rag([first, second, other])
        ids, method = engine.plan(prompt).layout.token_ids, engine.make_method()
        known = engine.prefixes.known(ids)
        with engine.prefixes.match(ids, method) as kept:
            continued = kept.num_tokens
        span = engine.plan(prompt).reused[-1]
        assert span.whole == other and span.start < known < continued < span.stop
        name = "cacheclip_rag.answering.pipeline.least_computed"  # as if the exact blocks had come after the plan
        monkeypatch.setattr(name, lambda plan, runs: replace(plan, continues=True))
        stats = engine.generate(prompt, SHORT).stats
        assert (stats.continued_tokens, stats.continued_turns, stats.stale_from) == (0, 0, None)
        assert stats.cached_prefix_tokens == span.start
        with engine.prefixes.match(ids, method) as kept:
            assert [(run.stop, run.turns) for run in kept.runs] == [(known, 0), (len(ids), 1)]
