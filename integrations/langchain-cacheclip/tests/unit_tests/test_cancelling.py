"""Questions that are cancelled while they wait for their turn, as by a server whose client hung up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from adapter_cases import leaves_the_queue
from cacheclip_testing import fake_models
from langchain_cacheclip import CacheClipLLM, ChatCacheClip


async def asked(model: Any) -> None:
    await model.ainvoke("What?")


async def streamed(model: Any) -> None:
    async for _ in model.astream("What?"):
        pass


@pytest.mark.parametrize(
    ("kind", "ask"),
    [(ChatCacheClip, asked), (ChatCacheClip, streamed), (CacheClipLLM, asked)],
    ids=["chat", "chat stream", "text"],
)
async def test_it_leaves_the_queue(kind: Any, ask: Callable[[Any], Awaitable[Any]]) -> None:
    model = kind(**fake_models(), max_tokens=2)
    await leaves_the_queue(model, ask)
