"""What tests of both frameworks' adapters need: errors that must not vanish, threads, processes, a README."""

import asyncio
import multiprocessing
import re
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing import fake_of
from pydantic import BaseModel, ValidationError

from cacheclip_rag import ConfigurationError, MissingExtraError, ModelError
from cacheclip_rag.answering.turns import turns_of
from cacheclip_rag.guards import Observer


class Town(BaseModel):
    name: str


def _invalid() -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Town.model_validate({})
    return caught.value


OURS = [ConfigurationError("it failed"), ModelError("it failed"), MissingExtraError("a part", "structured")]
"""Errors of ours, of which the last is an ImportError too."""
OTHERS = [
    ValueError("half a character"),
    TypeError("no tensor"),
    _invalid(),
    RuntimeError("no memory left"),
    KeyError("x"),
]
"""What libraries below may raise: jinja, tokenizers, torch, pydantic."""
FEW = [OURS[0], *OTHERS[:3]]
"""One of ours, and those that frameworks catch. All go through one component."""


def raised(error: Exception, call: Callable[[], Any]) -> None:
    """``call`` ends with this error, or with an error of ours that it caused."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    chain: list[BaseException | None] = [caught.value]
    while chain[-1] is not None:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    assert error in chain or any(str(error) in str(each) for each in chain if each is not None), caught.value


def in_loop(coroutine: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: asyncio.run(coroutine())


async def leaves_the_queue(model: Any, ask: Callable[[Any], Awaitable[Any]]) -> None:
    """A question that is cancelled while it waits is not asked; the next one is."""
    turns = turns_of(model.engine.primary)

    async def until(waiting: int) -> None:
        while len(turns._prompts) != waiting:
            await asyncio.sleep(0.001)

    with turns.prompt():
        task: asyncio.Task[Any] = asyncio.ensure_future(ask(model))  # type: ignore[assignment]
        await asyncio.wait_for(until(2), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(until(1), 30)
    assert not fake_of(model.engine).prompts, "nothing was prefilled"
    await ask(model)
    assert len(fake_of(model.engine).prompts) == 1


class Questions(Observer):
    """What scored the chunks of each answer."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def on_plan(self, plan: Any, sources: Any) -> None:
        self.asked.append(plan.question)


def join_workers(before: set[threading.Thread]) -> None:
    """Wait for the threads that were not there before."""
    for thread in set(threading.enumerate()) - before - {threading.current_thread()}:
        while thread.ident is None:  # it is being started, and cannot be joined yet
            time.sleep(0.001)
        thread.join(10.0)


def exit_code_of(program: Callable[[], object]) -> int | None:
    """Run a program in a process of its own, forked, because importing torch again takes seconds."""
    process = multiprocessing.get_context("fork").Process(target=program)
    process.start()
    process.join(60)
    return process.exitcode


def run_readme(folder: Path, models: dict[str, str], store: Path) -> None:
    """The program of a distribution's README, on tiny models."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for name, tiny in (
        ("Qwen/Qwen2.5-0.5B-Instruct", models["llama"]),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", models["auxiliary"]),
        ("my-store", str(store)),
    ):
        assert program.count(name) == 1
        program = program.replace(name, tiny)
    exec(program, {})
