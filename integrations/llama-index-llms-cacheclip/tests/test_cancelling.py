"""Questions that are cancelled while they wait for their turn, as by a server whose client hung up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from adapter_cases import leaves_the_queue
from cacheclip_testing import fake_models
from llama_index.llms.cacheclip import CacheClipLLM


async def streamed(model: Any) -> None:
    async for _ in await model.astream_complete("What?"):
        pass


@pytest.mark.parametrize("ask", [lambda model: model.acomplete("What?"), streamed], ids=["whole", "stream"])
async def test_it_leaves_the_queue(ask: Callable[[Any], Awaitable[Any]]) -> None:
    model = CacheClipLLM(**fake_models(), max_tokens=2)
    await leaves_the_queue(model, ask)
