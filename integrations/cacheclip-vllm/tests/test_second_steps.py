"""Loads of several passes, of which any step fails: a read, a forward pass, the write of a layer."""

from __future__ import annotations

from typing import Any

import pytest
from cacheclip_vllm.loading import Loaded
from cacheclip_vllm.passes import passes
from cacheclip_vllm.scheduling import Load
from store_steps import Steps, step_numbers
from vllm_worker import BLOCKS, Rows, Worker, Writer

from cacheclip_rag.store import StoreReader


def no_memory() -> RuntimeError:
    return RuntimeError("out of memory")


def failing(steps: Steps, patch: pytest.MonkeyPatch) -> None:
    for owner, name in ((StoreReader, "get"), (Rows, "run"), (Writer, "do_kv_cache_update")):
        original = getattr(owner, name)

        def called(*given: Any, _of: str = name, _run: Any = original, **options: Any) -> Any:
            steps.take(_of, no_memory)
            return _run(*given, **options)

        patch.setattr(owner, name, called)


def anew(worker: Worker) -> None:
    """Its paged cache is empty."""
    for layer in worker.layers.values():
        layer.kv_cache.fill_(float("nan"))
    worker.rows.runs.clear()


@pytest.mark.some(3)
@pytest.mark.parametrize("method", ["direct", "epic", "corrected"])
def test_a_load_ends_with_the_step_that_fails(made: dict[str, Any], method: str) -> None:
    worker = Worker(made, method, max_rows=60)
    assert method == "direct" or len(passes(worker.plan, 0, **worker.room)) > 2
    for number in step_numbers():
        anew(worker)
        steps = Steps(number)
        with pytest.MonkeyPatch.context() as patch:
            failing(steps, patch)
            worker.loader.load(Load("a", worker.block_ids, 0, worker.plan.num_ready, plan=worker.plan))
            ((load, found),) = worker.loader.work(10**6, waits=True)
        assert load.request_id == "a" and not worker.loader._queue
        if not steps.has_failed:
            assert number > 10 and isinstance(found, Loaded)
            worker.check()
            return
        after = [name for name in steps.taken[number + 1 :] if name != "get"]  # other reads are under way
        assert isinstance(found, RuntimeError) and not after, f"after step {number}, {steps.failed}: {after}"
        assert not any("do_kv_cache_update" in vars(layer.impl) for layer in worker.layers.values())
        anew(worker)
        worker.load()
        worker.check()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_others_go_on_after_a_pass_that_fails(
    made: dict[str, Any], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(made, "epic", max_rows=60)
    one = worker.block_ids
    other = tuple(sorted({*range(BLOCKS)} - {*one})[: len(one)])
    run = worker.rows.run

    def fail(requests: Any) -> None:
        if len(worker.rows.runs) == number:
            worker.rows.runs.append("failed")
            raise no_memory()
        run(requests)

    monkeypatch.setattr(worker.rows, "run", fail)
    for name, blocks in (("a", one), ("b", other)):
        worker.loader.load(Load(name, blocks, 0, worker.plan.num_ready, plan=worker.plan))
    found = {load.request_id: result for load, result in worker.loader.work(10**6, waits=True)}
    assert isinstance(found["a"], RuntimeError) and isinstance(found["b"], Loaded)
    worker.load()
    worker.check(0, (0, other))
