"""Many passes at a time, or one alone."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cacheclip_rag.models.load import load_model


def run(*jobs: Callable[[], None]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


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
