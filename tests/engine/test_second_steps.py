"""A failure at the second step, and at every later one, of each operation of an engine: the error reaches the caller,
nothing half is kept, what was stored before is found, and a second try succeeds."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from planted_faults import Broken, Fault

from cacheclip_rag import Answer, CacheClipEngine, Event, StoreError
from cacheclip_rag.answering.turns import turns_of
from cacheclip_rag.chunks.caches import ChunkCaches, PrefixKV
from cacheclip_rag.chunks.texts import ChunkTexts
from cacheclip_rag.guards import Observer
from cacheclip_rag.runtime.prompt_cache import PromptCache
from cacheclip_rag.store import Catalog, ChunkStore, Sources, TenantStore, TextIndex, Tiers
from tests.answering.test_turns import until
from tests.conftest import SENTENCES, Logs, Patch
from tests.engine.asking import SHORT, rag
from tests.store.samples import totals_are_right

Owner = Callable[[CacheClipEngine], Any]


@pytest.fixture
def asked(engine: CacheClipEngine, chunks: list[str]) -> Iterator[CacheClipEngine]:
    """An engine with two of four chunks, which has answered before; at the end, nothing half is kept."""
    engine.observers += [Observer(), Observer()]
    engine.precompute(chunks[:2])
    engine.generate(rag(chunks[:2]), SHORT)
    engine.prefixes.clear()
    before = {*threading.enumerate()}
    yield engine
    until(lambda: turns_of(engine.primary).is_idle)
    until(lambda: {*threading.enumerate()} <= before)
    assert not engine.store.catalog.announcements.writers() and totals_are_right(engine.store), "bytes stay reserved"
    engine.prefixes.clear()
    assert not engine.prefixes.stats.bytes, "blocks stay in use"
    assert all(map(engine.is_stored, chunks[:2])), "what was stored before is found"


ANSWER: list[tuple[Owner, str, int]] = [
    (lambda engine: TextIndex, "find", 1),
    (lambda engine: engine.observers[-2], "on_plan", 1),
    (lambda engine: engine.observers[-1], "on_plan", 1),
    (lambda engine: engine.primary, "fuse", 1),
    *((lambda engine: engine.primary, "decode_step", at) for at in (1, 3)),
    *((lambda engine: engine.primary, "decode_ids", at) for at in (1, 3)),
    *((lambda engine: PromptCache, "insert", at) for at in (1, 2)),
    (lambda engine: engine.observers[-2], "on_answer", 1),
    (lambda engine: engine.observers[-1], "on_answer", 1),
]
AFTER: list[tuple[Any, str, int, type[Exception]]] = [
    *((TenantStore, "check_writable", at, error) for at, error in ((1, StoreError), (2, OSError))),
    *((ChunkCaches, "write", at, error) for at, error in ((1, RuntimeError), (2, MemoryError), (3, RuntimeError))),
    *((TenantStore, "put", at, error) for at, error in ((2, OSError), (3, StoreError))),
    *((ChunkTexts, "add", at, error) for at, error in ((1, StoreError), (2, RuntimeError))),
]
"""Steps of storing what was missing, after the last event."""


def names(steps: Sequence[tuple[Any, ...]]) -> list[str]:
    return [f"{number}-{step[1]}-{step[2]}" for number, step in enumerate(steps)]


class TestAnswer:
    @pytest.mark.some(3)
    @pytest.mark.parametrize(("owner", "name", "at"), ANSWER, ids=names(ANSWER))
    def test_its_error_reaches_the_caller_and_the_next_is_answered(
        self, asked: CacheClipEngine, chunks: list[str], owner: Owner, name: str, at: int, monkeypatch: Patch
    ) -> None:
        right = asked.generate(rag(chunks[:2]), SHORT)
        asked.prefixes.clear()
        events = list[Event]()
        with monkeypatch.context() as patch:
            Fault(patch, owner(asked), name, at)
            with pytest.raises(Broken):
                events.extend(asked.stream(rag(chunks[:2]), SHORT))
        assert right.text.startswith("".join(event.text for event in events))
        assert not any(event.answer for event in events)
        asked.prefixes.clear()
        again = asked.generate(rag(chunks[:2]), SHORT)
        assert (again.token_ids, again.stats.hits) == (right.token_ids, 2)

    @pytest.mark.parametrize(("method", "name"), [("prefix", "prefill_from"), ("cacheclip", "run_slots")])
    def test_the_prefix_cache_gets_its_blocks_back(
        self, asked: CacheClipEngine, chunks: list[str], method: str, name: str, monkeypatch: Patch
    ) -> None:
        """What the fixture looks at after the test, in which a prompt's first tokens are known."""
        asked.generate(rag(chunks[:1], "Who?"), SHORT, method="prefix")
        with monkeypatch.context() as patch:
            Fault(patch, asked.primary, name, 1)
            with pytest.raises(Broken):
                asked.generate(rag(chunks[:2]), SHORT, method=method)
        assert asked.generate(rag(chunks[:2]), SHORT, method=method).text

    @pytest.mark.some(3)
    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_a_reader_that_leaves_after_some_events(
        self, asked: CacheClipEngine, chunks: list[str], count: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Observers are told what there is of the answer."""
        right, parts = asked.generate(rag(chunks[:2]), SHORT), list[Answer]()
        monkeypatch.setattr(asked.observers[-1], "on_cancelled", parts.append)
        stream = asked.stream(rag(chunks[:2]), SHORT)
        for _ in range(count):
            next(stream)
        stream.close()
        told = [(each.finish_reason, each.token_ids, each.stats.generated_tokens) for each in parts]
        assert told == [("cancelled", right.token_ids[:count], count)] * (count > 0)
        assert turns_of(asked.primary).is_idle and asked.generate(rag(chunks[:2]), SHORT).text == right.text

    @pytest.mark.some(2)
    @pytest.mark.parametrize(("owner", "name", "at", "error"), AFTER, ids=names(AFTER))
    def test_a_complete_answer_is_given_though_it_cannot_be_stored(
        self,
        asked: CacheClipEngine,
        chunks: list[str],
        owner: Any,
        name: str,
        at: int,
        error: type[Exception],
        monkeypatch: Patch,
        caplog: Logs,
    ) -> None:
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            fault = Fault(patch, owner, name, at, error)
            answer = asked.generate(rag(chunks), SHORT, documents=chunks)
            assert fault.has_failed
        assert (len(answer.token_ids), answer.stats.misses) == (SHORT.max_tokens, 2)
        assert f"{name} failed at call {at}" in caplog.text
        stored = [asked.is_stored(text) and asked.texts.index.known(text) for text in chunks[2:]]
        assert any(stored), "the other one is stored"
        asked.generate(rag(chunks), SHORT, documents=chunks)
        assert all(map(asked.is_stored, chunks)) and all(map(asked.texts.index.known, chunks))


BATCHES = [list(SENTENCES[:2]), list(SENTENCES[2:4]), list(SENTENCES[4:6])]
TEXTS = [text for batch in BATCHES for text in batch]
PRECOMPUTE: list[tuple[Owner | None, str, int]] = [
    *((lambda engine: engine.primary, "encode_many", at) for at in (2, 3)),
    (lambda engine: engine.auxiliary, "encode_many", 2),
    *((lambda engine: TenantStore, "put", at) for at in (6, 9)),
    (lambda engine: Tiers, "put", 6),
    *((lambda engine: ChunkTexts, "add", at) for at in (3, 6)),
    *((lambda engine: Sources, "add", at) for at in (2, 5)),
    *((None, "stored", at) for at in (2, 3)),
    (lambda engine: ChunkStore, "commit", 1),
]
"""Of three batches of two texts, for two models."""


def readable(engine: CacheClipEngine, text: str) -> bool:
    return all(caches.read(text) is not None for caches in engine.chunk_caches())


class TestPrecompute:
    @pytest.mark.some(3)
    @pytest.mark.parametrize(("owner", "name", "at"), PRECOMPUTE, ids=names(PRECOMPUTE))
    def test_batches_before_it_are_stored_and_a_second_try_stores_the_rest(
        self, asked: CacheClipEngine, owner: Owner | None, name: str, at: int, monkeypatch: Patch
    ) -> None:
        monkeypatch.setattr("cacheclip_rag.chunks.batches._TEXTS", 2)
        counted = Counter()
        with monkeypatch.context() as patch:
            Fault(patch, counted if owner is None else owner(asked), name, at)
            with pytest.raises(Broken, match=f"{name} failed at call {at}"):
                asked.precompute(TEXTS, source="s", document="d", stored=lambda *given: counted.stored(*given))
        whole = [text for text in TEXTS if asked.is_stored(text)]
        assert TEXTS[: counted.texts] == whole[: counted.texts], "what was said to be stored is stored"
        if name == "encode_many":
            assert counted.texts == 2 * (at - 1), "all batches before it"
        assert all(readable(asked, text) and asked.texts.index.known(text) for text in whole)
        again = Counter()
        asked.precompute(TEXTS, source="s", document="d", stored=again.stored)
        assert again.texts == len(TEXTS) and again.computed == len(TEXTS) - len(whole)
        assert all(readable(asked, text) and asked.texts.index.known(text) for text in TEXTS)
        assert {*asked.texts.texts("s")} == {*TEXTS} and asked.release(sources=["d"]) == len(TEXTS)


class Counter:
    """What :meth:`CacheClipEngine.precompute` says of its batches."""

    texts = computed = 0

    def stored(self, texts: int, computed: int) -> None:
        self.texts, self.computed = self.texts + texts, self.computed + computed


RELEASE: list[tuple[Any, str, int]] = [
    *((ChunkTexts, "release", at) for at in (2, 3)),
    *((TenantStore, "release", at) for at in (2, 3)),
    *((TextIndex, "remove", at) for at in (2, 3)),
    *((Catalog, "remove", at) for at in (2, 3)),
    (ChunkStore, "commit", 1),
]
SOURCES: list[tuple[Any, str, int]] = [*RELEASE, (ChunkTexts, "orphans", 1), (ChunkTexts, "remove_sources", 1)]
RELEASES = [("texts", *step) for step in RELEASE] + [("sources", *step) for step in SOURCES]


class TestRelease:
    @pytest.mark.some(4)
    @pytest.mark.parametrize(
        ("by", "owner", "name", "at"),
        RELEASES,
        ids=[f"{by}-{owner.__name__}-{name}-{at}" for by, owner, name, at in RELEASES],
    )
    def test_a_second_try_releases_the_rest(
        self, asked: CacheClipEngine, by: str, owner: Any, name: str, at: int, monkeypatch: Patch
    ) -> None:
        gone, kept = TEXTS[:3], TEXTS[3:]
        asked.precompute({text: [(f"s{number}", "d")] for number, text in enumerate(gone)})
        asked.precompute(kept, source="other")
        given: Any = {"texts": gone} if by == "texts" else {"sources": ["s0", "s1", "s2"]}
        with monkeypatch.context() as patch:
            Fault(patch, owner, name, at)
            with pytest.raises(Broken, match=f"{name} failed at call {at}"):
                asked.release(**given)
        left = [text for text in gone if asked.is_stored(text)]
        assert left == gone[len(gone) - len(left) :], "those before it are released, and those after it stay"
        assert all(readable(asked, text) and asked.texts.index.known(text) for text in left)
        asked.release(**given)
        assert not any(asked.texts.index.known(text) for text in gone)
        assert not any(caches.read(text) for text in gone for caches in asked.chunk_caches())
        assert not asked.release(**given) and all(readable(asked, text) for text in kept)
        assert not asked.store.catalog.keys_of("default", b"") and asked.texts.texts("other") == kept
        if by == "sources":
            assert asked.texts.sources() == ["other"]


WARM_UP: list[tuple[Owner, str, int]] = [
    (lambda engine: TextIndex, "find", 1),
    *((lambda engine: TenantStore, "get", at) for at in (1, 2, 3)),
    (lambda engine: PrefixKV, "_read_or_encode", 1),
    (lambda engine: PrefixKV, "_read_or_encode", 2),
    (lambda engine: engine.primary, "prefill", 1),
    (lambda engine: engine.primary, "decode_step", 1),
]


@pytest.mark.some(2)
@pytest.mark.parametrize(("owner", "name", "at"), WARM_UP, ids=names(WARM_UP))
def test_warming_up_again(
    asked: CacheClipEngine, chunks: list[str], owner: Owner, name: str, at: int, monkeypatch: Patch
) -> None:
    fresh = CacheClipEngine(asked.config)
    with monkeypatch.context() as patch:
        Fault(patch, owner(fresh), name, at)
        with pytest.raises(Broken):
            fresh.warm_up()
    assert turns_of(fresh.primary).is_idle
    again, other = fresh.warm_up(), asked.warm_up()
    assert (again.models, again.chunks_read) == (other.models, other.chunks_read) and again.chunks_read > 2
    assert fresh.generate(rag(chunks[:2]), SHORT).text == asked.generate(rag(chunks[:2]), SHORT).text
    fresh.close()


@pytest.mark.some(3)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_idle_finishing_of_the_other_prompts_goes_on(
    asked: CacheClipEngine, chunks: list[str], at: int, monkeypatch: Patch, caplog: Logs
) -> None:
    prompts = [rag(chunks[:2]), rag([chunks[1], chunks[0]])]
    right = asked.generate(prompts[0], SHORT).text
    asked.prefixes.clear()
    with monkeypatch.context() as patch:
        with turns_of(asked.primary).answer():  # none begins before both wait
            for prompt in prompts:
                asked.generate(prompt, SHORT, finish="idle")
            Fault(patch, asked.primary, "extend", at)
        assert asked.wait_for_observers()
    assert f"extend failed at call {at}" in caplog.text and turns_of(asked.primary).is_idle
    layouts = [asked.plan(prompt).layout for prompt in prompts]
    done = [asked.prefixes.known(layout.token_ids) > layout.num_tokens - 17 for layout in layouts]
    assert sum(done) == 1, "one is completed, and one failed"
    asked.prefixes.clear()
    assert asked.generate(prompts[0], SHORT).text == right


@pytest.mark.some(3)
@pytest.mark.parametrize("finish", ["verify", "revise"])
@pytest.mark.parametrize("at", [1, 2])
def test_finishing(asked: CacheClipEngine, chunks: list[str], finish: str, at: int, monkeypatch: Patch) -> None:
    prompt = rag(chunks[:2])
    right = asked.generate(prompt, SHORT, finish=finish).text
    asked.prefixes.clear()
    with monkeypatch.context() as patch:
        Fault(patch, asked.primary, "extend", at)
        with pytest.raises(Broken):
            asked.generate(prompt, SHORT, finish=finish)
    asked.prefixes.clear()
    assert asked.generate(prompt, SHORT, finish=finish).text == right


@pytest.mark.parametrize("number", [-1, -2])
def test_closing_goes_on_after_an_observer_that_cannot_be_closed(
    asked: CacheClipEngine, chunks: list[str], number: int, monkeypatch: Patch
) -> None:
    closed = []
    for owner in (asked.observers[-3 - number], asked._answering.completion, asked.parts):
        monkeypatch.setattr(owner, "close", lambda owner=owner, close=owner.close: (closed.append(owner), close()))
    with monkeypatch.context() as patch:
        Fault(patch, asked.observers[number], "close", 1)
        with pytest.raises(Broken):
            asked.close()
    assert len(closed) == 3
    assert asked.generate(rag(chunks[:2]), SHORT).text
