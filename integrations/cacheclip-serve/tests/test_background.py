"""Titles, tags and follow-up questions wait behind what users ask."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cacheclip_serve import Queue, QueueFull, in_background
from cacheclip_testing import fake_models, fake_of
from serve_cases import Questions, Served, play, running, until

from cacheclip_rag import EngineConfig

TITLE = "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n### Guidelines:"
TAGS = "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history."
FOLLOW_UPS = "### Task:\nSuggest 3-5 relevant follow-up questions or prompts that the user might naturally ask next."
TITLE_OF_0_12 = "### Task:\nGenerate a concise title summarizing the chat history.\n### Guidelines:\n- The title"
FOLLOW_UPS_OF_0_12 = "### Task:\nPredict 3-5 useful messages this user might naturally send next to advance their"
QUERIES = "### Task:\nAnalyze the chat history to determine the necessity of generating search queries."
FROM_DOCUMENTS = "### Task:\nRespond to the user query using the provided context."


class TestQueue:
    async def test_they_wait_behind_those_who_came_later(self) -> None:
        asked = Questions(Queue(1, 9))
        await asked.ask("a1")
        await asked.ask("a2", "b1", in_background=True)
        await asked.ask("a3", "b2")
        assert asked.queue.waiting == 4
        for name in ("a1", "a3", "b2", "a2", "b1"):
            assert asked.started[-1] == name
            await asked.end(name)
        assert (asked.queue.running, asked.queue.waiting) == (0, 0)

    async def test_none_begins_beside_a_question_that_waits_for_its_first_token(self) -> None:
        asked = Questions(Queue(32, 9))
        await asked.ask("a1", "a2")
        await asked.ask("b1", "b2", in_background=True)
        await asked.first_token("a1")
        assert asked.started == ["a1", "a2"]
        await asked.first_token("a2")
        assert asked.started == ["a1", "a2", "b1"], "one at once, however many places are free"
        await asked.first_token("b1")
        await asked.ask("a3")
        assert asked.started[3:] == ["a3"], "users' questions go on as if it were not there"
        await asked.end("b1")
        assert asked.started[4:] == [], "a3 has no first token"
        await asked.first_token("a3")
        assert asked.started[4:] == ["b2"]
        await asked.end("a1", "a2", "a3", "b2")

    async def test_those_who_leave_let_others_pass(self) -> None:
        asked = Questions(Queue(1, 9))
        await asked.ask("a1")
        await asked.ask("a2", "a3", in_background=True)
        await asked.ask("a4")
        await asked.leave("a2")
        await asked.leave("a4")
        await asked.end("a1")
        assert asked.started == ["a1", "a3"] and asked.queue.waiting == 0
        await asked.end("a3")

    async def test_they_fill_waiting_places_of_their_own(self) -> None:
        queue = Queue(1, 1)
        asked = Questions(queue)
        await asked.ask("a1")
        await asked.ask("a2", in_background=True)
        with pytest.raises(QueueFull):
            async with queue.place("a", in_background=True):
                raise AssertionError
        await asked.ask("a3")
        assert queue.waiting == 2
        await asked.end("a1", "a3", "a2")


KNOWN: dict[str, tuple[str, dict[str, Any], bool]] = {
    "title": (TITLE, {}, True),
    "tags": (TAGS, {}, True),
    "follow-ups": (FOLLOW_UPS, {}, True),
    "title of 0.12": (TITLE_OF_0_12, {}, True),
    "follow-ups of 0.12": (FOLLOW_UPS_OF_0_12, {}, True),
    "a user's own title": ("### Task:\nGenerate a concise title for my essay.", {}, False),
    "what a user waits for": (QUERIES, {}, False),
    "an answer from documents": (FROM_DOCUMENTS, {}, False),
    "a question": ("What is it?", {}, False),
    "stated": ("What is it?", {"cacheclip": {"background": True}}, True),
    "stated otherwise": (TITLE, {"cacheclip": {"background": False}}, False),
}


@pytest.fixture(scope="module")
def busy() -> Iterator[Served]:
    with running(EngineConfig(**fake_models(), method="full")) as found:
        yield found


@pytest.mark.some(3)
@pytest.mark.parametrize("case", KNOWN)
def test_known_by_their_prompts(busy: Served, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content, fields, behind = KNOWN[case]
    seen: list[Any] = []
    place = Queue.place

    def noted(self: Queue, *arguments: Any, **options: Any) -> Any:
        seen.append(options["in_background"])
        return place(self, *arguments, **options)

    monkeypatch.setattr(Queue, "place", noted)
    assert busy.chat(content, **fields).status_code == 200 and seen == [behind]


def test_texts_are_not_in_the_background() -> None:
    assert not any(in_background(None, prompt) for prompt in (TITLE, None, [], ["a"], [{"content": [TITLE]}]))


def test_a_question_passes_three_of_four_that_came_before(busy: Served) -> None:
    """Prompts in the order in which they were computed."""
    read: list[str] = []
    runtime, gate = fake_of(busy.engine), threading.Event()
    prefill = runtime.prefill

    def slow(ids: Any, *arguments: Any, **options: Any) -> Any:
        read.append(runtime.decode_ids(ids.tolist()))
        assert gate.wait(30)
        return prefill(ids, *arguments, **options)

    queue = busy.server.app._queue
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "prefill", slow)
        threads = [threading.Thread(target=busy.chat, args=(f"{TITLE} {number}",)) for number in range(4)]
        for number, thread in enumerate(threads, 1):
            thread.start()
            until(lambda number=number: queue.running + queue.waiting == number)
        threads.append(threading.Thread(target=busy.chat, args=("How tall is it?",)))
        threads[-1].start()
        until(lambda: queue.running == 2 and queue.waiting == 3)
        gate.set()
        for thread in threads:
            thread.join()
    order = ["How tall" in each for each in read]
    assert order == [False, True, False, False, False], "it waits for the one that runs"


def test_who_hangs_up_in_the_background_leaves_the_queue(busy: Served) -> None:
    runtime, gate = fake_of(busy.engine), threading.Event()
    prefill = runtime.prefill
    queue = busy.server.app._queue

    def slow(*arguments: Any, **options: Any) -> Any:
        assert gate.wait(30)
        return prefill(*arguments, **options)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=busy.server.address) as client:
            body = {"messages": [{"role": "user", "content": TITLE}]}
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            while not queue.waiting:
                await asyncio.sleep(0.005)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "prefill", slow)
        question = threading.Thread(target=busy.chat, args=("How wide is it?",))
        question.start()
        until(lambda: queue.running == 1)
        asyncio.run(leave())
        until(lambda: queue.waiting == 0)
        assert queue.running == 1
        gate.set()
        question.join()


async def test_the_requests_of_an_application(busy: Served) -> None:
    assert len(await play(busy.server.address, ["A text. " * 9, "Another. " * 9], max_tokens=4)) == 8
