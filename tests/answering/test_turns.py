"""Turns: prompts by their work and alone, tokens between them and their slices, nothing held by who gives up."""

import gc
import random
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch

from cacheclip_rag.answering.turns import CallerLeft, Turns, Waiter, turns_of
from tests.conftest import Patch, raising

WAIT_S = 30.0


class Threads:
    """Threads of a test, whose errors fail it."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a thread waits forever"
        assert not self.errors, self.errors


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)


def ask(turns: Turns, threads: Threads, order: list[str], *prompts: tuple[str, int]) -> None:
    """Prompts that come while another one has its turn: names and tokens."""

    def work(name: str, tokens: int) -> None:
        with turns.prompt(lambda: tokens):
            order.append(name)

    for prompt in prompts:
        before = len(turns._prompts)
        threads.start(partial(work, *prompt))
        until(lambda before=before: len(turns._prompts) == before + 1)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("prompts", "order"),
    [
        ([(f"{number}", 0) for number in range(8)], "0 1 2 3 4 5 6 7"),
        ([("long", 900), ("short", 20), ("shorter", 10), ("again", 20)], "shorter short again long"),
    ],
)
def test_prompts_come_in_order_but_short_ones_pass_long_ones(prompts: list[tuple[str, int]], order: str) -> None:
    turns, came, threads = Turns(), list[str](), Threads()
    with turns.prompt():
        ask(turns, threads, came, *prompts)
        assert not came
    threads.join()
    assert came == order.split()


def test_no_more_work_passes_a_long_prompt_than_it_is_itself() -> None:
    """Of short prompts, each of which comes when the one before has its turn."""
    turns, order, threads = Turns(), list[str](), Threads()

    def short(number: int) -> None:
        with turns.prompt(lambda: 10):
            order.append("short")
            if number < 50:
                before = len(turns._prompts)
                threads.start(lambda: short(number + 1))
                until(lambda: len(turns._prompts) > before)

    with turns.prompt():
        ask(turns, threads, order, ("long", 95))
        threads.start(lambda: short(1))
        until(lambda: len(turns._prompts) == 3)
    until(lambda: len(order) == 51)
    threads.join()
    assert order.index("long") == 10


def test_between_two_slices_others_go_first() -> None:
    turns, order, threads = Turns(), list[str](), Threads()

    def token() -> None:
        with turns.token():
            order.append("token")

    with turns.answer(), turns.answer(), turns.prompt() as pause:
        assert pause is not None
        pause(10, 100)
        ask(turns, threads, order, ("longer", 200), ("as long", 90), ("short", 20))
        threads.start(token)
        until(lambda: turns._waiting == 1)
        pause(20, 100)
        order.append("slice")
        ask(turns, threads, order, ("short", 20))
        pause(80, 100)
        order.append("slice")
    threads.join()
    assert order == ["token", "short", "slice", "short", "slice", "as long", "longer"]
    assert (turns._waiting, turns._invited, turns._prompts) == (0, 0, [])


def test_users_go_before_what_has_begun_in_the_background() -> None:
    turns, order, threads = Turns(), list[str](), Threads()
    with Waiter(in_background=True).asking(), turns.prompt() as pause:
        assert pause is not None
        ask(turns, threads, order, ("far longer", 900))
        pause(10, 100)
        order.append("slice")
    threads.join()
    assert order == ["far longer", "slice"]


def test_who_is_alone_has_no_slices() -> None:
    turns = Turns()
    with turns.answer(), turns.prompt() as pause:
        assert pause is None
        with turns.prompt() as inner:
            assert inner is None
    with Waiter().asking(), turns.answer(), turns.prompt() as pause:
        assert pause is not None, "the caller may leave"
        with turns.prompt() as inner:
            assert inner is None, "an observer's question is not cut: the prompt around it waits"


def take(turns: Turns, kind: str) -> None:
    with getattr(turns, kind)():
        pass


def test_who_leaves_between_two_slices_holds_up_nobody() -> None:
    turns, caller = Turns(), Waiter()
    with caller.asking(), turns.prompt() as pause:
        assert pause is not None
        pause(1, 2)
        caller.leave()
        with pytest.raises(CallerLeft):
            pause(2, 3)
    for kind in ("prompt", "token"):
        take(turns, kind)
    assert (turns._waiting, turns._invited, turns._prompts, turns.is_idle) == (0, 0, [], True)


def test_a_waiting_answer_gets_one_token_between_two_prompts() -> None:
    turns, order, threads = Turns(), list[str](), Threads()

    def answer() -> None:
        for _ in range(3):
            with turns.token():
                order.append("token")

    with turns.prompt():
        ask(turns, threads, order, ("first", 0), ("second", 0))
        threads.start(answer)
        until(lambda: turns._waiting == 1)
    threads.join()
    assert order.index("token") < order.index("first") < order.index("second") and order.count("token") == 3


def test_tokens_of_several_answers_side_by_side() -> None:
    turns, threads, together = Turns(), Threads(), threading.Barrier(3)

    def answer() -> None:
        with turns.token():
            together.wait(WAIT_S)

    for _ in range(3):
        threads.start(answer)
    threads.join()


def test_a_thread_with_a_turn_takes_another_one() -> None:
    """As of an observer that asks something itself."""
    turns, threads = Turns(), Threads()
    for outer in ("prompt", "token"):
        with getattr(turns, outer)():
            threads.start(lambda: take(turns, "prompt"))
            until(lambda outer=outer: len(turns._prompts) == 1 + (outer == "prompt"))  # type: ignore[misc]
            take(turns, "prompt")
            take(turns, "token")
        threads.join()


@pytest.mark.parametrize("kind", ["prompt", "token"])
def test_an_error_ends_the_turn(kind: str) -> None:
    turns, threads = Turns(), Threads()
    with pytest.raises(ZeroDivisionError), getattr(turns, kind)():
        raise ZeroDivisionError
    for name in ("prompt", "token", "prompt"):
        threads.start(partial(take, turns, name))
        threads.join()


@pytest.mark.parametrize("kind", ["prompt", "token"])
def test_who_is_interrupted_while_it_waits_holds_up_nobody(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, threads = Turns(), Threads()
    with turns.prompt():
        with monkeypatch.context() as patch:
            patch.setattr(turns._changed, "wait_for", raising(KeyboardInterrupt()))
            threads.start(partial(take, turns, kind)).join(WAIT_S)
        assert [type(error) for error in threads.errors] == [KeyboardInterrupt]
        threads.errors.clear()
    for name in ("prompt", "token"):
        take(turns, name)
    assert (turns._waiting, turns._invited, len(turns._prompts)) == (0, 0, 0)


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads are switched often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_many_at_once(switching: None) -> None:
    """Prompts alone and in order, and all come to an end."""
    turns, threads, lock = Turns(), Threads(), threading.Lock()
    running, counted = list[str](), Counter[str]()

    def work(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(60):
            kind = choice.choice(("prompt", "token", "token"))
            with getattr(turns, kind)():
                with lock:
                    assert kind == "token" or not running, "a prompt has its turn alone"
                    assert "prompt" not in running
                    running.append(kind)
                    counted[kind] += 1
                if choice.random() < 0.1:
                    time.sleep(0.0005)
                with lock:
                    running.remove(kind)

    for seed in range(8):
        threads.start(partial(work, seed))
    threads.join()
    assert counted.total() == 8 * 60 and min(counted.values()) > 50
    assert (turns._waiting, turns._invited, turns._tokens, len(turns._prompts)) == (0, 0, 0, 0)


class Steps:
    """A runtime of which only steps are asked: the logits of a token are the token, and a state is its tokens."""

    def __init__(self) -> None:
        self.passes: list[int] = []
        """Number of states of each pass."""
        self.fails: int | None = None
        """A token with which every pass fails."""
        self.before: Callable[[], None] = lambda: None

    def decode_steps(self, states: list[list[int]], token_ids: list[int]) -> list[torch.Tensor]:
        self.before()
        self.passes.append(len(states))
        if self.fails in token_ids:
            raise MemoryError
        for state, token_id in zip(states, token_ids, strict=True):
            state.append(token_id)
        return [torch.tensor(token_id) for token_id in token_ids]

    def decode_step(self, state: list[int], token_id: int) -> torch.Tensor:
        return self.decode_steps([state], [token_id])[0]


def step(turns: Turns, runtime: Steps, state: list[int], token_id: int) -> None:
    assert int(turns.step(cast(Any, runtime), state, token_id)) == token_id


def test_an_answer_alone_has_passes_of_its_own() -> None:
    turns, runtime, state = Turns(), Steps(), list[int]()
    with turns.answer():
        step(turns, runtime, state, 7)
    with turns.answer(), turns.answer(), turns.prompt():
        step(turns, runtime, state, 8)  # its first token, in the prompt's turn
    assert (state, runtime.passes) == ([7, 8], [1, 1])


@pytest.mark.parametrize(
    ("fails", "states", "passes"), [(None, [[0], [1], [2], [3]], [4]), (2, [[0], [1], [], [3]], [4, 1, 1, 1, 1])]
)
def test_who_waits_shares_the_next_pass(fails: int | None, states: list[list[int]], passes: list[int]) -> None:
    """An error is of the answer that made it."""
    turns, runtime, threads = Turns(), Steps(), Threads()
    runtime.fails = fails
    own, failed = [list[int]() for _ in range(4)], list[int]()

    def answer(number: int) -> None:
        with turns.answer():
            until(lambda: turns._answers == len(own) + 1)
            try:
                step(turns, runtime, own[number], number)
            except MemoryError:
                failed.append(number)

    with turns.answer(), turns.prompt():
        for number in range(len(own)):
            threads.start(partial(answer, number))
        until(lambda: len(turns._asked) == len(own))
    threads.join()
    assert (own, failed, runtime.passes) == (states, [] if fails is None else [fails], passes)


def test_answers_do_not_fall_into_groups_that_take_turns() -> None:
    """After a pass of one answer, those that asked meanwhile wait a little for it."""
    turns, runtime, threads = Turns(), Steps(), Threads()
    turns._pass_s = 10 * WAIT_S  # a little is as long as it takes
    first, second = list[int](), list[int]()
    turns._last = {id(first)}
    with turns.answer(), turns.answer():
        threads.start(lambda: step(turns, runtime, second, 2))
        until(lambda: turns._is_stepping and turns._tokens == 1)
        step(turns, runtime, first, 1)
    threads.join()
    assert (first, second, runtime.passes) == ([1], [2], [2])


def test_an_interrupted_pass_leaves_the_others_to_the_next_thread() -> None:
    turns, runtime, threads = Turns(), Steps(), Threads()
    state = list[int]()

    def interrupt() -> None:
        runtime.before = lambda: None
        raise KeyboardInterrupt

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            step(turns, runtime, [], 4)

    runtime.before = interrupt
    with turns.answer(), turns.answer():
        with turns.prompt():
            threads.start(interrupted)
            until(lambda: turns._is_stepping)
            threads.start(lambda: step(turns, runtime, state, 5))
            until(lambda: len(turns._asked) == 2)
        threads.join()
    assert state == [5] and (turns._tokens, turns._is_stepping) == (0, False)


def test_many_answers_with_prompts_between(switching: None) -> None:
    """Every answer gets its own tokens in their order, whoever computes them."""
    turns, runtime, threads = Turns(), Steps(), Threads()
    states = [list[int]() for _ in range(8)]

    def answer(seed: int) -> None:
        with turns.answer():
            take(turns, "prompt")
            for token in range(40):
                step(turns, runtime, states[seed], 100 * seed + token)

    for seed in range(8):
        threads.start(partial(answer, seed))
    threads.join()
    assert states == [[100 * seed + token for token in range(40)] for seed in range(8)]
    assert sum(runtime.passes) == 8 * 40
    assert (turns._asked, turns._tokens, turns._answers) == ([], 0, 0)


def test_turns_belong_to_a_model_and_go_with_it() -> None:
    """Also to one that has no place for what others would keep in it."""
    model, other = (type("Slotted", (), {"__slots__": ("__weakref__",)})() for _ in range(2))
    turns: list[Any] = [turns_of(each) for each in (model, other, model)]
    assert turns[0] is turns[2] is not turns[1]
    gone = weakref.ref(turns[0])
    del turns, model
    gc.collect()
    assert gone() is None


class LateSleeper:
    """A thread that waits in a queue, and wakes after all others, as the system may have it: for ``error``."""

    def __init__(
        self, turns: Turns, threads: Threads, wait: Callable[[], object], error: type[BaseException], monkeypatch: Patch
    ) -> None:
        self._changed, self._waits, self._error = turns._changed, turns._changed.wait_for, error
        self._sleeps, self._wakes, self._looked = threading.Event(), threading.Event(), 0
        monkeypatch.setattr(turns._changed, "wait_for", self._wait_for)

        def waiting() -> None:
            self._own = threading.get_ident()
            with pytest.raises(error):
                wait()

        self._own = 0
        self._thread = threads.start(waiting)
        assert self._sleeps.wait(WAIT_S)

    def leave(self) -> None:
        self._wakes.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def after_another_looked(self, work: Callable[[], object]) -> None:
        """Do something, and wait until another thread has looked whether its turn has come, and sleeps again."""
        before = self._looked
        work()
        until(lambda: self._looked > before)
        with self._changed:  # which it gives up when it sleeps
            pass

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        if threading.get_ident() != self._own:
            return self._waits(lambda: self._look(condition), timeout)
        if condition():
            return True
        self._sleeps.set()
        self._changed.release()
        self._wakes.wait(WAIT_S)
        self._changed.acquire()
        raise self._error

    def _look(self, condition: Callable[[], bool]) -> bool:
        self._looked += 1
        return condition()


@pytest.mark.parametrize("error", [CallerLeft, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("running", "leaves", "behind"),
    [
        ("token", "prompt", "prompt"),
        ("token", "prompt", "token"),
        ("token", "prompt", "idle"),
        ("prompt", "prompt", "prompt"),
        ("prompt", "prompt", "idle"),
        ("prompt", "token", "prompt"),
        ("prompt", "step", "step"),
    ],
)
def test_the_next_one_is_woken(
    running: str, leaves: str, behind: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, runtime, threads, came = Turns(), Steps(), Threads(), threading.Event()
    monkeypatch.setattr("tests.answering.test_turns.WAIT_S", 5.0)

    def wait(kind: str) -> None:
        if kind == "step":
            with turns.answer(), turns.answer():
                step(turns, runtime, [], 1)
        else:
            take(turns, kind)

    def wait_behind() -> None:
        wait(behind)
        came.set()

    held = getattr(turns, running)()
    held.__enter__()
    first = LateSleeper(turns, threads, lambda: wait(leaves), error, monkeypatch)
    first.after_another_looked(lambda: threads.start(wait_behind))
    first.after_another_looked(lambda: held.__exit__(None, None, None))
    assert not came.is_set(), "who leaves was before it"
    first.leave()
    threads.join()
    assert came.is_set() and turns.is_idle
