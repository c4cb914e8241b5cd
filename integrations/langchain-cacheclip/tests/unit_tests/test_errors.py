"""LangChain swallows no error of ours: it ends the call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_cacheclip import CacheClipLLM as TextCacheClip, ChatCacheClip
from langchain_cacheclip.base import ContextTooLongError
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langgraph.prebuilt import ToolNode
from llama_index.core.bridge.pydantic import BaseModel, ValidationError

from cacheclip_rag import ConfigurationError, MissingExtraError, ModelError, PromptTooLongError
from cacheclip_rag.testing import fake_models, fake_of


class Town(BaseModel):
    name: str


def invalid() -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Town.model_validate({})
    return caught.value


OURS = [ConfigurationError("it failed"), ModelError("it failed"), MissingExtraError("a part", "structured")]
"""Errors of ours, of which the last is an ImportError too."""
OTHERS = [
    ValueError("half a character"),
    TypeError("no tensor"),
    invalid(),
    RuntimeError("no memory left"),
    KeyError("x"),
]
"""What libraries below may raise: jinja, tokenizers, torch, pydantic."""
FEW = [OURS[0], *OTHERS[:3]]
"""One of ours, and those that frameworks catch. All go through one component."""


@pytest.fixture
def chat(tmp_path: Any) -> ChatCacheClip:
    return ChatCacheClip(**fake_models(), store=str(tmp_path / "store"), max_tokens=8)


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


class TestLangChain:
    def test_chains(self, chat: ChatCacheClip) -> None:
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

    def test_tools_of_agents(self, chat: ChatCacheClip) -> None:
        """A tool that asks our model."""
        from langchain_core.messages import AIMessage
        from langchain_core.tools import tool
        from langgraph.graph import END, START, MessagesState, StateGraph

        @tool
        def berths(question: str) -> str:
            """How many berths there are."""
            return str(chat.invoke(question).content)

        graph = StateGraph(MessagesState)
        graph.add_node("tools", ToolNode([berths]))
        graph.add_edge(START, "tools")
        graph.add_edge("tools", END)
        call = AIMessage("", tool_calls=[{"name": "berths", "args": {"question": "How many?"}, "id": "1"}])
        for error in FEW:
            fake_of(chat.engine).error = error
            raised(error, lambda: graph.compile().invoke({"messages": [call]}))


def test_too_long_is_langchains_error_too(chat: ChatCacheClip) -> None:
    fake_of(chat.engine).error = PromptTooLongError("it failed")
    with pytest.raises(ContextTooLongError, match="it failed"):
        chat.invoke("How many?")
