"""Many passes at a time, or one alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers.model import Passes


def run(*jobs: Callable[[], None]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
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
            with passes.exclusive() if alone else passes.shared():
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
    for enter in (passes.shared, passes.exclusive):
        with pytest.raises(RuntimeError), enter():
            raise RuntimeError
    with passes.exclusive():
        pass


class TestModels:
    """Which models run one pass at a time: two threads answer, and either meet within a pass or never can."""

    @pytest.mark.parametrize(
        ("name", "meets"),
        # rotary modules that change their frequencies with the length of each pass, and one that does not
        [("llama-rope-dynamic", False), ("phi3-longrope", False), ("llama", True)],
    )
    def test_pinned_rotary_modules_have_each_pass_for_themselves(
        self, tiny_models: dict[str, str], name: str, meets: bool
    ) -> None:
        runtime = load_model(tiny_models[name])  # without an engine, whose prompts take turns
        ids = torch.arange(5, 25)
        barrier = threading.Barrier(2, timeout=30 if meets else 0.5)
        met = []

        def wait(*_: Any) -> None:
            try:
                barrier.wait()
                met.append(True)
            except threading.BrokenBarrierError:
                met.append(False)

        hook = runtime.model.register_forward_pre_hook(wait)
        try:
            run(*[lambda: runtime.prefill(ids, 32)] * 2)
        finally:
            hook.remove()
        assert met == [meets, meets]
