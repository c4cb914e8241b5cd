"""Questions that are cancelled while they wait for their turn, as by a server whose client hung up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from llama_index.llms.cacheclip import CacheClipLLM

from cacheclip_rag.answering.turns import turns_of
from cacheclip_rag.testing import fake_models, fake_of


async def streamed(model: Any) -> None:
    async for _ in await model.astream_complete("What?"):
        pass


@pytest.mark.parametrize("ask", [lambda model: model.acomplete("What?"), streamed], ids=["whole", "stream"])
async def test_it_leaves_the_queue(ask: Callable[[Any], Awaitable[Any]]) -> None:
    model = CacheClipLLM(**fake_models(), max_tokens=2)
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
