"""Several questions at once: of as much work, first come, first token. Nobody waits for an answer that is not read, or
that failed."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fake_time import FakeTime

from cacheclip_rag import Answer, CacheClipEngine, SamplingParams
from cacheclip_rag.adapters.aio import iterate_in_thread
from cacheclip_rag.answering.prefill import Prefilling
from cacheclip_rag.answering.turns import CallerLeft, Turns, Waiter, turns_of
from cacheclip_rag.base import clock
from cacheclip_rag.guards import Observer
from cacheclip_rag.methods import preset
from tests.answering.test_turns import WAIT_S, Threads, until
from tests.conftest import Patch, rag_prompt, spied
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
    engine: CacheClipEngine, chunks: list[str], monkeypatch: Patch
) -> None:
    """By tokens to compute: a long prompt whose KV is held is a short one."""
    threads = Threads()
    prompts = [[{"role": "user", "content": " ".join(texts)}] for texts in (chunks[::-1], chunks * 3)]
    engine.generate(prompts[1], PARAMS, method="prefix")
    read = spied(monkeypatch, Prefilling, "run")
    with turns_of(engine.primary).prompt():
        for number, prompt in enumerate(prompts, 2):
            threads.start(partial(engine.generate, prompt, PARAMS, method="prefix"))
            until(lambda number=number: waiting(engine) == number)  # type: ignore[misc]
    threads.join()
    first, second = (plan.layout.num_tokens for _, plan in read)
    assert first > 2 * second, "the long one is the first"


LONG = [{"role": "user", "content": "The harbour is deep. " * 60}]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("known", ["", "The harbour is deep. " * 30], ids=["nothing", "a beginning"])
def test_slices_of_a_long_prompt(engine: CacheClipEngine, known: str, behind: bool, monkeypatch: Patch) -> None:
    """Of a caller who may leave: the same KV and logits, up to rounding."""
    monkeypatch.setattr("cacheclip_rag.answering.prefill._SLICE_TOKENS", {"cpu": 96})
    whole = engine.generate(LONG, PARAMS, method="full", logprobs=5)
    engine.prefixes.clear()
    if known:
        engine.generate([{"role": "user", "content": known}], PARAMS, method="prefix")
    calls = spied(monkeypatch, type(engine.primary), "extend")
    with Waiter(in_background=behind).asking():
        answer = engine.generate(LONG, PARAMS, method="prefix", logprobs=5)
    passes = [len(ids) for _, _, ids, _ in calls]
    most = 36 if behind else 144
    cached = answer.stats.cached_prefix_tokens
    computed = answer.stats.prompt_tokens - cached
    assert len(passes) >= 3 and most / 3 < max(passes) <= most and bool(known) == (cached > 0)
    assert sum(passes) == computed if known else 0 < computed - sum(passes) <= most
    assert answer.token_ids == whole.token_ids
    for one, other in zip(answer.logprobs or (), whole.logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_an_answer_goes_on_between_slices(engine: CacheClipEngine, monkeypatch: Patch) -> None:
    """Its tokens, and those of a short question that comes, do not wait for the whole of a long prompt."""
    monkeypatch.setattr("cacheclip_rag.answering.prefill._SLICE_TOKENS", {"cpu": 64})
    monkeypatch.setattr(engine.primary, "eos_ids", frozenset())
    threads, order, reached, go_on = Threads(), list[str](), threading.Event(), threading.Event()
    running = engine.stream([{"role": "user", "content": "Go on."}], SamplingParams(max_tokens=200), method="prefix")
    next(running)

    def held(*_: Any, **__: Any) -> None:
        order.append("slice")
        reached.set()
        assert go_on.wait(WAIT_S)
        if order.count("slice") == 4:  # in the long prompt's turn: both have had theirs
            until(lambda: {"short", "token"} <= {*order})

    def ask(name: str, prompt: Any) -> None:
        next(engine.stream(prompt, PARAMS, method="prefix"))
        order.append(name)

    spied(monkeypatch, type(engine.primary), "extend", held)
    threads.start(lambda: ask("long", LONG))
    assert reached.wait(WAIT_S)
    threads.start(lambda: ask("short", [{"role": "user", "content": "How?"}]))
    until(lambda: waiting(engine) == 2)
    threads.start(lambda: order.extend("token" for _ in running))
    until(lambda: turns_of(engine.primary)._waiting == 1)
    go_on.set()
    threads.join()
    assert order.count("slice") > 4


def test_work_of_an_unsure_prompt_is_that_of_both_passes(
    engine: CacheClipEngine, chunks: list[str], monkeypatch: Patch
) -> None:
    """It is never counted backwards, so that who comes meanwhile does not pass those who came before."""
    monkeypatch.setattr("cacheclip_rag.answering.prefill._SLICE_TOKENS", {"cpu": 48})
    engine.precompute(chunks)
    method, turns = replace(preset("cacheclip"), min_confidence=1.0), turns_of(engine.primary)
    fused, plain = (spied(monkeypatch, type(engine.primary), name) for name in ("run_slots", "prefill"))
    before, counted, pause = turns._work, list[int](), Turns._pause

    def paused(self: Turns, mine: Any, done: int, work: int) -> None:
        pause(self, mine, done, work)
        counted.append(self._work - before)
        assert done < work

    monkeypatch.setattr(Turns, "_pause", paused)
    with Waiter().asking():
        stats = engine.generate(rag_prompt(chunks), SamplingParams(max_tokens=1), method=method).stats
    computed = sum(len(ids) for _, _, ids, _ in fused) + sum(len(ids) for _, ids, _ in plain)
    assert stats.gated and counted == sorted(counted) and len({*counted}) > 6
    assert turns._work - before == computed and computed - stats.prompt_tokens in counted, "between the passes, too"


def test_a_fused_prompt_lets_others_go_first(engine: CacheClipEngine, chunks: list[str], monkeypatch: Patch) -> None:
    """A short question that comes while its first slice is computed has its first token before the second one."""
    monkeypatch.setattr("cacheclip_rag.answering.prefill._SLICE_TOKENS", {"cpu": 48})
    engine.precompute(chunks)
    threads, order, run_slots = Threads(), list[str](), type(engine.primary).run_slots

    def short() -> None:
        next(engine.stream([{"role": "user", "content": "How?"}], PARAMS, method="full"))
        order.append("short")

    def held(self: Any, cache: Any, ids: Any, slots: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            if not order:
                threads.start(short)
                until(lambda: waiting(engine) == 2)
            else:  # in this prompt's turn: the other one has had its own
                until(lambda: "short" in order)
            order.append("slice")
        return run_slots(self, cache, ids, slots, **options)

    monkeypatch.setattr(type(engine.primary), "run_slots", held)
    with Waiter().asking():
        answer = engine.generate(asked(engine, 1, chunks), PARAMS, method="epic", recompute_ratio=0.3)
    threads.join()
    assert order[:3] == ["slice", "short", "slice"] and answer.stats.hits and answer.stats.queued_s > 0


def test_who_leaves_while_a_long_prompt_is_read(engine: CacheClipEngine, monkeypatch: Patch) -> None:
    monkeypatch.setattr("cacheclip_rag.answering.prefill._SLICE_TOKENS", {"cpu": 64})
    caller = Waiter()
    passes = spied(monkeypatch, type(engine.primary), "extend", lambda *_, **__: caller.leave())
    with caller.asking(), pytest.raises(CallerLeft):
        engine.generate(LONG, PARAMS, method="prefix")
    assert len(passes) == 1 and turns_of(engine.primary).is_idle


def test_the_time_in_the_queue(engine: CacheClipEngine, chunks: list[str], monkeypatch: Patch) -> None:
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


def test_who_raises_holds_up_nobody(engine: CacheClipEngine, chunks: list[str], monkeypatch: Patch) -> None:
    engine.precompute(chunks)
    failed: list[int] = []

    def fails(runtime: Any, plan: Any, *_: Any, **__: Any) -> None:
        if "number 1?" in runtime.decode_ids(plan.layout.token_ids):
            failed.append(1)
            raise ZeroDivisionError

    spied(monkeypatch, type(engine.primary), "fuse", fails)
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
    engine.precompute(chunks)
    answers, threads = list[Any](), Threads()

    class Asking(Observer):
        def on_plan(self, plan: Any, sources: Any) -> None:
            if not answers:
                answers.append(None)
                answers.append(engine.generate(asked(engine, 5, chunks), PARAMS))

    engine.observers.append(Asking())
    threads.start(lambda: engine.generate(asked(engine, 1, chunks), PARAMS))
    threads.join()
    assert answers[1].stats.hits == len(chunks)


def ask_async(engine: CacheClipEngine, number: int, chunks: list[str]) -> Any:
    """As both adapters ask: a thread for each answer."""
    return iterate_in_thread(lambda: engine.stream(asked(engine, number, chunks), PARAMS))


async def until_async(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_asynchronous_questions(engine: CacheClipEngine, chunks: list[str]) -> None:
    """One of them is given up at its first token."""
    engine.precompute(chunks)
    order, tasks = list[int](), list[asyncio.Task[None]]()

    async def ask(number: int) -> None:
        stream = ask_async(engine, number, chunks)
        async for _ in stream:
            order.append(number)
            if number == 1:
                break
        await stream.aclose()

    with turns_of(engine.primary).prompt():
        for number in range(4):
            tasks.append(asyncio.create_task(ask(number)))
            await until_async(lambda number=number: waiting(engine) == number + 2)  # type: ignore[misc]
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert sorted({*order}) == [0, 1, 2, 3] and order.count(1) == 1


async def test_who_leaves_while_it_waits_is_not_answered(
    engine: CacheClipEngine, chunks: list[str], monkeypatch: Patch
) -> None:
    """Cancelled, as by a server whose client hung up. Its thread ends at once, and those behind it move up."""
    engine.precompute(chunks)
    calls, tasks = spied(monkeypatch, type(engine.primary), "fuse"), list[asyncio.Task[int]]()

    async def ask(number: int) -> int:
        return len([event async for event in ask_async(engine, number, chunks)])

    with turns_of(engine.primary).prompt():  # the loop's thread computes
        for number in range(3):
            tasks.append(asyncio.create_task(ask(number)))
            await until_async(lambda number=number: waiting(engine) == number + 2)  # type: ignore[misc]
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        await until_async(lambda: waiting(engine) <= 3)
        assert waiting(engine) == 3 and not calls
    assert all(await asyncio.wait_for(asyncio.gather(tasks[0], tasks[2]), 60))
    fused = [engine.primary.decode_ids(plan.layout.token_ids) for _, plan, *_ in calls]
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
    """Holds every answer at its second token, until it is opened."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.waiting, self.opened = list[object](), threading.Event()

        def gated(turns: Any, _: Any, state: Any, *__: Any) -> None:
            self.waiting.append(state)
            assert self.opened.wait(2 * WAIT_S), "nobody opens"

        spied(monkeypatch, Turns, "step", gated)


def says(engine: CacheClipEngine, text: str, monkeypatch: Patch) -> None:
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
    "with a schema": ("a", {"stop": NEVER, "json_schema": {"type": "object"}}),
    "with tools": ("\n", {"tools": [SEARCH]}),
}


@pytest.mark.parametrize("kind", HELD_BACK)
def test_text_that_is_held_back_holds_up_nobody(
    engine: CacheClipEngine, tool_model: str, chunks: list[str], kind: str, monkeypatch: Patch
) -> None:
    text, options = HELD_BACK[kind]
    if {"json_schema", "tools"} & {*options}:
        own: Any = {"primary": tool_model, "auxiliary": None, "method": "direct", "chunk_context": "prefix"}
        engine = CacheClipEngine(**own, min_confidence=0.0)  # else such answers are gated
    engine.precompute(chunks)
    says(engine, text, monkeypatch)
    gate, threads, events = Gate(monkeypatch), Threads(), list[Any]()
    threads.start(lambda: events.extend([*engine.stream(asked(engine, 1, chunks), max_tokens=4, **options)]))
    try:
        until(lambda: len(gate.waiting) == 1)
        threads.start(lambda: events.append(engine.generate(asked(engine, 2, chunks), max_tokens=1)))
        until(lambda: bool(events))
    finally:
        gate.opened.set()
        threads.join()
    other, *own = events
    assert len(other.token_ids) == 1 and len(own[-1].answer.token_ids) > 1
    assert own[0].text == "" and own[0].answer is None


def test_who_leaves_while_text_is_held_back_has_no_token_more(
    engine: CacheClipEngine, chunks: list[str], monkeypatch: Patch
) -> None:
    says(engine, "a", monkeypatch)
    steps = spied(monkeypatch, engine.primary, "decode_step")
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
    engine: CacheClipEngine, chunks: list[str], finish: str, tool_model: str, monkeypatch: Patch
) -> None:
    """Samplers, penalties, stop strings, schemas and lengths side by side, and one caller who leaves."""
    options: dict[str, Any] = {"primary": tool_model, "prefix_cache_bytes": 0}  # no answer continues another one's KV
    options["min_confidence"] = 1e-12  # a gate below which no token is
    engine = CacheClipEngine(replace(engine.config, **options))
    engine.precompute(chunks)
    params = [SamplingParams(**{"max_tokens": 24, **kind}) for kind in KINDS]
    params = [each for each in params if finish == "none" or not each.json_schema]
    alone, together = dict[int, tuple[int, ...]](), dict[int, tuple[int, ...]]()

    def ask(number: int, into: dict[int, tuple[int, ...]]) -> None:
        *_, last = engine.stream(asked(engine, number, chunks), params[number], finish=finish)
        into[number] = last.answer.token_ids

    def leave() -> None:
        events = engine.stream(asked(engine, 0, chunks), params[0], finish=finish)
        next(events)
        events.close()

    for number in range(len(params)):
        ask(number, alone)
    threads, batches = Threads(), spied(monkeypatch, engine.primary, "decode_steps")
    with turns_of(engine.primary).prompt():
        for number in range(len(params)):
            threads.start(partial(ask, number, together))
        threads.start(leave)
    threads.join()
    assert together == alone and max(len(states) for states, *_ in batches) > 2
