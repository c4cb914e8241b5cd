"""Agents and structured output of both frameworks. Where a model must choose, a fake says what it is told; where the
answer is forced, a tiny model writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_cacheclip import ChatCacheClip
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.tools import tool
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

from cacheclip_rag.base.errors import ConfigurationError, ModelError
from tests.integrations.fakes import fake_models, watched

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "fenêtre"}}\n</tool_call>'


class _Free:
    """A constraint that allows all."""

    def allowed(self, logits: Any) -> Any:
        return logits

    def accept(self, token: int) -> None:
        pass


class Keeper(BaseModel):
    """A keeper."""

    name: str
    age: int


class Keepers(BaseModel):
    names: list[str]


@pytest.fixture
def chat(tmp_path: Path) -> ChatCacheClip:
    """On a fake model."""
    return ChatCacheClip(**fake_models(), store=str(tmp_path / "store"), max_tokens=100)


@pytest.fixture
def llm(tmp_path: Path) -> CacheClipLLM:
    """On a fake model."""
    return CacheClipLLM(**fake_models(), store=str(tmp_path / "store"), max_tokens=100, is_function_calling_model=True)


@pytest.fixture
def settings(tool_model: str) -> dict[str, Any]:
    """Of a tiny model, whose JSON comes to an end."""
    return {"primary": tool_model, "auxiliary": None, "method": "direct", "max_tokens": 100}


@tool
def search(query: str) -> str:
    """Find texts about the island."""
    return query


class TestLangChain:
    def test_a_call(self, chat: ChatCacheClip) -> None:
        bound = chat.bind_tools([search])
        watched(chat.engine).says = [f"Let me see.\n{CALL}"] * 2
        message = bound.invoke("Where?")
        assert isinstance(message, AIMessage) and message.content == "Let me see.\n"
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("search", {"query": "fenêtre"}) and call["id"]
        assert '"description": "Find texts about the island."' in watched(chat.engine).prompts[0]
        parts = list(bound.stream("Where?"))
        whole = parts[0]
        for part in parts[1:]:
            whole = whole + part
        assert isinstance(whole, AIMessageChunk)
        assert [c["args"] for c in whole.tool_calls] == [{"query": "fenêtre"}] and whole.content == "Let me see.\n"
        assert sum(bool(part.tool_call_chunks) for part in parts) == 1  # type: ignore[attr-defined]

    async def test_several_calls_have_their_places(self, chat: ChatCacheClip) -> None:
        watched(chat.engine).says = [f"{CALL}\n{CALL}"]
        parts = [part async for part in chat.bind_tools([search]).astream("Where?")]
        chunks = [chunk for part in parts for chunk in part.tool_call_chunks]  # type: ignore[attr-defined]
        assert [chunk["index"] for chunk in chunks] == [0, 1] and chunks[0]["id"] != chunks[1]["id"]

    async def test_one_call_at_most(self, chat: ChatCacheClip) -> None:
        bound = chat.bind_tools([search], parallel_tool_calls=False)
        watched(chat.engine).says = [f"{CALL}\n{CALL}"] * 3
        message = bound.invoke("Where?")
        assert len(message.tool_calls) == 1  # type: ignore[attr-defined]
        parts = list(bound.stream("Where?"))
        assert sum(len(part.tool_call_chunks) for part in parts) == 1  # type: ignore[attr-defined]
        assert len((await bound.ainvoke("Where?")).tool_calls) == 1  # type: ignore[attr-defined]
        watched(chat.engine).says = [f"{CALL}\n{CALL}"]
        assert len(chat.bind_tools([search], parallel_tool_calls=True).invoke("Where?").tool_calls) == 2  # type: ignore[attr-defined]

    def test_without_tools_a_call_is_text(self, chat: ChatCacheClip) -> None:
        watched(chat.engine).says = [CALL]
        message = chat.invoke("Where?")
        assert message.content == CALL and not message.tool_calls  # type: ignore[attr-defined]

    def test_choices(self, chat: ChatCacheClip) -> None:
        with pytest.raises(ConfigurationError, match="no tool 'find'"):
            chat.bind_tools([search], tool_choice="find")
        with pytest.raises(ConfigurationError, match="no tool ''"):
            chat.bind_tools([], tool_choice="any")
        with pytest.raises(ConfigurationError, match="tool_choice must"):
            chat.bind_tools([search], tool_choice=3)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="Give one of them"):
            chat.bind_tools([search], tool_choice="any", json_schema={})
        watched(chat.engine).says = [CALL]
        assert chat.bind_tools([search], tool_choice="none").invoke("Where?").content == CALL
        assert "Find texts" not in watched(chat.engine).prompts[-1]

    @pytest.mark.parametrize(
        "choice", ["any", "required", True, "search", {"type": "function", "function": {"name": "search"}}]
    )
    def test_a_forced_call(self, settings: dict[str, Any], choice: Any) -> None:
        @tool
        def leave() -> str:
            """Leave the island."""
            return ""

        message = ChatCacheClip(**settings).bind_tools([search, leave], tool_choice=choice).invoke("Where?")
        assert len(message.tool_calls) == 1  # type: ignore[attr-defined]
        if choice not in ("any", "required", True):
            assert message.tool_calls[0]["name"] == "search"  # type: ignore[attr-defined]

    def test_a_model_without_tools_says_so(self, tiny_models: dict[str, str]) -> None:
        plain = ChatCacheClip(primary=tiny_models["llama"], auxiliary=None)
        with pytest.raises(ConfigurationError, match="chat template does not use tools"):
            plain.bind_tools([search]).invoke("Where?")

    async def test_an_agent_reuses_what_its_tool_found(self, chat: ChatCacheClip, chunks: list[str]) -> None:
        from langchain.agents import create_agent

        chat.engine.precompute(chunks[:2])

        @tool
        def search(query: str) -> str:
            """Find texts about the island."""
            assert query == "fenêtre"
            return "\n\n".join(chunks[:2])

        agent = create_agent(chat, [search])
        for run in (agent.invoke, agent.ainvoke):
            watched(chat.engine).says = [CALL, "On the rock."]
            done = run({"messages": [("user", "Where did the keeper live?")]})
            state = done if isinstance(done, dict) else await done
            asked, called, found, answered = state["messages"]
            assert isinstance(called, AIMessage) and isinstance(found, ToolMessage)
            assert answered.content == "On the rock."
            assert answered.response_metadata["cacheclip"]["hits"] == 2

    @pytest.mark.parametrize("strategy", ["plain", "provider", "tool"])
    @pytest.mark.parametrize("with_tools", [False, True])
    def test_an_agents_response_format(self, settings: dict[str, Any], strategy: str, with_tools: bool) -> None:
        from langchain.agents import create_agent
        from langchain.agents.structured_output import ProviderStrategy, ToolStrategy

        wanted = {"plain": Keeper, "provider": ProviderStrategy(Keeper), "tool": ToolStrategy(Keeper)}[strategy]
        agent = create_agent(ChatCacheClip(**settings), [search] if with_tools else [], response_format=wanted)
        asked = {"messages": [("user", "Who?")]}
        if not with_tools:
            assert isinstance(agent.invoke(asked)["structured_response"], Keeper)
            return
        # which of the two this tiny model writes is chance: each is one that the agent can read
        first = next(iter(agent.stream(asked)))["model"]
        (message, *_) = first["messages"]
        called = {call["name"] for call in message.tool_calls}
        assert called <= {"search", "Keeper"} and (called or isinstance(first["structured_response"], Keeper))

    def test_with_tools_an_agent_calls_them_before_it_answers(self, chat: ChatCacheClip) -> None:
        """A response format does not keep the model from its tools."""
        from langchain.agents import create_agent

        constraints: list[str] = []
        runtime = watched(chat.engine)
        runtime.can_constrain = True
        runtime.constrain = lambda schema: constraints.append(schema) or _Free()  # type: ignore[method-assign]
        runtime.says = ['{"name": "search", "arguments": {"query": "who"}}', '{"name": "Ole", "age": 3}']
        done = create_agent(chat, [search], response_format=Keeper).invoke({"messages": [("user", "Who?")]})
        assert done["structured_response"] == Keeper(name="Ole", age=3)
        assert [type(each) for each in done["messages"]][1:] == [AIMessage, ToolMessage, AIMessage]
        assert all('"search"' in each and '"age"' in each for each in constraints) and len(constraints) == 2

    @pytest.mark.parametrize("choice", ["any", "search"])
    async def test_a_forced_call_that_was_cut_says_so(self, settings: dict[str, Any], choice: str) -> None:
        cut = ChatCacheClip(**{**settings, "max_tokens": 3}).bind_tools([search], tool_choice=choice)
        for ask in (lambda: cut.invoke("Who?"), lambda: list(cut.stream("Who?"))):
            with pytest.raises(ModelError, match="cut off after 3 tokens. Raise max_tokens"):
                ask()
        with pytest.raises(ModelError, match="cut off"):
            await cut.ainvoke("Who?")

    def test_the_profile(self, settings: dict[str, Any], tiny_models: dict[str, str]) -> None:
        assert ChatCacheClip(**settings).profile == {
            **{"text_inputs": True, "text_outputs": True, "image_inputs": False},
            **{"max_input_tokens": 4096, "structured_output": True, "tool_calling": True},
        }
        assert not ChatCacheClip(primary=tiny_models["llama"]).profile["tool_calling"]

    @pytest.mark.parametrize("asked", [{"type": "json_schema"}, {"type": "magic"}, Keeper, 3])
    def test_a_response_format_that_is_none(self, chat: ChatCacheClip, asked: Any) -> None:
        with pytest.raises(ConfigurationError, match="response_format must be"):
            chat.invoke("Who?", response_format=asked)
        assert chat.invoke("Who?", response_format={"type": "text"}).content

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    async def test_structured_output(self, settings: dict[str, Any], method: str) -> None:
        structured = ChatCacheClip(**settings).with_structured_output(Keeper, method=method)
        assert isinstance(structured.invoke("Who?"), Keeper)
        assert isinstance(await structured.ainvoke("Who?"), Keeper)
        assert isinstance(list(structured.stream("Who?"))[-1], Keeper)
        as_dict = ChatCacheClip(**settings).with_structured_output(Keeper.model_json_schema(), method=method)
        assert set(as_dict.invoke("Who?")) == {"name", "age"}
        raw = ChatCacheClip(**settings).with_structured_output(Keeper, method=method, include_raw=True).invoke("Who?")
        assert isinstance(raw["parsed"], Keeper) and isinstance(raw["raw"], AIMessage) and not raw["parsing_error"]

    def test_structured_output_needs_no_template_with_tools(self, tiny_models: dict[str, str]) -> None:
        plain = ChatCacheClip(primary=tiny_models["llama"], auxiliary=None, max_tokens=60)
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        assert plain.with_structured_output(schema).invoke("Well?")["ok"] in (True, False)

    def test_a_cut_answer_is_a_parsing_error(self, chat: ChatCacheClip) -> None:
        """Also where LangChain's parsers would take what is there: the beginning of a list."""
        runtime = watched(chat.engine)
        runtime.can_constrain = True
        runtime.constrain = lambda schema: _Free()  # type: ignore[method-assign]
        cut = chat.model_copy(update={"max_tokens": 12})
        for schema in (Keepers, Keepers.model_json_schema()):
            runtime.says = ['{"names": ["Ole", "Per", "Kari", "Liv"]}'] * 3 + ['{"names": ["Ole"]}']
            structured = cut.with_structured_output(schema)
            with pytest.raises(OutputParserException, match="cut off. Raise max_tokens"):
                structured.invoke("Who?")
            with pytest.raises(OutputParserException, match="cut off. Raise max_tokens"):
                list(structured.stream("Who?"))
            raw = cut.with_structured_output(schema, include_raw=True).invoke("Who?")
            assert raw["parsed"] is None and "cut off" in str(raw["parsing_error"])
            found = chat.with_structured_output(schema).invoke("Who?")
            assert found in ({"names": ["Ole"]}, Keepers(names=["Ole"]))

    def test_json_mode(self, settings: dict[str, Any]) -> None:
        found = ChatCacheClip(**settings).with_structured_output(Keeper, method="json_mode", include_raw=True)
        assert found.invoke("Who?")["raw"].content.startswith("{")
        with pytest.raises(ConfigurationError, match="method must be"):
            ChatCacheClip(**settings).with_structured_output(Keeper, method="magic")

    def test_the_schema_may_be_a_setting(self, settings: dict[str, Any]) -> None:
        llm = ChatCacheClip(**settings, json_schema=Keeper.model_json_schema())
        assert Keeper.model_validate_json(str(llm.invoke("Who?").content))
        assert llm._identifying_params["json_schema"] != ChatCacheClip(**settings)._identifying_params["json_schema"]


class TestLlamaIndex:
    def test_what_it_says_of_itself(
        self, tool_model: str, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert issubclass(CacheClipLLM, FunctionCallingLLM)
        assert CacheClipLLM(primary=tool_model).metadata.is_function_calling_model
        assert not CacheClipLLM(primary=tiny_models["llama"]).metadata.is_function_calling_model
        assert not CacheClipLLM(primary="some/model").metadata.is_function_calling_model
        assert not CacheClipLLM(primary=tool_model, is_chat_model=False).metadata.is_function_calling_model
        monkeypatch.setattr("llama_index.llms.cacheclip.base.can_constrain", lambda: False)
        assert not CacheClipLLM(primary=tool_model).metadata.is_function_calling_model

    def test_a_packaged_model_need_not_be_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path))
        assert CacheClipLLM(primary="qwen2.5-coder-0.5b").metadata.is_function_calling_model
        assert not CacheClipLLM(primary="smollm2-135m").metadata.is_function_calling_model

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

        watched(llm.engine).says = [CALL, "On the rock."]
        agent = FunctionAgent(tools=[FunctionTool.from_defaults(search)], llm=llm, streaming=streaming)
        done = await agent.run("Where did the keeper live?")
        assert str(done) == "On the rock."
        first, second = watched(llm.engine).prompts
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
        watched(llm.engine).says = [f"{CALL}\n{CALL}", f"{CALL}\n{CALL}", CALL, "No."]
        response = llm.chat_with_tools(wanted, user_msg="Where?", allow_parallel_tool_calls=True)
        calls = llm.get_tool_calls_from_response(response)
        assert [call.tool_kwargs for call in calls] == [{"query": "fenêtre"}] * 2
        response = llm.chat_with_tools(wanted, user_msg="Where?")
        assert len(llm.get_tool_calls_from_response(response)) == 1
        *_, last = llm.stream_chat_with_tools(wanted, user_msg="Where?")
        assert len(llm.get_tool_calls_from_response(last)) == 1 and not last.message.content
        response = llm.chat_with_tools(wanted, user_msg="Where?")
        assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
        with pytest.raises(ValueError, match="at least one tool call, got 'No.'"):
            llm.get_tool_calls_from_response(response)

    def test_calls_of_other_models_are_read(self, llm: CacheClipLLM) -> None:
        """Newer versions of LlamaIndex keep calls in blocks."""
        from llama_index.core.base.llms import types

        block = types.ToolCallBlock(tool_call_id="1", tool_name="search", tool_kwargs={"query": "x"})
        messages = [
            ChatMessage(role=MessageRole.USER, content="Where?"),
            ChatMessage(role=MessageRole.ASSISTANT, blocks=[block]),
            ChatMessage(role=MessageRole.TOOL, content="Here.", additional_kwargs={"tool_call_id": "1"}),
        ]
        llm.chat(messages)
        assert '{"name": "search", "arguments": {"query": "x"}}' in watched(llm.engine).prompts[0]
        assert "[tool] Here." in watched(llm.engine).prompts[0]

    def test_half_a_character_in_an_earlier_call(self, llm: CacheClipLLM) -> None:
        call = {"id": "abcdefghi", "function": {"name": "search", "arguments": r'{"q\ud83d": "\ud83d"}'}}
        answer = ChatMessage(role=MessageRole.ASSISTANT, content="", additional_kwargs={"tool_calls": [call]})
        user = ChatMessage(role=MessageRole.USER, content="Where?")
        llm.chat([user, answer, user])
        assert '{"name": "search", "arguments": {"q\ufffd": "\ufffd"}}' in watched(llm.engine).prompts[0]

    def test_a_required_call(self, settings: dict[str, Any]) -> None:
        llm = CacheClipLLM(**settings)
        wanted = [FunctionTool.from_defaults(lambda query: query, name="search", description="Finds.")]
        response = llm.chat_with_tools(wanted, user_msg="Where?", tool_required=True)
        assert [call.tool_name for call in llm.get_tool_calls_from_response(response)] == ["search"]

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

    def test_a_model_without_tools_predicts_structures_too(self, tiny_models: dict[str, str]) -> None:
        class Flag(BaseModel):
            ok: bool

        llm = CacheClipLLM(primary=tiny_models["llama"], auxiliary=None, max_tokens=40)
        assert isinstance(llm.structured_predict(Flag, PromptTemplate("Well?")), Flag)
