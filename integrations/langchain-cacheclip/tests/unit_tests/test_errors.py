"""LangChain swallows no error of ours: it ends the call. A question that is cancelled leaves the queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from adapter_cases import FEW, OTHERS, OURS, in_loop, leaves_the_queue, raised
from cacheclip_testing import fake_models, fake_of
from langchain_cacheclip import CacheClipLLM as TextCacheClip, ChatCacheClip
from langchain_core.runnables import RunnableLambda, RunnableParallel


@pytest.fixture
def chat(tmp_path: Any) -> ChatCacheClip:
    return ChatCacheClip(**fake_models(), store=str(tmp_path / "store"), max_tokens=8)


def test_chains(chat: ChatCacheClip) -> None:
    chains = [
        chat,
        chat.with_fallbacks([chat]),
        chat.with_retry(stop_after_attempt=2, wait_exponential_jitter=False),
        RunnableParallel(one=chat, two=RunnableLambda(len)),
        TextCacheClip.from_engine(chat.engine),
    ]
    for chain in chains:
        for error in (*OURS, *OTHERS) if chain is chat else FEW:
            fake_of(chat.engine).error = error
            raised(error, lambda chain=chain: chain.invoke("How many?"))
            raised(error, in_loop(lambda chain=chain: chain.ainvoke("How many?")))
            raised(error, lambda chain=chain: [*chain.stream("How many?")])
            raised(error, lambda chain=chain: chain.batch(["How many?"]))


async def asked(model: Any) -> None:
    await model.ainvoke("What?")


async def streamed(model: Any) -> None:
    async for _ in model.astream("What?"):
        pass


@pytest.mark.parametrize(
    ("kind", "ask"),
    [(ChatCacheClip, asked), (ChatCacheClip, streamed), (TextCacheClip, asked)],
    ids=["chat", "chat stream", "text"],
)
async def test_it_leaves_the_queue(kind: Any, ask: Callable[[Any], Awaitable[Any]]) -> None:
    model = kind(**fake_models(), max_tokens=2)
    await leaves_the_queue(model, ask)
