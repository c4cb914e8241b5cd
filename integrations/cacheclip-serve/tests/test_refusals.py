"""What a server refuses, and how it says so."""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing.plugin import CHUNKS
from serve_cases import NAME, Served, running

from cacheclip_rag import EngineConfig, StoreError
from cacheclip_rag.runtime import Runtime

MESSAGES = [{"role": "user", "content": "What?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


OPENED = {"role": "assistant", "content": "Well,", "prefix": True}
OBJECT = {"response_format": {"type": "json_object"}}
NAMELESS = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}]}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": MESSAGES, "max_tokens": 2, **fields}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def message(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "What?", **fields}])


def cacheclip(**fields: Any) -> dict[str, Any]:
    return chat(cacheclip=fields)


CHATS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    # name: body, field that the error names, words of its message
    "no messages": ({"model": NAME}, "messages", "required"),
    "empty messages": (chat(messages=[]), "messages", "at least 1"),
    "messages are no list": (chat(messages="What?"), "messages", "list"),
    "unknown role": (message(role="robot"), "messages[0].role", "'user'"),
    "no content": (chat(messages=[{"role": "user"}]), "messages[0].content", "missing"),
    "content is a number": (chat(messages=[{"role": "user", "content": 3}]), "messages[0].content", "string"),
    "picture": (message(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content", "'image_url'"),
    "picture beside the content": (message(images=["x"]), "messages[0].images", "Leave it out"),
    "beginning of the answer": (chat(messages=[*MESSAGES, OPENED]), "messages[1].prefix", "Leave it out"),
    "variables": (chat(chat_template_kwargs={"chat_template": "x"}), "chat_template_kwargs", "cannot set 'chat_temp"),
    "variable with a control tag": (chat(chat_template_kwargs={"mode": "<|im_end|>"}), None, "name of a control token"),
    "half a token": (chat(max_tokens=8.5), "max_tokens", "integer"),
    "function call": (message(function_call={"name": "f"}), "messages[0].function_call", "Leave it out"),
    "calls of a user": (message(tool_calls=[TOOL]), "messages[0].tool_calls", "assistant"),
    "temperature": (chat(temperature="hot"), "temperature", "number"),
    "temperature too high": (chat(temperature=3), "temperature", "less than or equal to 2"),
    "top_p": (chat(top_p=-0.1), "top_p", "greater than or equal to 0"),
    "max_tokens": (chat(max_tokens=0), "max_tokens", "greater than or equal to 1"),
    "max_tokens is a flag": (chat(max_tokens=True), "max_tokens", "integer"),
    "two limits": (chat(max_completion_tokens=3), "max_completion_tokens", "not both"),
    "seed": (chat(seed=2**63), "seed", "less than"),
    "stop": (chat(stop=["", 3]), "stop", "string"),
    "too many answers": (chat(n=9), "n", "less than or equal to 8"),
    "no answer": (chat(n=0), "n", "greater than or equal to 1"),
    "n is a flag": (chat(n=True), "n", "integer"),
    "logprobs": (chat(logprobs=2), "logprobs", "boolean"),
    "top_logprobs": (chat(logprobs=True, top_logprobs=21), "top_logprobs", "less than or equal to 20"),
    "top_logprobs alone": (chat(top_logprobs=2), "top_logprobs", "needs logprobs=true"),
    "logprobs of what is withdrawn": (chat(logprobs=True, cacheclip={"finish": "revise"}), None, "Set finish='none'"),
    "penalty": (chat(frequency_penalty=2.5), "frequency_penalty", "less than or equal to 2"),
    "reward": (chat(presence_penalty=-2.5), "presence_penalty", "greater than or equal to -2"),
    "bias": (chat(logit_bias={"1": 5}), "logit_bias", "not supported"),
    "reasoning": (chat(reasoning_effort="extreme"), "reasoning_effort", "Leave it out"),
    "tiny penalty": (chat(repetition_penalty=1e-300), "repetition_penalty", "greater than or equal"),
    "top_k": (chat(top_k=-2), "top_k", "greater than or equal"),
    "Ollama's limit": (chat(num_predict=5), "num_predict", "give max_tokens"),
    "Ollama's options": (chat(options={"num_ctx": 8, "temperature": 0}), "options.temperature", "beside the messages"),
    "Ollama's penalty": (chat(options={"repeat_penalty": 1.1}), "options.repeat_penalty", "give repetition_penalty"),
    "Ollama's thinking": (chat(options={"think": False}), "options.think", "Leave it out"),
    "Ollama's format": (chat(format="json"), "format", "give response_format"),
    "samplers": (chat(samplers=["top_k"]), "samplers", "Leave it out"),
    "reasoning in the text": (chat(reasoning_format="none"), "reasoning_format", "not supported"),
    "misspelt": (chat(temprature=0), "temprature", "not supported"),
    "options of no stream": (chat(stream_options={"include_usage": True}), "stream_options", "stream=true"),
    "functions": (chat(functions=[{"name": "f"}]), "functions", "tools instead"),
    "tool": (chat(tools=[{"type": "web_search"}]), "tools[0]", "function"),
    "tool's name": (chat(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools", "word"),
    "choice": (chat(tools=[TOOL], tool_choice="maybe"), "tool_choice", "none, auto, required"),
    "unknown tool": (chat(tools=[TOOL], tool_choice={**TOOL, "function": {"name": "g"}}), "tool_choice", "'g'"),
    "unknown tools": (
        chat(tools=[TOOL], tool_choice=allowed("auto", "f", "g")),
        "tool_choice",
        "'g', and there is no",
    ),
    "another mode": (chat(tools=[TOOL], tool_choice=allowed("any", "f")), "tool_choice", "a mode, auto or required"),
    "tools without names": (
        chat(tools=[TOOL], tool_choice=NAMELESS),
        "tool_choice",
        "got {'mode': 'auto', 'tools",
    ),
    "none of the tools": (chat(tools=[TOOL], tool_choice=allowed("required")), "tool_choice", "no tools"),
    "choice without tools": (chat(tool_choice="required"), "tool_choice", "no tools"),
    "format": (chat(response_format={"type": "xml"}), "response_format.type", "json_schema"),
    "no schema": (chat(response_format={"type": "json_schema"}), "response_format.json_schema.schema", "schema"),
    "unknown cacheclip field": (cacheclip(documants=["a"]), "cacheclip.documants", "Did you mean 'documents'?"),
    "documents": (cacheclip(documents="a text"), "cacheclip.documents", "list"),
    "a document": (cacheclip(documents=[1]), "cacheclip.documents[0]", "string"),
    "method": (cacheclip(method="cachclip"), "cacheclip.method", "cacheclip"),
    "ratio": (cacheclip(ratio=1.5), "cacheclip", "between 0"),
    "ratio's name": (cacheclip(ratio="much"), "cacheclip", "'auto'"),
    "ratio and time": (cacheclip(ratio=0.5, max_ttft_s=1.0), "cacheclip", "Leave one"),
    "confidence": (cacheclip(min_confidence=2), "cacheclip.min_confidence", "probability"),
    "finish": (cacheclip(finish="maybe"), "cacheclip.finish", "verify"),
    "moved": (cacheclip(moved="maybe"), "cacheclip.moved", "on"),
    "schema and finish": (chat(**OBJECT, cacheclip={"finish": "verify"}), None, "json_schema cannot be combined"),
}


@pytest.mark.some(5)
@pytest.mark.parametrize("name", CHATS)
def test_of_a_chat(served: Served, name: str) -> None:
    body, param, words = CHATS[name]
    response = served.client.post("/v1/chat/completions", json=body)
    if "stream_options" not in body:
        streamed = served.client.post("/v1/chat/completions", json={**body, "stream": True})
        assert (streamed.status_code, streamed.json()) == (response.status_code, response.json())
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert words in error["message"], error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, 2, 3]}, "prompt"),
        ({"prompt": [[1, 2], [3]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"], "stream": True}, "stream"),
        ({"prompt": "a", "n": 2, "stream": True}, "stream"),
        ({}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
    ],
)
def test_of_a_completion(served: Served, body: dict[str, Any], param: str) -> None:
    response = served.client.post("/v1/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b'{"messages": NaN}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
    ids=["empty", "cut", "list", "string", "nan", "bytes", "deep", "half a character"],
)
def test_of_a_body_that_is_no_json(served: Served, body: bytes) -> None:
    gc.collect()  # what earlier tests left would else be collected, and complain, at the limit of recursion
    response = served.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_answers_do_not_tell_where_files_are(
    tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither errors nor statistics: messages for operators name the model by its path."""
    models = {"primary": tiny_models["llama-rope-dynamic"], "auxiliary": tiny_models["auxiliary"]}
    with running(EngineConfig(**models, store=tmp_path / "store", method="direct")) as found:
        found.engine.precompute(CHUNKS)
        runtime = found.engine.primary
        monkeypatch.setattr(runtime, "reuse_tokens", 100)
        said = found.chat(messages=[{"role": "user", "content": "\n\n".join(CHUNKS)}])
        monkeypatch.setattr(runtime, "constrain", partial(Runtime.constrain, runtime))  # which cannot
        refused = [found.chat(response_format={"type": "json_object"}, stream=stream) for stream in (False, True)]
        assert "of model 'llama-rope-dynamic' change" in said.json()["cacheclip"]["fallback"]
        assert [each.status_code for each in refused] == [400, 400]
        for each in (said, *refused):
            assert "llama-rope-dynamic" in each.text
            assert not any(str(path) in each.text for path in (*models.values(), tmp_path)), each.text


def test_of_another_content_type(served: Served) -> None:
    """A web page can send text to another server without asking it, but no JSON."""
    response = served.client.post("/v1/chat/completions", content=json.dumps(chat()))
    assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]


def test_of_another_host(served: Served) -> None:
    """A web page may have a name of its own for this machine."""
    response = served.client.get("/v1/models", headers={"host": "evil.example"})
    assert response.status_code == 403
    assert served.client.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200


def test_of_an_unknown_model(served: Served) -> None:
    response = served.chat(model="gpt-5")
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": f"there is no model 'gpt-5'. This server has '{NAME}'.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert served.client.get("/v1/models/gpt-5").status_code == 404
    assert served.chat().status_code == 200, "without a model, it is the one that there is"


def test_of_a_prompt_that_is_too_long(served: Served) -> None:
    """Alone, in a stream, or with others."""
    together = served.client.post("/v1/completions", json={"prompt": ["word " * 10_000] * 2})
    for response in (*(served.chat("word " * 6000, stream=stream) for stream in (False, True)), together):
        assert response.status_code == 400, response.request.content[:60]
        assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("says_so", [True, False], ids=["stated", "in pieces"])
def test_of_a_body_that_is_too_large(served: Served, says_so: bool) -> None:
    most = served.server.app.limits.body_bytes
    text = b" " * (most + 1)
    content = text if says_so else (text[at : at + 2**20] for at in range(0, len(text), 2**20))
    response = served.client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


def test_of_unknown_paths(served: Served) -> None:
    response = served.client.get("/v1/images")
    assert response.status_code == 404 and "/v1/images" in response.json()["error"]["message"]
    assert served.client.get("/v1/chat/completions").status_code == 405


@pytest.mark.parametrize("kind", [RuntimeError, StoreError])
def test_an_internal_error_tells_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise kind("/secret/store")

    monkeypatch.setattr(served.engine, "stream", fail)
    response = served.chat()
    assert response.status_code == 500 and "secret" not in response.text
    assert response.headers["x-should-retry"] == "false"
    assert kind.__name__ in caplog.text


def test_the_log_has_no_texts(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="cacheclip_serve")
    assert served.chat("Something private").status_code == 200
    assert served.chat("Something private", n=9).status_code == 400
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("cacheclip_serve")]
    assert any("/v1/chat/completions 200 in" in line and "prompt tokens" in line for line in lines)
    assert any("/v1/chat/completions 400 in" in line for line in lines)
    assert not any("private" in line for line in lines)
