"""Many at once, too many, those who hang up, and those who wait too long."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from cacheclip_serve import app
from cacheclip_serve.app import Limits
from cacheclip_serve.backend import ServedQuestion
from cacheclip_serve.server import Server
from fake_time import FakeTime
from serve_cases import Served, running, until

from cacheclip_rag import CallOptions, ConfigurationError, EngineConfig, ModelError, SamplingParams
from cacheclip_rag.answering.prefill import Prefilling
from cacheclip_rag.answering.turns import Turns, turns_of
from cacheclip_rag.base import clock as base_clock

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def narrow(config: EngineConfig) -> Iterator[Served]:
    """A server that answers one question while one waits."""
    with running(replace(config, store=None), limits=Limits(running=1, waiting=1, request_s=30)) as found:
        yield found


def prompts_of(served: Served) -> Any:
    return turns_of(served.engine.primary)


class Gate:
    """Holds every answer at its second token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting = list[object]()
        """Their states."""
        self._opened, step = threading.Event(), Turns.step

        def gated(*given: Any) -> Any:
            self.waiting.append(given[2])
            assert self._opened.wait(60), "nobody opens"
            return step(*given)

        monkeypatch.setattr(Turns, "step", gated)

    def open(self) -> None:
        self._opened.set()


NEVER = ("a" * 99,)


class Clock(FakeTime):
    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)

    def slowly(self, ordinary: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """A function that takes so many seconds."""

        def called(*args: Any, **options: Any) -> Any:
            self.perf_counter()
            self.sleep(seconds)
            return ordinary(*args, **options)

        return called


class TestQueue:
    def test_too_many_are_refused(self, narrow: Served) -> None:
        queue = narrow.server.app._queue
        with ThreadPoolExecutor(2) as pool:
            with prompts_of(narrow).prompt():
                first = pool.submit(narrow.chat)
                until(lambda: queue.running == 1)
                second = pool.submit(narrow.chat)
                until(lambda: queue.waiting == 1)
                third = narrow.chat()
                assert third.status_code == 429 and int(third.headers["retry-after"]) >= 1
                assert third.json()["error"]["code"] == "queue_full"
                assert narrow.client.get("/health").status_code == 200, "it is busy, not ill"
            assert first.result().status_code == second.result().status_code == 200
        until(lambda: (queue.running, queue.waiting) == (0, 0))

    @pytest.mark.parametrize("stream", [False, True])
    def test_every_second_is_counted_once(self, narrow: Served, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """By a clock that only sleeps move: before its turn, in the model's queue and while tokens are computed."""
        clock = Clock(monkeypatch, app, base_clock)
        queue, runtime = narrow.server.app._queue, narrow.engine.primary
        slow = clock.slowly(Prefilling.run, 2.0)
        monkeypatch.setattr(Prefilling, "run", lambda *args: slow(*args))
        monkeypatch.setattr(runtime, "decode_step", clock.slowly(runtime.decode_step, 0.5))
        monkeypatch.setattr(runtime, "eos_ids", frozenset())
        with ThreadPoolExecutor(2) as pool, prompts_of(narrow).prompt():
            first = pool.submit(narrow.chat, n=2)
            until(lambda: queue.running == 1 and len(prompts_of(narrow)._prompts) == 2)
            second = pool.submit(narrow.chat, "How?", stream=stream)
            until(lambda: queue.waiting == 1)
            clock.sleep(32.0)
        times = ("queued_s", "ttft_s", "decode_s")
        own = [[choice["cacheclip"][each] for each in times] for choice in first.result().json()["choices"]]
        answer_s = 2.0 + 3 * 0.5
        waited_s = 32.0 + 2 * answer_s  # the other question comes between the two answers
        assert own == [[32.0, 32.0 + 2.0, 1.5], [waited_s, waited_s + 2.0, 1.5]]
        lines = second.result().text.split("\n\n")
        last = json.loads(lines[-3].removeprefix("data: ")) if stream else second.result().json()
        waited_s = 32.0 + answer_s
        assert [last["cacheclip"][each] for each in times] == [waited_s, waited_s + 2.0, 1.5]

    def hang_up(self, served: Served, **fields: Any) -> None:
        body = {"messages": [{"role": "user", "content": "What?"}], **fields}
        with httpx.Client(base_url=served.server.address) as leaving, pytest.raises(httpx.ReadTimeout):
            leaving.post(PATH, json=body, timeout=httpx.Timeout(60, read=0.3))

    @pytest.mark.parametrize("stream", [False, True])
    def test_who_hangs_up_before_the_first_token(self, narrow: Served, stream: bool) -> None:
        turns, queue = prompts_of(narrow), narrow.server.app._queue
        with turns.prompt():
            before = len(turns._prompts)
            self.hang_up(narrow, stream=stream)
            until(lambda: queue.running == 0)
            until(lambda: len(turns._prompts) == before)
        assert narrow.chat().status_code == 200

    def test_who_hangs_up_while_it_waits(self, narrow: Served) -> None:
        queue = narrow.server.app._queue
        with ThreadPoolExecutor(1) as pool, prompts_of(narrow).prompt():
            pool.submit(narrow.chat)
            until(lambda: queue.running == 1)
            self.hang_up(narrow)
            until(lambda: queue.waiting == 0)

    def test_who_hangs_up_in_the_middle(self, narrow: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        """No token is computed for nobody."""
        runtime, computed = narrow.engine.primary, []
        step = runtime.decode_step

        def counted(*args: Any) -> Any:
            computed.append(time.monotonic())
            time.sleep(0.005)
            return step(*args)

        monkeypatch.setattr(runtime, "decode_step", counted)
        body = {"messages": [{"role": "user", "content": "What?"}], "stream": True, "temperature": 2, "seed": 1}
        with narrow.client.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 2000}) as response:
            lines = response.iter_lines()
            assert response.status_code == 200 and next(lines).startswith("data: {")
        until(lambda: narrow.server.app._queue.running == 0)
        time.sleep(0.1)
        count = len(computed)
        time.sleep(0.2)
        assert len(computed) == count < 1500
        assert "cacheclip_http_disconnects_total 0" not in narrow.client.get("/metrics").text

    @pytest.mark.parametrize("began", [False, True], ids=["before", "after the first token"])
    def test_who_takes_too_long(self, narrow: Served, monkeypatch: pytest.MonkeyPatch, began: bool) -> None:
        monkeypatch.setattr(narrow.server.app, "limits", replace(narrow.server.app.limits, request_s=0.3))
        if began:
            step = narrow.engine.primary.decode_step
            monkeypatch.setattr(narrow.engine.primary, "decode_step", lambda *a: time.sleep(0.02) or step(*a))
            response = narrow.chat(stream=True, max_tokens=2000, temperature=2, seed=1)
            assert response.status_code == 200
            last = [line for line in response.text.splitlines() if line][-1]
            assert '"code":"timeout"' in last, last
        else:
            with prompts_of(narrow).prompt():
                response = narrow.chat()
            assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
            assert response.headers["x-should-retry"] == "false"
        until(lambda: narrow.server.app._queue.running == 0)


HELD_BACK: dict[str, tuple[str, dict[str, Any]]] = {
    "by a stop string": ("a", {"stop": NEVER}),
    "as a blank line": ("\n", {}),
    "of several answers": ("a", {"stop": NEVER, "n": 2}),
    "of a stream": ("\n", {"stream": True}),
}


@pytest.mark.parametrize(("text", "fields"), HELD_BACK.values(), ids=HELD_BACK)
def test_text_that_is_held_back_holds_up_no_other_client(
    served: Served, text: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as may be without a first token, each held at the second token of its first answer."""
    monkeypatch.setattr(served.engine.primary, "eos_ids", frozenset())
    for name in ("decode_ids", "decode_calls"):  # every token has this text
        monkeypatch.setattr(served.engine.primary, name, lambda ids: text * len(ids))
    gate = Gate(monkeypatch)
    with ThreadPoolExecutor(5) as pool:
        try:
            others = [pool.submit(served.chat, f"Who is number {n}?", **fields) for n in range(4)]
            until(lambda: len(gate.waiting) == len(others))
            answered = pool.submit(served.chat, max_tokens=1)
            assert answered.result(20).status_code == 200
        finally:
            gate.open()
    assert [other.result().status_code for other in others] == [200] * 4


class TestMemory:
    @pytest.mark.parametrize("text", ["The harbour is deep. " * 40, "港は深い。" * 40, "8 15 16 23 42 " * 40])
    def test_an_answers_kv_is_estimated_before_its_tokens_are_known(self, narrow: Served, text: str) -> None:
        backend, runtime = narrow.server.app.backend, narrow.engine.primary
        options = CallOptions(SamplingParams(max_tokens=10))
        question = ServedQuestion([{"role": "user", "content": text}], "default", options)
        held = runtime.encode(runtime.tokenize(text).ids)
        # a tokenizer of 400 entries has few tokens that are longer than a byte
        assert 0.3 * held.nbytes < backend.kv_bytes(question) < 4 * held.nbytes + 10 * held[:, :, :, :1].nbytes

    def test_kv_that_is_opaque_is_counted_in_bytes(self, narrow: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        backend, runtime = narrow.server.app.backend, narrow.engine.primary
        question = ServedQuestion("The harbour is deep.", "default", CallOptions(SamplingParams(max_tokens=10)))
        numbers = backend.kv_bytes(question) // runtime.dtype.itemsize
        monkeypatch.setattr(runtime, "kv_codec", "opaque")
        assert backend.kv_bytes(question) == numbers

    def test_tools_and_calls_are_work_too(self, narrow: Served) -> None:
        backend, long = narrow.server.app.backend, "word " * 1000
        tool = {"type": "function", "function": {"name": "f", "description": long, "parameters": {"type": "object"}}}
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": long})}}
        plain = [{"role": "user", "content": "Hi"}]
        questions = {
            "none": ServedQuestion(plain, "default", CallOptions()),
            "tools": ServedQuestion(plain, "default", CallOptions(tools=[tool])),
            "calls": ServedQuestion([*plain, {"role": "assistant", "tool_calls": [call]}], "default", CallOptions()),
        }
        work = {name: backend.work_tokens(question) for name, question in questions.items()}
        assert work["none"] < 10 and min(work["tools"], work["calls"]) > 1000

    def test_a_prompt_that_is_too_long_is_refused_before_it_waits(self, narrow: Served) -> None:
        with prompts_of(narrow).prompt():
            response = narrow.chat("word " * 6000, stream=True)
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"

    def test_the_limit_is_half_of_what_is_free(self, narrow: Served) -> None:
        assert 0 < narrow.server.app._queue.most_bytes < math.inf


class TestSilence:
    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cacheclip_serve.sending._PING_S", 0.1)

    def test_a_stream_says_that_it_is_alive(self, narrow: Served) -> None:
        body = {"messages": [{"role": "user", "content": "What?"}], "stream": True, "max_tokens": 3, "temperature": 0}
        with prompts_of(narrow).prompt():
            response = narrow.client.send(narrow.client.build_request("POST", PATH, json=body), stream=True)
            lines = response.iter_lines()
            assert response.status_code == 200 and next(lines) == ": waiting"
        rest = [line for line in lines if line.startswith("data: ")]
        assert '"role":"assistant"' in rest[0] and rest[-1] == "data: [DONE]"

    def test_an_error_after_it_is_an_event(self, narrow: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*arguments: Any) -> Any:
            raise ModelError("the weights are damaged.")

        monkeypatch.setattr(Prefilling, "run", fails)
        body = {"messages": [{"role": "user", "content": "word"}], "stream": True}
        with prompts_of(narrow).prompt():
            response = narrow.client.send(narrow.client.build_request("POST", PATH, json=body), stream=True)
            lines = response.iter_lines()
            assert next(lines) == ": waiting"
        rest = [line for line in lines if line.startswith("data: ")]
        assert len(rest) == 1 and "server_error" in rest[0]


class TestStopping:
    def test_what_runs_is_finished(self, config: EngineConfig) -> None:
        with running(config) as served, ThreadPoolExecutor(1) as pool:
            queue = served.server.app._queue
            with prompts_of(served).prompt():
                asked = pool.submit(served.chat)
                until(lambda: queue.running == 1)
                served.server.stop()
                until(lambda: _status(served.server) in (503, None))
            assert asked.result().status_code == 200

    def test_new_questions_are_refused(self, config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", logger="cacheclip_serve")
        with running(config) as served:
            served.server.app.is_stopping = True
            for response in (served.chat(), served.client.get("/health")):
                assert response.status_code == 503 and response.json()["error"]["code"] == "not_ready"
        assert "/v1/chat/completions 503" in caplog.text and "/health" not in caplog.text, "probes would fill the log"


class TestStarting:
    def test_health_while_it_loads(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        from cacheclip_serve.transformers import TransformersBackend

        may_start, seen = threading.Event(), []
        start = TransformersBackend.start

        def slowly(self: Any) -> Any:
            assert may_start.wait(30)
            return start(self)

        def watch(server: Server) -> None:
            until(lambda: bool(server.address))
            until(lambda: _status(server) is not None)
            seen.append(_status(server))
            may_start.set()

        monkeypatch.setattr(TransformersBackend, "start", slowly)
        made = Server.__init__

        def watched(self: Any, *args: Any, **options: Any) -> None:
            made(self, *args, **options)
            threading.Thread(target=watch, args=(self,)).start()

        monkeypatch.setattr(Server, "__init__", watched)
        with running(config) as served:
            assert seen == [503] and served.client.get("/health").status_code == 200

    def test_a_failure_is_raised(self, config: EngineConfig) -> None:
        with pytest.raises(AssertionError, match="UnknownModelError"), running(replace(config, primary="/no/folder")):
            pass

    def test_a_taken_port(self, served: Served) -> None:
        port = int(served.server.address.rpartition(":")[2])
        server = Server(served.backend, name="tiny", access=served.server.app.access, port=port)
        with pytest.raises(ConfigurationError, match="--port"):
            server.run()


def _status(server: Server) -> int | None:
    try:
        return httpx.get(f"{server.address}/health", timeout=5).status_code
    except httpx.TransportError:
        return None
