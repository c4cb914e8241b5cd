"""Several questions at once: of as much work, first come, first token. Nobody waits for an answer that is not read, or
that failed."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from fake_time import FakeTime

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.answering.prefill import Prefilling
from cacheclip_rag.answering.turns import CallerLeft, Turns, Waiter, turns_of
from cacheclip_rag.base import clock
from cacheclip_rag.fusion.answer import Answer
from tests.answering.test_turns import WAIT_S, Threads, until
from tests.conftest import rag_prompt
from tests.prompt.test_tools import SEARCH

PARAMS = SamplingParams(max_tokens=4)


def asked(engine: CacheClipEngine, number: int, chunks: list[str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": rag_prompt(chunks, f"Question number {number}?")}]


def waiting(engine: CacheClipEngine) -> int:
    return len(turns_of(engine.primary)._prompts)


def first_tokens(
    engine: CacheClipEngine, chunks: list[str], count: int = 4, **options: Any
) -> tuple[list[int], list[Answer]]:
    """Who got a first token, in order, when all asked while another prompt was computed; and all answers."""
    order: list[int] = []
    answers: list[Answer] = []
    threads = Threads()

    def ask(number: int) -> None:
        for count_, event in enumerate(engine.stream(asked(engine, number, chunks), PARAMS, **options)):
            if not count_:
                order.append(number)
            if event.answer is not None:
                answers.append(event.answer)

    with turns_of(engine.primary).prompt():
        for number in range(count):
            threads.start(lambda number=number: ask(number))  # type: ignore[misc]
            until(lambda number=number: waiting(engine) == number + 2)  # type: ignore[misc]
    threads.join()
    return order, answers


def test_first_come_first_token(engine: CacheClipEngine, chunks: list[str]) -> None:
    engine.precompute(chunks)
    alone = {n: engine.generate(asked(engine, n, chunks), PARAMS, method="prefix").token_ids for n in range(4)}
    order, answers = first_tokens(engine, chunks, method="prefix")
    assert order == [0, 1, 2, 3]
    assert {answer.token_ids for answer in answers} == {*alone.values()}


def test_a_short_question_passes_those_of_more_work(
    engine: CacheClipEngine, chunks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tokens to compute: a long prompt whose KV is held is a short one."""
    read, threads, run = list[int](), Threads(), Prefilling.run
    prompts = [[{"role": "user", "content": " ".join(texts)}] for texts in (chunks[::-1], chunks * 3)]
    engine.generate(prompts[1], PARAMS, method="prefix")

    def noted(self: Prefilling, plan: Any) -> Any:
        read.append(plan.layout.num_tokens)
        return run(self, plan)

    monkeypatch.setattr(Prefilling, "run", noted)
    with turns_of(engine.primary).prompt():
        for number, prompt in enumerate(prompts, 2):
            threads.start(lambda prompt=prompt: engine.generate(prompt, PARAMS, method="prefix"))  # type: ignore[misc]
            until(lambda number=number: waiting(engine) == number)  # type: ignore[misc]
    threads.join()
    assert read[0] > 2 * read[1], "the long one is the first"


LONG = [{"role": "user", "content": "The harbour is deep. " * 60}]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("known", ["", "The harbour is deep. " * 30], ids=["nothing", "a beginning"])
def test_slices_of_a_long_prompt(
    engine: CacheClipEngine, known: str, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a caller who may leave: the same KV and logits, up to rounding."""
    monkeypatch.setattr("cacheclip_rag.answering.prefill._SLICE_TOKENS", {"cpu": 96})
    passes, threads, found = list[int](), Threads(), list[Answer]()
    whole = engine.generate(LONG, PARAMS, method="full", logprobs=5)
    engine.prefixes.clear()
    if known:
        engine.generate([{"role": "user", "content": known}], PARAMS, method="prefix")
    extend = type(engine.primary).extend

    def counted(self: Any, state: Any, ids: Any, start: int, **options: Any) -> Any:
        passes.append(len(ids))
        return extend(self, state, ids, start, **options)

    def ask() -> None:
        with Waiter(in_background=behind).asking():
            found.append(engine.generate(LONG, PARAMS, method="prefix", logprobs=5))

    monkeypatch.setattr(type(engine.primary), "extend", counted)
    threads.start(ask)
    threads.join()
    computed = found[0].stats.prompt_tokens - found[0].stats.cached_prefix_tokens
    most = 36 if behind else 144
    assert (
        len(passes) >= 3 and most / 3 < max(passes) <= most and bool(known) == (found[0].stats.cached_prefix_tokens > 0)
    )
    assert sum(passes) == computed if known else 0 < computed - sum(passes) <= most
    assert found[0].token_ids == whole.token_ids
    for one, other in zip(found[0].logprobs or (), whole.logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_an_answer_goes_on_between_slices(engine: CacheClipEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens, and those of a short question that comes, do not wait for the whole of a long prompt."""
    monkeypatch.setattr("cacheclip_rag.answering.prefill._SLICE_TOKENS", {"cpu": 64})
    monkeypatch.setattr(engine.primary, "eos_ids", frozenset())
    threads, order, reached, go_on = Threads(), list[str](), threading.Event(), threading.Event()
    running = engine.stream([{"role": "user", "content": "Go on."}], SamplingParams(max_tokens=200), method="prefix")
    next(running)
    extend = type(engine.primary).extend

    def held(self: Any, state: Any, ids: Any, start: int, **options: Any) -> Any:
        order.append("slice")
        reached.set()
        assert go_on.wait(WAIT_S)
        if order.count("slice") == 4:  # in the long prompt's turn: both have had theirs
            until(lambda: {"short", "token"} <= {*order})
        return extend(self, state, ids, start, **options)

    def long() -> None:
        next(engine.stream(LONG, PARAMS, method="prefix"))
        order.append("long")

    def short() -> None:
        next(engine.stream([{"role": "user", "content": "How?"}], PARAMS, method="prefix"))
        order.append("short")

    def answer() -> None:
        for _ in running:
            order.append("token")

    monkeypatch.setattr(type(engine.primary), "extend", held)
    threads.start(long)
    assert reached.wait(WAIT_S)
    threads.start(short)
    until(lambda: waiting(engine) == 2)
    threads.start(answer)
    until(lambda: turns_of(engine.primary)._waiting == 1)
    go_on.set()
    threads.join()
    assert order.count("slice") > 4


def test_who_leaves_while_a_long_prompt_is_read(engine: CacheClipEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheclip_rag.answering.prefill._SLICE_TOKENS", {"cpu": 64})
    extend, caller, passes = type(engine.primary).extend, Waiter(), list[int]()

    def leaving(self: Any, state: Any, ids: Any, start: int, **options: Any) -> Any:
        passes.append(start)
        caller.leave()
        return extend(self, state, ids, start, **options)

    monkeypatch.setattr(type(engine.primary), "extend", leaving)
    with caller.asking(), pytest.raises(CallerLeft):
        engine.generate(LONG, PARAMS, method="prefix")
    assert len(passes) == 1 and turns_of(engine.primary).is_idle


def test_the_time_in_the_queue(engine: CacheClipEngine, chunks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still but for the seconds of the turns before."""
    engine.precompute(chunks)
    engine.generate(asked(engine, 0, chunks), PARAMS)
    time, threads, found = FakeTime(monkeypatch, clock), Threads(), list[Answer]()
    with turns_of(engine.primary).prompt():
        threads.start(lambda: found.append(engine.generate(asked(engine, 0, chunks), PARAMS)))
        until(lambda: waiting(engine) == 2)
        time.sleep(7.0)
    threads.join()
    found.append(engine.generate(asked(engine, 1, chunks), PARAMS))
    assert [(answer.stats.queued_s, answer.stats.ttft_s) for answer in found] == [(7.0, 7.0), (0.0, 0.0)]
    assert all(not any(answer.stats.phases_s.values()) for answer in found)


def test_who_raises_holds_up_nobody(
    engine: CacheClipEngine, chunks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.precompute(chunks)
    fuse = type(engine.primary).fuse
    failed: list[int] = []

    def fails(self: Any, plan: Any, *arguments: Any, **options: Any) -> Any:
        if "number 1?" in self.decode_ids(plan.layout.token_ids):
            failed.append(1)
            raise ZeroDivisionError
        return fuse(self, plan, *arguments, **options)

    monkeypatch.setattr(type(engine.primary), "fuse", fails)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        first_tokens(engine, chunks, 3)
    assert failed == [1]
    assert engine.generate(asked(engine, 0, chunks), PARAMS).token_ids and waiting(engine) == 0


def test_an_answer_that_nobody_reads_on_holds_up_nobody(engine: CacheClipEngine, chunks: list[str]) -> None:
    engine.precompute(chunks)
    left = engine.stream(asked(engine, 9, chunks), SamplingParams(max_tokens=50))
    next(left)
    assert sorted(first_tokens(engine, chunks)[0]) == [0, 1, 2, 3]
    left.close()
    assert sorted(first_tokens(engine, chunks, 2)[0]) == [0, 1]


def test_an_observer_may_ask_itself(engine: CacheClipEngine, chunks: list[str]) -> None:
    from cacheclip_rag.guards.base import Observer

    engine.precompute(chunks)
    found: list[Answer] = []

    class Asking(Observer):
        def on_plan(self, plan: Any, sources: Any) -> None:
            if not found:
                found.append(None)  # type: ignore[arg-type]
                found.append(engine.generate(asked(engine, 5, chunks), PARAMS))

    engine.observers.append(Asking())
    threads = Threads()
    threads.start(lambda: engine.generate(asked(engine, 1, chunks), PARAMS))
    threads.join()
    assert found[1].stats.hits == len(chunks)


def test_asynchronous_questions(engine: CacheClipEngine, chunks: list[str]) -> None:
    """As both adapters ask: a thread for each answer. One of them is given up at its first token."""
    from cacheclip_rag.adapters.aio import iterate_in_thread

    engine.precompute(chunks)
    order: list[int] = []

    async def ask(number: int) -> None:
        stream = iterate_in_thread(lambda: engine.stream(asked(engine, number, chunks), PARAMS))
        async for _ in stream:
            order.append(number)
            if number == 1:
                break
        await stream.aclose()

    async def all_of_them() -> None:
        held = threading.Event()
        holder = threading.Thread(target=hold, args=(held,))
        holder.start()
        until(lambda: waiting(engine) == 1)
        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(ask(number)))
            while waiting(engine) < number + 2:
                await asyncio.sleep(0.001)
        held.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        holder.join()

    def hold(held: threading.Event) -> None:
        with turns_of(engine.primary).prompt():
            held.wait(60)

    asyncio.run(all_of_them())
    assert sorted({*order}) == [0, 1, 2, 3] and order.count(1) == 1


def test_who_leaves_while_it_waits_is_not_answered(
    engine: CacheClipEngine, chunks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled, as by a server whose client hung up. Its thread ends at once, and those behind it move up."""
    from cacheclip_rag.adapters.aio import iterate_in_thread

    engine.precompute(chunks)
    fuse, fused = type(engine.primary).fuse, list[str]()

    def seen(self: Any, plan: Any, *arguments: Any, **options: Any) -> Any:
        fused.append(self.decode_ids(plan.layout.token_ids))
        return fuse(self, plan, *arguments, **options)

    monkeypatch.setattr(type(engine.primary), "fuse", seen)

    async def ask(number: int) -> int:
        events = iterate_in_thread(lambda: engine.stream(asked(engine, number, chunks), PARAMS))
        return len([event async for event in events])

    async def all_of_them() -> None:
        running = turns_of(engine.primary)
        tasks = []
        with running.prompt():  # the loop's thread computes
            for number in range(3):
                tasks.append(asyncio.create_task(ask(number)))
                while waiting(engine) < number + 2:
                    await asyncio.sleep(0.001)
            tasks[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[1]
            while waiting(engine) > 3:
                await asyncio.sleep(0.001)
            assert waiting(engine) == 3 and not fused
        assert all(await asyncio.wait_for(asyncio.gather(tasks[0], tasks[2]), 60))

    asyncio.run(all_of_them())
    assert ["number 0?" in fused[0], "number 2?" in fused[1], len(fused)] == [True, True, 2]
    until(lambda: waiting(engine) == 0)


def test_engines_that_share_weights_share_the_queue(engine: CacheClipEngine, chunks: list[str]) -> None:
    """Two tenants of one server."""
    other = CacheClipEngine(engine.config, namespace="another")
    order: list[str] = []
    threads = Threads()

    def ask(which: CacheClipEngine, name: str) -> None:
        next(which.stream(asked(which, 1, chunks), PARAMS))
        order.append(name)

    assert other.primary is engine.primary
    with turns_of(engine.primary).prompt():
        threads.start(lambda: ask(other, "other"))
        until(lambda: waiting(engine) == 2)
        threads.start(lambda: ask(engine, "own"))
        until(lambda: waiting(engine) == 3)
        assert not order
    threads.join()
    assert order == ["other", "own"] and waiting(other) == 0


class Gate:
    """Holds every answer at its second token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting = list[object]()
        """Their states."""
        self._opened, step = threading.Event(), Turns.step

        def gated(*given: Any) -> Any:
            self.waiting.append(given[2])
            assert self._opened.wait(2 * WAIT_S), "nobody opens"
            return step(*given)

        monkeypatch.setattr(Turns, "step", gated)

    def open(self) -> None:
        self._opened.set()


def says(engine: CacheClipEngine, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every token have this text."""
    for name in ("decode_ids", "decode_calls"):
        monkeypatch.setattr(engine.primary, name, lambda ids: text * len(ids))


NEVER = ("a" * 99,)
HELD_BACK: dict[str, tuple[str, dict[str, Any]]] = {
    "by a stop string": ("a", {"stop": NEVER}),
    "as a blank line": ("\n", {}),
    "as a part of a character": ("\ufffd", {}),
    "as the beginning of reasoning": ("<", {}),
    "as there is none": ("", {}),
    "until it is verified": ("a", {"stop": NEVER, "finish": "revise", "method": "direct"}),
}
HELD_BACK_TOO: dict[str, tuple[str, dict[str, Any]]] = {
    "with a schema": ("a", {"stop": NEVER, "json_schema": {"type": "object"}}),
    "with tools": ("\n", {"tools": [SEARCH]}),
}


@pytest.mark.some(2)
@pytest.mark.parametrize(("text", "options"), HELD_BACK.values(), ids=HELD_BACK)
def test_text_that_is_held_back_holds_up_nobody(
    engine: CacheClipEngine, chunks: list[str], text: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.precompute(chunks)
    says(engine, text, monkeypatch)
    gate, threads, events = Gate(monkeypatch), Threads(), list[Any]()
    threads.start(lambda: events.extend([*engine.stream(asked(engine, 1, chunks), max_tokens=4, **options)]))
    try:
        until(lambda: len(gate.waiting) == 1)
        threads.start(lambda: events.append(engine.generate(asked(engine, 2, chunks), max_tokens=1)))
        until(lambda: bool(events))
    finally:
        gate.open()
        threads.join()
    other, *own = events
    assert len(other.token_ids) == 1 and len(own[-1].answer.token_ids) > 1
    assert own[0].text == "" and own[0].answer is None


@pytest.mark.parametrize(("text", "options"), HELD_BACK_TOO.values(), ids=HELD_BACK_TOO)
def test_a_schema_or_a_call_holds_up_nobody(
    tool_model: str, chunks: list[str], text: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CacheClipEngine(primary=tool_model, auxiliary=None, method="direct", chunk_context="prefix", store=None)
    test_text_that_is_held_back_holds_up_nobody(engine, chunks, text, options, monkeypatch)


def test_who_leaves_while_text_is_held_back_has_no_token_more(
    engine: CacheClipEngine, chunks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(engine, "a", monkeypatch)
    steps, step = list[int](), engine.primary.decode_step
    monkeypatch.setattr(engine.primary, "decode_step", lambda *given: steps.append(given[1]) or step(*given))
    stream = engine.stream(asked(engine, 1, chunks), max_tokens=50, stop=NEVER)
    for count in range(3):
        assert next(stream).text == "" and len(steps) == count
    stream.close()
    assert len(steps) == 2


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 7},
    {"temperature": 1.5, "seed": 8, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"stop": ("e",)},
    {"json_schema": SCHEMA},
    {"max_tokens": 3},
]


@pytest.mark.some(3)
@pytest.mark.parametrize("finish", ["none", "verify", "revise"])
def test_answers_in_one_pass_are_those_alone(
    engine: CacheClipEngine, chunks: list[str], finish: str, tool_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samplers, penalties, stop strings, schemas and lengths side by side, and one caller who leaves."""
    engine = CacheClipEngine(
        replace(engine.config, primary=tool_model, prefix_cache_bytes=0)
    )  # no answer continues another one's KV
    engine.precompute(chunks)
    runtime, batches = engine.primary, list[int]()
    params = [SamplingParams(**{"max_tokens": 24, **kind}) for kind in KINDS]
    params = [each for each in params if finish == "none" or not each.json_schema]

    def ask(number: int) -> Any:
        return engine.stream(asked(engine, number, chunks), params[number], finish=finish)

    alone = {number: [*ask(number)][-1].answer.token_ids for number in range(len(params))}
    together, threads = dict[int, tuple[int, ...]](), Threads()
    step = runtime.decode_steps
    monkeypatch.setattr(runtime, "decode_steps", lambda *given: batches.append(len(given[0])) or step(*given))

    def work(number: int) -> None:
        together[number] = [*ask(number)][-1].answer.token_ids

    def leave() -> None:
        events = ask(0)
        next(events)
        events.close()

    with turns_of(runtime).prompt():
        for number in range(len(params)):
            threads.start(lambda number=number: work(number))  # type: ignore[misc]
        threads.start(leave)
    threads.join()
    assert together == alone and batches and max(batches) > 2
