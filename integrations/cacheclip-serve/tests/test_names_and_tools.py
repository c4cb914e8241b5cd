"""Other names of the model, and tools that its chat template has no place for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from cacheclip_testing import fake_models
from openai import OpenAI
from serve_cases import NAME, Served, running

from cacheclip_rag import EngineConfig

TOOL: Any = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
IN_RESPONSES: Any = {"type": "function", **TOOL["function"]}
OF_ANTHROPIC: Any = {"name": "search", "input_schema": {"type": "object"}}
LEFT_OUT = 'cacheclip_ignored_fields_total{field="tools"}'


def toolless(tiny_models: dict[str, str]) -> EngineConfig:
    return EngineConfig(primary=tiny_models["llama"], auxiliary=None, method="full")


@pytest.fixture(scope="module")
def lenient(tiny_models: dict[str, str]) -> Iterator[Served]:
    """Its model's chat template has no tools."""
    with running(toolless(tiny_models), drops_tools=True) as found:
        yield found


def test_other_names() -> None:
    with running(EngineConfig(**fake_models(), method="full"), aliases=("gpt-4o", "claude-sonnet")) as served:
        for name in (NAME, "gpt-4o"):
            assert served.chat(model=name).json()["model"] == NAME
            assert served.client.get(f"/v1/models/{name}").json()["id"] == name
        client, other = OpenAI(base_url=served.url, api_key="a"), Anthropic(base_url=served.server.address, api_key="a")
        assert client.responses.create(model="gpt-4o", input="a", max_output_tokens=2).output
        messages: Any = [{"role": "user", "content": "a"}]
        assert other.messages.create(model="claude-sonnet", messages=messages, max_tokens=2).content
        assert [each.id for each in client.models.list()] == [NAME, "gpt-4o", "claude-sonnet"]
        refused = served.chat(model="gpt-4")
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"


def count(served: Served) -> int:
    lines = served.client.get("/metrics").text.splitlines()
    return sum(int(line.rpartition(" ")[2]) for line in lines if line.startswith(LEFT_OUT))


def test_tools_that_need_not_be_called_are_left_out(lenient: Served, caplog: pytest.LogCaptureFixture) -> None:
    client = OpenAI(base_url=lenient.url, api_key="a", max_retries=0)
    other = Anthropic(base_url=lenient.server.address, api_key="a", max_retries=0)
    plain = lenient.chat().json()
    before = count(lenient)
    with caplog.at_level(logging.WARNING):
        said = [lenient.chat(tools=[TOOL], **fields).json() for fields in ({}, {"tool_choice": "auto"})]
    assert [each["choices"][0]["message"]["content"] for each in said] == [
        plain["choices"][0]["message"]["content"]
    ] * 2
    assert {each["usage"]["prompt_tokens"] for each in said} == {plain["usage"]["prompt_tokens"]}
    messages: Any = [{"role": "user", "content": "What is it?"}]
    asked = client.responses.create(model=NAME, input=messages, tools=[IN_RESPONSES], max_output_tokens=4)
    assert asked.usage is not None and asked.usage.input_tokens == plain["usage"]["prompt_tokens"]
    assert other.messages.create(model=NAME, messages=messages, tools=[OF_ANTHROPIC], max_tokens=4).content
    assert count(lenient) - before == 4
    assert sum("tools of a request are left out" in each.message for each in caplog.records) == 1


def test_a_tool_that_must_be_called_is_refused(lenient: Served) -> None:
    one = {"type": "function", "function": {"name": "search"}}
    for choice in ("required", one, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}):
        refused = lenient.chat(tools=[TOOL], tool_choice=choice)
        assert refused.status_code == 400 and "does not use tools" in refused.json()["error"]["message"]
    refused = lenient.chat(tools=[TOOL], tool_choice={"type": "function"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"


def test_without_the_setting_they_are_refused(tiny_models: dict[str, str]) -> None:
    with running(toolless(tiny_models)) as served:
        refused = served.chat(tools=[TOOL])
    assert refused.status_code == 400 and "does not use tools" in refused.json()["error"]["message"]


def test_a_template_with_tools_keeps_them(config: EngineConfig) -> None:
    with running(config, drops_tools=True) as served:
        counts = [served.chat(**fields).json()["usage"]["prompt_tokens"] for fields in ({}, {"tools": [TOOL]})]
        assert counts[1] > counts[0] and count(served) == 0
