"""Histories and requests as real clients send them: OpenAI's SDK, LangChain, LlamaIndex, LiteLLM, Open WebUI, Continue,
Cline. What is odd in a history is sent again with every later question, and must not end the conversation."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from cacheclip_serve.errors import RequestError
from cacheclip_serve.schema import ChatBody, CompletionBody, parse
from cacheclip_testing import fake_of
from cacheclip_testing.plugin import CHUNKS
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as OfAChat
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as OfACompletion
from serve_cases import NAME, Served, Unexpected, play, running

from cacheclip_rag import EngineConfig
from cacheclip_rag.prompt.segments import check_messages

USER = {"role": "user", "content": "How tall is the mast?"}
ENGLISH = "Twelve metres."
TEXT = {"type": "text", "text": ENGLISH}


def call(arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}, **fields}


def read(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """Messages as the engine gets them, between two of a user."""
    body = parse(ChatBody, {"messages": [USER, *messages, USER], **fields})
    (found,) = body.prompts
    assert isinstance(found, list) and check_messages(found)
    return found[1:-1]


DEEP = '{"a": ' + "[" * 500 + "]" * 500 + "}"
ARGUMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": ('{"q": 1}', {"q": 1}),
    "object": ({"q": 1}, {"q": 1}),
    "cut off": ('{"q": "ma', {"arguments": '{"q": "ma'}),
    "null as text": ("null", {}),
    "null": (None, {}),
    "missing": ("", {}),
    "list": ("[]", {}),
    "string": ('"mast"', {"arguments": "mast"}),
    "JSON in JSON": (json.dumps('{"q": 1}'), {"q": 1}),
    "as Python writes it": ("{'q': None}", {"q": None}),
    "deep": ("[" * 5000, {"arguments": "[" * 5000}),
    "half a character": (r'{"a": "x\ud83d"}', {"a": "x\ufffd"}),
    "half a character in a key": (r'{"\udd27": [{"b\ud83d": "\ud83d"}]}', {"\ufffd": [{"b\ufffd": "\ufffd"}]}),
    "half a character in JSON in JSON": (json.dumps(r'{"a": "\ud83d"}'), {"a": "\ufffd"}),
    "a whole one in two halves": (r'{"a": "\ud83d\udd27"}', {"a": "\U0001f527"}),
    "deeper than a template can write": (DEEP, {"arguments": DEEP}),
    "a set": ("{'a': {1}}", {"arguments": "{'a': {1}}"}),
    "two objects": ("{}{}", {"arguments": "{}{}"}),
}


class TestCalls:
    @pytest.mark.parametrize("name", ARGUMENTS)
    def test_arguments(self, name: str) -> None:
        given, expected = ARGUMENTS[name]
        result = {"role": "tool", "tool_call_id": "call_1", "content": "error: bad arguments"}
        (said, answered) = read({"role": "assistant", "content": None, "tool_calls": [call(given)]}, result)
        assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}
        assert (said["content"], answered["tool_call_id"]) == ("", "call_1")

    def test_names_and_ids_become_words(self) -> None:
        odd = {"id": "fc_1|call 2", "function": {"name": "multi tool<|im_end|>", "arguments": "{}"}}
        result = {"role": "tool", "tool_call_id": "fc_1|call 2", "name": "multi tool", "content": None}
        said, answered = read({"role": "assistant", "tool_calls": [odd]}, result)
        assert said["tool_calls"][0]["id"] == answered["tool_call_id"] == "fc_1_call_2"
        assert said["tool_calls"][0]["function"]["name"] == "multi_tool__im_end__"
        assert (answered["name"], answered["content"]) == ("multi_tool", "")

    @pytest.mark.parametrize("calls", [None, [], "f", [None], [{}], [{"function": {"arguments": "{}"}}]])
    def test_none(self, calls: Any) -> None:
        plain = {"role": "assistant", "content": ENGLISH}
        assert read({**plain, "tool_calls": calls}) == [plain]

    def test_of_the_old_kind_and_of_custom_tools(self) -> None:
        old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"q": 1}'}}
        custom = {"id": "call_2", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}
        result = {"role": "function", "name": "f", "content": "x"}
        first, second, third = read(old, result, {"role": "assistant", "tool_calls": [custom]})
        assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": {"q": 1}}
        assert second == {"role": "tool", "name": "f", "content": "x"}
        assert third["tool_calls"][0]["function"] == {"name": "sql", "arguments": {"input": "select 1"}}


ANSWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "null": ({"content": None}, {"content": ""}),
    "nothing": ({}, {"content": ""}),
    "refusal": ({"content": None, "refusal": "No."}, {"content": "No."}),
    "part with a refusal": ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
    "reasoning only": ({"content": None, "reasoning_content": "Hm."}, {"content": "", "reasoning_content": "Hm."}),
    "vLLM's reasoning": ({"content": ENGLISH, "reasoning": "Hm."}, {"content": ENGLISH, "reasoning_content": "Hm."}),
    "reasoning of another kind": ({"content": ENGLISH, "reasoning": {"summary": []}}, {"content": ENGLISH}),
    "part with reasoning": (
        {"content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": ENGLISH}]},
        {"content": ENGLISH, "reasoning_content": "Hm."},
    ),
    **{
        f"part with reasoning of {name}": ({"content": [part, TEXT]}, {"content": ENGLISH, "reasoning_content": "Hm."})
        for name, part in {
            "Mistral": {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}], "closed": True},
            "OpenAI": {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
            "LangChain": {"type": "reasoning", "reasoning": "Hm.", "summary": []},
            "Bedrock": {"type": "reasoning_content", "text": "Hm."},
        }.items()
    },
    "part with a call": ({"content": [TEXT, {"type": "tool_use", "id": "1", "name": "f"}]}, {"content": ENGLISH}),
    "part without text": ({"content": [{"type": "text", "text": None}, "More."]}, {"content": "More."}),
    "part of no kind": ({"content": [{"type": "new"}, TEXT, {"no": "type"}, {"type": []}, 3]}, {"content": ENGLISH}),
    "picture": ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, {"content": ""}),
    "object": ({"content": {"answer": "zwölf"}}, {"content": '{"answer": "zwölf"}'}),
    "number": ({"content": 12}, {"content": "12"}),
    "parts of other APIs": (
        {"content": [{"type": "output_text", "text": ENGLISH, "annotations": []}, "More."]},
        {"content": f"{ENGLISH}\nMore."},
    ),
    **{
        f"field {next(iter(fields))}": ({"content": ENGLISH, **fields}, {"content": ENGLISH})
        for fields in (
            {"provider_specific_fields": {"refusal": None}},
            {"name": "researcher"},
            {"audio": {"id": "a"}},
            {"thinking_blocks": [{"type": "thinking", "thinking": "x"}]},
            {"images": ["x"]},
            {"documents": ["x"]},
            {"prefix": True},
            {"never_heard_of": 1},
        )
    },
}


class TestAnswers:
    @pytest.mark.parametrize("name", ANSWERS)
    def test_of_assistants(self, name: str) -> None:
        given, expected = ANSWERS[name]
        assert read({"role": "assistant", **given}) == [{"role": "assistant", **expected}]

    @pytest.mark.parametrize("role", ["user", "system", "developer"])
    @pytest.mark.parametrize(
        "fields",
        [{"cache_control": {}}, {"name": "anna"}, {"tool_calls": []}, {"tool_calls": None, "function_call": None}],
    )
    def test_of_others(self, role: str, fields: dict[str, Any]) -> None:
        role_read = "system" if role == "developer" else role
        assert read({"role": role, "content": "x", **fields}) == [{"role": role_read, "content": "x"}]

    @pytest.mark.parametrize("role", ["tool", "function"])
    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ({"metres": 12, "è": [None]}, '{"metres": 12, "è": [null]}'),
            (1.5, "1.5"),
            (0, "0"),
            (False, "false"),
            ({}, "{}"),
            ([{"name": "x"}], '[{"name": "x"}]'),
            ([{"type": "text", "text": "x"}, "y"], "x\ny"),
            ([], ""),
            (None, ""),
        ],
    )
    def test_of_tools(self, role: str, content: Any, expected: str) -> None:
        assert read({"role": role, "content": content}) == [{"role": "tool", "content": expected}]

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "x"}]}, "x"),
            ({"content": "x", "images": ["y"]}, "x"),
            ({"content": 3}, "3"),
            ({"content": None}, ""),
            ({"content": "x", "tool_calls": [call()]}, "x"),
        ],
    )
    @pytest.mark.parametrize("role", ["user", "tool"])
    def test_of_another_model(self, role: str, fields: dict[str, Any], expected: str) -> None:
        """What was read by another model before is no error in later turns; of a user, it is one in this turn. A tool's
        result is sent again until the user's next question."""
        message = {"role": role, **fields}
        assert read(message) == [{"role": role, "content": expected}]
        if role == "user":
            with pytest.raises(RequestError):
                parse(ChatBody, {"messages": [message]})
            return
        for later in ([], [{"role": "assistant", "content": "x", "prefix": True}, message]):
            [found] = parse(ChatBody, {"messages": [USER, message, *later]}).prompts
            assert found[1] == found[-1] == {"role": role, "content": expected}

    @pytest.mark.parametrize("role", ["system", "developer"])
    @pytest.mark.parametrize("fields", [{"content": None}, {"content": []}, {"content": ""}, {}])
    def test_of_instructions_that_say_nothing(self, role: str, fields: dict[str, Any]) -> None:
        assert read({"role": role, **fields}) == [{"role": "system", "content": ""}]


OFF = {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        *(
            ({"verbosity": value}, {"chat_template_kwargs": {"verbosity": value}})
            for value in ("low", "medium", "high")
        ),
        *(
            (field, {"chat_template_kwargs": {"reasoning_effort": effort}})
            for effort in ("minimal", "low", "medium", "high", "xhigh", "max")
            for field in ({"reasoning_effort": effort}, {"reasoning": {"effort": effort, "x": 1}}, {"think": effort})
        ),
        (
            {"reasoning_effort": "low", "verbosity": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"chat_template_kwargs": {"reasoning_effort": "high", "verbosity": "low"}},
        ),
        ({"max_tokens": 8.0}, {"max_tokens": 8}),
        ({"max_completion_tokens": 8.0, "seed": 3.0}, {"max_tokens": 8, "seed": 3}),
        ({"n": 1.0, "logit_bias": {}}, {}),
        *(({name: n}, {name: n}) for name in ("presence_penalty", "frequency_penalty") for n in (0, 0.0, -2, 1.5)),
        ({"top_p": 0}, {"top_p": 0}),
        *(({"stop": value}, {}) for value in ("", [], [""], [None], {}, None)),
        ({"stop": ["", "END"]}, {"stop": ["END"]}),
        *(({"response_format": value}, {}) for value in ({}, {"type": "text"}, {"type": None}, "")),
        *(({"stream_options": value}, {}) for value in ({}, {"include_usage": False}, {"include_usage": None})),
        *(({"function_call": value}, {}) for value in ("none", "auto", {}, None)),
        *(({"reasoning": value}, {}) for value in ({}, {"effort": None, "summary": None})),
        *(({"tool_choice": value}, {}) for value in ("", {}, {"type": None}, "none", "auto")),
        ({"reasoning_effort": "none"}, OFF),
        ({"thinking": {"type": "disabled"}}, OFF),
        *(({name: no}, OFF) for name, no in (("think", False), ("enable_thinking", False), ("thinking", False))),
        *(({"reasoning": no}, OFF) for no in ({"effort": "none"}, {"enabled": False}, {"enabled": False, "x": 1})),
        ({"reasoning": {"enabled": True}}, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        ({"enable_thinking": True, "reasoning_effort": "none"}, OFF),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"cache_prompt": True, "id_slot": -1, "n_predict": -1, "mirostat": 0, "repeat_penalty": 1.0, "min_p": 0}, {}),
        ({"provider": {"order": ["x"]}, "transforms": [], "usage": {"include": True}, "num_retries": 2}, {}),
        ({"add_bos_token": True, "ban_eos_token": False, "truncation_length": 4096, "typical": 1}, {}),
        ({"enable_thinking": True}, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}, {}),
    ],
)
def test_requests(fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert parse(ChatBody, {"messages": [USER], **fields}).sampling() == options


CHAT: dict[str, Any] = {"messages": [USER]}
COMPLETION: dict[str, Any] = {"prompt": "x"}


@pytest.mark.parametrize(
    ("kind", "given", "fields"),
    [(ChatBody, CHAT, OfAChat), (CompletionBody, COMPLETION, OfACompletion)],
    ids=["chat", "completion"],
)
@pytest.mark.parametrize("nothing", [None, "", [], {}], ids=repr)
def test_every_field_of_openai_may_say_nothing(kind: Any, given: dict[str, Any], fields: Any, nothing: Any) -> None:
    names = {name for each in fields.__mro__ for name in getattr(each, "__annotations__", ())} - given.keys()
    assert {"top_p", "stop", "stream_options", "logit_bias", "presence_penalty", "model"} <= names
    plain = parse(kind, given)
    for name in names:
        body = parse(kind, {**given, name: nothing})
        assert (body.sampling(), body.one_call, body.model) == (plain.sampling(), False, None), name
        assert list(body.prompts) == list(plain.prompts)
    body = parse(kind, {**given, **dict.fromkeys(names, nothing)})
    assert body.sampling() == plain.sampling()


def test_every_default_of_openai() -> None:
    """What its reference calls the default, or what clients send in its place."""
    shared = {"n": 1, "stream": False, "logit_bias": None, "user": "", "seed": None, "stop": None}
    numbers = {"temperature": 1, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0}
    chat = {"logprobs": False, "top_logprobs": 0, "store": False, "service_tier": "auto", "modalities": ["text"]}
    chat |= {"parallel_tool_calls": True, "tool_choice": "none", "function_call": "none", "metadata": {}, "tools": []}
    chat |= {"audio": None, "prediction": None, "web_search_options": None, "response_format": {"type": "text"}}
    completion = {"best_of": 1, "echo": False, "logprobs": None, "suffix": None, "max_tokens": 16}
    assert parse(ChatBody, {**CHAT, **shared, **numbers, **chat}).sampling() == numbers
    read = parse(CompletionBody, {**COMPLETION, **shared, **numbers, **completion}).sampling()
    assert read == {**numbers, "max_tokens": 16}


def named(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


@pytest.mark.parametrize("is_flat", [False, True], ids=["chat completions", "responses"])
def test_allowed_tools(is_flat: bool) -> None:
    """The model is told of those that it may call, in the order of the choice."""

    def read(mode: str, *names: str) -> dict[str, Any]:
        own = {"mode": mode, "tools": [{"type": "function", "name": n} for n in names] if is_flat else named(*names)}
        choice = {"type": "allowed_tools", **(own if is_flat else {"allowed_tools": own})}
        return parse(ChatBody, {"messages": [USER], "tools": named("f", "g", "h"), "tool_choice": choice}).sampling()

    assert read("auto", "h", "f") == {"tools": named("h", "f")}
    assert read("auto") == {}
    only = parse(ChatBody, {"messages": [USER], "tools": named("f", "g"), "tool_choice": "required"}).sampling()
    assert read("required", "f", "g") == only and "json_schema" in only


@pytest.mark.parametrize(
    "field",
    [
        {"n_predict": 5},
        {"mirostat": 2},
        {"repeat_penalty": 1.1},
        {"reasoning": {"effort": "extreme"}},
        {"reasoning": {"max_tokens": 0}},
        {"reasoning_effort": "extreme"},
        {"reasoning_effort": 3},
        {"verbosity": "none"},
        {"think": "much"},
        {"add_bos_token": False},
        {"transforms": ["middle-out"]},
    ],
)
def test_what_would_change_the_answer(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(field))} is not supported with this value"):
        parse(ChatBody, {"messages": [USER], **field})


def test_marks_for_caches_in_tools() -> None:
    """They are no part of what the model is told."""
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}
    (found,) = parse(ChatBody, {"messages": [USER], "tools": [tool]}).sampling()["tools"]
    assert found == {"type": "function", "function": {"name": "f"}}


HALF = "x\ud83d"


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "old",
    [
        {"role": "assistant", "content": HALF},
        {"role": "assistant", "content": None, "tool_calls": [call({HALF: HALF})]},
        {"role": "assistant", "content": None, "tool_calls": [call(json.dumps({HALF: HALF}))]},
        {"role": "tool", "tool_call_id": "call_1", "content": HALF},
        {"role": "tool", "tool_call_id": "call_1", "content": {HALF: 1}},
        USER | {"content": HALF},
    ],
    ids=["answer", "arguments", "arguments as text", "result", "result as an object", "earlier question"],
)
def test_half_a_character_in_an_old_turn(served: Served, old: dict[str, Any]) -> None:
    for messages, status in [([USER, old, USER], 200), ([USER, USER, old], 400 if old["role"] == "user" else 200)]:
        body = json.dumps({"messages": messages, "max_tokens": 2})
        json_type = {"content-type": "application/json"}
        response = served.client.post("/v1/chat/completions", content=body, headers=json_type)
        assert response.status_code == status, response.text


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize(
    "fields", [{"content": HALF}, {"content": 3}, {"content": [{"type": []}]}, {"content": "x", "files": [1]}]
)
def test_instructions_hold_in_every_turn(served: Served, role: str, fields: dict[str, Any]) -> None:
    """So nothing of them is left out; null says nothing."""
    body = json.dumps({"messages": [{"role": role, **fields}, USER], "max_tokens": 2})
    response = served.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text


def ignored(served: Served, field: str) -> float:
    """How many requests had a field that was ignored."""
    lines = served.client.get("/metrics").text.splitlines()
    name = f'cacheclip_ignored_fields_total{{field="{field}"}} '
    found = [line.removeprefix(name) for line in lines if line.startswith(name)]
    return float(found[0]) if found else 0.0


def test_ignored_fields_are_counted(served: Served) -> None:
    counted = partial(ignored, served)
    names = ("user", "verbosity", "messages.cache_control", "messages.other", "messages.id", "reasoning_effort")
    names += ("messages.files", "messages.content")
    before = {name: counted(name) for name in names}
    odd = {**USER, "cache_control": {"type": "ephemeral"}, 'x"}\n': 1, "id": None}
    answer = {"role": "assistant", "content": [{"type": "text", "text": None}, ENGLISH], "files": ["x"]}
    whole = {"role": "assistant", "content": [{"type": "text", "text": ENGLISH}, {"type": "thinking", "thinking": "x"}]}
    messages = [odd, answer, odd]
    assert served.chat(user="u", verbosity="medium", reasoning_effort="none", messages=messages).status_code == 200
    assert served.chat(messages=[odd, whole, USER]).status_code == 200
    assert served.chat(verbosity="low", reasoning_effort="high").status_code == 200
    assert [counted(name) - before[name] for name in names] == [1, 2, 2, 2, 0, 2, 1, 1], names


def test_a_template_that_reads_the_effort(tiny_models: dict[str, str], tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_models["llama"], tmp_path / "model"))
    with (model / "chat_template.jinja").open("a") as template:
        template.write("{% if reasoning_effort is defined %}Reasoning: {{ reasoning_effort }}{% endif %}")
    with running(EngineConfig(primary=str(model), auxiliary=None, method="full")) as served:

        def tokens(**fields: Any) -> int:
            found = served.chat(**fields).json()
            return int(found["usage"]["prompt_tokens"])

        ways = ({"reasoning_effort": "high"}, {"reasoning": {"effort": "high"}}, {"think": "high"})
        own = {"chat_template_kwargs": {"reasoning_effort": "high"}}
        assert {tokens(**way) for way in (*ways, own, {**own, "reasoning_effort": "minimal"})} == {tokens(**own)}
        assert tokens(**own) > tokens() == tokens(verbosity="low") == tokens(reasoning_effort="none")
        counts = [ignored(served, name) for name in ("reasoning_effort", "reasoning", "think", "verbosity")]
        assert counts == [1, 0, 0, 1], "only thinking cannot be switched off here"


SAID = "<think>I could say STOP.</think>It is twelve metres tall. STOP."


class TestReasoning:
    def ask(self, thinking: Served, **fields: Any) -> Any:
        fake_of(thinking.engine).says = [SAID]
        client = openai.OpenAI(base_url=thinking.url, api_key="none", max_retries=0)
        with client:
            return client.chat.completions.create(model=NAME, messages=[USER], stop="STOP", **fields)  # type: ignore[call-overload]

    def test_whole(self, thinking: Served) -> None:
        message = self.ask(thinking).choices[0].message
        assert message.content == "It is twelve metres tall. "
        assert message.model_extra["reasoning_content"] == "I could say STOP."
        fake_of(thinking.engine).says = []
        messages = [USER, message.model_dump(), USER]
        response = thinking.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
        assert response.status_code == 200, "an answer comes back in the next request"

    def test_streamed(self, thinking: Served) -> None:
        fake_of(thinking.engine).says = [SAID]
        body = {"messages": [USER], "stop": "STOP", "stream": True}
        text, reasoning = "", ""
        for line in thinking.client.post("/v1/chat/completions", json=body).text.split("\n\n"):
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    delta = choice["delta"]
                    assert not (text and delta.get("reasoning_content")), "reasoning comes first"
                    text += delta.get("content") or ""
                    reasoning += delta.get("reasoning_content") or ""
        assert (reasoning, text) == ("I could say STOP.", "It is twelve metres tall. ")


async def test_the_requests_of_applications(served: Served) -> None:
    """Open WebUI's and LiteLLM's, with documents before the question, titles and tags beside, streams, and a stop."""
    served.engine.precompute(CHUNKS)
    found = await play(served.server.address, CHUNKS[:2], max_tokens=4)
    assert len(found) == 8 and set(found.values()) == {2}, "all of them hold both documents"
    with pytest.raises(Unexpected, match="GET models"):
        await play(f"{served.server.address}/elsewhere", CHUNKS[:2])
