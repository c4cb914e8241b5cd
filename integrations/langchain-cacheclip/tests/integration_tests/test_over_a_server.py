"""Both models over a server of cacheclip-serve: the same answers and metadata as with the model here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from cacheclip_testing.plugin import CACHECLIP, CHUNKS, rag_prompt
from langchain_cacheclip import ChatCacheClip
from pydantic import BaseModel

from cacheclip_rag import EngineConfig
from cacheclip_rag.answering.turns import turns_of

serve_cases = pytest.importorskip("serve_cases", reason="cacheclip-serve is not installed")
PROMPT = rag_prompt(CHUNKS)


@pytest.fixture(scope="module")
def server(tool_model: str, tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with the chunks stored."""
    store = str(tmp_path_factory.mktemp("server") / "store")
    config = EngineConfig(primary=tool_model, auxiliary=tiny_models["auxiliary"], store=store, **CACHECLIP)  # type: ignore[arg-type]
    with serve_cases.running(config) as found:
        found.engine.precompute(CHUNKS)
        yield found


@pytest.fixture
def own(server: Any) -> dict[str, Any]:
    """Settings of a model that the server answers for."""
    return {"base_url": server.url, "max_tokens": 12}


def test_the_same_metadata(server: Any, own: dict[str, Any]) -> None:
    there, here = ChatCacheClip(**own), ChatCacheClip.from_engine(server.engine, max_tokens=12)
    server.engine.prefixes.clear()
    said = there.invoke(PROMPT)
    server.engine.prefixes.clear()  # the same prompt would continue the KV of the answer before
    same = here.invoke(PROMPT)
    assert set(said.response_metadata) == set(same.response_metadata)
    assert said.usage_metadata == same.usage_metadata
    assert said.response_metadata["model_name"] == serve_cases.NAME


class Year(BaseModel):
    """A year."""

    year: int


def search(words: str) -> str:
    """Look words up."""
    return words


def test_calls_and_structures(own: dict[str, Any]) -> None:
    llm = ChatCacheClip(**{**own, "max_tokens": 200})
    bound = llm.bind_tools([search], tool_choice="any")
    message: Any = bound.invoke(PROMPT)
    (call,) = message.tool_calls
    assert call["name"] == "search" and call["id"] and isinstance(call["args"]["words"], str)
    parts: list[Any] = list(bound.stream(PROMPT))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [("search", call["args"])]
    assert isinstance(llm.with_structured_output(Year).invoke("Which year?"), Year)


async def test_a_cancelled_call_leaves(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in a thread, which notices at the server's next sign of life."""
    monkeypatch.setattr("cacheclip_serve.sending._PING_S", 0.1)
    queue = server.server.app._queue
    llm = ChatCacheClip(base_url=server.url, max_tokens=2)
    with turns_of(server.engine.primary).prompt():
        task = asyncio.create_task(llm.ainvoke("What?"))
        await asyncio.to_thread(serve_cases.until, lambda: queue.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(serve_cases.until, lambda: queue.running == 0)
