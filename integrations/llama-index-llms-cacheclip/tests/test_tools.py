"""Agents and structured output. Where a model must choose, a fake says what it is told; where the answer is forced, a
tiny model writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing import fake_models, fake_of
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.llms.cacheclip import CacheClipLLM
from llama_index.llms.cacheclip.base import _warn_once
from pydantic import BaseModel

from cacheclip_rag import ModelError

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "fenêtre"}}\n</tool_call>'


class Keeper(BaseModel):
    """A keeper."""

    name: str
    age: int


@pytest.fixture
def llm(tmp_path: Path) -> CacheClipLLM:
    """On a fake model."""
    return CacheClipLLM(**fake_models(), store=str(tmp_path / "store"), max_tokens=100, is_function_calling_model=True)


@pytest.fixture
def settings(tool_model: str) -> dict[str, Any]:
    """Of a tiny model, whose JSON comes to an end."""
    return {"primary": tool_model, "auxiliary": None, "method": "direct", "max_tokens": 100}


def calls_functions(**settings: Any) -> bool:
    return CacheClipLLM(**settings).metadata.is_function_calling_model


class TestLlamaIndex:
    def test_what_it_says_of_itself(
        self, tool_model: str, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A packaged model need not be there."""
        assert issubclass(CacheClipLLM, FunctionCallingLLM) and calls_functions(primary=tool_model)
        assert not calls_functions(primary=tiny_models["llama"]) and not calls_functions(primary="some/model")
        assert not calls_functions(primary=tool_model, is_chat_model=False)
        with monkeypatch.context() as patch:
            patch.setenv("CACHECLIP_HOME", "/nowhere")
            assert calls_functions(primary="qwen2.5-coder-0.5b") and not calls_functions(primary="smollm2-135m")
        monkeypatch.setattr("llama_index.llms.cacheclip.base.can_constrain", lambda: False)
        assert not calls_functions(primary=tool_model)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    async def test_an_agent_that_is_refused_is_told_why(
        self, tiny_models: dict[str, str], tool_model: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        async def asked(**settings: Any) -> str:
            _warn_once.cache_clear()
            caplog.clear()
            tools = [FunctionTool.from_defaults(lambda: "", name="f")]
            agent = FunctionAgent(tools=tools, llm=CacheClipLLM(**settings))
            with pytest.raises(Exception, match="FunctionCallingLLM"):
                await agent.run("Where?")
            return str(caplog.text)

        assert "chat template of model" in await asked(primary=tiny_models["llama"])
        assert "not on this machine yet" in await asked(primary="some/model")
        assert "is_chat_model=False is set" in await asked(primary=tool_model, is_chat_model=False)
        monkeypatch.setattr("llama_index.llms.cacheclip.base.can_constrain", lambda: False)
        assert "pip install" in await asked(primary=tool_model)
        caplog.clear()
        llm = CacheClipLLM(primary=tool_model)
        assert llm.metadata.context_window and llm.metadata.model_dump() and not caplog.text, "who does not ask"
        assert not llm.metadata.is_function_calling_model and not caplog.text, "said once"

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize("streaming", [True, False])
    async def test_an_agent_reuses_what_its_tool_found(
        self, llm: CacheClipLLM, chunks: list[str], streaming: bool
    ) -> None:
        llm.engine.precompute(chunks[:2])

        def search(query: str) -> str:
            """Find texts about the island."""
            assert query == "fenêtre"
            return "\n\n".join(chunks[:2])

        fake_of(llm.engine).says = [CALL, "On the rock."]
        agent = FunctionAgent(tools=[FunctionTool.from_defaults(search)], llm=llm, streaming=streaming)
        done = await agent.run("Where did the keeper live?")
        assert str(done) == "On the rock."
        first, second = fake_of(llm.engine).prompts
        assert "Find texts about the island." in first and chunks[0] in second and '"fenêtre"' in second

    @pytest.mark.parametrize("calls_functions", [True, False])
    async def test_a_cut_object_says_so(self, settings: dict[str, Any], calls_functions: bool) -> None:
        """Synthesizers would take it for no answer, and leave its context out."""
        options = {**settings, "is_function_calling_model": calls_functions}
        llm, prompt = CacheClipLLM(**{**options, "max_tokens": 3}), PromptTemplate("Who?")
        node = NodeWithScore(node=TextNode(text="Ole kept the lamp."), score=1.0)
        refine = get_response_synthesizer(llm=llm, response_mode="refine", output_cls=Keeper)
        for ask in (
            lambda: llm.structured_predict(Keeper, prompt),
            lambda: list(llm.stream_structured_predict(Keeper, prompt)),
            lambda: refine.synthesize("Who?", [node]),
        ):
            with pytest.raises(ModelError, match="cut off after 3 tokens"):
                ask()
        with pytest.raises(ModelError, match="cut off after 3 tokens"):
            await llm.astructured_predict(Keeper, prompt)
        assert isinstance(CacheClipLLM(**options).structured_predict(Keeper, prompt), Keeper)

    def test_calls_in_a_response(self, llm: CacheClipLLM) -> None:
        wanted = [FunctionTool.from_defaults(lambda query: query, name="search", description="Finds.")]
        calls = llm.get_tool_calls_from_response
        fake_of(llm.engine).says = [f"{CALL}\n{CALL}", f"{CALL}\n{CALL}", CALL, "No."]
        response = llm.chat_with_tools(wanted, user_msg="Where?", allow_parallel_tool_calls=True)
        assert [call.tool_kwargs for call in calls(response)] == [{"query": "fenêtre"}] * 2
        assert len(calls(llm.chat_with_tools(wanted, user_msg="Where?"))) == 1
        *_, last = llm.stream_chat_with_tools(wanted, user_msg="Where?")
        assert len(calls(last)) == 1 and not last.message.content
        response = llm.chat_with_tools(wanted, user_msg="Where?")
        assert calls(response, error_on_no_tool_call=False) == []
        with pytest.raises(ValueError, match="at least one tool call, got 'No.'"):
            calls(response)

    def test_calls_of_other_models_are_read(self, llm: CacheClipLLM) -> None:
        """Newer versions of LlamaIndex keep calls in blocks. Half a character in one is replaced."""
        from llama_index.core.base.llms import types

        user = ChatMessage(role=MessageRole.USER, content="Where?")
        block = types.ToolCallBlock(tool_call_id="1", tool_name="search", tool_kwargs={"query": "x"})
        called = ChatMessage(role=MessageRole.ASSISTANT, blocks=[block])
        llm.chat([user, called, ChatMessage(role="tool", content="Here.", additional_kwargs={"tool_call_id": "1"})])
        prompts = fake_of(llm.engine).prompts
        assert '{"name": "search", "arguments": {"query": "x"}}' in prompts[0] and "[tool] Here." in prompts[0]
        call = {"id": "abcdefghi", "function": {"name": "search", "arguments": r'{"q\ud83d": "\ud83d"}'}}
        answer = ChatMessage(role=MessageRole.ASSISTANT, content="", additional_kwargs={"tool_calls": [call]})
        llm.chat([user, answer, user])
        assert '{"name": "search", "arguments": {"q\ufffd": "\ufffd"}}' in prompts[1]

    @pytest.mark.some(2)
    @pytest.mark.parametrize("calling", [True, False])
    async def test_structured_prediction(self, settings: dict[str, Any], calling: bool) -> None:
        llm = CacheClipLLM(**settings, is_function_calling_model=calling)
        prompt = PromptTemplate("Who lived {where}?")
        assert isinstance(llm.structured_predict(Keeper, prompt, where="there"), Keeper)
        assert isinstance(await llm.astructured_predict(Keeper, prompt, where="there"), Keeper)
        *_, last = llm.stream_structured_predict(Keeper, prompt, where="there")
        assert isinstance(last, Keeper)
        found = [each async for each in await llm.astream_structured_predict(Keeper, prompt, where="there")]
        assert found[-1] == last
        assert isinstance(llm.as_structured_llm(Keeper).complete("Who?").raw, Keeper)

    @pytest.mark.long
    def test_a_model_without_tools_predicts_structures_too(self, tiny_models: dict[str, str]) -> None:
        class Flag(BaseModel):
            ok: bool

        llm = CacheClipLLM(primary=tiny_models["llama"], auxiliary=None, max_tokens=40)
        assert isinstance(llm.structured_predict(Flag, PromptTemplate("Well?")), Flag)
