"""``/v1/messages``, through Anthropic's own client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from cacheclip_serve import Access, RequestError, TransformersBackend
from cacheclip_testing import fake_models, fake_of
from cacheclip_testing.plugin import CHUNKS, rag_prompt
from openai import OpenAI
from serve_cases import NAME, Served, running

from cacheclip_rag import EngineConfig, Event

PROMPT = rag_prompt(CHUNKS)
SEARCH: Any = {
    "name": "search",
    "description": "Looks up.",
    "input_schema": {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]},
    "cache_control": {"type": "ephemeral"},
}
NAMED = {name: SEARCH[name] for name in ("name", "description")}
IN_A_CHAT: Any = {"type": "function", "function": {**NAMED, "parameters": SEARCH["input_schema"]}}


def client_of(served: Served, key: str = "unused") -> Anthropic:
    return Anthropic(base_url=served.server.address, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(served: Served) -> Anthropic:
    served.engine.precompute(CHUNKS)
    return client_of(served)


def ask(client: Anthropic, *, extra_body: Any = None, **fields: Any) -> Any:
    """Greedy: this version of the client has no ``temperature``, which its older ones send."""
    own: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12}
    return client.messages.create(**{**own, **fields}, extra_body={"temperature": 0, **(extra_body or {})})


class TestAnswers:
    def test_an_answer_is_the_engines_own(self, served: Served, client: Anthropic) -> None:
        answer = served.engine.generate([{"role": "user", "content": PROMPT}], max_tokens=12)
        said = ask(client)
        (block,) = said.content
        assert (block.type, block.text) == ("text", answer.text) and answer.text
        assert (said.type, said.role, said.model, said.stop_reason) == ("message", "assistant", NAME, "max_tokens")
        usage = said.usage
        assert usage.cache_read_input_tokens == said.cacheclip["reused_tokens"] > 0
        assert usage.input_tokens + usage.cache_read_input_tokens == answer.stats.prompt_tokens
        assert usage.output_tokens == len(answer.token_ids) and usage.cache_creation_input_tokens == 0
        assert said.cacheclip["hits"] == len(CHUNKS)

    def test_a_stream_is_the_same_answer(self, client: Anthropic) -> None:
        whole, events = ask(client), list(ask(client, stream=True))
        kinds = [event.type for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        texts = [event.delta.text for event in events if event.type == "content_block_delta"]
        assert "".join(texts) == whole.content[0].text and len(texts) > 3
        assert events[-2].delta.stop_reason == "max_tokens"
        counted = events[-2].usage
        assert counted.input_tokens + counted.cache_read_input_tokens == (
            whole.usage.input_tokens + whole.usage.cache_read_input_tokens
        )
        assert counted.output_tokens == whole.usage.output_tokens

    def test_the_clients_helper_reads_the_stream(self, client: Anthropic) -> None:
        whole = ask(client)
        messages: Any = [{"role": "user", "content": PROMPT}]
        greedy: Any = {"extra_body": {"temperature": 0}}
        with client.messages.stream(model=NAME, messages=messages, max_tokens=12, **greedy) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
            read = stream.get_final_message()
        assert read.usage.output_tokens == whole.usage.output_tokens and read.usage.input_tokens > 0
        assert read.usage.cache_read_input_tokens and read.id.startswith("msg_")

    def test_stop_sequences(self, client: Anthropic) -> None:
        text = ask(client).content[0].text
        said = ask(client, stop_sequences=["never written", text[5:8]])
        assert said.content[0].text == text[: text.index(text[5:8])]
        assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", text[5:8])
        *_, delta, _ = ask(client, stop_sequences=[text[5:8]], stream=True)
        assert (delta.delta.stop_reason, delta.delta.stop_sequence) == ("stop_sequence", text[5:8])

    def test_system_and_blocks(self, served: Served, client: Anthropic) -> None:
        kept = {"cache_control": {"type": "ephemeral"}}
        said = ask(
            client,
            system=[{"type": "text", "text": "Be short.", **kept}, {"type": "text", "text": "And true."}],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": CHUNKS[0], **kept}]},
                {"role": "assistant", "content": [{"type": "text", "text": "I look."}]},
                {"role": "user", "content": "Go on."},
            ],
        )
        same = [
            {"role": "system", "content": "Be short.\nAnd true."},
            {"role": "user", "content": CHUNKS[0]},
            {"role": "assistant", "content": "I look."},
            {"role": "user", "content": "Go on."},
        ]
        assert said.content[0].text == served.engine.generate(same, max_tokens=12).text
        assert said.cacheclip["hits"] == 1

    def test_tokens_are_counted(self, served: Served, client: Anthropic) -> None:
        fields: Any = {"messages": [{"role": "user", "content": PROMPT}], "system": "Be short.", "tools": [SEARCH]}
        said = ask(client, **fields)
        counted = client.messages.count_tokens(model=NAME, **fields)
        assert counted.input_tokens == said.usage.input_tokens + said.usage.cache_read_input_tokens
        assert 'path="/v1/messages/count_tokens",status="200"' in served.client.get("/metrics").text


class TestTools:
    @pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "search"}], ids=["any", "one"])
    def test_a_forced_call(self, client: Anthropic, choice: Any) -> None:
        said = ask(client, tools=[SEARCH], tool_choice=choice, max_tokens=200)
        (block,) = said.content
        assert (block.type, block.name, set(block.input)) == ("tool_use", "search", {"words"})
        assert said.stop_reason == "tool_use" and block.id

    def test_in_a_stream(self, client: Anthropic) -> None:
        fields: Any = {"tools": [SEARCH], "tool_choice": {"type": "any"}, "max_tokens": 200}
        (whole,) = ask(client, **fields).content
        events = list(ask(client, **fields, stream=True))
        assert (events[1].content_block.type, events[1].content_block.input) == ("tool_use", {})
        pieces = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
        assert json.loads("".join(pieces)) == whole.input and events[-2].delta.stop_reason == "tool_use"

    def test_none(self, client: Anthropic) -> None:
        plain = ask(client).content[0].text
        assert ask(client, tools=[SEARCH], tool_choice={"type": "none"}).content[0].text == plain

    def test_the_second_request_is_that_of_a_chat(self, served: Served, client: Anthropic) -> None:
        use: Any = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {"words": "a"}}
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": CHUNKS[0]}]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "None.", "is_error": True},
            {"type": "text", "text": "Go on."},
        ]
        thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
        said = ask(
            client,
            tools=[SEARCH],
            messages=[
                {"role": "user", "content": "Where?"},
                {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, use,
                                                  {**use, "id": "toolu_2"}]},
                {"role": "user", "content": results},
            ],
        )  # fmt: skip
        call = {"type": "function", "function": {"name": "search", "arguments": '{"words": "a"}'}}
        calls = [{"id": "toolu_1", **call}, {"id": "toolu_2", **call}]
        same: Any = [
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "toolu_1", "content": CHUNKS[0]},
            {"role": "tool", "tool_call_id": "toolu_2", "content": "None."},
            {"role": "user", "content": "Go on."},
        ]
        chat = OpenAI(base_url=served.url, api_key="unused").chat.completions.create(
            model=NAME, messages=same, tools=[IN_A_CHAT], max_tokens=12, temperature=0
        )
        assert said.content[0].text == chat.choices[0].message.content
        assert chat.usage is not None
        assert said.usage.input_tokens + said.usage.cache_read_input_tokens == chat.usage.prompt_tokens


def test_reasoning_is_a_block(thinking: Served) -> None:
    fake_of(thinking.engine).says = ["<think>Is it tall?</think>Twelve metres."] * 2
    client = client_of(thinking)
    thought, text = ask(client, max_tokens=200).content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "Is it tall?", "Twelve metres.")
    deltas = [event.delta for event in ask(client, max_tokens=200, stream=True) if event.type == "content_block_delta"]
    assert "".join(each.thinking for each in deltas if each.type == "thinking_delta") == "Is it tall?"
    assert "".join(each.text for each in deltas if each.type == "text_delta") == "Twelve metres."


def test_an_answer_that_ends_by_itself(thinking: Served) -> None:
    fake_of(thinking.engine).says = ["Twelve metres."]
    said = ask(client_of(thinking), max_tokens=200, stop_sequences=["never written"])
    assert (said.stop_reason, said.stop_sequence) == ("end_turn", None)


def test_an_error_in_a_stream(thinking: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(self: TransformersBackend, question: Any) -> Any:
        yield Event("A beginning. ")
        raise RequestError("it broke", status=500, code="broken")

    monkeypatch.setattr(TransformersBackend, "answer", failing)
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(ask(client_of(thinking), stream=True))
    assert caught.value.body["error"] == {"type": "api_error", "message": "it broke"}  # type: ignore[index]


USER, OPENED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "{"}
RESULT = {"role": "user", "content": [{"type": "tool_result"}]}


class TestErrors:
    REFUSED: Any = {
        "picture": ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        "tool of Anthropic's": ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0] has type"),
        "beginning of the answer": ({"messages": [USER, OPENED]}, "messages[1]: this server does not go on"),
        "code": ({"container": "a"}, "container is not supported"),
        "servers of tools": ({"mcp_servers": [{"name": "a"}]}, "mcp_servers is not supported"),
        "no messages": ({"messages": None}, "messages: Field required"),
        "malformed": ({"messages": "a"}, "messages: Input should be a valid list"),
        "role": ({"messages": [RESULT, {"role": "critic", "content": "a"}]}, "messages[1].role"),
        "tool choice": ({"tool_choice": {"type": "some"}}, "tool_choice must have type"),
        "stop sequences": ({"stop_sequences": "a"}, "stop_sequences: Input should be a valid list"),
        "no limit": ({"max_tokens": 0}, "max_tokens"),
        "unknown": ({"suffix": "a"}, "suffix is not supported"),
    }

    @pytest.mark.parametrize("case", REFUSED)
    def test_in_anthropics_form(self, client: Anthropic, case: str) -> None:
        fields, says = self.REFUSED[case]
        with pytest.raises(anthropic.BadRequestError) as caught:
            ask(client, extra_body=fields)
        body: Any = caught.value.body
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert says in body["error"]["message"]

    def test_of_other_kinds(self, served: Served, client: Anthropic) -> None:
        with pytest.raises(anthropic.NotFoundError) as caught:
            ask(client, model="another")
        assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        assert served.client.get("/v1/messages").json()["type"] == "error"

    def test_what_changes_nothing_is_counted(self, served: Served, client: Anthropic) -> None:
        plain = ask(client).content[0].text
        neutral = {"metadata": {"user_id": "a"}, "cache_control": {"type": "ephemeral"}, "service_tier": "auto"}
        neutral |= {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}, "container": None}
        neutral |= {"thinking": {"type": "adaptive"}}
        assert ask(client, extra_body=neutral).content[0].text == plain
        metrics = served.client.get("/metrics").text
        for name in ("context_management", "cache_control", "metadata"):
            assert f'cacheclip_ignored_fields_total{{field="{name}"}}' in metrics


def test_keys() -> None:
    access = Access("default", "server-key-1", {"north-key-11": ("north",)})
    with running(EngineConfig(**fake_models(), method="full"), access=access) as served:
        assert ask(client_of(served, "north-key-11")).content
        assert ask(Anthropic(base_url=served.server.address, auth_token="north-key-11", api_key=None)).content
        for wrong in ("south-key-11", "north-key-1"):
            with pytest.raises(anthropic.AuthenticationError) as caught:
                ask(client_of(served, wrong))
            assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        both = {"authorization": "Bearer south-key-11", "x-api-key": "north-key-11"}
        assert served.client.get("/v1/models", headers=both).status_code == 401, "what is stated first counts"
        assert served.client.get("/metrics", headers={"x-api-key": "north-key-11"}).status_code == 403


def test_half_characters_of_results_are_mended(thinking: Served) -> None:
    half = "\ud83d"
    result = {"type": "tool_result", "tool_use_id": "a", "content": half}
    for place, blocks, status in (("result", [result], 200), ("question", [{"type": "text", "text": half}], 400)):
        body = json.dumps({"messages": [{"role": "user", "content": blocks}], "max_tokens": 2})
        headers = {"content-type": "application/json"}
        assert thinking.client.post("/v1/messages", content=body, headers=headers).status_code == status, place
    items = [{"type": "function_call_output", "call_id": "a", "output": half}, {"role": "user", "content": "Go on."}]
    body = json.dumps({"input": items, "max_output_tokens": 2})
    headers = {"content-type": "application/json"}
    assert thinking.client.post("/v1/responses", content=body, headers=headers).status_code == 200
