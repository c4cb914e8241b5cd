"""``/v1/messages`` and ``/v1/responses`` before vLLM: planned as the chats that vLLM makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from cacheclip_testing.plugin import CHUNKS
from cacheclip_vllm.other_apis import MESSAGES, RESPONSES
from cacheclip_vllm.settings import ServerSettings
from starlette.responses import JSONResponse
from vllm_served import CHAT, NORTH, OWN, PROMPT, SEAL, Served, running

from cacheclip_rag import EngineConfig

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
UNTYPED = {"properties": SCHEMA["properties"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "Finds.", "parameters": SCHEMA}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
USER, RESULT = {"role": "user", "content": PROMPT}, {"role": "tool", "tool_call_id": "abcdefghi"}


def text(content: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": content}


NAMED = {"name": "f", "description": "Finds."}
DEFINED = {**NAMED, "input_schema": SCHEMA}
SEARCH = {"role": "user", "content": "Search."}
RETURNED = {"type": "tool_result", "tool_use_id": "abcdefghi"}
USE = {"type": "tool_use", "id": "abcdefghi", "name": "f", "input": {"a": "b"}}
SAID = {"type": "message", "role": "assistant"}
OUTPUT = {"type": "function_call_output", "call_id": "abcdefghi"}
CALLED = {"type": "function_call", "call_id": "abcdefghi", "name": "f", "arguments": '{"a": "b"}'}
PLANNED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: path, body, and the chat that has the same prompt
    "a message": (MESSAGES, {"messages": [USER]}, {"messages": [USER]}),
    "a system": (
        MESSAGES,
        {"system": [text("x-anthropic-billing-header: 1"), text("Be"), text(" short.")], "messages": [USER]},
        {"messages": [{"role": "system", "content": "Be short."}, USER]},
    ),
    "blocks": (
        MESSAGES,
        {"messages": [{"role": "user", "content": [text(CHUNKS[0]), text(""), {**text("Who?"), "cache_control": {}}]}]},
        {"messages": [{"role": "user", "content": f"{CHUNKS[0]}\nWho?"}]},
    ),
    "a result": (
        MESSAGES,
        {
            "messages": [
                SEARCH,
                {"role": "assistant", "content": [text("I do."), USE]},
                {"role": "user", "content": [text("And?"), {**RETURNED, "content": [text(CHUNKS[0]), text("")]}]},
            ],
            "tools": [{**NAMED, "input_schema": UNTYPED}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
        {
            "messages": [
                SEARCH,
                {"role": "assistant", "content": "I do.", "tool_calls": [CALL]},
                {**RESULT, "content": f"{CHUNKS[0]}\n"},
                {"role": "user", "content": "And?"},
            ],
            "tools": [{**TOOL, "function": {**NAMED, "parameters": {**UNTYPED, "type": "object"}}}],
        },
    ),
    "a call alone": (
        MESSAGES,
        {"messages": [USER, {"role": "assistant", "content": [USE]}, USER]},
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, USER]},
    ),
    "an input": (RESPONSES, {"input": PROMPT, "store": True, "truncation": "disabled"}, {"messages": [USER]}),
    "instructions": (
        RESPONSES,
        {"instructions": "Be short.", "input": [{"role": "user", "content": [text(PROMPT, "input_text")]}]},
        {"messages": [{"role": "system", "content": "Be short."}, USER]},
    ),
    "items": (
        RESPONSES,
        {
            "input": [
                SEARCH,
                {**SAID, "id": "msg_1", "status": "completed", "content": [text("I do.", "output_text")]},
                CALLED,
                {**OUTPUT, "output": CHUNKS[0]},
                {"role": "assistant", "content": "Good."},
                {"type": "message", "role": "user", "content": [text("And", "input_text"), text("who?", "input_text")]},
            ],
            "tools": [{"type": "function", **NAMED, "parameters": SCHEMA}],
            "tool_choice": {"type": "function", "name": "f"},
        },
        {
            "messages": [
                SEARCH,
                {"role": "assistant", "content": "I do.", "tool_calls": [CALL]},
                {**RESULT, "content": CHUNKS[0]},
                {"role": "assistant", "content": "Good."},
                {"role": "user", "content": "And\nwho?"},
            ],
            "tools": [TOOL],
        },
    ),
    "a call item alone": (
        RESPONSES,
        {"input": [USER, CALLED, {**CALLED, "call_id": "other"}, USER]},
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, USER]},
    ),
}
PLAIN: dict[str, tuple[str, dict[str, Any], str]] = {
    # name: path, fields beside a prompt, and the reason
    "an adapter": (MESSAGES, {"model": "an-adapter"}, "another model"),
    "no thinking": (MESSAGES, {"thinking": {"type": "disabled"}}, "thinking"),
    "effort": (MESSAGES, {"output_config": {"effort": "low"}}, "reasoning_effort"),
    "unknown": (MESSAGES, {"later": 1}, "another field"),
    "no call": (MESSAGES, {"tools": [DEFINED], "tool_choice": {"type": "none"}}, "tools with tool_choice none"),
    "deferred": (MESSAGES, {"tools": [{**DEFINED, "defer_loading": True}]}, "definition of a tool"),
    "a tool of theirs": (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "definition of a tool"),
    "a later system": (MESSAGES, {"messages": [USER, {"role": "system", "content": "Stop."}]}, "role of a message"),
    "a picture": (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts of a content"),
    "thoughts": (MESSAGES, {"messages": [USER, {**SAID, "content": [{"type": "thinking"}]}]}, "parts of a content"),
    "text": (MESSAGES, {"messages": "What?"}, "malformed"),
    "no message": (MESSAGES, {"messages": [3]}, "malformed"),
    "an earlier response": (RESPONSES, {"previous_response_id": "resp_1"}, "another field"),
    "reasoning": (RESPONSES, {"reasoning": {"effort": "low"}}, "another field"),
    "cut": (RESPONSES, {"truncation": "auto"}, "truncation"),
    "later": (RESPONSES, {"background": True}, "background"),
    "a tool of vLLM's": (RESPONSES, {"tools": [{"type": "code_interpreter"}]}, "definition of a tool"),
    "allowed": (RESPONSES, {"tool_choice": {"type": "allowed_tools"}}, "allowed tools"),
    "a thought": (RESPONSES, {"input": [{"type": "reasoning", "content": []}]}, "kind of an item"),
    "two texts": (RESPONSES, {"input": [{**SAID, "content": [text("a", "output_text")] * 2}]}, "parts of a content"),
    "a named user": (RESPONSES, {"input": [{**USER, "name": "anna"}]}, "field of a message"),
    "a namespace": (RESPONSES, {"input": [{**CALLED, "namespace": "n"}]}, "field of a message"),
    "parts of an output": (RESPONSES, {"input": [{**OUTPUT, "output": [text("a", "input_text")]}]}, "kind of an item"),
    "half an answer": (
        RESPONSES,
        {"input": [USER, {**SAID, "content": "The", "status": "incomplete"}]},
        "continue_final_message",
    ),
}


@pytest.fixture(scope="module")
def server(config: EngineConfig) -> Iterator[Served]:
    with running(ServerSettings(config, "tiny", seal=SEAL)) as found:
        yield found


@pytest.fixture
def served(server: Served) -> Served:
    server.inner.bodies.clear()
    server.inner.told, server.inner.error = {"outcome": "fused", "reason": None}, None
    return server


def answered(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json()["cacheclip"])


@pytest.mark.some(3)
@pytest.mark.parametrize("name", PLANNED)
def test_a_prompt_is_that_of_a_chat(served: Served, name: str) -> None:
    path, body, chat = PLANNED[name]
    assert answered(served.client.post(CHAT, json=chat))["outcome"] == "fused"
    expected = served.inner.last["kv_transfer_params"]
    assert answered(served.client.post(path, json=body))["outcome"] == "fused"
    sent = served.inner.last
    assert sent["kv_transfer_params"]["prompt_token_ids"] == expected["prompt_token_ids"]
    assert sent["kv_transfer_params"] == expected, "the same plan"
    assert {field: value for field, value in sent.items() if field != "kv_transfer_params"} == body


@pytest.mark.some(5)
@pytest.mark.parametrize("name", PLAIN)
def test_what_plans_cannot_follow(served: Served, name: str) -> None:
    path, fields, reason = PLAIN[name]
    body = {**({"messages": [USER]} if path == MESSAGES else {"input": PROMPT}), **fields}
    own = answered(served.client.post(path, json=body))
    assert (own["outcome"], own["reason"]) == ("plain", reason) and served.inner.last == body


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
class TestBoth:
    def body(self, path: str, **fields: Any) -> dict[str, Any]:
        return {**({"messages": [USER]} if path == MESSAGES else {"input": PROMPT}), **fields}

    def test_answers_say_what_those_of_chats_say(self, served: Served, path: str) -> None:
        def without_times(own: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in own.items() if not name.endswith("_s")}

        expected = without_times(answered(served.ask()))
        response = served.client.post(path, json=self.body(path))
        assert without_times(answered(response)) == expected
        assert not response.json().get("kv_transfer_params") and not response.json().get("metrics")
        streamed = served.client.post(path, json=self.body(path, stream=True)).text
        events = [line.partition("data: ")[2] for line in streamed.split("\n\n")]
        (end,) = (json.loads(each) for each in events if '"cacheclip"' in each)
        assert without_times(end.get("response", end)["cacheclip"]) == expected
        assert streamed.startswith("event: ") and end["type"] in ("message_delta", "response.completed")

    def test_a_system_prompt_of_the_settings(self, config: EngineConfig, path: str) -> None:
        with running(ServerSettings(replace(config, system_prompt="Be short."), "tiny", seal=SEAL)) as served:
            field = "system" if path == MESSAGES else "instructions"
            answered(served.client.post(path, json=self.body(path)))
            assert served.inner.last[field] == "Be short."
            answered(served.client.post(path, json=self.body(path, **{field: "Other."})))
            assert served.inner.last[field] == "Other."

    def test_errors_pass(self, served: Served, path: str) -> None:
        served.inner.error = JSONResponse({"type": "error", "error": {"message": "no"}}, 400)
        response = served.client.post(path, json=self.body(path))
        assert response.status_code == 400 and response.json()["error"]["message"] == "no"

    def test_bounds_and_refusals(self, served: Served, path: str) -> None:
        """Also of texts that stand elsewhere than a chat's."""
        field, long = "system" if path == MESSAGES else "instructions", "word " * 20_000
        for more in ({field: long}, {field: [text(long)]}, {"kv_transfer_params": {}}, {"cacheclip": {"ratio": 2}}):
            refused = served.client.post(path, json=self.body(path, **more))
            assert refused.status_code == 400 and not served.inner.bodies, more
            assert (refused.json().get("type") == "error") == (path == MESSAGES)

    def test_tenants(self, config: EngineConfig, path: str, tmp_path: Path) -> None:
        """Each has its own chunks and salt, also by the header of Anthropic's clients."""
        (tmp_path / "tenants.json").write_text(json.dumps({NORTH: "north"}))
        with running(ServerSettings(config, "tiny", "", OWN, tmp_path / "tenants.json", SEAL)) as served:
            found = []
            for headers in ({"authorization": f"Bearer {OWN}"}, {"x-api-key": NORTH}):
                own = answered(served.client.post(path, json=self.body(path), headers=headers))
                found.append((own["hits"], served.inner.last["cache_salt"]))
            assert [hits for hits, _ in found] == [4, 2] and found[0][1] != found[1][1]
            earlier = self.body(path, previous_response_id="resp_1")
            assert served.client.post(path, json=earlier, headers=headers).status_code == 400
            assert served.client.post(path, json=self.body(path), headers={"x-api-key": "wrong"}).status_code == 401
