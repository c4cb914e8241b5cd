"""The adapters over a server: the same answers and metadata as with the model here."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from cacheclip_serve.access import Access
from langchain_cacheclip import CacheClipLLM as TextModel
from langchain_cacheclip import ChatCacheClip
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform
from pydantic import BaseModel

from cacheclip_rag.base.errors import ConfigurationError, PromptTooLongError, ServerError
from cacheclip_rag.config import EngineConfig
from cacheclip_rag.methods import preset
from tests.conftest import CHUNKS, rag_prompt
from tests.serving.conftest import NAME, Served, running

KEY, NORTH = "server-key-1", "north-key-11"
PROMPT = rag_prompt(CHUNKS)
MODELS: list[Any] = [ChatCacheClip, TextModel, CacheClipLLM]


class Year(BaseModel):
    """A year."""

    year: int


def search(words: str) -> str:
    """Look words up."""
    return words


@pytest.fixture(scope="module")
def server(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with keys, and with the chunks of its own tenant."""
    store = str(tmp_path_factory.mktemp("adapters") / "store")
    access = Access("default", KEY, {NORTH: ("north", "east")})
    with running(replace(config, store=store), access=access) as found:
        found.engine.precompute(CHUNKS)
        yield found


@pytest.fixture
def own(server: Served) -> dict[str, Any]:
    """Settings of a model that the server answers for."""
    return {"base_url": server.url, "api_key": KEY, "max_tokens": 12}


def stats_of(llm: Any, prompt: str = PROMPT, **options: Any) -> dict[str, Any]:
    if isinstance(llm, CacheClipLLM):
        return dict(llm.complete(prompt, **options).additional_kwargs["cacheclip"])
    if isinstance(llm, ChatCacheClip):
        return dict(llm.invoke(prompt, **options).response_metadata["cacheclip"])
    return dict(llm.generate([prompt], **options).generations[0][0].generation_info["cacheclip"])


def text_of(llm: Any, prompt: str = PROMPT) -> str:
    if isinstance(llm, CacheClipLLM):
        return llm.complete(prompt).text
    said = llm.invoke(prompt)
    return str(said if isinstance(said, str) else said.content)


class TestProfile:
    def test_it_is_the_servers(self, server: Served, own: dict[str, Any]) -> None:
        llm = ChatCacheClip(**own)
        assert llm.profile is not None and llm.profile["max_input_tokens"] == server.engine.primary.context_tokens
        assert llm.profile["structured_output"] is True and llm.profile["tool_calling"] is True
        assert ChatCacheClip(**own, profile={"max_input_tokens": 7}).profile["max_input_tokens"] == 7

    def test_a_server_that_is_not_there_yet(self) -> None:
        llm = ChatCacheClip(base_url="http://127.0.0.1:1/v1")
        assert llm.profile is not None and "max_input_tokens" not in llm.profile


class TestEveryModel:
    @pytest.mark.parametrize("kind", MODELS)
    def test_answers_as_the_engine(self, server: Served, own: dict[str, Any], kind: Any) -> None:
        answer = server.engine.generate(PROMPT, max_tokens=12)
        llm = kind(**own)
        assert text_of(llm) == answer.text != ""
        stats = stats_of(llm)
        assert set(stats) == set(answer.stats.to_dict()) and stats["hits"] == len(CHUNKS)
        assert llm.model_name == NAME

    @pytest.mark.parametrize("kind", MODELS)
    def test_settings_of_the_call(self, own: dict[str, Any], kind: Any) -> None:
        assert stats_of(kind(**own, method="direct"))["method"] == "direct"
        assert stats_of(kind(**own), method="direct", max_tokens=2)["generated_tokens"] == 2
        assert stats_of(kind(**own, recompute_ratio=0.5, method="cacheclip"))["nominal_ratio"] == 0.5

    @pytest.mark.parametrize("kind", MODELS)
    def test_documents_are_candidates(self, own: dict[str, Any], kind: Any) -> None:
        new = f"The {kind.__module__} keeper counted nineteen ships and wrote them into a book. " * 2
        first = stats_of(kind(**own), f"{new}\n\nHow many?", documents=[new])
        assert (first["hits"], first["misses"]) == (0, 1)
        while stats_of(kind(**own), f"{new}\n\nHow many?")["hits"] == 0:  # stored after the answer
            pass

    @pytest.mark.parametrize("kind", MODELS)
    def test_tenants(self, own: dict[str, Any], kind: Any) -> None:
        assert stats_of(kind(**{**own, "api_key": NORTH}))["hits"] == 0
        assert stats_of(kind(**{**own, "api_key": NORTH}, namespace="east"))["hits"] == 0
        with pytest.raises(ServerError, match="may not use that tenant") as caught:
            stats_of(kind(**{**own, "api_key": NORTH}, namespace="south"))
        assert caught.value.status == 403

    @pytest.mark.parametrize("kind", MODELS)
    def test_a_key_from_the_environment(self, own: dict[str, Any], kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CACHECLIP_API_KEY", KEY)
        llm = kind(**{**own, "api_key": None})
        assert stats_of(llm)["hits"] == len(CHUNKS)
        monkeypatch.setenv("CACHECLIP_API_KEY", "another-key")
        with pytest.raises(ServerError, match="API key"):
            stats_of(llm)

    @pytest.mark.parametrize("kind", MODELS)
    @pytest.mark.parametrize(
        "fields",
        [{"store": "s"}, {"auxiliary": None}, {"dtype": "bfloat16"}, {"device": "cuda"}, {"max_bytes": 3}],
        ids=lambda fields: next(iter(fields)),
    )
    def test_refuses_what_belongs_to_the_server(self, kind: Any, fields: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="cannot be combined with base_url"):
            kind(base_url="http://localhost:1/v1", **fields)

    @pytest.mark.parametrize("kind", MODELS)
    def test_refuses_what_a_server_cannot_do(self, own: dict[str, Any], kind: Any) -> None:
        with pytest.raises(ConfigurationError, match="preset's name"):
            kind(**own, method=preset("direct"))
        with pytest.raises(ConfigurationError, match="names of methods"):
            stats_of(kind(**own), method=preset("direct"))
        with pytest.raises(ConfigurationError, match="no engine here"):
            _ = kind(**own).engine
        with pytest.raises(ConfigurationError, match="no engine here"):
            kind(**own).warm_up()
        with pytest.raises(ConfigurationError, match="address of a server"):
            kind(base_url="localhost:8000")

    @pytest.mark.parametrize("kind", MODELS)
    def test_errors_of_the_server(self, own: dict[str, Any], kind: Any) -> None:
        with pytest.raises(PromptTooLongError):
            stats_of(kind(**own), "word " * 6000)
        with pytest.raises(ConfigurationError, match="no model 'gpt-5'"):
            stats_of(kind(**own, primary="gpt-5"))
        with pytest.raises(ServerError, match="cannot be reached"):
            stats_of(kind(base_url="http://127.0.0.1:9/v1", max_tokens=2))

    @pytest.mark.parametrize("kind", MODELS)
    def test_the_key_is_not_written(self, own: dict[str, Any], kind: Any) -> None:
        llm = kind(**own)
        assert KEY not in repr(llm) and KEY not in llm.model_dump_json(exclude={"callback_manager"})
        assert text_of(pickle.loads(pickle.dumps(llm))) == text_of(llm)


class TestLangChain:
    def test_the_same_metadata(self, server: Served, own: dict[str, Any]) -> None:
        there, here = ChatCacheClip(**own), ChatCacheClip.from_engine(server.engine, max_tokens=12)
        server.engine.prefixes.clear()
        said = there.invoke(PROMPT)
        server.engine.prefixes.clear()  # the same prompt would continue the KV of the answer before
        same = here.invoke(PROMPT)
        assert set(said.response_metadata) == set(same.response_metadata)
        assert said.usage_metadata == same.usage_metadata
        assert said.response_metadata["model_name"] == NAME

    def test_streams(self, own: dict[str, Any]) -> None:
        llm = ChatCacheClip(**own)
        chunks = list(llm.stream(PROMPT))
        whole = llm.invoke(PROMPT)
        assert "".join(str(chunk.content) for chunk in chunks) == whole.content and len(chunks) > 4
        assert chunks[-1].response_metadata["cacheclip"]["hits"] == len(CHUNKS)
        assert "".join(TextModel(**own).stream(PROMPT)) == whole.content

    def test_messages(self, server: Served, own: dict[str, Any]) -> None:
        call = {"name": "search", "args": {"words": "x"}, "id": "abcdefghi"}
        messages = [
            SystemMessage("Be short."),
            HumanMessage("Search."),
            AIMessage("", tool_calls=[call]),
            ToolMessage(CHUNKS[0], tool_call_id="abcdefghi", artifact=[Document(CHUNKS[0])]),
        ]
        local = ChatCacheClip.from_engine(server.engine, max_tokens=12)
        assert ChatCacheClip(**own).invoke(messages).content == local.invoke(messages).content

    def test_a_system_prompt(self, server: Served, own: dict[str, Any]) -> None:
        said = ChatCacheClip(**own, system_prompt="Be short.").invoke("What?")
        expected = server.engine.generate(
            [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What?"}], max_tokens=12
        )
        assert said.content == expected.text

    def test_a_prompt_that_is_too_long(self, own: dict[str, Any]) -> None:
        with pytest.raises(ContextOverflowError):
            ChatCacheClip(**own).invoke("word " * 6000)


class TestLlamaIndex:
    def test_metadata(self, server: Served, own: dict[str, Any]) -> None:
        found = CacheClipLLM(**own).metadata
        assert found.context_window == server.engine.primary.context_tokens
        assert found.model_name == NAME and found.is_function_calling_model

    def test_all_calls(self, own: dict[str, Any]) -> None:
        llm = CacheClipLLM(**own)
        text = llm.complete(PROMPT).text
        messages = [ChatMessage(role="user", content=PROMPT)]
        assert llm.chat(messages).message.content == text
        assert [each.text for each in llm.stream_complete(PROMPT)][-1] == text
        last = list(llm.stream_chat(messages))[-1]
        assert last.message.content == text
        assert last.raw["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    async def test_asynchronously(self, own: dict[str, Any]) -> None:
        llm = CacheClipLLM(**own)
        text = (await llm.acomplete(PROMPT)).text
        assert text == llm.complete(PROMPT).text
        assert [each.text async for each in await llm.astream_complete(PROMPT)][-1] == text

    def test_tools(self, own: dict[str, Any]) -> None:
        llm = CacheClipLLM(**{**own, "max_tokens": 200})
        said = llm.chat_with_tools([FunctionTool.from_defaults(search)], user_msg=PROMPT, tool_required=True)
        (call,) = llm.get_tool_calls_from_response(said)
        assert call.tool_name == "search"

    def test_structured_output(self, own: dict[str, Any]) -> None:
        llm = CacheClipLLM(**{**own, "max_tokens": 200})
        assert isinstance(llm.structured_predict(Year, PromptTemplate("Which year?")), Year)

    def test_ingestion_is_the_servers(self, own: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="on its machine"):
            CacheClipTransform.from_llm(CacheClipLLM(**own))


def test_another_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of OpenAI's API without our statistics."""
    text = 'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "other"}]})
        return httpx.Response(200, text=text)

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        monkeypatch.setattr("cacheclip_rag.adapters.remote._client", lambda: client)
        with pytest.raises(ServerError, match="another server"):
            TextModel(base_url="http://other/v1").invoke("What?")
        with pytest.raises(ServerError, match="what a cacheclip server does not send"):
            _ = CacheClipLLM(base_url="http://other/v1").metadata
