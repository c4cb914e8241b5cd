"""Whose turn it is, and who is cut off."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from cacheclip_serve import bodies, connections, server
from cacheclip_serve.backend import ServedQuestion
from cacheclip_serve.bodies import Bodies
from cacheclip_serve.errors import RequestError
from cacheclip_serve.queue import Queue, QueueFull
from cacheclip_serve.transformers import TransformersBackend
from serve_cases import HALVES, Questions, Served, running, settle, until, wait_for_the_end

from cacheclip_rag import EngineConfig, Event


class TestQueue:
    async def test_tenants_take_turns(self) -> None:
        asked = Questions(Queue(2, 9, is_shared=True))
        await asked.ask("a1", "a2", "a3", "a4", "a5")
        assert asked.started == ["a1"], "one place stays free of the first tenant"
        await asked.ask("b1", "b2", "c1")
        assert asked.started == ["a1", "b1"]
        await asked.end("a1", "b1", "a2", "b2", "c1")
        assert asked.started == ["a1", "b1", "a2", "b2", "c1", "a3"]
        assert (asked.queue.running, asked.queue.waiting) == (1, 2)
        await asked.end("a3", "a4", "a5")
        assert (asked.queue.running, asked.queue.waiting) == (0, 0)

    async def test_a_flood_fills_its_own_places_only(self) -> None:
        queue = Queue(2, 3, is_shared=True)
        asked = Questions(queue)
        await asked.ask(*(f"a{n}" for n in range(4)))
        with pytest.raises(QueueFull) as refused:
            async with queue.place("a"):
                raise AssertionError
        assert refused.value.status == 429 and "3 wait" in refused.value.message
        async with queue.place("b"):
            assert queue.running == 2
        await asked.end(*(f"a{n}" for n in range(4)))

    async def test_the_next_answer_of_a_request_waits_and_is_not_refused(self) -> None:
        """Else the answers that the request has would be lost."""
        queue, came = Queue(1, 1), list[str]()
        asked = Questions(queue)
        await asked.ask("a1", "a2")

        async def next_answer() -> None:
            async with queue.place("a", goes_on=True):
                came.append("a0")

        goes_on = asyncio.create_task(next_answer())
        await settle()
        assert queue.waiting == 2 and not goes_on.done()
        with pytest.raises(QueueFull):
            async with queue.place("a"):
                raise AssertionError
        await asked.end("a1")
        assert asked.started == ["a1", "a2"] and not came, "behind those who came before"
        await asked.end("a2")
        await goes_on
        assert came == ["a0"] and (queue.running, queue.waiting) == (0, 0)

    async def test_who_leaves_keeps_no_place(self) -> None:
        asked = Questions(Queue(1, 9))
        await asked.ask("a1", "a2", "b1", "a3")
        await asked.leave("a2")
        assert asked.queue.waiting == 2
        asked._ends["a1"].set()
        while asked.queue.waiting == 2:
            await asyncio.sleep(0)
        assert "a3" not in asked.started
        await asked.leave("a3")  # it has just got its place, and does not know it yet
        assert asked.started == ["a1", "b1"] and (asked.queue.running, asked.queue.waiting) == (1, 0)
        await asked.end("b1")
        assert asked.queue.running == 0

    async def test_a_place_before_the_first_token_is_short(self) -> None:
        """Answers that are decoded hold up no prompt."""
        asked = Questions(Queue(32, 9))
        await asked.ask(*(f"a{n}" for n in range(7)))
        assert asked.started == ["a0", "a1", "a2", "a3"]
        await asked.first_token("a1")
        await asked.first_token("a1")  # said with every event
        assert asked.started[4:] == ["a4"]
        await asked.end("a1")
        assert asked.queue.running == 4, "its place was given already"
        await asked.end("a0")
        assert asked.started[5:] == ["a5"]
        await asked.end("a2", "a3", "a4", "a5", "a6")

    async def test_no_more_kv_than_there_is_memory(self) -> None:
        asked = Questions(Queue(32, 9))
        asked.queue.most_bytes = 10
        await asked.ask("a1", "b1", num_bytes=4)
        await asked.ask("a2", num_bytes=7)
        await asked.ask("a3", "b2", num_bytes=1)
        assert asked.started == ["a1", "b1"], "nobody overtakes: the large one would wait for ever"
        await asked.end("a1")
        assert asked.started == ["a1", "b1"]
        await asked.end("b1")
        assert asked.started == ["a1", "b1", "a2", "b2", "a3"]
        await asked.ask("c1", num_bytes=1000)
        await asked.ask("b3", num_bytes=1)
        await asked.end("a2", "a3")
        assert "c1" not in asked.started
        await asked.end("b2")
        assert asked.started[5:] == ["c1"], "what needs more than there is runs alone"
        await asked.end("c1")
        assert asked.started[6:] == ["b3"]
        await asked.end("b3")

    async def test_short_questions_pass_long_ones_of_their_tenant(self) -> None:
        asked = Questions(Queue(1, 99))
        await asked.ask("a0")
        await asked.ask("a1", num_tokens=900)
        await asked.ask("b1", num_tokens=500)
        await asked.ask("a2", "a3", num_tokens=20)
        for name in ("a0", "a2", "b1", "a3", "a1"):
            assert asked.started[-1] == name
            await asked.end(name)

    async def test_a_short_question_passes_long_ones_that_have_begun(self) -> None:
        asked = Questions(Queue(32, 99))
        await asked.ask(*(f"a{number}" for number in range(6)), num_tokens=900)
        assert asked.started == ["a0", "a1", "a2", "a3"]
        await asked.ask("a6", num_tokens=20)
        await asked.ask("a7", num_tokens=900)
        assert asked.started[4:] == ["a6"]
        await asked.first_token("a6")
        assert asked.started[5:] == [], "a place that was beside the others gives none"
        await asked.end("a0", "a1", "a2", "a3", "a6", "a4", "a5", "a7")

    async def test_no_more_tokens_pass_a_long_question_than_it_has(self) -> None:
        asked = Questions(Queue(1, 99))
        await asked.ask("a0", num_tokens=10)
        await asked.ask("a_long", num_tokens=95)
        for number in range(40):
            await asked.ask(f"a{number + 1}", num_tokens=10)
            await asked.end(asked.started[-1])
        assert asked.started.index("a_long") == 10
        while asked.queue.running:
            await asked.end(asked.started[-1])

    async def test_one_of_several_tenants_does_not_hold_all_memory(self) -> None:
        asked = Questions(Queue(32, 9, is_shared=True))
        asked.queue.most_bytes = 100
        await asked.ask("a1", "a2", "a3", num_bytes=40)
        for name in ("a1", "a2"):
            await asked.first_token(name)
        await asked.ask("b1", num_bytes=20)
        assert asked.started == ["a1", "a2", "b1"], "a holds more than its share: b does not wait behind its next one"
        await asked.end("a1", "a2", "b1", "a3")

    @pytest.mark.parametrize("seed", range(8))
    async def test_any_order_of_arrivals_keeps_the_limits_and_starves_nobody(self, seed: int) -> None:
        drawn = random.Random(seed)
        queue = Queue(drawn.randint(1, 9), 99, is_shared=seed % 2 == 0)
        queue.most_bytes = 50
        asked, sizes, running, begun = Questions(queue), dict[str, int](), set[str](), set[str]()

        async def check() -> None:
            await settle()
            running.update(name for name in asked.started if name not in asked.ended)
            held = sum(sizes[name] for name in running)
            assert held <= 50 or len(running) == 1, "more KV than there is memory"
            assert len(running - begun) <= 4 and len(running) <= queue._most_running
            order: dict[str, list[str]] = {}
            for name in asked.started:
                order.setdefault(name[0], []).append(name)
            for own in order.values():
                assert own == sorted(own, key=lambda name: int(name[1:])), "a tenant's questions keep their order"

        for number in range(40):
            name = f"{drawn.choice('abc')}{number}"
            sizes[name] = drawn.choice((1, 5, 20, 49, 80))
            await asked.ask(name, num_bytes=sizes[name])
            await check()
            for other in sorted(running):
                if drawn.random() < 0.3:
                    await asked.first_token(other)
                    begun.add(other)
                elif drawn.random() < 0.3:
                    running.discard(other)
                    await asked.end(other)
                await check()
        while running:
            name = drawn.choice(sorted(running))
            running.discard(name)
            await asked.end(name)
            await check()
        assert len(asked.started) == len(sizes) and (queue.running, queue.waiting) == (0, 0)


def test_who_leaves_keeps_the_place_until_the_thread_ends(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else those who leave at once have a prompt read each, beside one another."""
    at_work, gate = list[ServedQuestion](), threading.Event()

    def reading(backend: TransformersBackend, question: ServedQuestion) -> Iterator[Event]:
        at_work.append(question)
        gate.wait(30)
        return iter(())

    monkeypatch.setattr(TransformersBackend, "_events", reading)
    body = json.dumps({"messages": [{"role": "user", "content": "What?"}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with running(config) as served:
        counters, address = served.server.app._counters, served.server.address.removeprefix("http://")
        try:
            for number in range(1, 11):
                with socket.create_connection(tuple(address.split(":")), timeout=20) as connection:
                    connection.sendall(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
                    until(lambda: at_work)
                until(lambda number=number: counters.disconnects == number)
            assert len(at_work) <= 4
            gate.set()
            until(lambda: not served.server.app._queue.running)
        finally:
            gate.set()


class Sending:
    """A request whose body comes when :meth:`send` is called."""

    headers = {"content-type": "application/json"}

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, piece: bytes | None) -> None:
        self._pieces.put_nowait(piece)

    async def stream(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece


class TestBodies:
    async def test_the_first_of_the_busiest_client_is_cut_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bodies, "_MOST_AT_ONCE", 3)
        reader = Bodies(100)
        requests = [Sending() for _ in range(5)]
        reading = []
        for request, client in zip(requests, "abaac", strict=True):
            reading.append(asyncio.create_task(reader.read(request, client)))  # type: ignore[arg-type]
            request.send(b"{")
            await settle()
        assert [task.done() for task in reading] == [True, False, True, False, False]
        for number in (0, 2):
            error = reading[number].exception()
            assert isinstance(error, RequestError) and error.status == 408
        for number in (1, 3, 4):
            requests[number].send(b"}")
            requests[number].send(None)
            assert await reading[number] == b"{}"
        assert not reader._reading

    async def test_bytes_count_too(self) -> None:
        reader = Bodies(10)
        reader._most_held = 15
        first, second = Sending(), Sending()
        reading = [asyncio.create_task(reader.read(each, "a")) for each in (first, second)]  # type: ignore[arg-type]
        first.send(b"a" * 9)
        second.send(b"b" * 9)
        await settle()
        assert [task.done() for task in reading] == [True, False]
        second.send(None)
        assert await reading[1] == b"b" * 9
        assert reading[0].exception().status == 408  # type: ignore[union-attr]

    async def test_who_sends_too_slowly_is_cut_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bodies, "_FIRST_S", 0.05)
        slow = Sending()
        slow.send(b"{")
        with pytest.raises(RequestError) as refused:
            await Bodies(100).read(slow, "a")  # type: ignore[arg-type]
        assert refused.value.status == 408 and refused.value.headers == {"connection": "close"}


HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def ask_health(connection: socket.socket, sent: bytes = HEALTH) -> None:
    connection.sendall(sent)
    said = b""
    while not said.endswith(b"}"):
        piece = connection.recv(4096)
        assert piece, "closed"
        said += piece
    assert said.startswith(b"HTTP/1.1 200")


@contextmanager
def kept(served: Served, client: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A connection whose first request was answered."""
    host, port = served.server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20, source_address=(client, 0)) as connection:
        ask_health(connection)
        yield connection


class TestConnections:
    @pytest.fixture
    def brief(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr(connections, "_HEAD_S", 0.1)
        with running(replace(config, store=None)) as found:
            yield found

    @pytest.mark.parametrize("sent", HALVES.values(), ids=HALVES)
    def test_who_sends_no_request_is_closed(self, brief: Served, sent: bytes) -> None:
        wait_for_the_end(brief.server.address, sent)
        assert brief.client.get("/health").status_code == 200

    @pytest.mark.parametrize("blank", [b"\r\n", b"\n"])
    def test_blank_lines_are_no_request(self, brief: Served, blank: bytes) -> None:
        """RFC 9112, 2.2: after a request, with it, and before the next one."""
        with kept(brief) as connection:
            connection.sendall(blank)
            wait_for_the_end(brief.server.address, b"")  # the time for a head is over
            ask_health(connection)
            for sent in (HEALTH + blank, blank + HEALTH):
                ask_health(connection, sent)
                wait_for_the_end(brief.server.address, b"")
            connection.sendall(blank + b"GE")
            assert connection.recv(1) == b""

    def test_a_connection_is_kept_for_its_next_request(self, brief: Served) -> None:
        """Longer than proxies keep theirs: Envoy, for an hour."""
        assert brief.server._config.timeout_keep_alive == connections.KEEP_S > 3600
        with kept(brief) as connection:
            wait_for_the_end(brief.server.address, b"")  # the time for a head is over
            ask_health(connection)

    def test_not_for_ever(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "KEEP_S", 0)
        with running(replace(config, store=None)) as served, kept(served) as connection:
            assert connection.recv(1) == b""

    def test_who_keeps_many_closes_none_of_others(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connections, "_MOST_EXPECTING", 5)
        with running(replace(config, store=None)) as served, kept(served, "127.0.0.2") as of_proxy, ExitStack() as many:
            first, *_ = [many.enter_context(kept(served)) for _ in range(20)]
            assert first.recv(1) == b"", "closed"
            ask_health(of_proxy)

    def test_an_answer_takes_its_time(self, brief: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        step = brief.engine.primary.decode_step
        monkeypatch.setattr(brief.engine.primary, "decode_step", lambda *given: time.sleep(0.1) or step(*given))
        assert brief.chat(max_tokens=4).status_code == 200
