"""The middleware before vLLM's server: what reaches vLLM, and what goes back."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from cacheclip_serve import EmbeddingService, Queue, bodies, connections
from cacheclip_serve.connections import KEEP_S
from cacheclip_testing.plugin import CHUNKS
from cacheclip_vllm.middleware import CacheClip
from cacheclip_vllm.parameters import PARAMETER, SEAL_VARIABLE, UNREADABLE, Ready, Settings
from cacheclip_vllm.planner import Planner
from cacheclip_vllm.planners import Planning, Route
from cacheclip_vllm.replies import ReplyText, Result, StreamReply
from cacheclip_vllm.served import Served as HowServed
from cacheclip_vllm.settings import ServerSettings
from llama_index.llms.cacheclip import CacheClipLLM
from prometheus_client.parser import text_string_to_metric_families
from serve_cases import HALVES, until, wait_for_the_end
from starlette.responses import JSONResponse, Response
from tool_templates import TOOLS_TEMPLATE
from vllm_inner import METRICS, WORDS, Inner
from vllm_served import BOTH, CHAT, COMPLETION, NORTH, OWN, PICTURE, PROMPT, SEAL, Served, running

from cacheclip_rag import CacheClipEngine, ConfigurationError, EngineConfig, FusionStats, PromptTooLongError
from cacheclip_rag.planning import FusionPlan, load_planning

TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def settings(config: EngineConfig) -> ServerSettings:
    return ServerSettings(config, "tiny", seal=SEAL)


@pytest.fixture(scope="module")
def server(settings: ServerSettings) -> Iterator[Served]:
    with running(settings) as found:
        yield found


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    """A server without keys, and an inner application as new."""
    inner = server.inner
    inner.bodies.clear()
    inner.paths.clear()
    inner.told, inner.cached, inner.error = {"outcome": "fused", "reason": None}, None, None
    yield server
    inner.gate.set()


@pytest.fixture(scope="module")
def guarded(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a key of its own, and with keys of tenants."""
    file = tmp_path_factory.mktemp("keys") / "tenants.json"
    file.write_text(json.dumps({NORTH: "north", BOTH: ["south", "north"]}))
    with running(ServerSettings(config, "tiny", api_key=OWN, tenants=file, seal=SEAL)) as found:
        yield found


@pytest.fixture
def crowded(guarded: Served) -> Iterator[Served]:
    """The same before a vLLM that computes four sequences at once."""
    with running(guarded.middleware._settings, sequences=4) as found:
        yield found


def plan_of(body: dict[str, Any]) -> FusionPlan:
    return FusionPlan.from_dict(body["kv_transfer_params"][PARAMETER]["plan"])


def metric(served: Served, name: str) -> float:
    lines = served.client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"cacheclip_{name}"))


def test_who_sends_no_request_is_closed(settings: ServerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's server gets our connections before it opens its sockets."""
    monkeypatch.setattr(connections, "_HEAD_S", 0.1)
    monkeypatch.setattr(bodies, "_FIRST_S", 0.1)
    with running(settings) as served:
        wait_for_the_end(served.address, HALVES["half a head"])
        assert served.client.get("/health").status_code == 200
        served.inner.gate.clear()
        threading.Timer(0.3, served.inner.gate.set).start()
        assert len(served.events()) > 3, "an answer takes its time"


class TestPlans:
    def test_of_a_chat(self, served: Served, config: EngineConfig) -> None:
        response = served.ask(temperature=0, cacheclip={"ratio": 0.5})
        assert response.status_code == 200
        body = served.inner.last
        expected = Planner(config).plan(PROMPT, recompute_ratio=0.5)
        assert plan_of(body) == expected.fusion != Planner(config).plan(PROMPT).fusion
        assert body["kv_transfer_params"]["prompt_token_ids"] == list(expected.token_ids)
        assert body["messages"] == [{"role": "user", "content": PROMPT}] and body["temperature"] == 0
        assert "cacheclip" not in body and "cache_salt" not in body and "stream_options" not in body

    def test_of_a_completion(self, served: Served, config: EngineConfig) -> None:
        assert served.complete(max_tokens=3).status_code == 200
        body, runtime = served.inner.last, load_planning(config.primary)
        assert body["prompt"] == runtime.tokenizer(PROMPT)["input_ids"] == list(plan_of(body).token_ids)
        assert set(body["kv_transfer_params"]) == {PARAMETER}

    def test_of_a_chat_with_tools(self, served: Served, config: EngineConfig) -> None:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
        messages = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "Search."}]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": CHUNKS[0]},
        ]
        assert served.client.post(CHAT, json={"messages": messages, "tools": [TOOL]}).status_code == 200
        tokenizer = load_planning(config.primary).tokenizer
        call["function"]["arguments"] = {"a": "b"}  # type: ignore[index]
        messages[1]["content"] = "Search."
        shown = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
        expected = tokenizer(shown, add_special_tokens=False)["input_ids"]
        assert served.inner.last["kv_transfer_params"]["prompt_token_ids"] == expected

    def test_the_connector_takes_them_and_no_others(
        self, served: Served, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served.ask()
        given = served.inner.last["kv_transfer_params"][PARAMETER]
        runtime, ids = load_planning(config.primary), plan_of(served.inner.last).token_ids
        settings = Settings(Path(str(config.store)), sealed=True)

        def ready(given: Any) -> Ready:
            return Ready.of(given, ids, settings, runtime, max_runs=99, max_rows=999)

        with pytest.raises(ConfigurationError, match="not set"):
            ready(given)
        monkeypatch.setenv(SEAL_VARIABLE, SEAL)
        assert ready(given).plan == plan_of(served.inner.last)
        plan = {**given["plan"], "correction": 0.25}
        for other in ({**given, "plan": plan}, {"plan": given["plan"]}, {**given, "seal": "0" * 64}):
            with pytest.raises(ConfigurationError, match="not planned by this server"):
                ready(other)

    def test_a_system_prompt(self, config: EngineConfig) -> None:
        settings = ServerSettings(replace(config, system_prompt="Be short."), "tiny", seal=SEAL)
        with running(settings) as served:
            served.ask("Hello")
            own = {"role": "system", "content": "Be short."}
            assert served.inner.last["messages"] == [own, {"role": "user", "content": "Hello"}]
            messages = [{"role": "system", "content": "Other."}, {"role": "user", "content": "Hello"}]
            served.client.post(CHAT, json={"messages": messages})
            assert served.inner.last["messages"] == messages


HALF_A_CALL = {"function": {"arguments": "{"}}
CHATS: dict[str, tuple[dict[str, Any], str]] = {
    # name: fields beside a user's message, and the reason
    "adapter": ({"model": "an-adapter"}, "another model"),
    "template": ({"chat_template": "{{ 1 }}"}, "chat_template"),
    "template's settings": ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    "documents": ({"documents": [{"text": "a"}]}, "documents"),
    "reasoning": ({"reasoning_effort": "low"}, "reasoning_effort"),
    "no generation prompt": ({"add_generation_prompt": False}, "add_generation_prompt"),
    "continued": ({"add_generation_prompt": False, "continue_final_message": True}, "add_generation_prompt"),
    "special tokens": ({"add_special_tokens": True}, "add_special_tokens"),
    "several answers": ({"n": 2}, "n"),
    "echo": ({"echo": True}, "echo"),
    "truncated": ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    "logprobs of the prompt": ({"prompt_logprobs": 1}, "prompt_logprobs"),
    "beams": ({"use_beam_search": True}, "use_beam_search"),
    "tools that are not called": ({"tools": [TOOL], "tool_choice": "none"}, "tools with tool_choice none"),
    "unknown part of a tool": ({"tools": [{**TOOL, "defer_loading": True}]}, "definition of a tool"),
    "messages are no list": ({"messages": "What?"}, "malformed"),
    "message is no object": ({"messages": ["What?"]}, "malformed"),
    "picture": ({"messages": [{"role": "user", "content": [PICTURE]}]}, "parts of a content"),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, 3]}]}, "parts of a content"),
    "no content": ({"messages": [{"role": "assistant", "content": None}]}, "no content"),
    "developer": ({"messages": [{"role": "developer", "content": "a"}]}, "role of a message"),
    "name of a tool": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "prompt that cannot be planned"),
    "name": ({"messages": [{"role": "user", "content": "a", "name": "anna"}]}, "field of a message"),
    "reasoning of an answer": ({"messages": [{"role": "assistant", "reasoning": "b"}]}, "field of a message"),
    "arguments": ({"messages": [{"role": "assistant", "tool_calls": [HALF_A_CALL]}]}, "arguments of a call"),
}
COMPLETIONS: dict[str, tuple[dict[str, Any], str]] = {
    "adapter": ({"model": "an-adapter"}, "another model"),
    "ids": ({"prompt": [1, 2, 3]}, "prompt is no single text"),
    "several": ({"prompt": ["a", "b"]}, "prompt is no single text"),
    "echo": ({"echo": True}, "echo"),
    "suffix": ({"suffix": "b"}, "suffix"),
    "no special tokens": ({"add_special_tokens": False}, "add_special_tokens"),
}


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARTS = TOOLS_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['content'] is string %}{{ message['content'] or 'EMPTY' }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}",
)
"""A chat template that loops over parts of contents, and writes an empty text and an empty list differently."""


class TestNullContents:
    """As clients of OpenAI send them with calls of tools."""

    def ask(self, served: Served, content: Any) -> dict[str, Any]:
        turns = [{"role": "assistant", "content": content, "tool_calls": [CALL]}, {"role": "tool", "content": "Yes."}]
        messages = [{"role": "user", "content": PROMPT}, *turns]
        found = served.client.post(CHAT, json={"messages": messages, "tools": [TOOL]})
        return dict(found.json()["cacheclip"])

    def test_they_are_empty_texts(self, served: Served) -> None:
        assert self.ask(served, "")["outcome"] == "fused"
        expected = served.inner.last["kv_transfer_params"]["prompt_token_ids"]
        assert self.ask(served, None)["outcome"] == "fused"
        assert served.inner.last["kv_transfer_params"]["prompt_token_ids"] == expected
        assert served.inner.last["messages"][1]["content"] is None

    @pytest.mark.parametrize("template", [PARTS, PARTS.replace(" or 'EMPTY'", "")], ids=["differs", "same"])
    def test_a_template_that_loops_over_parts(
        self, served: Served, template: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runtime = served.middleware.planning.planner("default").primary
        monkeypatch.setattr(runtime.tokenizer, "chat_template", template)
        assert self.ask(served, "")["outcome"] == "fused"
        said = self.ask(served, None)
        assert (said["outcome"], said["reason"]) == (("plain", "no content") if template == PARTS else ("fused", None))

    def test_several_parts_are_lines(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        """Unless the template loops over parts, and writes them otherwise."""
        parts = [{"type": "text", "text": text} for text in (CHUNKS[0], "Who?")]
        assert served.ask("\n".join((CHUNKS[0], "Who?"))).json()["cacheclip"]["outcome"] == "fused"
        expected = served.inner.last["kv_transfer_params"]["prompt_token_ids"]
        assert served.ask(parts).json()["cacheclip"]["outcome"] == "fused"
        assert served.inner.last["kv_transfer_params"]["prompt_token_ids"] == expected
        assert served.inner.last["messages"][0]["content"] == parts
        runtime = served.middleware.planning.planner("default").primary
        monkeypatch.setattr(runtime.tokenizer, "chat_template", PARTS)
        assert served.ask(parts).json()["cacheclip"]["reason"] == "parts of a content"


class TestAsItIs:
    """What plans cannot follow goes to vLLM untouched."""

    @pytest.mark.some(5)
    @pytest.mark.parametrize("name", CHATS)
    def test_a_chat(self, served: Served, name: str) -> None:
        fields_, reason = CHATS[name]
        body = {"messages": [{"role": "user", "content": PROMPT}], **fields_}
        response = served.client.post(CHAT, json={**body, "cacheclip": {"ratio": 0.3}})
        assert served.inner.last == body
        stats = response.json()["cacheclip"]
        assert (stats["outcome"], stats["reason"], stats["fallback"]) == ("plain", reason, reason)
        assert metric(served, f'plain_total{{reason="{reason}"}}') >= 1

    @pytest.mark.parametrize("name", COMPLETIONS)
    def test_a_completion(self, served: Served, name: str) -> None:
        fields_, reason = COMPLETIONS[name]
        body = {"prompt": PROMPT, **fields_}
        assert served.client.post(COMPLETION, json=body).json()["cacheclip"]["reason"] == reason
        assert served.inner.last == body

    def test_a_prompt_that_the_template_writes_otherwise(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ids that vLLM would not make are never given to it."""
        assert served.ask().json()["cacheclip"]["outcome"] == "fused"
        runtime = type(load_planning(served.middleware.planning.planner("default").config.primary))
        render = runtime.render_chat
        calls = iter(range(9))
        monkeypatch.setattr(runtime, "render_chat", lambda *a, **o: render(*a, **o) + " " * next(calls))
        stats = served.ask().json()["cacheclip"]
        assert (stats["outcome"], stats["reason"]) == ("plain", "chat template")

    def test_what_cannot_be_planned_for_whatever_reason(
        self, served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*args: Any, **options: Any) -> Any:
            raise RuntimeError("the disk is gone")

        monkeypatch.setattr(Planner, "plan", fail)
        before = metric(served, 'plain_total{reason="planning failed"}')
        for _ in range(2):
            stats = served.ask().json()["cacheclip"]
            assert (stats["outcome"], stats["reason"]) == ("plain", "planning failed")
            assert "disk" not in json.dumps(stats)
        assert caplog.text.count("because planning failed: RuntimeError: the disk is gone") == 1
        assert metric(served, 'plain_total{reason="planning failed"}') == before + 2

    def test_nothing_tells_where_files_are(
        self, served: Served, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runtime = served.middleware.planning.planner("default").primary
        monkeypatch.setattr(runtime, "reuse_tokens", 100)
        name = Path(config.primary).name
        whole, streamed = served.ask().json()["cacheclip"], served.events()[-1]["cacheclip"]
        for own in (whole, streamed):
            assert own["outcome"] == "plain" and f"of model {name!r} change" in own["reason"] == own["fallback"], own

        def fail(*args: Any, **options: Any) -> Any:
            raise PromptTooLongError(f"too long for {config.primary!r}")

        monkeypatch.setattr(Planner, "plan", fail)
        refused = served.ask()
        assert refused.status_code == 400 and f"too long for {name!r}" in refused.json()["error"]["message"]
        metrics = served.client.get("/metrics").text
        assert f"of model {name!r} change" in metrics
        for text in (json.dumps([whole, streamed]), refused.text, metrics):
            assert not any(str(path) in text for path in (config.primary, config.auxiliary, config.store)), text

    def test_what_no_certificate_covers(self, config: EngineConfig) -> None:
        settings = ServerSettings(replace(config, method="full", require_certificate=True), "tiny", seal=SEAL)
        with running(settings) as served:
            assert served.ask().json()["cacheclip"]["reason"] is None
            stats = served.ask(cacheclip={"method": "direct"}).json()["cacheclip"]
            assert (stats["outcome"], stats["reason"]) == ("plain", "no certificate")

    def test_other_paths(self, served: Served) -> None:
        assert served.client.post("/tokenize", content=b"not read").json() == {"path": "/tokenize"}
        assert served.client.get("/health").status_code == 200
        assert served.client.get("/elsewhere").status_code == 404


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: fields, field that the error names, words of its message
    "a plan": ({"kv_transfer_params": {"cacheclip": {}}}, "kv_transfer_params", "server's own"),
    "remote prefill": ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params", "server's own"),
    "hidden": ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params", "server's own"),
    "misspelt": ({"cacheclip": {"documants": []}}, "cacheclip.documants", "documents"),
    "a method that is gone": ({"cacheclip": {"method": "map_reduce"}}, "cacheclip.method", "map_reduce is gone"),
    "ratio": ({"cacheclip": {"ratio": 2}}, "cacheclip", "between 0"),
    "auto": ({"cacheclip": {"ratio": "auto"}}, "cacheclip.ratio", "number"),
    "time": ({"cacheclip": {"max_ttft_s": 1.0}}, "cacheclip.max_ttft_s", "no effect"),
    "finish": ({"cacheclip": {"finish": "verify"}}, "cacheclip.finish", "no effect"),
}


class TestRefusals:
    @pytest.mark.parametrize("name", REFUSED)
    def test_of_a_field(self, served: Served, name: str) -> None:
        body, param, words = REFUSED[name]
        for response in (served.ask(**body), served.ask(**body, stream=True), served.complete(**body)):
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param) and words in error["message"]
        assert not served.inner.bodies

    def test_what_changes_nothing_is_taken(self, served: Served) -> None:
        assert served.ask(kv_transfer_params=None, cacheclip={"finish": "none"}, vllm_xargs={"a": 1}).status_code == 200
        assert served.inner.last["vllm_xargs"] == {"a": 1}

    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        ("given", "sent"),
        [
            ({"top_p": 0}, {"top_p": 1, "top_k": 1}),
            ({"top_p": 0.5, "top_k": 7}, {"top_p": 0.5, "top_k": 7}),
            *(({"stop": value}, {}) for value in ("", [], [""], [None], None)),
            ({"stop": ["", "END"]}, {"stop": ["END"]}),
            *(({"response_format": value}, {}) for value in ({}, "", None, {"type": None})),
            *(({name: {"type": None}}, {}) for name in ("tool_choice", "stream_options")),
            *(({"stream_options": value}, {}) for value in ({}, {"include_usage": False})),
            *(({name: -1}, {}) for name in ("max_tokens", "max_completion_tokens")),
            *(({name: 0.5}, {name: 0.5}) for name in ("frequency_penalty", "presence_penalty")),
            ({"bad_words": [], "seed": 0, "stream": False}, {"bad_words": [], "seed": 0, "stream": False}),
        ],
    )
    def test_what_vllm_does_not_take_is_said_in_its_words(
        self, served: Served, given: dict[str, Any], sent: dict[str, Any]
    ) -> None:
        for ask in (served.ask, served.complete):
            assert ask(**given).status_code == 200, ask
            own = {"messages", "prompt", "kv_transfer_params", "cache_salt"}
            assert {name: value for name, value in served.inner.last.items() if name not in own} == sent, ask

    def test_allowed_tools(self, served: Served) -> None:
        def choice(mode: str, *names: str) -> dict[str, Any]:
            tools = [{"type": "function", "function": {"name": name}} for name in names]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

        other = {**TOOL, "function": {**TOOL["function"], "name": "g"}}
        for mode in ("auto", "required"):
            served.ask(tools=[TOOL, other], tool_choice=choice(mode, "g"))
            assert (served.inner.last["tools"], served.inner.last["tool_choice"]) == ([other], mode)
        for given in ({"tools": [TOOL], "tool_choice": choice("auto")}, {"tools": [], "tool_choice": "auto"}):
            served.ask(**given)
            assert not {"tools", "tool_choice"} & served.inner.last.keys()
        for tools in ([TOOL], {}, None, 3):
            refused = served.ask(tools=tools, tool_choice=choice("auto", "h"))
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"

    def test_of_a_prompt_that_is_too_long(self, served: Served) -> None:
        for response in (served.ask("word " * 6000), served.complete("word " * 6000)):
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"

    def test_of_another_host_and_of_a_tenant(self, served: Served) -> None:
        for path in ("/v1/models", "/metrics", "/health"):
            assert served.client.get(path, headers={"host": "evil.example"}).status_code == 403, path
        assert served.ask(cacheclip={"tenant": "default"}).status_code == 403

    async def test_of_a_websocket(self, settings: ServerSettings) -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        await CacheClip(Inner().app, settings)({"type": "websocket", "path": "/v1/realtime"}, receive, send)
        assert sent == [{"type": "websocket.close", "code": 1008}]


class TestReplies:
    def test_the_same_names_as_with_the_engine(self, served: Served, config: EngineConfig) -> None:
        found = served.ask().json()
        own, stats = found["cacheclip"], Planner(config).plan(PROMPT).stats
        assert set(own) == {*stats.to_dict(), "outcome", "reason", "planning_s"}
        assert (own["outcome"], own["reason"], own["method"]) == ("fused", None, "cacheclip")
        assert own["hits"] == len(CHUNKS) and own["misses"] == 0 and own["generated_tokens"] == 4
        assert 0 < own["effective_ratio"] < 1 and 0 < own["reused_tokens"] < own["prompt_tokens"]
        assert 0 < own["planning_s"] < own["ttft_s"] <= own["planning_s"] + own["queued_s"] + 0.005 + 1e-6
        assert found["kv_transfer_params"] is None and found["metrics"] is None
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == plan_of(served.inner.last).num_ready

    def test_continued_kv(self, served: Served) -> None:
        """Counts of a plan of which vLLM had the first tokens, by hand."""
        served.ask()
        plan, stats = plan_of(served.inner.last), served.ask().json()["cacheclip"]
        known = plan.pieces[1].start + 3
        about = {"continued_tokens": known, "continued_turns": 2, "stale_from": 7}
        served.inner.told = {"outcome": "fused", "reason": None, **about}
        own = served.ask().json()["cacheclip"]
        assert {name: own[name] for name in about} == about and not own["bypassed"]
        assert own["prefix_tokens"] == known - plan.pieces[0].num_tokens - 3
        assert own["prefix_tokens"] + own["fresh_tokens"] == stats["prefix_tokens"] + stats["fresh_tokens"]
        rows = {row for run in plan.computed for row in range(*run) if row >= known}
        chunks = {row for piece in plan.pieces for row in range(piece.start, piece.stop)}
        assert own["recomputed_tokens"] == len(rows & chunks) < stats["recomputed_tokens"]
        assert own["charged_ratio"] == pytest.approx(own["recomputed_tokens"] / stats["chunk_tokens"])

    @pytest.mark.parametrize("stream", [False, True])
    def test_of_a_chunk_that_workers_could_not_read(
        self, served: Served, config: EngineConfig, stream: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The planner reads no payloads of the primary. It drops the damaged one when it hears of the failure."""
        planner = served.middleware.planning.planner("default")
        store, key = planner.parts.store, planner.plan(PROMPT).fusion.pieces[-1].key  # type: ignore[union-attr]
        served.inner.told, served.inner.cached = {"outcome": "plain", "reason": UNREADABLE}, 0
        try:
            served.ask()
            served.middleware.planning._checker.submit(int).result()
            assert key in store and "damaged" not in caplog.text, "nothing is wrong with it"
            payload = Path(str(config.store)) / "kv" / key[:2] / f"{key}.kv"
            payload.write_bytes(payload.read_bytes()[:-1] + b"x")
            served.events() if stream else served.ask()
            stats = served.ask().json()["cacheclip"]
            assert (stats["hits"], stats["misses"]) == (len(CHUNKS) - 1, 1)
            assert key not in store and "Ingest" in caplog.text
        finally:
            CacheClipEngine(config).precompute(CHUNKS)

    def test_of_a_prompt_that_vllm_has_cached(self, served: Served) -> None:
        served.inner.cached = 30
        own = served.ask("Hello").json()["cacheclip"]
        assert (own["method"], own["outcome"]) == ("prefix", "plain")
        assert (own["cached_prefix_tokens"], own["fresh_tokens"], own["effective_ratio"]) == (30, 10, 0.25)

    def test_errors_pass(self, served: Served) -> None:
        served.inner.error = JSONResponse({"error": {"message": "no", "type": "x", "param": None, "code": 400}}, 400)
        response = served.ask()
        assert response.status_code == 400 and response.json() == json.loads(served.inner.error.body)

    @pytest.mark.parametrize(
        "message",
        [
            "This model's maximum context length is 8 tokens. However, your prompt contains 9 input tokens",
            "Input length (9) exceeds model's maximum context length (8).",
            "The decoder prompt (length 9) is longer than the maximum model length of 8.",
        ],
    )
    def test_a_prompt_that_is_too_long_for_vllm(self, guarded: Served, message: str) -> None:
        """vLLM may hold less than the model's context."""
        told = {"message": message, "type": "x", "param": None, "code": 400}
        guarded.inner.error = JSONResponse({"error": told}, 400)
        try:
            found = guarded.ask(key=OWN)
            assert (found.status_code, found.json()["error"]) == (400, {**told, "code": "context_length_exceeded"})
            with pytest.raises(PromptTooLongError, match="maximum"):
                CacheClipLLM(base_url=f"{guarded.address}/v1", api_key=OWN).complete(PROMPT)
        finally:
            guarded.inner.error = None

    def test_models(self, served: Served) -> None:
        first, second = served.client.get("/v1/models").json()["data"]
        can = {"uses_tools": True, "can_constrain": True}
        assert first == {"id": "tiny", "object": "model", "root": "tiny", "max_model_len": 4096, "cacheclip": can}
        assert "cacheclip" not in second

    def test_metrics(self, served: Served) -> None:
        before = {name: metric(served, name) for name in ("answers_total", "chunk_hits_total", "outcomes_total")}
        served.ask(), served.events(), served.ask("Hello")
        text = served.client.get("/metrics", headers={"accept-encoding": "gzip"}).text
        assert text.startswith(METRICS)
        assert metric(served, "answers_total") == before["answers_total"] + 3
        assert metric(served, "outcomes_total") == before["outcomes_total"] + 3
        assert metric(served, "chunk_hits_total") == before["chunk_hits_total"] + 2 * len(CHUNKS)
        assert f'cacheclip_http_requests_total{{path="{CHAT}",status="200"}}' in text
        assert "cacheclip_questions_running 0\n" in text and "cacheclip_questions_waiting 0\n" in text
        assert len(list(text_string_to_metric_families(text))) > 15

    def test_reasons_are_counted_apart_up_to_a_number(self, settings: ServerSettings) -> None:
        planning = Planning(settings)
        for number in (*range(60), 0, 59):
            planning.count("plain", f"reason {number}")
        lines = [line for line in planning.text().splitlines() if line.startswith("cacheclip_plain_total")]
        assert len(lines) == 51 and 'cacheclip_plain_total{reason="other"} 11' in lines
        assert 'cacheclip_plain_total{reason="reason 0"} 2' in lines
        planning.close()


class TestStreams:
    @pytest.mark.parametrize("path", [CHAT, COMPLETION])
    def test_without_token_counts(self, served: Served, path: str) -> None:
        chunks = served.events(path)
        assert served.inner.last["stream_options"] == {"include_usage": True}
        assert len(chunks) == len(WORDS) and not any("usage" in chunk for chunk in chunks)
        assert [("cacheclip" in chunk) for chunk in chunks] == [False] * 3 + [True]
        own = chunks[-1]["cacheclip"]
        assert (own["outcome"], own["hits"], own["generated_tokens"]) == ("fused", len(CHUNKS), 4)
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and chunks[-1]["system_fingerprint"] == "f"

    @pytest.mark.parametrize("path", [CHAT, COMPLETION])
    def test_with_token_counts(self, served: Served, path: str) -> None:
        chunks = served.events(path, stream_options={"include_usage": True, "continuous_usage_stats": True})
        assert served.inner.last["stream_options"]["continuous_usage_stats"] is True
        assert [("cacheclip" in chunk) for chunk in chunks] == [False] * 4 + [True]
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 4
        assert "metrics" not in chunks[-1]

    @pytest.mark.parametrize("on", [1, "true"])
    def test_other_ways_to_say_true(self, served: Served, on: Any) -> None:
        """vLLM takes them, so they must get token counts too."""
        served.inner.told, served.inner.cached = {"outcome": "cached", "reason": None}, 10**6
        said = served.ask(stream=on).text
        assert served.inner.last["stream_options"] == {"include_usage": True} and served.inner.last["stream"] == on
        assert '"outcome":"cached"' in said and '"usage"' not in said
        options = {"include_usage": on}
        assert '"usage"' in served.ask(stream=on, stream_options=options).text
        assert served.inner.last["stream_options"] == options

    @pytest.mark.parametrize("usage", [True, False])
    def test_a_plan_that_vllm_had_cached(self, served: Served, usage: bool) -> None:
        """Its own cache answers for more tokens than the plan makes; streams have no other sign of it."""
        options = {"stream_options": {"include_usage": usage}}
        served.ask()
        plan = plan_of(served.inner.last)
        ends = {plan.num_exact: "plain", plan.num_ready - 1: "exact"}
        ends |= {plan.num_ready: "fused", plan.num_ready + 1: "cached", plan.num_ready + 20: "cached"}
        for end, outcome in ends.items():
            served.inner.cached = end
            own = served.events(**options)[-1]["cacheclip"]
            assert own["outcome"] == outcome and (own["chunk_tokens"] == 0) == (outcome in ("plain", "exact"))
            assert own["bypassed"] == (outcome == "exact")
        before = metric(served, 'outcomes_total{outcome="cached"}')
        served.events(**options)
        assert metric(served, 'outcomes_total{outcome="cached"}') == before + 1

    def test_a_client_that_leaves(self, served: Served) -> None:
        before = metric(served, "http_disconnects_total")
        aborted = metric(served, 'outcomes_total{outcome="aborted"}')
        served.inner.gate.clear()
        body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True}
        with served.client.stream("POST", CHAT, json=body) as response:
            next(response.iter_lines())
        while metric(served, "http_disconnects_total") == before:
            pass
        assert metric(served, "questions_running") == 0
        assert metric(served, 'outcomes_total{outcome="aborted"}') == aborted + 1


def test_the_server_closes_though_an_answer_does_not_end(
    settings: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM closes its server when its engine is gone, and never ends what the engine left."""
    monkeypatch.setattr("cacheclip_vllm.middleware._CLOSING_S", 0.1)
    with running(settings) as served:
        served.inner.gate.clear()
        body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True}
        with served.client.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            assert "The" in next(lines)
            served.inner.app.state.server.should_exit = True
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)


@pytest.mark.parametrize("stated", [None, "7"])
def test_connections_are_kept_for_longer_than_vllm_keeps_them(
    settings: ServerSettings, monkeypatch: pytest.MonkeyPatch, stated: str | None
) -> None:
    """Unless vLLM's own variable says how long."""
    monkeypatch.delenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", raising=False)
    if stated is not None:
        monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", stated)
    with running(settings) as served:
        config = served.inner.app.state.server.config
        assert config.timeout_keep_alive == (5 if stated else KEEP_S), "5 is uvicorn's; vLLM gives it the variable's"


def event(**values: Any) -> bytes:
    return b"data: " + json.dumps(values, separators=(",", ":")).encode() + b"\n\n"


class TestStreamReply:
    def made(self, *, shows_usage: bool = False) -> tuple[StreamReply, list[tuple[FusionStats, str, str | None]]]:
        recorded: list[Any] = []
        return StreamReply(Result(Route(reason="n"), lambda *each: recorded.append(each)), shows_usage), recorded

    def test_pieces_of_any_length(self) -> None:
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        whole = event(choices=[{"index": 0, "delta": {"content": "ü"}, "finish_reason": None}]) + event(**last)
        whole += event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 1}) + b"data: [DONE]\n\n"
        reply, _ = self.made()
        expected = reply.feed(whole) + reply.finish()
        for size in (1, 7, 50):
            reply, recorded = self.made()
            pieces = [reply.feed(whole[at : at + size]) for at in range(0, len(whole), size)] + [reply.finish()]
            found = b"".join(pieces)
            strip = [json.loads(e[6:]) for e in found.split(b"\n\n")[:-2]]
            assert [set(each) for each in strip] == [{"choices"}, {"choices", "cacheclip"}]
            assert len(found.split(b"\n\n")) == len(expected.split(b"\n\n")) and len(recorded) == 1

    def test_of_a_plan_without_counts_of_vllm(self, served: Served) -> None:
        """Nothing says whether it was carried out."""
        planned = served.middleware.planning.planner("default").plan(PROMPT)
        reply = StreamReply(Result(Route(planned), lambda *each: None), False)
        reply.feed(event(choices=[{"index": 0, "text": "a", "finish_reason": "length"}]))
        assert b'"outcome":"unknown","reason":null' in reply.feed(b"data: [DONE]\n\n")

    def test_several_choices(self) -> None:
        reply, recorded = self.made(shows_usage=True)
        ends = [event(choices=[{"index": n, "text": "a", "finish_reason": "stop"}]) for n in range(2)]
        out = b"".join(map(reply.feed, [*ends, event(choices=[], usage={"prompt_tokens": 3}), b"data: [DONE]\n\n"]))
        assert out.count(b'"finish_reason":"stop"') == 2 and out.count(b'"cacheclip"') == 1 and len(recorded) == 1

    def test_errors_and_comments_pass(self) -> None:
        reply, recorded = self.made()
        for line in (b": keep-alive\n\n", b'data: {"error":{"message":"\\"finish_reason\\""}}\n\n', b"data: {\n\n"):
            assert reply.feed(line) == line
        assert reply.feed(b"data: [DONE]\n\n") == b"data: [DONE]\n\n" and not recorded


class TestKeys:
    @pytest.mark.parametrize("key", [None, "wrong-key-11", NORTH[:-1]])
    def test_without_one_nothing_happens(
        self, guarded: Served, key: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        planned: list[Any] = []
        monkeypatch.setattr(Planner, "plan", lambda *a, **o: planned.append(a))
        came = len(guarded.inner.bodies), len(guarded.inner.paths)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        response = guarded.ask(key=key)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        for path in ("/metrics", "/metrics/", "/v1/models", "/tokenize", "/v1/responses", "/elsewhere"):
            assert guarded.client.get(path, headers=headers).status_code == 401
        assert guarded.client.post(COMPLETION, json={"prompt": "a"}, headers=headers).status_code == 401
        assert not planned and came == (len(guarded.inner.bodies), len(guarded.inner.paths))
        assert guarded.client.get("/health").status_code == 200

    def test_a_key_gives_its_tenant(self, guarded: Served) -> None:
        def hits(key: str, tenant: str | None = None) -> int:
            response = guarded.ask(key=key, cacheclip={"tenant": tenant} if tenant else {})
            assert response.status_code == 200, response.text
            return int(response.json()["cacheclip"]["hits"])

        assert (hits(OWN), hits(NORTH), hits(BOTH), hits(BOTH, "north")) == (4, 2, 0, 2)
        assert plan_of(guarded.inner.last).namespace == "north"

    def test_a_key_allows_its_tenants_only(self, guarded: Served) -> None:
        for key, tenant in ((NORTH, "south"), (BOTH, "default"), (OWN, "north")):
            response = guarded.ask(key=key, cacheclip={"tenant": tenant})
            assert response.status_code == 403 and response.json()["error"]["param"] == "cacheclip.tenant"

    def test_a_flood_leaves_room_for_others(self, crowded: Served) -> None:
        """One tenant's answers fill three of four places; others get theirs at once."""
        inner, places, headers = crowded.inner, crowded.middleware._places, {"authorization": f"Bearer {NORTH}"}
        assert places is not None
        inner.gate.clear()
        asked = {"prompt": "Where?", "stream": True}
        with ThreadPoolExecutor(12) as many:
            floods = [many.submit(crowded.client.post, COMPLETION, json=asked, headers=headers) for _ in range(11)]
            until(lambda: len(inner.bodies) == 3 and places.waiting == 8)
            assert crowded.ask("What?", key=BOTH).status_code == 200
            assert len(inner.bodies) == 4, "none of the flood's before the other's"
            inner.gate.set()
            assert [each.result().status_code for each in floods] == [200] * 11
        until(lambda: not places.waiting and not places.running)

    def test_tenants_use_few_paths(self, guarded: Served) -> None:
        headers = {"authorization": f"Bearer {NORTH}"}
        for path in ("/v1/responses/resp_1", "/tokenize", "/metrics"):
            assert guarded.client.post(path, headers=headers).status_code == 403
        assert guarded.client.get("/v1/models", headers=headers).status_code == 200
        own = {"authorization": f"Bearer {OWN}"}
        assert guarded.client.post("/tokenize", headers=own).status_code == 200
        assert "north" not in guarded.client.get("/metrics", headers=own).text


async def test_planning_does_not_block_the_server(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, may_plan, places, both = Planner.plan, threading.Event(), threading.Semaphore(2), threading.Barrier(3)

    def slowly(self: Planner, *args: Any, **options: Any) -> Any:
        assert places.acquire(blocking=False), "two prompts at a time"
        try:
            if not may_plan.is_set():
                both.wait(30)
            assert may_plan.wait(30)
            return plan(self, *args, **options)
        finally:
            places.release()

    monkeypatch.setattr(Planner, "plan", slowly)
    async with httpx.AsyncClient(base_url=served.address, timeout=60) as client:
        body = {"messages": [{"role": "user", "content": PROMPT}]}
        asked = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(3)]
        while "cacheclip_questions_waiting 3\n" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(served.middleware.planning._queue, "_most_waiting", 1)
        other = (await client.post(CHAT, json=body)).json()["cacheclip"]
        assert other["reason"] == "too many prompts wait to be planned"
        await asyncio.to_thread(both.wait, 30)
        may_plan.set()
        found = [(await each).json()["cacheclip"] for each in asked]
    assert [each["outcome"] for each in found] == ["fused"] * 3 and max(each["queued_s"] for each in found) > 0


@pytest.fixture
def shadowed(config: EngineConfig) -> Iterator[Served]:
    """A server that compares every answer that it may."""
    with running(ServerSettings(replace(config, shadow_rate=1.0), "tiny", seal=SEAL)) as found:
        yield found


def compared(served: Served, count: int) -> dict[str, float]:
    """The counters of shadow checks, when there are so many."""
    found: dict[str, float] = {}
    for _ in range(4000):
        values = served.middleware.planning.metrics.snapshot()
        found = {name.removeprefix("shadow_"): n for name, n in values.items() if name.startswith("shadow_")}
        if found.get("checks_total", 0) + found.get("skipped_total", 0) >= count:
            break
        time.sleep(0.005)
    assert found.get("checks_total", 0) + found.get("skipped_total", 0) == count
    return found


class TestShadowChecks:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("path", [CHAT, COMPLETION])
    def test_an_answer_is_asked_again(self, shadowed: Served, path: str, stream: bool) -> None:
        prompt = {"prompt": PROMPT} if path == COMPLETION else {"messages": [{"role": "user", "content": PROMPT}]}
        rest = {"temperature": 0, "max_tokens": 99, "min_tokens": 9, "stop": ["x"], "request_id": "1"}
        shadowed.client.post(path, json={**prompt, **rest, "stream": stream})
        found = compared(shadowed, 1)
        assert found == {"checks_total": 1, "greedy_checks_total": 1, "agreement_sum": 1, "other_first_token_total": 0}
        first, again = shadowed.inner.bodies
        ids = list(plan_of(first).token_ids)
        same = {"prompt": ids} if path == COMPLETION else {**prompt, "kv_transfer_params": {"prompt_token_ids": ids}}
        assert again == {**same, "temperature": 0, "max_tokens": 4, "min_tokens": 4, "stop": ["x"]}
        assert metric(shadowed, "shadow_checks_total") == 1 and metric(shadowed, "outcomes_total") == 1
        assert metric(shadowed, f'http_requests_total{{path="{path}"') == 1

    @pytest.mark.parametrize("stream", [False, True])
    def test_no_response_changes(self, served: Served, shadowed: Served, stream: bool) -> None:
        def response(by: Served) -> tuple[bytes, Any]:
            found = by.ask(temperature=0, stream=stream)
            times = rb'"phases_s":\{[^}]*\}|"\w+_s":[^,}]+'
            headers = [each for each in found.headers.items() if each[0] not in ("date", "content-length")]
            return re.sub(times, b"", found.content), headers

        shadowed.inner.plain = ["Other."], "stop"
        assert response(shadowed) == response(served)
        assert compared(shadowed, 1)["agreement_sum"] == 0

    def test_which_are_not(self, shadowed: Served) -> None:
        """Neither sampled nor plain answers, nor those with more than a free text. At the end, one that is."""
        inner = shadowed.inner
        schema = {"type": "json_object"}
        for fields_ in ({}, {"temperature": 0.5}, {"logprobs": True}, {"tools": [TOOL]}, {"response_format": schema}):
            shadowed.ask(**{"temperature": 0 if fields_ else None, **fields_})
        shadowed.ask(temperature=0, n=2), shadowed.ask("Hello", temperature=0)
        shadowed.ask(temperature=0, cacheclip={"method": "full"})
        inner.told = {"outcome": "plain", "reason": "gone"}
        shadowed.ask(temperature=0)
        inner.told, inner.error = {"outcome": "cached", "reason": None}, JSONResponse({}, 400)
        shadowed.ask(temperature=0)
        asked, inner.error = len(inner.bodies), None
        shadowed.ask(temperature=0, tools=[], response_format={"type": "text"}, logprobs=False, n=1)
        assert compared(shadowed, 1)["checks_total"] == 1 and (asked, len(inner.bodies)) == (10, 12)

    def test_vllm_may_be_greedy_by_default(self, shadowed: Served) -> None:
        model = SimpleNamespace()
        shadowed.inner.app.state.vllm_config = SimpleNamespace(model_config=model)
        assert shadowed.ask().status_code == 200
        assert compared(shadowed, 1) == {"skipped_total": 1}, "what cannot be asked"
        model.get_diff_sampling_param = lambda: {"temperature": 0.0, "top_p": 0.9}
        shadowed.ask(temperature=1), shadowed.ask(temperature=None)
        assert compared(shadowed, 2)["checks_total"] == 1 and "temperature" not in shadowed.inner.last

    def test_one_at_a_time(self, shadowed: Served) -> None:
        """Answers do not wait for it, and the server's end does not either."""
        shadowed.inner.plain_gate.clear()
        for stream in (False, True, False):
            assert shadowed.ask(temperature=0, stream=stream).status_code == 200
        assert compared(shadowed, 2) == {"skipped_total": 2} and len(shadowed.inner.bodies) == 4
        shadowed.inner.plain_gate.set()
        assert compared(shadowed, 3)["checks_total"] == 1
        shadowed.inner.plain_gate.clear()
        shadowed.ask(temperature=0)
        for _ in range(4000):
            if len(shadowed.inner.bodies) == 6:
                return
            time.sleep(0.005)
        pytest.fail("it was not asked again")

    def test_what_goes_wrong(self, shadowed: Served, caplog: pytest.LogCaptureFixture) -> None:
        inner = shadowed.inner
        for number, error in enumerate((JSONResponse({}, 503), JSONResponse([]), Response(b"{"), broken)):
            inner.plain_error = error
            assert shadowed.ask(temperature=0).json()["cacheclip"]["outcome"] == "fused"
            assert compared(shadowed, number + 1) == {"skipped_total": number + 1}
        assert "vLLM answered with status 503" in caplog.text and PROMPT[:30] not in caplog.text
        inner.plain_error = None
        shadowed.ask(temperature=0)
        assert compared(shadowed, 5)["checks_total"] == 1

    def test_tenants_stay_apart(self, config: EngineConfig, tmp_path: Path) -> None:
        """The plain request has the salt of the tenant's plain requests, and its key."""
        (tmp_path / "tenants.json").write_text(json.dumps({NORTH: "north"}))
        shadow = replace(config, shadow_rate=1.0)
        with running(ServerSettings(shadow, "tiny", "", OWN, tmp_path / "tenants.json", SEAL)) as found:
            salts = []
            for number, key in enumerate((OWN, NORTH)):
                found.ask("Hello", key=key)
                salts.append(found.inner.last["cache_salt"])
                found.ask(key=key, temperature=0)
                compared(found, number + 1)
                assert found.inner.last["cache_salt"] == salts[-1] and "cacheclip" not in str(found.inner.last)
            assert salts[0] != salts[1]

    def test_what_was_said(self) -> None:
        pieces = [{"reasoning": "So"}, {"content": "."}, {"role": "assistant", "content": ""}]
        stream = b"".join(event(choices=[{"delta": each, "finish_reason": None}]) for each in pieces)
        assert ReplyText.of(b": alive\n\n" + stream + b'data: {"choices":[{"del') == ReplyText(".", "So")
        stream += event(choices=[{"delta": {}, "finish_reason": "stop"}]) + event(choices=[]) + b"data: [DONE]\n\n"
        assert ReplyText.of(stream) == ReplyText(".", "So", "stop")
        assert ReplyText.of(b'{"choices": [{"text": "a", "finish_reason": "length"}]}') == ReplyText("a", "", "length")


async def broken(scope: Any, receive: Any, send: Any) -> None:
    raise OSError("the engine is dead")


class TestStarting:
    def life(self, settings: ServerSettings, inner: Inner | None = None) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def live() -> None:
            messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

            async def receive() -> Any:
                return next(messages)

            async def send(message: Any) -> None:
                sent.append(message)

            app = (inner or Inner()).app
            await CacheClip(app, settings)({"type": "lifespan", "app": None, "state": {}}, receive, send)

        asyncio.run(live())
        return sent

    def test_it_says_that_it_is_ready(self, config: EngineConfig, capfd: pytest.CaptureFixture[str]) -> None:
        read, write = os.pipe()
        settings = ServerSettings(config, "tiny", "http://127.0.0.1:1", seal=SEAL)
        assert self.life(settings)[0]["type"] == "lifespan.startup.complete"
        assert "tiny is ready at http://127.0.0.1:1/v1\n" in capfd.readouterr().err
        self.life(ServerSettings(config, "tiny", "http://127.0.0.1:1", seal=SEAL, json_to=write))
        ready = {"address": "http://127.0.0.1:1", "model": "tiny", "backend": "vllm"}
        assert json.loads(os.read(read, 1000)) == ready
        os.close(read), os.close(write)

    def test_it_says_why_not(self, config: EngineConfig) -> None:
        failed = self.life(ServerSettings(replace(config, min_confidence=0.5), "tiny", seal=SEAL))[0]
        assert failed["type"] == "lifespan.startup.failed" and "nothing would be reused" in failed["message"]
        failed = self.life(ServerSettings(replace(config, require_certificate=True), "tiny", seal=SEAL))[0]
        assert "no valid certificate" in failed["message"]

    @pytest.mark.parametrize(
        ("told", "plain", "starts"), [("fused", WORDS, True), ("plain", WORDS, False), ("fused", WORDS[1:], False)]
    )
    def test_a_vllm_that_was_never_tried(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, told: str, plain: list[str], starts: bool
    ) -> None:
        """A plan that computes every token has the answer of plain prefill, or the server does not start."""
        inner = Inner()
        inner.told, inner.plain = {"outcome": told, "reason": None}, (plain, "length")
        message = self.life(ServerSettings(config, "tiny", seal=SEAL, is_untried=True), inner)[0]
        assert message["type"] == f"lifespan.startup.{'complete' if starts else 'failed'}"
        assert starts or "to have plain prefill's answer" in message["message"]
        fused, again = inner.bodies
        assert fused["prompt"] == again["prompt"] and "kv_transfer_params" not in again
        monkeypatch.setenv(SEAL_VARIABLE, SEAL)
        given, room = fused["kv_transfer_params"][PARAMETER], {"max_runs": 1, "max_rows": 8}
        runtime = load_planning(config.primary, dtype="float32")
        ready = Ready.of(given, fused["prompt"], Settings(Path(str(config.store)), sealed=True), runtime, **room)
        assert ready.plan is not None and ready.plan.num_rows == len(fused["prompt"])

    def test_settings_travel_in_the_environment(self, config: EngineConfig, tmp_path: Path) -> None:
        file = tmp_path / "tenants.json"
        file.write_text(json.dumps({NORTH: "north"}))
        how = HowServed("cuda", "fp8")
        names = {"aliases": ("gpt-4o",), "drops_tools": True}
        settings = ServerSettings(config, "tiny", "http://a", OWN, file, SEAL, 5, False, True, how, 7, **names)
        assert ServerSettings.of_environment(settings.to_environment()) == settings
        assert OWN not in repr(settings) and SEAL not in repr(settings)
        assert settings.access.identify(f"Bearer {NORTH}").tenants == ("north",)
        for broken in ({}, {**settings.to_environment(), "CACHECLIP_VLLM_SERVER": "{}"}):
            with pytest.raises(ConfigurationError, match="--backend vllm"):
                ServerSettings.of_environment(broken)


@pytest.fixture(scope="module")
def lenient(config: EngineConfig) -> Iterator[Served]:
    settings = ServerSettings(config, "tiny", seal=SEAL, aliases=("gpt-4o",), drops_tools=True, calls_tools=False)
    with running(settings) as found:
        yield found


def test_embeddings_are_ours(config: EngineConfig, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmbeddingService, "_embed", lambda self, texts: ([np.ones(2, np.float32)] * len(texts), 3))
    with running(ServerSettings(config, "tiny", seal=SEAL, embedding="small")) as found:
        said = found.client.post("/v1/embeddings", json={"input": ["a", "b"], "model": "small"}).json()
        assert [each["embedding"] for each in said["data"]] == [[1, 1], [1, 1]] and said["usage"]["total_tokens"] == 3
        assert found.inner.paths == []
    refused = served.client.post("/v1/embeddings", json={"input": "a"})
    assert refused.status_code == 404 and "[serve]" in refused.json()["error"]["message"]


def test_titles_wait_behind_questions(guarded: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    place = Queue.place

    def noted(self: Queue, *arguments: Any, **options: Any) -> Any:
        seen.append(options.get("in_background"))
        return place(self, *arguments, **options)

    monkeypatch.setattr(guarded.middleware._places, "place", partial(noted, guarded.middleware._places))
    title = "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history."
    for content, more in ((title, {}), (PROMPT, {}), (PROMPT, {"cacheclip": {"background": True}})):
        assert guarded.ask(content, key=NORTH, **more).status_code == 200
    assert seen == [True, False, True]


class TestNamesAndTools:
    def test_another_name_is_planned(self, lenient: Served) -> None:
        lenient.ask(model="gpt-4o")
        body = lenient.inner.bodies[-1]
        assert body["model"] == "tiny" and plan_of(body)
        lenient.ask(model="gpt-5")
        assert lenient.inner.bodies[-1]["model"] == "gpt-5" and "kv_transfer_params" not in lenient.inner.bodies[-1]

    def test_tools_that_need_not_be_called_are_left_out(self, lenient: Served, served: Served) -> None:
        lenient.ask(tools=[TOOL], tool_choice="auto")
        assert not {"tools", "tool_choice"} & lenient.inner.bodies[-1].keys()
        assert metric(lenient, 'ignored_fields_total{field="tools"}') == 1
        lenient.ask(tools=[TOOL], tool_choice="required")
        assert lenient.inner.bodies[-1]["tools"] == [TOOL], "vLLM says why it cannot"
        served.ask(tools=[TOOL])
        assert served.inner.bodies[-1]["tools"] == [TOOL], "the setting is off"
