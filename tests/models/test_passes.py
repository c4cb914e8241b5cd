"""Many passes at a time, or one alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from cacheclip_rag.runtime.transformers.passes import Passes


def run(*jobs: Callable[[], None]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_shared_passes_meet() -> None:
    passes, both = Passes(one_at_a_time=False), threading.Barrier(2, timeout=5)

    def job() -> None:
        with passes.shared():
            both.wait()

    run(job, job)


@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_one_alone_meets_nobody(one_at_a_time: bool) -> None:
    passes = Passes(one_at_a_time=one_at_a_time)
    inside, met = set[str](), []

    def job(name: str, alone: bool) -> None:
        for _ in range(30):
            with passes.alone() if alone else passes.shared():
                inside.add(name)
                for _ in range(3):
                    if (alone or one_at_a_time) and len(inside) > 1:
                        met.append(set(inside))
                    time.sleep(0.0003)
                inside.discard(name)

    run(*(lambda n=n: job(str(n), n % 2 == 0) for n in range(6)))  # type: ignore[misc]
    assert met == []


def test_an_error_ends_the_pass() -> None:
    passes = Passes(one_at_a_time=False)
    for enter in (passes.shared, passes.alone):
        with pytest.raises(RuntimeError), enter():
            raise RuntimeError
    with passes.alone():
        pass
