"""Who leaves the queue wakes those who wait behind: nobody else does, if they woke first and went to sleep again."""

import threading
from collections.abc import Callable

import pytest

from cacheclip_rag.answering.turns import CallerLeft, Turns
from tests.answering.test_turns import WAIT_S, Steps, Threads, step, take, until


class LateSleeper:
    """A thread that waits in a queue, and wakes after all others, as the system may have it: for ``error``."""

    def __init__(
        self,
        turns: Turns,
        threads: Threads,
        wait: Callable[[], object],
        error: type[BaseException],
        monkeypatch: pytest.MonkeyPatch,
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
