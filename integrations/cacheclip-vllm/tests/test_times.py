"""Seconds that clients of vLLM's server see, with a clock that only sleeps move: exact, streamed and whole."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from cacheclip_vllm import planners, replies
from cacheclip_vllm.middleware import CacheClip
from cacheclip_vllm.planners import Planning
from cacheclip_vllm.requests import NotPlanned
from cacheclip_vllm.settings import ServerSettings

from cacheclip_rag import EngineConfig

QUEUED_S, PLANNING_S, FIRST_S, REST_S, READ_S = 32.0, 8.0, 2.0, 0.5, 0.125
"""In the queue of plans, being planned, until vLLM's first byte, and until its last one. No sum of some of them equals
another one. Before the first byte, in whole answers, vLLM's workers waited for stored KV."""
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
MESSAGES = [{"role": "user", "content": "What?"}]
PATHS = {"/v1/chat/completions": {"messages": MESSAGES}, "/v1/completions": {"prompt": "a"}}


class Clock:
    """In place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (planners, replies):
        monkeypatch.setattr(module, "time", found)

    def planned(self: Planning, *_: Any) -> Any:
        found.sleep(PLANNING_S)
        raise NotPlanned("a reason")

    monkeypatch.setattr(Planning, "_planned", planned)
    return found


def vllm(clock: Clock, in_vllm_s: float | None) -> Any:
    """An application in place of vLLM's, which says its own time to the first token, if it is given."""
    metrics: dict[str, Any] = {"metrics": {"time_to_first_token_ms": 1.0, "queue_time_ms": None}}
    if in_vllm_s is not None:  # vLLM counts from when the request is scheduled, behind its queue and its load
        metrics = {"metrics": {"queue_time_ms": in_vllm_s * 750, "time_to_first_token_ms": in_vllm_s * 250}}

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        kind = b"text/event-stream" if body.get("stream") else b"application/json"
        choice = {"index": 0, "text": "A", "delta": {"content": "A"}, "finish_reason": "stop"}
        told = {"kv_transfer_params": {"cacheclip": {"read_s": READ_S}}}
        whole = {"id": "1", "choices": [choice], "usage": USAGE, **metrics, **told}
        events = [{"choices": [choice]}, {"choices": [], "usage": USAGE, **metrics}]
        pieces = [b"data: " + json.dumps(each, separators=(",", ":")).encode() + b"\n\n" for each in events]
        pieces += [b"data: [DONE]\n\n"]
        if not body.get("stream"):
            text = json.dumps(whole, separators=(",", ":")).encode()
            pieces = [text[:9], text[9:]]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        clock.sleep(FIRST_S)
        await send({"type": "http.response.body", "body": pieces[0], "more_body": True})
        clock.sleep(REST_S)
        await send({"type": "http.response.body", "body": b"".join(pieces[1:]), "more_body": False})

    return application


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("stream", "in_vllm_s", "ttft_s"),
    [
        (True, None, QUEUED_S + PLANNING_S + FIRST_S),
        (True, 0.25, QUEUED_S + PLANNING_S + FIRST_S),
        (False, FIRST_S, QUEUED_S + PLANNING_S + FIRST_S),
        (False, 0.25, QUEUED_S + PLANNING_S + 0.25),
        (False, None, QUEUED_S + PLANNING_S + FIRST_S + REST_S),
        (False, 100.0, QUEUED_S + PLANNING_S + FIRST_S + REST_S),
    ],
    ids=["stream", "stream with vLLM's", "whole", "whole, sooner", "whole without vLLM's", "whole, later than its end"],
)
async def test_every_second_is_counted_once(
    clock: Clock, tool_model: str, tmp_path: Path, path: str, stream: bool, in_vllm_s: float | None, ttft_s: float
) -> None:
    config = EngineConfig(primary=tool_model, auxiliary=None, method="epic-corrected", store=tmp_path / "store")
    middleware = CacheClip(vllm(clock, in_vllm_s), ServerSettings(config, "tiny", seal="a-seal"))
    transport = httpx.ASGITransport(middleware)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        queue = middleware.planning._queue
        async with AsyncExitStack() as others:
            for _ in range(planners._THREADS):  # as many other prompts are being planned as can be
                await others.enter_async_context(queue.place("default"))
            asked = asyncio.create_task(client.post(path, json={**PATHS[path], "stream": stream}))
            while not queue.waiting:
                await asyncio.sleep(0)
            clock.sleep(QUEUED_S)
        text = (await asked).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
    (own,) = [each["cacheclip"] for each in (chunks if stream else [json.loads(text)]) if "cacheclip" in each]
    everything = QUEUED_S + PLANNING_S + FIRST_S + REST_S
    found = {name: own[name] for name in ("ttft_s", "decode_s", "queued_s", "planning_s", "reason")}
    times = {"ttft_s": ttft_s, "decode_s": everything - ttft_s}
    assert found == {**times, "queued_s": QUEUED_S, "planning_s": PLANNING_S, "reason": "a reason"}
    in_vllm_s, read_s = ttft_s - QUEUED_S - PLANNING_S, 0.0 if stream else READ_S
    idle = dict.fromkeys(("lookup", "select", "assemble", "first"), 0.0)
    phases = {**idle, "read": read_s, "recompute": in_vllm_s - read_s}
    assert own["phases_s"] == phases
    counted = middleware.planning.metrics.snapshot()
    assert counted["ttft_seconds_sum"] == ttft_s
    middleware.planning.close()
