"""The page of an answer, and who sees it."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from cacheclip_serve import ServedQuestion, page_writer
from cacheclip_serve.inspection import MOST_ANSWERS, Inspection
from cacheclip_serve.pages import ComparedAnswer, answer_page, list_page
from cacheclip_serve.transformers import TransformersBackend
from cacheclip_testing.plugin import CHUNKS, rag_prompt
from serve_cases import Served, running, until

from cacheclip_rag import Answer, CacheClipEngine, CallOptions, ConfigurationError, EngineConfig, Event

MARKUP = """<script>alert(1)</script><img src="https://example.org/x" onerror='x'>&"""
NEVER = "A note that nobody ever stored: the bell of the chapel was cast in 1903, and hung there in spring. " * 3


@pytest.fixture(scope="module")
def pages(config: EngineConfig) -> Iterator[tuple[Served, Inspection]]:
    inspection = Inspection(["default", "other"])
    with running(replace(config, shadow_rate=1.0), inspection=inspection) as found:
        found.engine.precompute(CHUNKS, document="a.md", source="a node")
        yield found, inspection


def visitor(served: Served, inspection: Inspection, tenant: str = "default") -> httpx.Client:
    """A browser that opened the address which the server printed."""
    client = httpx.Client(base_url=served.server.address, follow_redirects=True)
    address = dict(inspection.addresses(served.server.address))[tenant]
    opened = client.get(address)
    assert opened.status_code == 200 and "key=" not in str(opened.url)
    return client


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.names, self.attributes, self.text = set[str](), dict[str, set[str | None]](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_an_answer_from_stored_chunks(pages: tuple[Served, Inspection]) -> None:
    served, inspection = pages
    said = served.chat(f"…\n\n{NEVER}\n\n{rag_prompt(CHUNKS)}").json()
    assert "trace" not in said["cacheclip"]
    client = visitor(served, inspection)
    number = max(map(int, re.findall(r"/inspect/(\d+)", client.get("/inspect").text)))
    assert served.engine.wait_for_observers()
    page = client.get(f"/inspect/{number}").text
    shown = Elements(page)
    assert "approximate" in shown.text and "a.md" in shown.text and "first token after" in shown.text
    assert CHUNKS[0][:40] in shown.text and "<|" in shown.text and "rank 1 of" in page
    assert "Full prefill" in shown.text, "it was compared"
    why = client.get(re.findall(r'href="(/inspect/\d+/why[^"]*)"', page)[0])
    assert "never precomputed" in why.text and str(served.engine.config.store) not in why.text
    learned = client.post(re.findall(r'action="(/inspect/\d+/learn[^"]*)"', page)[0])
    assert learned.status_code == 200 and served.engine.texts.texts("inspect") == [NEVER.strip()]
    served.engine.release([NEVER])
    served.engine.store.chunk_store.erasures.look()  # now, and not while other tests look at answers


def test_who_may_see_it(pages: tuple[Served, Inspection], monkeypatch: pytest.MonkeyPatch) -> None:
    served, inspection = pages
    served.chat("Mine?")
    number = inspection.of("default")[0].number
    own, other = visitor(served, inspection), visitor(served, inspection, "other")
    assert own.get(f"/inspect/{number}").status_code == 200
    assert "Mine?" in own.get("/inspect").text and "Mine?" not in other.get("/inspect").text
    for path in (f"/inspect/{number}", f"/inspect/{number}/why?start=0"):
        assert other.get(path).status_code == 404
        assert httpx.get(f"{served.server.address}{path}").status_code == 401
    monkeypatch.setattr(served.server.app, "any_host", True)  # as with an API key
    assert own.get("/inspect", headers={"host": "example.org"}).status_code == 403
    assert httpx.get(f"{served.server.address}/inspect?key=wrong").status_code == 401
    (key,) = (key for key, tenant in inspection.keys.items() if tenant == "default")
    linked = httpx.get(f"{served.server.address}/inspect/{number}?key={key}", follow_redirects=True)
    assert linked.status_code == 200 and key not in linked.text


def test_a_server_has_none_unless_told(served: Served) -> None:
    assert served.client.get("/inspect").status_code == 404


def question(text: str, tenant: str = "default") -> ServedQuestion:
    return ServedQuestion(text, tenant, CallOptions())


def test_memory_is_bounded(served: Served) -> None:
    answer = served.engine.generate("Why?", max_tokens=1)
    inspection = Inspection(["default", "other"])
    inspection.add(question("first", "other"), answer, 0)
    for number in range(MOST_ANSWERS + 5):
        inspection.add(question(str(number)), answer, 0)
    assert [each.question.prompt for each in inspection.of("default")][::49] == ["54", "5"]
    assert len(inspection.of("other")) == 1
    inspection.most_bytes = 3 * inspection.of("default")[0].num_bytes
    inspection.add(question("last"), answer, 0)
    assert len(inspection.of("default")) == 2 and not inspection.of("other")


def test_what_is_released_is_forgotten(pages: tuple[Served, Inspection]) -> None:
    served, inspection = pages
    client = visitor(served, inspection)
    served.engine.precompute(["It was released."])
    answer = served.engine.generate("It was released.", max_tokens=1)
    for tenant in ("default", "other"):
        inspection.add(question("It was released.", tenant), answer, inspection.forgets(tenant))
    assert "It was released." in client.get("/inspect").text
    served.engine.release(["It was released."])
    served.engine.store.chunk_store.erasures.look()  # as every ten seconds
    assert "It was released." not in client.get("/inspect").text and inspection.of("other")


def test_what_is_released_meanwhile_is_never_shown(
    pages: tuple[Served, Inspection], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, inspection = pages
    served.engine.precompute(["It was released meanwhile."])
    answer = served.backend.answer

    async def erased(asked: ServedQuestion) -> AsyncGenerator[Event, None]:
        async for event in answer(asked):
            if event.answer is not None:
                served.engine.release(["It was released meanwhile."])
                served.engine.store.chunk_store.erasures.look()
            yield event

    monkeypatch.setattr(served.backend, "answer", erased)
    assert served.chat("It was released meanwhile.").status_code == 200
    assert not inspection.of("default")


def test_erasures_before_the_first_answer_are_seen(config: EngineConfig) -> None:
    """Of a tenant that asked nothing yet."""
    inspection, other = Inspection(["default", "other"]), CacheClipEngine(replace(config, namespace="other"))
    other.precompute(CHUNKS[:1])
    backend = TransformersBackend(config, inspection=inspection)
    other.release(CHUNKS[:1])
    backend._store.erasures.look()
    assert inspection.forgets("other") == 1 and not inspection.forgets("default")


def test_an_answer_that_its_client_stopped(pages: tuple[Served, Inspection], monkeypatch: pytest.MonkeyPatch) -> None:
    served, inspection = pages
    events, gate = served.backend._events, threading.Event()

    def held(asked: ServedQuestion) -> Iterator[Event]:
        for event in events(asked):
            yield event
            gate.wait(30)

    monkeypatch.setattr(served.backend, "_events", held)
    body = {"messages": [{"role": "user", "content": "Stopped?"}], "max_tokens": 9, "stream": True}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as reply:
        next(reply.iter_lines())
    until(lambda: served.server.app._counters.disconnects)
    gate.set()
    until(lambda: inspection.of("default")[:1] and inspection.of("default")[0].heading == "Stopped?")
    client = visitor(served, inspection)
    assert "stopped by its client" in client.get("/inspect").text
    page = client.get(f"/inspect/{inspection.of('default')[0].number}").text
    assert "stopped by its client" in page and "Stopped?" in Elements(page).text


def test_what_nobody_waits_for(served: Served) -> None:
    """Ends with a tag that says nothing: its beginning tells what it is."""
    asked = "### Task:\nGenerate 1-3 broad tags for the chat.\n<chat_history>\nWhy?\n</chat_history>"
    answer, inspection = served.engine.generate("Why?", max_tokens=1), Inspection(["default"])
    for is_behind in (False, True):
        inspection.add(replace(question(asked), in_background=is_behind), answer, 0)
    headings = [each.heading for each in inspection.of("default")]
    assert headings == ["In the background: Generate 1-3 broad tags for the chat.", "</chat_history>"]


@pytest.mark.parametrize("method", ["cacheclip", "full"])
def test_text_is_never_markup(engine: CacheClipEngine, method: str) -> None:
    chunks = [f"{MARKUP} {chunk}" for chunk in CHUNKS]
    engine.precompute(chunks, document=MARKUP, source="a node")
    asked = f"{rag_prompt(chunks)} {MARKUP} " + NEVER
    answer = engine.generate(asked, max_tokens=2, method=method, trace=True)
    answer = replace(answer, text=MARKUP)
    compared = ComparedAnswer(MARKUP, 1, MARKUP)
    page = answer_page(MARKUP, answer, model=MARKUP, compared=compared, place="/inspect/1")
    shown = Elements(page)
    assert not shown.names & {"script", "img"} and not shown.attributes.keys() & {"src", "onerror", "style"}
    assert escape(MARKUP) in page and "example.org" not in str(shown.attributes)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'" in page
    engine.release(chunks)


def test_without_a_trace(engine: CacheClipEngine) -> None:
    answer: Answer = engine.generate("Why?", max_tokens=1)
    assert "first token after" in answer_page("Why?", answer, model="a model")
    for hits, says in ((1, ">1 text found"), (2, ">2 texts found")):
        assert says in list_page([(1, "Why?", replace(answer, stats=replace(answer.stats, hits=hits)))], 1)


@pytest.mark.parametrize(("reason", "says"), [("length", True), ("stop", False)])
def test_an_answer_that_was_cut_off(engine: CacheClipEngine, reason: str, says: bool) -> None:
    answer = replace(engine.generate("Why?", max_tokens=1), finish_reason=reason)
    assert ("cut off at the limit" in answer_page("Why?", answer, model="a model")) is says


def test_a_file_that_cannot_be_written(
    engine: CacheClipEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused before there is an answer, and after it if it was one then."""
    (tmp_path / "file").write_text("mine")
    for place in ("file/page", "file/x/page", "x" * 300, "."):
        with pytest.raises(ConfigurationError, match="must be a file in a folder that can be written, got"):
            page_writer(tmp_path / place, model="a model")
    write = page_writer(tmp_path / "new" / "page", model="a model")
    (tmp_path / "new" / "page").mkdir()
    with pytest.raises(ConfigurationError, match="can be written, got .*: Is a directory"):
        write("Who?", engine.generate("Who?", max_tokens=1))
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path / "file")
    with pytest.raises(ConfigurationError, match="may not be written"):
        page_writer(tmp_path / "file", model="a model")
    assert (tmp_path / "file").read_text() == "mine"
