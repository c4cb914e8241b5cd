"""Texts that recur in prompts are stored as chunks; beside each promise, the mistake that breaks it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cacheclip_serve import LearnedTexts, TransformersBackend, learning
from cacheclip_testing import fake_models, fake_of

from cacheclip_rag import CacheClipEngine, ConfigurationError, EngineConfig, SamplingParams, StoreError
from cacheclip_rag.store import LEARNED, ChunkStore

SHORT = SamplingParams(max_tokens=2)
Learner = Callable[..., CacheClipEngine]


def words(seed: int, count: int = 100) -> str:
    """A text of so many tokens of the fake model."""
    chooser = random.Random(seed)
    return " ".join(f"w{chooser.randrange(10_000)}" for _ in range(count))


@pytest.fixture
def learner() -> Iterator[Learner]:
    engines: list[CacheClipEngine] = []

    def make(max_bytes: int = 2**30, **options: Any) -> CacheClipEngine:
        engines.append(CacheClipEngine(**{**fake_models(), **options}))
        engines[-1].observers.append(LearnedTexts(engines[-1], max_bytes, quiet_s=0))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def ask(engine: CacheClipEngine, *prompts: Any) -> list[str]:
    """Ask one after the other, each when nothing is left to do; what is learned by then."""
    for prompt in prompts:
        engine.generate(prompt, SHORT)
        assert engine.wait_for_observers(10)
    return engine.texts.texts(LEARNED)


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


BORDERS: dict[str, Callable[[str, str, str], Any]] = {
    "paragraph": lambda before, text, after: f"{before}\n\n{text}\n\n{after}",
    "line": lambda before, text, after: f"{before}\n{text}\n{after}",
    "tag": lambda before, text, after: f"{before} <passage-{before[:3]}>{text}</passage-{before[:3]}> {after}",
    "fence": lambda before, text, after: f"{before} ```{text}``` {after}",
    "sentence": lambda before, text, after: f"{before}. {text}. {after}",
    "message": lambda before, text, after: chat(before, "Yes.", text, "Well.", after),
}


@pytest.mark.some(5)
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("size", [64, 100, 300])
def test_what_recurs_is_cut_at_the_border_where_the_prompts_part(learner: Learner, border: str, size: int) -> None:
    engine, text, write = learner(), words(0, size), BORDERS[border]
    assert ask(engine, write(words(1, 40), text, words(2, 40))) == [], "it stood once"
    learned = ask(engine, write(words(3, 50), text, words(4, 20)))
    assert [each.removesuffix(".") for each in learned] == [text]
    assert ask(engine, write(words(5), text, words(6)), write(words(7), text, words(8))) == learned, "never twice"
    answer = engine.generate(write(words(9), text, words(10)), SHORT)
    assert answer.stats.hits == 1 and answer.stats.misses == 0
    assert engine.metrics.snapshot()["learned_texts_total"] == 1


def test_what_no_two_prompts_share_is_not_learned(learner: Learner) -> None:
    """Nor what is shorter than the least, however often it recurs."""
    short = words(0, learning.LEAST_TOKENS - 1)
    prompts = [f"{words(2 * n)}\n\n{short}\n\n{words(2 * n + 1)}" for n in range(1, 6)]
    assert ask(learner(), *prompts) == []


def test_what_is_marked_as_retrieved_is_stored_at_first_sight(learner: Learner) -> None:
    engine, texts = learner(), [words(seed) for seed in range(4)]

    def sources(order: list[str]) -> str:
        return "\n".join(f'<source id="{n}" name="a.txt">{text}</source>' for n, text in enumerate(order))

    assert sorted(ask(engine, f"Use these.\n{sources(texts)}\nWhat is it?")) == sorted(texts)
    assert engine.generate(f"{sources(texts[::-1])}\nWho is it?", SHORT).stats.hits == 4
    assert ask(engine, f"<source>{words(9)}") == ask(engine), "a tag that does not end marks nothing"


def test_a_tag_that_names_a_resource_is_stored_with_the_first_of_its_texts(learner: Learner) -> None:
    engine, texts, tag = learner(), [words(seed) for seed in range(3)], f'<source id="1" name="{words(9, 40)}"> '
    prompts = ["\n".join(f"{tag}{text}</source>" for text in order) for order in (texts, texts[::-1])]
    assert sorted(ask(engine, f"{prompts[0]}\nWhat is it?")) == sorted(
        [tag + texts[0], *(text.partition(" ")[2] for text in texts[1:])]
    )
    stats = engine.generate(f"{prompts[1]}\nWho is it?", SHORT).stats
    assert stats.chunk_tokens > 300 + 3 * 38, "the tag is a part of a chunk before the others, too"
    learned = ask(engine, f"{tag}{words(7)}</source>\n{tag}{words(8)}</source>\nWhere is it?")
    assert {words(7), words(8)} <= {*learned}, "also behind a tag that is stored"


def test_a_tag_without_an_end_cuts_no_text(learner: Learner) -> None:
    text = f'{words(0, 40)} such as <source id="1"> {words(1, 40)}'
    assert ask(learner(), *(f"{words(n)}\n\n{text}\n\n{words(n + 9)}" for n in (2, 3))) == [text]


def test_documents_as_claude_is_given_them_are_stored_at_first_sight(learner: Learner) -> None:
    texts = [words(seed) for seed in range(2)]
    documents = "\n".join(
        f'<document index="{n}">\n<source>a-{n}.txt</source>\n<document_content>\n{text}\n</document_content>'
        "\n</document>"
        for n, text in enumerate(texts)
    )
    assert sorted(ask(learner(), f"<documents>\n{documents}\n</documents>\nWhat is it?")) == sorted(texts)


@pytest.mark.parametrize("setting", ["on", "off"])
def test_a_request_that_takes_nothing_of_earlier_prompts_leaves_nothing(learner: Learner, setting: str) -> None:
    """The engine's own setting is another matter: learning has one of its own."""
    engine, prompt = learner(moved=setting), f"<source>{words(0)}</source>\nWhat?"
    engine.generate(prompt, SHORT, moved="off")
    assert engine.wait_for_observers(10) and engine.texts.texts(LEARNED) == [words(0)] * (setting == "off")
    assert ask(engine, prompt) == [words(0)]


def test_nobody_else_can_give_the_source_of_learned_texts(learner: Learner) -> None:
    engine = learner()
    named: list[Callable[[], object]] = [
        lambda: engine.precompute({words(0): [(LEARNED, "")]}),
        lambda: engine.precompute({words(0): [("a.txt", LEARNED)]}),
        lambda: engine.precompute([words(0)], source="a.txt", document=LEARNED),
        lambda: engine.texts.add_source(words(0), LEARNED),
        lambda: engine.generate(words(0), SHORT, documents={words(0): [(LEARNED, "")]}),
    ]
    for give in named:
        with pytest.raises(ConfigurationError, match="recurred in prompts.*name the source or document of these texts"):
            give()
    assert engine.store.stats().entries == 0 and not any(fake_of(engine).threads.values())
    engine.precompute([words(0)], source="learned")
    ask(engine, f"<source>{words(1)}</source>\nWhat?")
    engine.release(sources=[LEARNED])
    assert engine.is_stored(words(0)) and not engine.is_stored(words(1))


def test_overlapping_splits_become_chunks_and_parts(learner: Learner) -> None:
    """No token is stored twice, unless the overlap is too short to be reused as a part."""
    for overlap, copies in ((50, 0), (20, 20)):
        whole = words(overlap, 350).split(" ")
        first, second = " ".join(whole[:200]), " ".join(whole[200 - overlap :])
        engine = learner()
        learned = ask(engine, f"<source>{first}</source>\n<source>{second}</source>")
        assert sum(len(each.split()) for each in learned) == 350 + copies
        stats = engine.generate(f"<source>{second}</source>\nWhat?", SHORT).stats
        assert stats.chunk_tokens >= 150 + overlap - 2


def test_what_lies_within_a_stored_text_is_not_learned(learner: Learner) -> None:
    engine, whole = learner(), words(0, 300)
    engine.precompute([whole])
    part = " ".join(whole.split(" ")[50:200])
    assert ask(engine, *(f"{words(n)}\n\n{part}\n\n{words(n + 9)}" for n in range(1, 4))) == []


@pytest.mark.parametrize("shares", [False, True])
def test_another_tenants_prompts_count_for_nothing(learner: Learner, tmp_path: Path, shares: bool) -> None:
    """Planted: tenants that share what they have seen."""
    models = fake_models()
    one, other = (learner(store=tmp_path, namespace=name, **models) for name in ("one", "other"))
    if shares:
        other.observers[-1].sights = one.observers[-1].sights  # type: ignore[attr-defined]
    assert ask(one, f"{words(1)}\n\n{words(0)}\n\n{words(2)}") == []
    assert ask(other, f"{words(3)}\n\n{words(0)}\n\n{words(4)}") == [words(0)] * shares


@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("by_other", [False, True])
def test_what_was_released_counts_as_never_seen(
    learner: Learner, tmp_path: Path, forgets: bool, by_other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: fingerprints that stay."""
    engine, text = learner(store=tmp_path), words(0)
    ask(engine, f"{words(1)}\n\n{text}\n\n{words(2)}")
    if not forgets:

        def follow(self: LearnedTexts) -> None:
            self._generation = self._engine.prefixes.generation

        monkeypatch.setattr(LearnedTexts, "_follow_erasures", follow)
    if by_other:
        with CacheClipEngine(**fake_models(), store=tmp_path) as other:
            other.release([text])
    else:
        engine.release([text])
    prompts = [f"{words(n)}\n\n{text}\n\n{words(n + 9)}" for n in (3, 4, 5)]
    assert ask(engine, prompts[0]) == [text] * (not forgets)
    assert ask(engine, *prompts[1:]) == [text]
    engine.release([text])
    assert not engine.is_stored(text) and engine.texts.index.find(prompts[0]) == []
    assert engine.texts.texts(LEARNED) == [], "nor its source, of which a repaired store would have it again"


@pytest.mark.parametrize("by_other", [False, True])
def test_what_is_released_while_it_is_computed_does_not_stay(learner: Learner, tmp_path: Path, by_other: bool) -> None:
    engine, text, models = learner(store=tmp_path), words(0), fake_models()
    other = learner(store=tmp_path, **models) if by_other else engine
    encode = engine.primary.encode_many

    def released(*args: Any, **options: Any) -> Any:
        other.release([text])
        return encode(*args, **options)

    engine.primary.encode_many = released  # type: ignore[method-assign]
    assert ask(engine, f"<source>{text}</source>\nWhat?") == []
    assert not engine.is_stored(text)


def test_a_store_without_room_has_no_row_of_it(learner: Learner, tmp_path: Path) -> None:
    engine = learner(store=tmp_path, max_bytes=2**30)
    engine.store.chunk_store.set_limit(1)
    assert ask(engine, f"<source>{words(0)}</source>\nWhat?") == []
    assert not engine.metrics.snapshot().get("learned_texts_total")


def test_a_store_that_cannot_be_written_computes_nothing(
    learner: Learner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = learner()

    def refused(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(type(engine.store), "check_writable", refused)
    assert ask(engine, *(f"<source>{words(n)}</source>\nWhat?" for n in range(3))) == []
    assert not fake_of(engine).threads["encode"]
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert sum("could not be stored" in message for message in warned) == 1


def test_memory_is_bounded_and_reveals_nothing() -> None:
    sights, ids = learning.Sights(most=1000), np.random.default_rng(0).integers(0, 50_000, (50, 2000))
    for prompt in ids:
        sights.add(sights.of(prompt)[1])
        assert len(sights) <= 1000 and sights.num_bytes <= 16_000
    assert sights.known(sights.of(ids[-1])[1]).all(), "the latest stay"
    assert not sights.known(sights.of(ids[0])[1]).any()
    assert not np.isin(sights.of(ids[0])[1], learning.Sights().of(ids[0])[1]).any(), "two processes have other hashes"


def test_budget_takes_what_was_used_longest_ago(learner: Learner) -> None:
    engine = learner()
    ask(engine, *(f"<source>{words(n)}</source>\nWhat?" for n in range(3)))
    of_one = engine.store.stats().bytes // 3
    small = learner(max_bytes=3 * of_one)
    ask(small, *(f"<source>{words(n)}</source>\nWhat?" for n in (0, 1, 2)))
    learned = ask(small, f"<source>{words(0)}</source>\nWho?", f"<source>{words(3)}</source>\nWhat?")
    assert sorted(learned) == sorted(words(n) for n in (0, 2, 3)) and not small.is_stored(words(1))
    small.store.release([words(2)])  # it comes again among a request's documents, which have names
    small.generate(words(2), SHORT, documents={words(2): [("a.txt", "a.txt")]})
    ask(small, *(f"<source>{words(n)}</source>\nWhat?" for n in range(4, 9)))
    assert small.is_stored(words(2)), "it was ingested meanwhile"


def test_a_new_process_knows_what_was_used_longest_ago(learner: Learner, tmp_path: Path) -> None:
    prompts = [f"<source>{words(n)}</source>\nWhat?" for n in range(4)]
    first, models = learner(store=tmp_path), fake_models()
    ask(first, *prompts[:3])
    first.observers[-1].on_plan(first.plan(prompts[0]), None)  # type: ignore[arg-type]  # used, though it is not read
    of_one = first.store.stats().bytes // 3
    first.close()
    learned = ask(learner(3 * of_one, store=tmp_path, **models), prompts[3])
    assert sorted(learned) == sorted(words(n) for n in (0, 2, 3))


@pytest.mark.parametrize("is_named", [False, True])
def test_learned_texts_are_evicted_first(learner: Learner, tmp_path: Path, is_named: bool) -> None:
    """Unless another source has them, too."""
    engine = learner(store=tmp_path)
    engine.precompute([words(0)], source="a.txt")
    ask(engine, f"<source>{words(1)}</source>\nWhat?")
    if is_named:
        engine.texts.add_source(words(1), "c.txt")
    room = engine.store.stats().bytes
    assert ChunkStore.open(tmp_path).set_limit(room) == 0
    engine.precompute([words(2)], source="b.txt")
    assert engine.is_stored(words(1)) is is_named and engine.is_stored(words(2))
    assert is_named or engine.is_stored(words(0))


def test_nothing_is_computed_or_written_in_the_way_of_an_answer(learner: Learner) -> None:
    engine = learner()
    ask(engine, f"<source>{words(0)}</source>\nWhat?")
    assert {thread.name for thread in fake_of(engine).threads["encode"]} == {"cacheclip-idle"}


def test_a_question_soon_after_an_answer_does_not_wait_for_what_is_learned() -> None:
    with CacheClipEngine(**fake_models()) as engine:
        engine.observers.append(LearnedTexts(engine, quiet_s=0.5))
        for number in range(3):  # in less than the pause
            engine.generate(f"<source>{words(number)}</source>\nWhat?", SHORT)
            time.sleep(0.2)
            assert engine.texts.texts(LEARNED) == []
        assert engine.wait_for_observers(10) and len(engine.texts.texts(LEARNED)) == 3


@pytest.mark.parametrize("learned_bytes", [0, 2**20])
def test_a_server_learns_unless_it_must_not(learned_bytes: int) -> None:
    backend = TransformersBackend(EngineConfig(**fake_models()), learned_bytes=learned_bytes)
    engine = backend.engine("default")
    learned = ask(engine, f"<source>{words(0)}</source>\nWhat?")
    assert bool(learned) == bool(learned_bytes) == ("learned_texts_total 1" in backend.metrics())
    backend.close()


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_learns_although_its_parent_was_learning() -> None:
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS, words(0)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


FORKS = """
import os, sys, threading
from cacheclip_rag import CacheClipEngine
from cacheclip_serve import LearnedTexts
from cacheclip_testing import fake_models
engine, began, may_end = CacheClipEngine(**fake_models()), threading.Event(), threading.Event()
engine.observers.append(LearnedTexts(engine))
engine.when_idle(lambda: began.set() or may_end.wait())
assert began.wait(10)
if not (child := os.fork()):
    engine.unload()  # its weights are another process's
    engine.generate(f"<source>{sys.argv[1]}</source> What?", max_tokens=2)
    engine.wait_for_observers(10)
    os._exit(engine.texts.texts("cacheclip:learned") != [sys.argv[1]])
may_end.set()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
