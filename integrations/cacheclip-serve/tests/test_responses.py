"""``/v1/responses``, through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cacheclip_serve import RequestError, TransformersBackend
from cacheclip_testing import fake_of
from cacheclip_testing.plugin import CHUNKS, rag_prompt
from openai import BadRequestError, OpenAI
from openai.types.responses import Response
from serve_cases import NAME, Served, until

from cacheclip_rag import Event

PROMPT = rag_prompt(CHUNKS)
SEARCH = {
    "type": "function",
    "name": "search",
    "description": "Looks up.",
    "strict": True,
    "parameters": {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]},
}
IN_CHAT = {"type": "function", "function": {name: SEARCH[name] for name in ("name", "description", "parameters")}}


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    served.engine.precompute(CHUNKS)
    return OpenAI(base_url=served.url, api_key="unused", max_retries=0)


def ask(client: OpenAI, **fields: Any) -> Any:
    own = {"model": NAME, "input": PROMPT, "max_output_tokens": 12, "temperature": 0}
    return client.responses.create(**{**own, **fields})


class TestAnswers:
    def test_an_answer_is_the_engines_own(self, served: Served, client: OpenAI) -> None:
        answer = served.engine.generate([{"role": "user", "content": PROMPT}], max_tokens=12)
        said = ask(client)
        assert said.output_text == answer.text != ""
        assert (said.status, said.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert said.error is None and said.store is False and said.model == NAME and said.id.startswith("resp_")
        usage = said.usage
        assert (usage.input_tokens, usage.output_tokens) == (answer.stats.prompt_tokens, len(answer.token_ids))
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert usage.input_tokens_details.cached_tokens == said.cacheclip["reused_tokens"] > 0
        assert said.cacheclip["hits"] == len(CHUNKS)
        assert Response.model_validate(said.to_dict(), strict=False).output_text == answer.text

    def test_what_was_asked_is_repeated(self, client: OpenAI) -> None:
        said = ask(client, instructions="Be short.", tools=[SEARCH], metadata={"a": "b"}, top_p=0.5)
        assert (said.instructions, said.metadata, said.top_p) == ("Be short.", {"a": "b"}, 0.5)
        assert said.tools[0].name == "search" and said.tool_choice == "auto" and said.max_output_tokens == 12

    def test_a_schema(self, client: OpenAI) -> None:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        format = {"type": "json_schema", "name": "a", "schema": schema}
        said = ask(client, text={"format": format}, max_output_tokens=99)
        assert said.status == "completed" and set(json.loads(said.output_text)) == {"n"}
        assert said.text.format.name == "a"

    def test_a_stream_is_the_same_answer(self, client: OpenAI) -> None:
        whole, events = ask(client), list(ask(client, stream=True))
        kinds = [event.type for event in events]
        first = ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds[:4] == [f"response.{kind}" for kind in first]
        last = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
        assert kinds[-4:] == [f"response.{kind}" for kind in last]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(texts) == whole.output_text == events[-1].response.output_text and len(texts) > 3
        assert events[-4].text == whole.output_text
        assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
        assert events[0].response.status == "in_progress" and events[0].response.usage is None
        assert {event.item_id for event in events if hasattr(event, "item_id")} == {events[2].item.id}

    def test_the_clients_helper_reads_the_stream(self, client: OpenAI) -> None:
        fields: Any = {"model": NAME, "input": PROMPT, "max_output_tokens": 200, "tools": [SEARCH]}
        with client.responses.stream(**fields, tool_choice="required") as stream:
            (call,) = stream.get_final_response().output
        assert call.type == "function_call" and set(json.loads(call.arguments)) == {"words"}

    def test_logprobs(self, client: OpenAI) -> None:
        said = ask(client, top_logprobs=2, include=["message.output_text.logprobs"])
        found = said.output[0].content[0].logprobs
        assert len(found) == 12 and all(len(each.top_logprobs) == 2 for each in found)
        *_, last = ask(client, top_logprobs=2, stream=True)
        assert last.response.output[0].content[0].logprobs == found


class TestTools:
    @pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "search"}], ids=["any", "one"])
    def test_a_forced_call(self, client: OpenAI, choice: Any) -> None:
        said = ask(client, tools=[SEARCH], tool_choice=choice, max_output_tokens=200)
        (call,) = said.output
        assert said.status == "completed" and said.output_text == "" and said.tool_choice is not None
        assert call.type == "function_call" and call.name == "search" and set(json.loads(call.arguments)) == {"words"}

    def test_in_a_stream(self, client: OpenAI) -> None:
        fields: dict[str, Any] = {"tools": [SEARCH], "tool_choice": "required", "max_output_tokens": 200}
        (whole,), events = ask(client, **fields).output, list(ask(client, **fields, stream=True))
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == done.arguments == whole.arguments and done.name == "search"
        (call,) = events[-1].response.output
        assert call.call_id and call.id == done.item_id and events[-1].type == "response.completed"

    def test_the_second_request_is_that_of_a_chat(self, served: Served, client: OpenAI) -> None:
        asked: list[Any] = [
            {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
             "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            {"type": "function_call", "call_id": "call_1", "name": "search", "arguments": '{"words": "a"}'},
            {"type": "function_call", "call_id": "call_2", "name": "search", "arguments": '{"words": "b"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": CHUNKS[0]},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "None."}]},
        ]  # fmt: skip
        call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"words": "a"}'}}
        other = {"id": "call_2", "type": "function", "function": {"name": "search", "arguments": '{"words": "b"}'}}
        same: list[Any] = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call, other]},
            {"role": "tool", "tool_call_id": "call_1", "content": CHUNKS[0]},
            {"role": "tool", "tool_call_id": "call_2", "content": "None."},
        ]
        said = ask(client, input=asked, instructions="Be short.", tools=[SEARCH])
        chat = client.chat.completions.create(model=NAME, messages=same, tools=[IN_CHAT], max_tokens=12, temperature=0)
        assert said.output_text == chat.choices[0].message.content
        assert chat.usage is not None and said.usage.input_tokens == chat.usage.prompt_tokens


def test_reasoning_is_an_item(thinking: Served) -> None:
    fake_of(thinking.engine).says = ["<think>Is it tall?</think>Twelve metres."] * 2
    client = OpenAI(base_url=thinking.url, api_key="unused", max_retries=0)
    fields: dict[str, Any] = {"input": "How tall?", "max_output_tokens": 200}
    reasoning, message = ask(client, **fields).output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Is it tall?") and reasoning.summary == []
    assert (message.type, message.content[0].text) == ("message", "Twelve metres.")
    events = list(ask(client, **fields, stream=True))
    for kind, text in (("reasoning_text", "Is it tall?"), ("output_text", "Twelve metres.")):
        deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
        assert "".join(deltas) == text and len(deltas) > 1
    output = events[-1].response.output
    assert [item.type for item in output] == ["reasoning", "message"] and output[0].content == reasoning.content
    assert [event.output_index for event in events if event.type == "response.output_item.done"] == [0, 1]
    fake_of(thinking.engine).says = []
    again = [{"role": "user", "content": "How tall?"}, *(item.to_dict() for item in output)]
    assert ask(client, input=[*again, {"role": "user", "content": "Sure?"}], max_output_tokens=2).output


def test_an_error_in_a_stream(thinking: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(self: TransformersBackend, question: Any) -> Any:
        yield Event("A beginning. ")
        raise RequestError("it broke", status=500, code="broken")

    monkeypatch.setattr(TransformersBackend, "answer", failing)
    client = OpenAI(base_url=thinking.url, api_key="unused", max_retries=0)
    *_, last = ask(client, stream=True)
    assert (last.type, last.code, last.message) == ("error", "broken", "it broke")


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "earlier answer": ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no answers"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "keeps no answers"),
    "item that is kept": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "keeps no answers"),
    "template of prompts": ({"prompt": {"id": "pmpt_1"}}, "prompt", "no templates"),
    "in the background": ({"background": True}, "background", "does not follow it"),
    "shortened": ({"truncation": "auto"}, "truncation", "does not follow it"),
    "hosted tool": ({"tools": [SEARCH, {"type": "web_search"}]}, "tools[1]", "runs no tools"),
    "item of a hosted tool": ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "web_search_call"),
    "picture": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", "input_image"),
    "no input": ({"input": None}, "input", "required"),
    "malformed input": ({"input": 7}, "input", "valid list"),
    "malformed item": ({"input": ["a"]}, "input[0]", "valid object"),
    "malformed role": ({"input": [{"role": "critic", "content": "a"}]}, "input[0].role", "input"),
    "no limit": ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
    "schema": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "schema"),
    "format": ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "text.format must"),
    "tool choice": ({"tool_choice": "required"}, "tool_choice", "no tools"),
    "unknown": ({"suffix": "a"}, "suffix", "does not follow it"),
    "several": ({"n": 2}, "n", "one answer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(client: OpenAI, case: str) -> None:
    fields, param, says = REFUSED[case]
    with pytest.raises(BadRequestError) as caught:
        ask(client, extra_body=fields)
    assert caught.value.param == param and says in caught.value.message
    assert "messages[" not in caught.value.message


def test_what_changes_nothing_is_counted(served: Served, client: OpenAI) -> None:
    plain = ask(client).output_text
    neutral: dict[str, Any] = {"store": True, "include": ["reasoning.encrypted_content"], "truncation": "disabled"}
    neutral |= {"stream_options": {"include_obfuscation": False}, "reasoning": {"summary": "auto"}, "background": False}
    neutral |= {"parallel_tool_calls": True, "prompt_cache_key": "a", "max_tool_calls": 3, "previous_response_id": None}
    neutral |= {"text": {"format": {"type": "text"}}}
    assert ask(client, extra_body=neutral).output_text == plain
    metrics = served.client.get("/metrics").text
    for name in ("include", "store", "max_tool_calls", "stream_options"):
        assert f'cacheclip_ignored_fields_total{{field="{name}"}}' in metrics
    assert 'cacheclip_http_requests_total{path="/v1/responses",status="200"}' in metrics


def test_a_client_that_leaves_stops_the_answer(served: Served, client: OpenAI) -> None:
    stream = ask(client, stream=True, max_output_tokens=2000, extra_body={"seed": 1}, temperature=1.5)
    next(iter(stream))
    stream.close()
    until(lambda: not served.server.app._queue.running)
