"""The model over a server of cacheclip-serve: the same answers and metadata as with the model here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.cacheclip import CacheClipLLM
from pydantic import BaseModel

from cacheclip_rag import EngineConfig
from cacheclip_rag.testing.plugin import CACHECLIP, CHUNKS, rag_prompt

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


class Year(BaseModel):
    """A year."""

    year: int


def search(words: str) -> str:
    """Look words up."""
    return words


def test_metadata(server: Any, own: dict[str, Any]) -> None:
    found = CacheClipLLM(**own).metadata
    assert found.context_window == server.engine.primary.context_tokens
    assert found.model_name == serve_cases.NAME and found.is_function_calling_model


def test_all_calls(own: dict[str, Any]) -> None:
    llm = CacheClipLLM(**own)
    text = llm.complete(PROMPT).text
    messages = [ChatMessage(role="user", content=PROMPT)]
    assert llm.chat(messages).message.content == text
    assert [each.text for each in llm.stream_complete(PROMPT)][-1] == text
    last = list(llm.stream_chat(messages))[-1]
    assert last.message.content == text
    assert last.raw["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_asynchronously(own: dict[str, Any]) -> None:
    llm = CacheClipLLM(**own)
    text = (await llm.acomplete(PROMPT)).text
    assert text == llm.complete(PROMPT).text
    assert [each.text async for each in await llm.astream_complete(PROMPT)][-1] == text


def test_tools(own: dict[str, Any]) -> None:
    llm = CacheClipLLM(**{**own, "max_tokens": 200})
    said = llm.chat_with_tools([FunctionTool.from_defaults(search)], user_msg=PROMPT, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(said)
    assert call.tool_name == "search"


def test_structured_output(own: dict[str, Any]) -> None:
    llm = CacheClipLLM(**{**own, "max_tokens": 200})
    assert isinstance(llm.structured_predict(Year, PromptTemplate("Which year?")), Year)
