"""The page of an answer of vLLM's, and who sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from cacheclip_serve import Inspection
from cacheclip_testing.plugin import CHUNKS
from cacheclip_vllm.middleware import _MOST_KEPT
from cacheclip_vllm.planners import Planning, Route
from cacheclip_vllm.replies import ReplyText
from cacheclip_vllm.settings import ServerSettings
from serve_cases import until
from vllm_inner import WORDS
from vllm_served import CHAT, COMPLETION, NORTH, OWN, PROMPT, SEAL, Served, running

from cacheclip_rag import CacheClipEngine, EngineConfig
from cacheclip_rag.planning import PlanningEngine


@pytest.fixture(scope="module")
def served(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("keys") / "tenants.json"
    file.write_text(json.dumps({NORTH: "north"}))
    shadow = replace(config, shadow_rate=1.0)
    with running(ServerSettings(shadow, "tiny", api_key=OWN, tenants=file, seal=SEAL, inspects=True)) as found:
        yield found


def visitor(served: Served, tenant: str = "default") -> httpx.Client:
    """A browser that opened the address which the server printed."""
    inspecting = served.middleware._inspecting
    assert inspecting is not None
    client = httpx.Client(base_url=served.address, follow_redirects=True)
    opened = client.get(dict(inspecting._inspection.addresses(served.address))[tenant])
    assert opened.status_code == 200 and "key=" not in str(opened.url)
    return client


def last_page(served: Served) -> str:
    """Of the latest answer."""
    client = visitor(served)
    return client.get(f"/inspect/{numbers(client)[0]}").text


def numbers(client: httpx.Client) -> list[str]:
    """Of the answers that a visitor sees, the latest first."""
    return re.findall(r"/inspect/(\d+)", client.get("/inspect").text)


def asked(served: Served, path: str, key: str = OWN, tenant: str = "default", **body: Any) -> None:
    """Ask, and wait for the page: the client has its answer first."""
    visiting = visitor(served, tenant)
    before = numbers(visiting)
    assert served.client.post(path, json=body, headers={"authorization": f"Bearer {key}"}).status_code == 200
    until(lambda: numbers(visiting) != before)


MESSAGES = [{"role": "user", "content": PROMPT}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETION: {"prompt": PROMPT},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": PROMPT},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*ASKED])
def test_a_fused_answer(served: Served, path: str, stream: bool) -> None:
    served.inner.plain = ([*WORDS[:2], " will", " be"], "stop")
    asked(served, path, stream=stream, temperature=0, **ASKED[path])
    page = last_page(served)
    assert PROMPT.splitlines()[-1][-60:] in page and "approximate" in page and "computed again" in page
    assert "".join(WORDS) in page and CHUNKS[0][:40] in page and "first token after" in page
    assert "/why" not in page and "/learn" not in page, "nobody would answer"
    if path in (CHAT, COMPLETION):  # the others are not compared
        until(lambda: "Full prefill differs from token" in last_page(served))


def test_plain_answers(served: Served) -> None:
    asked(served, CHAT, messages=MESSAGES, cacheclip={"method": "full"})
    assert "exact: all KV" in last_page(served)
    served.inner.cached = 16
    asked(served, CHAT, messages=MESSAGES, cacheclip={"method": "full"})
    served.inner.cached = None
    assert re.search(r"prefix cache.*?<td[^>]*>16</td>", last_page(served))
    asked(served, COMPLETION, prompt=["Two?", "Texts?"])
    assert "plain prefill: prompt is no single text" in last_page(served)


def test_who_may_see_it(served: Served) -> None:
    asked(served, CHAT, NORTH, "north", messages=[{"role": "user", "content": "Of the north?"}])
    own, north = visitor(served), visitor(served, "north")
    (number,) = numbers(north)
    assert "Of the north?" in north.get(f"/inspect/{number}").text
    assert "Of the north?" not in own.get("/inspect").text and own.get(f"/inspect/{number}").status_code == 404
    bearer = {"authorization": f"Bearer {OWN}"}
    assert httpx.get(f"{served.address}/inspect", headers=bearer).status_code == 401
    assert own.get("/inspect/x").status_code == 404
    assert own.get("/inspect", headers={"host": "example.org"}).status_code == 403


def test_what_is_erased_is_forgotten(served: Served, config: EngineConfig) -> None:
    asked(served, CHAT, messages=MESSAGES)
    CacheClipEngine(config).release(CHUNKS[-1:])
    served.middleware.planning.store.erasures.look()  # as every ten seconds
    assert not numbers(visitor(served))


def test_what_is_erased_meanwhile_is_never_shown(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the plan of a tenant's first answer and its page."""
    kept: list[object] = []
    add, plan = Inspection.add, Planning.plan

    async def erased(planning: Planning, *asked: Any) -> Route:
        way = await plan(planning, *asked)
        assert CacheClipEngine(replace(config, namespace="north")).release(CHUNKS[:1])
        planning.store.erasures.look()  # as every ten seconds
        return way

    monkeypatch.setattr(Planning, "plan", erased)
    monkeypatch.setattr(Inspection, "add", lambda *answered: kept.append(add(*answered)))
    (file := tmp_path / "tenants.json").write_text(json.dumps({NORTH: "north"}))
    with running(ServerSettings(config, "tiny", api_key=OWN, tenants=file, seal=SEAL, inspects=True)) as fresh:
        assert fresh.ask(key=NORTH).json()["cacheclip"]["outcome"] == "fused"
        until(lambda: kept)
        assert kept == [None] and not numbers(visitor(fresh, "north"))


def test_a_server_has_none_unless_told(config: EngineConfig) -> None:
    with running(ServerSettings(config, "tiny", seal=SEAL)) as plain:
        assert plain.client.get("/inspect").status_code == 404


def test_a_trace_counts_as_the_answer_does(config: EngineConfig) -> None:
    with PlanningEngine(config) as planner:
        planned = planner.plan(PROMPT, recompute_ratio=0.3)
        trace = planner.trace(planned, planned.stats)
        exact = planner.trace(planned, replace(planned.stats, chunk_tokens=0))
    assert len(trace.recomputed) == planned.stats.recomputed_tokens > 0 and not trace.is_exact
    assert sum(stop - start for start, stop in trace.chunks) == planned.stats.chunk_tokens
    assert exact.is_exact and not exact.recomputed and {span.kind for span in exact.spans} == {"fresh"}


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_a_long_stream_is_shown_to_its_end(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_inner.WORDS", [*(f" w{number}" for number in range(_MOST_KEPT // 50)), " and so on."])
    asked(served, path, stream=True, **ASKED[path])
    page = last_page(served)
    assert " w0 w1 w2 " in page and " and so on." in page


def event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


ITEMS = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}]
ITEMS += [{"type": "message", "content": [{"type": "output_text", "text": "In 1904"}]}]
WHOLE = {"object": "response", "output": ITEMS}
THOUGHT = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "In 1904"}]
DELTAS = [{"type": "thinking_delta", "thinking": "Hm."}, {"type": "text_delta", "text": "In 1904"}]
STREAM = "".join(event("content_block_delta", delta=each) for each in DELTAS)
SAID = [{"delta": {"reasoning": "Hm."}}, {"index": 1, "delta": {"content": "Two"}, "finish_reason": "length"}]
SAID += [{"index": 0, "delta": {"content": "In 1904"}, "finish_reason": "stop"}]
EVENTS = event("response.created", response={"status": "in_progress"})
EVENTS += event("response.reasoning_text.delta", delta="Hm.") + event("response.output_text.delta", delta="In 1904")


@pytest.mark.parametrize(
    ("body", "end", "finish"),
    [
        ("".join(f"data: {json.dumps({'choices': [each]})}\n\n" for each in SAID), "stop", "stop"),
        (json.dumps({**WHOLE, "status": "incomplete"}), "incomplete", "length"),
        (json.dumps({**WHOLE, "status": "completed"}), "completed", "stop"),
        (EVENTS + event("response.incomplete", response={**WHOLE, "status": "incomplete"}), "incomplete", "length"),
        (EVENTS + event("response.completed", response={**WHOLE, "status": "completed"}), "completed", "stop"),
        (json.dumps({"type": "message", "content": THOUGHT, "stop_reason": "max_tokens"}), "max_tokens", "length"),
        (json.dumps({"type": "message", "content": THOUGHT, "stop_reason": "tool_use"}), "tool_use", "stop"),
        (STREAM + event("message_delta", delta={"stop_reason": "max_tokens"}), "max_tokens", "length"),
        (STREAM + event("message_delta", delta={"stop_reason": "end_turn"}), "end_turn", "stop"),
    ],
)
def test_what_was_said(body: str, end: str, finish: str) -> None:
    """The same of an answer that is whole and of one that streams, however its bytes are cut."""
    said = ReplyText.of(body.encode())
    assert (said.reasoning, said.text, said.end, said.finish_reason) == ("Hm.", "In 1904", end, finish)
    slowly = ReplyText()
    for byte in body.encode():
        slowly.feed(bytes([byte]))
    slowly.finish()
    assert slowly == said


def test_what_is_no_answer() -> None:
    with pytest.raises(ValueError):
        ReplyText.of(b"{")
