"""A failure at the second step of what a server does: the second prompt of a request, the second event of an answer.
The client is told, its place is given back, and the next request is answered."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from cacheclip_serve.app import Limits
from cacheclip_serve.backend import ServedQuestion
from cacheclip_serve.transformers import TransformersBackend
from serve_cases import Broken, Served, fail_at, running, until

from cacheclip_rag import CacheClipEngine, EngineConfig, Event
from cacheclip_rag.answering.turns import turns_of

PROMPTS = ["One?", "Two?", "Three?"]


@pytest.fixture(scope="module")
def server(config: EngineConfig) -> Iterator[Served]:
    with running(replace(config, store=None), limits=Limits(running=2, waiting=1, request_s=30)) as found:
        yield found


@pytest.fixture
def small(server: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server; at the end, nobody has a place or a turn."""
    monkeypatch.setattr(server.engine.primary, "eos_ids", frozenset())
    yield server
    monkeypatch.undo()
    queue = server.server.app._queue
    until(lambda: (queue.running, queue.waiting) == (0, 0) and turns_of(server.engine.primary).is_idle)
    assert server.chat().status_code == 200


def complete(served: Served, prompt: Any, **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    return served.client.post("/v1/completions", json=body)


def texts(response: Any) -> list[str]:
    return [choice["text"] for choice in response.json()["choices"]]


@pytest.mark.parametrize("asked", [{"prompt": PROMPTS}, {"prompt": "One?", "n": 3}, {"prompt": PROMPTS[:1]}])
def test_each_prompt_has_a_place_which_starts_at_its_own_first_event(
    small: Served, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it is among the few whose first token has not come, also if one before it has started."""
    queue, answer = small.server.app._queue, TransformersBackend.answer
    seen: list[list[list[bool]]] = []

    async def watched(self: TransformersBackend, question: ServedQuestion) -> AsyncGenerator[Event, None]:
        own = [[place.is_starting for place in queue._places]]
        seen.append(own)
        async for event in answer(self, question):
            yield event
            own.append([place.is_starting for place in queue._places])

    monkeypatch.setattr(TransformersBackend, "answer", watched)
    assert complete(small, **asked).status_code == 200
    assert len(seen) == asked.get("n", len(asked["prompt"]) if isinstance(asked["prompt"], list) else 1)
    for first, *later in seen:
        assert first == [True] and len(later) > 1 and all(places == [False] for places in later)


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_prompt_of_several(small: Served, fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = texts(complete(small, PROMPTS))
    with monkeypatch.context() as patch:
        fail_at(patch, CacheClipEngine, "stream", fails + 1)
        found = complete(small, PROMPTS)
    assert found.status_code == 500 and "error" in found.json() and "Broken" not in found.text
    assert texts(complete(small, PROMPTS)) == right and len(right) == len(PROMPTS)


@pytest.mark.some(3)
@pytest.mark.parametrize("step", ["decode_step", "decode_ids"])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_an_event_of_an_answer(
    small: Served, step: str, at: int, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = small.chat().json()["choices"][0]["message"]["content"]
    with monkeypatch.context() as patch:
        fail_at(patch, small.engine.primary, step, at)
        found = small.chat(stream=stream)
    if not stream or found.status_code != 200:
        assert found.status_code == 500 and "error" in found.json()
        return
    lines = [json.loads(line.removeprefix("data: ")) for line in found.text.split("\n\n") if line]
    assert "error" in lines[-1] and "[DONE]" not in found.text, "the client is told that its answer is not whole"
    shown = "".join(line["choices"][0]["delta"].get("content") or "" for line in lines[:-1])
    assert right.startswith(shown) and shown != right


@pytest.mark.parametrize("stream", [False, True])
def test_what_comes_after_a_complete_answer_takes_nothing_away(
    small: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails when the reader asks for what follows the last event."""
    events = TransformersBackend._events

    def failing(self: TransformersBackend, question: ServedQuestion) -> Iterator[Event]:
        yield from events(self, question)
        raise Broken

    right = small.chat(stream=stream)
    with monkeypatch.context() as patch:
        patch.setattr(TransformersBackend, "_events", failing)
        found = small.chat(stream=stream)
    assert found.status_code == 200 and found.text.count("[DONE]") == right.text.count("[DONE]") == int(stream)
    assert '"finish_reason":"length"' in found.text and "error" not in found.text


@pytest.mark.parametrize("fails", [0, 1])
def test_closing_goes_on_after_a_tenant_that_cannot_be_closed(
    config: EngineConfig, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TransformersBackend(replace(config, store=None))
    engines, closed = [backend.engine(name) for name in ("one", "two", "three")], list[CacheClipEngine]()
    close = CacheClipEngine.close
    monkeypatch.setattr(CacheClipEngine, "close", lambda self: (closed.append(self), close(self)))
    fail_at(monkeypatch, engines[fails].parts, "close", 1)
    with pytest.raises(Broken):
        backend.close()
    assert {*closed} == {*engines}
