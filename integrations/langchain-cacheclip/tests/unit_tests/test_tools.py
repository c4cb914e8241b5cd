"""Agents and structured output. Where a model must choose, a fake says what it is told; where the answer is forced, a
tiny model writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing import fake_models, fake_of
from langchain_cacheclip import ChatCacheClip
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from cacheclip_rag import ConfigurationError, ModelError

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "fenêtre"}}\n</tool_call>'


class _Free:
    """A constraint that allows all."""

    def allowed(self, logits: Any) -> Any:
        return logits

    def accept(self, token: int) -> None:
        pass


class Keepers(BaseModel):
    names: list[str]


class Keeper(BaseModel):
    """A keeper."""

    name: str
    age: int


@pytest.fixture
def chat(tmp_path: Path) -> ChatCacheClip:
    """On a fake model."""
    return ChatCacheClip(**fake_models(), store=str(tmp_path / "store"), max_tokens=100)


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
        fake_of(chat.engine).says = [f"Let me see.\n{CALL}"] * 2
        message = bound.invoke("Where?")
        assert isinstance(message, AIMessage) and message.content == "Let me see.\n"
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("search", {"query": "fenêtre"}) and call["id"]
        assert '"description": "Find texts about the island."' in fake_of(chat.engine).prompts[0]
        parts = list(bound.stream("Where?"))
        whole = parts[0]
        for part in parts[1:]:
            whole = whole + part
        assert isinstance(whole, AIMessageChunk)
        assert [c["args"] for c in whole.tool_calls] == [{"query": "fenêtre"}] and whole.content == "Let me see.\n"
        assert sum(bool(part.tool_call_chunks) for part in parts) == 1  # type: ignore[attr-defined]

    async def test_one_call_at_most(self, chat: ChatCacheClip) -> None:
        bound: Any = chat.bind_tools([search], parallel_tool_calls=False)
        fake_of(chat.engine).says = [f"{CALL}\n{CALL}"] * 4
        assert len(bound.invoke("Where?").tool_calls) == len((await bound.ainvoke("Where?")).tool_calls) == 1
        assert sum(len(part.tool_call_chunks) for part in bound.stream("Where?")) == 1
        several: Any = chat.bind_tools([search], parallel_tool_calls=True)
        assert len(several.invoke("Where?").tool_calls) == 2

    @pytest.mark.parametrize(
        ("tools", "options", "message"),
        [
            ([search], {"tool_choice": "find"}, "no tool 'find'"),
            ([], {"tool_choice": "any"}, "no tool ''"),
            ([search], {"tool_choice": 3}, "tool_choice must"),
            ([search], {"tool_choice": "any", "json_schema": {}}, "Give one of them"),
        ],
    )
    def test_choices_that_are_refused(self, chat: ChatCacheClip, tools: Any, options: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            chat.bind_tools(tools, **options)

    def test_no_tool_by_choice(self, chat: ChatCacheClip) -> None:
        fake_of(chat.engine).says = [CALL]
        assert chat.bind_tools([search], tool_choice="none").invoke("Where?").content == CALL
        assert "Find texts" not in fake_of(chat.engine).prompts[-1]

    @pytest.mark.some(3)
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
            fake_of(chat.engine).says = [CALL, "On the rock."]
            done = run({"messages": [("user", "Where did the keeper live?")]})
            state = done if isinstance(done, dict) else await done
            asked, called, found, answered = state["messages"]
            assert isinstance(called, AIMessage) and isinstance(found, ToolMessage)
            assert answered.content == "On the rock."
            assert answered.response_metadata["cacheclip"]["hits"] == 2

    def test_with_tools_an_agent_calls_them_before_it_answers(self, chat: ChatCacheClip) -> None:
        """A response format does not keep the model from its tools."""
        from langchain.agents import create_agent

        constraints: list[str] = []
        runtime = fake_of(chat.engine)
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

    @pytest.mark.parametrize("asked", [{"type": "json_schema"}, {"type": "magic"}, Keeper, 3])
    def test_a_response_format_that_is_none(self, chat: ChatCacheClip, asked: Any) -> None:
        with pytest.raises(ConfigurationError, match="response_format must be"):
            chat.invoke("Who?", response_format=asked)
        assert chat.invoke("Who?", response_format={"type": "text"}).content

    @pytest.mark.some(2)
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
        runtime = fake_of(chat.engine)
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
