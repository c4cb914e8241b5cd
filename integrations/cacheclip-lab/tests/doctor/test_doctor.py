"""What recorded requests would gain: read, compared, judged, shown."""

from __future__ import annotations

import http.client
import json
import random
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.doctor.proxy import proxy
from cacheclip_lab.doctor.report import Report, chars_per_token, to_html
from cacheclip_lab.doctor.requests import RecordedPrompt, RequestLog, bodies
from cacheclip_lab.doctor.reuse import PromptReuse, causes, measured

from cacheclip_rag import ConfigurationError
from cacheclip_rag.models import loader_of

WORDS = [f"{a}{b}" for a in ("har", "lan", "mir", "tol", "ves") for b in ("bour", "tern", "ror", "ling", "sel", "ger")]


def text(seed: int, count: int = 200) -> str:
    choice = random.Random(seed)
    return " ".join(choice.choice(WORDS) + str(choice.randint(0, 999)) for _ in range(count)) + "\n"


def prompt(whole: str) -> RecordedPrompt:
    return RecordedPrompt("session", whole, ((0, "prompt"),))


def reuses(*texts: str) -> list[PromptReuse]:
    return list(measured(map(prompt, texts)))


BODIES = {
    "chat": {"messages": [{"role": "system", "content": "Rules."}, {"role": "user", "content": [{"text": "Why?"}]}]},
    "anthropic": {"system": [{"type": "text", "text": "Rules."}], "messages": [{"role": "user", "content": "Why?"}]},
    "responses": {"instructions": "Rules.", "input": "Why?"},
    "wrapped": {"request": json.dumps({"body": {"prompt": ["Rules. Why?"]}})},
}
LINES = {
    **{name: json.dumps(body) for name, body in BODIES.items()},
    "llama-server": "srv  log_server_r: request:  " + json.dumps(BODIES["chat"]),
    "vllm, with a tool": 'INFO 11-28 cmpl-2: prompt: \'Rules.\\nTools: {"input": "a"} Why?\', params: SamplingParams()',
    "two objects": '{"level": "info", "prompt": null} ' + json.dumps(BODIES["chat"]),
    "null messages": json.dumps({"messages": None, "input": "Rules. Why?"}),
    "vllm": "INFO 11-28 Received request cmpl-1: prompt: 'Rules.\\nWhy\\'s {that}?', params: SamplingParams(n=1)",
}


HOSTILE = ["{" * 5000, '{"a":[1,' * 20_000, "prompt: 'C:\\xyz'", '{"request":' * 1500, '{"messages": null}']


class TestReading:
    @pytest.mark.parametrize("kind", LINES)
    def test_bodies_of_every_kind(self, kind: str) -> None:
        [parts] = bodies(LINES[kind])
        whole = "".join(each for _, each in parts)
        assert "Rules." in whole and "Why" in whole and "\\n" not in whole and whole.index("Rules") < whole.index("Why")

    def test_tools_come_first_and_calls_count(self) -> None:
        call = {"function": {"name": "look", "arguments": "{}"}}
        result = {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "found"}]}]}
        messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
        [parts] = bodies(json.dumps({"messages": messages, "tools": [{"name": "look"}]}))
        assert [name for name, _ in parts] == ["tools", "message 0 (assistant)", "message 1 (user)"]
        assert '"look"' in parts[1][1] and "found" in parts[2][1] and "tool_result" not in parts[2][1]

    @pytest.mark.parametrize("line", ["INFO started", "{}", '{"messages": ', "[1, 2]", '{"a": {"b": 1}}', *HOSTILE])
    def test_other_lines_hold_none(self, line: str, tmp_path: Path) -> None:
        (tmp_path / "log").write_text(f"{line}\n{LINES['chat']}\n")
        log, began = RequestLog([tmp_path / "log"]), time.perf_counter()
        assert len([*log.prompts()]) == log.unreadable == 1 and time.perf_counter() - began < 2

    def test_what_holds_no_request_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "server.log").write_text("started\nstopped\n\n")
        with pytest.raises(ConfigurationError, match=r"got 2 lines without\. Record requests with"):
            list(RequestLog([tmp_path / "server.log"]).prompts())
        with pytest.raises(ConfigurationError, match="cannot read"):
            list(RequestLog([tmp_path / "none.log"]).prompts())

    @pytest.mark.parametrize(
        ("prompt", "text"),
        [(r'"half \ud83d here"', "half ? here"), (json.dumps("a\x1b[2J\x9b1m\tb\nc"), "a?[2J?1m\tb\nc")],
    )
    def test_characters_that_terminals_must_not_get(self, tmp_path: Path, prompt: str, text: str) -> None:
        (tmp_path / "log.jsonl").write_text(f'{{"prompt": {prompt}}}\n')
        assert [each.text for each in RequestLog([tmp_path / "log.jsonl"]).prompts()] == [text]

    def test_files_of_one_name_are_told_apart(self, tmp_path: Path) -> None:
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "log.jsonl").write_text(LINES["chat"] + "\n")
        found = RequestLog([tmp_path / folder / "log.jsonl" for folder in ("a", "b")]).prompts()
        assert [each.session for each in found] == ["a/log", "b/log"]


class TestReuse:
    def test_an_exact_beginning(self) -> None:
        _, again = reuses(text(0), text(0) + text(1))
        assert (again.prefix, again.moved, again.new) == (len(text(0)), 0, len(text(1))) and again.broken is None

    def test_a_changed_line_moves_all_behind_it(self) -> None:
        _, now = reuses(*(f"Rules.\nBuild {number}\n{text(0)}" for number in ("a1f3", "b27c4")))
        assert now.prefix < 20 and now.moved >= 0.8 * len(text(0)) and now.new < 20
        assert now.broken is not None and (now.broken.before, now.broken.was) == ("Build ", "a1f3")

    def test_a_text_that_repeats_itself_is_moved_as_it_was(self) -> None:
        song = "We sail to the north and come back with fish. " * 60
        _, now = reuses(f"It is 14:01. {song}", f"It is now 15:12. {song}")
        assert now.moved > 0.95 * now.total

    def test_other_company_is_no_move(self) -> None:
        parts = [text(seed, 60) for seed in range(6)]
        _, now = reuses("".join(parts), "".join(parts[::-1]))
        assert now.recurring > 0.9 * now.total and now.moved < 0.05 * now.total

    def test_a_stretch_with_another_character_inside_is_two(self) -> None:
        """Of 90 characters each, so that neither counts. Planted: the stretch as it was."""
        stretch = text(7, 40)[:180]
        changed = stretch[:90] + "#" + stretch[91:]
        for inside, counts in ((stretch, True), (changed, False)):
            _, now = reuses(text(1) + stretch + text(2), text(3) + inside + text(4))
            assert (now.moved + now.recurring >= 178) is counts and (now.moved + now.recurring == 0) is not counts

    @pytest.mark.parametrize("seed", range(6))
    def test_random_edits_against_all_pairs(self, seed: int) -> None:
        """A character counts if it stands in an equal stretch of 160 or more, found by comparing all windows; none
        counts that stands in no stretch of 128."""
        choice = random.Random(seed)
        parts = [text(choice.randint(0, 5), choice.randint(5, 60)) for _ in range(8)]
        before = "".join(parts)
        choice.shuffle(parts)
        now = "".join(part if choice.random() < 0.7 else part[choice.randint(0, 40) :] for part in parts)

        def standing(length: int) -> int:
            windows = {before[at : at + length] for at in range(len(before) - length + 1)}
            is_known = [False] * len(now)
            for at in range(len(now) - length + 1):
                if now[at : at + length] in windows:
                    is_known[at : at + length] = [True] * length
            return sum(is_known)

        found = reuses(before, now)[1]
        known = found.prefix + found.moved + found.recurring
        assert 0.9 * standing(160) <= known <= standing(128) + found.prefix
        assert found.total == known + found.new and found.new >= 0

    def test_what_was_forgotten_serves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cacheclip_lab.doctor.reuse._REMEMBERED", 2)
        *_, last = reuses("x" + text(0), text(1), text(2), text(3), "y" + text(0))
        assert last.moved + last.recurring == 0

    def test_causes_are_lines_that_begin_alike(self) -> None:
        texts = [f"Rules.\nBuild 1.{number // 3}; sum={number * 7919 % 1000:03x}\n{text(0)}" for number in range(9)]
        cause, versions = causes(reuses(*texts))
        assert (cause.beginning, cause.count) == ("Build 1.", 6) and cause.lost > 6 * 0.8 * len(text(0))
        assert (versions.beginning, versions.count) == ("Build 1.", 2)


def report(*texts: str, **options: Any) -> Report:
    prompts = [prompt(each) for each in texts]
    settings = {"tokens_per_second": None, "unreadable": 0, **options}
    return Report.of(prompts, list(measured(prompts)), **settings)


CHECKED = [f"Rules.\nBuild {number * 7919 % 1000:03x}\n{text(0)}" for number in range(12)]


class TestVerdicts:
    def test_a_line_to_take_out(self) -> None:
        found = report(*CHECKED, tokens_per_second=100.0)
        assert "You do not need us: take the word behind 'Build' out" in found.verdict()
        assert found.without is not None and found.without > 0.85 > 0.1 > found.whole.shares["prefix"]
        assert " s of prefill a request" in found.verdict()
        assert "seconds" not in report(*CHECKED).verdict() and report(*CHECKED).seconds(1.0) is None

    def test_what_else_there_is(self) -> None:
        lines = [f"Rules.\nBuild {n * 7919 % 1000:03x} at {n * 613} of {n * 389}\n{text(0)}" for n in range(12)]
        assert "take the line that begins with 'Build' out" in report(*lines).verdict(), "more than a word changes"
        assert "You do not need us: an exact prefix cache" in report(*[text(0)] * 20).verdict()
        assert "The rest is new (100%)" in report(*map(text, range(5))).verdict()

    def test_what_this_package_is_for(self) -> None:
        orders = [random.Random(seed).sample(range(8), 8) for seed in range(10)]
        found = report(*("".join(text(part, 60) for part in order) for order in orders)).verdict()
        assert found.startswith("An exact prefix cache serves") and "This package would serve" in found


class TestCommand:
    @pytest.fixture
    def log(self, tmp_path: Path) -> Path:
        path = tmp_path / "requests.jsonl"
        lines = [json.dumps({"prompt": each.replace("Build", "[/x]<script>")}) for each in CHECKED]
        path.write_text("\n".join(["started", *lines]))
        return path

    def test_tables_and_a_page(self, cacheclip: Any, log: Path, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        result = cacheclip("doctor", str(log), "--html", str(page), "--tokens-per-second", "500")
        assert result.code == 0, result.err
        assert "1 lines hold no request" in result.out and "Where prefixes break" in result.out
        assert "4.0 characters each" in result.out and "moved: it moved together with" in result.out
        written = page.read_text()
        assert "<svg" in written and "You do not need us" in written and "<script" not in written

    def test_json(self, cacheclip: Any, log: Path) -> None:
        found = cacheclip("doctor", str(log), "--json").json
        assert found["whole"]["requests"] == 12 and found["unreadable"] == 1
        assert sum(found["whole"]["shares"].values()) == pytest.approx(1.0)
        assert found["causes"][0]["line_begins"] == "[/x]<script> " and found["seconds_of_prefill"]["new"] is None

    def test_a_tokenizer_counts(self, cacheclip: Any, log: Path, tiny_models: dict[str, str]) -> None:
        primary = tiny_models["llama"]
        counted = cacheclip("doctor", str(log), "--json", "--tokenizer", primary).json
        tokenize = loader_of(primary).tokenizer()
        assert tokenize is not None
        texts = [each.text for each in RequestLog([log]).prompts()]
        tokens = sum(len(tokenize(each)) for each in texts)
        assert counted["whole"]["tokens"] == tokens != sum(map(len, texts)) // 4
        assert chars_per_token(["ab" * 500_000, "c"], lambda text: [*text]) == 1.0 and chars_per_token([], list) == 4.0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("x.log", "--tokens-per-second", "0"), "--tokens-per-second must be above 0"),
            (("x.log", "--html", "/no/such/page.html"), "cannot write"),
            (("x.log", "x.log", "--record", "http://localhost"), "expected one file"),
            (("x.log", "--record", "localhost:80"), "--record must be a URL"),
        ],
    )
    def test_wrong_use(
        self, cacheclip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("x.log").write_text(LINES["chat"])
        result = cacheclip("doctor", *arguments)
        assert result.code == 2 and message in result.err and not result.out


class _Upstream(BaseHTTPRequestHandler):
    """Answers in parts, the second of which waits for :attr:`may_end`."""

    protocol_version = "HTTP/1.1"
    may_end = threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("X-Seen", f"{self.path} {self.headers['Authorization']}")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in (body[:4], b"end"):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            assert self.may_end.wait(20)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def answered(port: int, path: str, body: str, **headers: str) -> Iterator[http.client.HTTPResponse]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    client.request("POST", path, body, headers)
    yield client.getresponse()
    client.close()


@pytest.fixture
def behind() -> Iterator[int]:
    with running(ThreadingHTTPServer(("127.0.0.1", 0), _Upstream)) as port:
        yield port


class TestProxy:
    def test_it_passes_on_and_records(self, tmp_path: Path, behind: int) -> None:
        file, body = tmp_path / "requests.jsonl", json.dumps(BODIES["chat"])
        _Upstream.may_end.clear()
        with (
            running(proxy(file, f"http://127.0.0.1:{behind}/api", behind)) as port,
            answered(port, "/v1/chat/completions", body, Authorization="Bearer secret") as answer,
        ):
            assert answer.getheader("X-Seen") == "/api/v1/chat/completions Bearer secret"
            assert answer.read1(100) == body[:4].encode()  # before the server has ended
            _Upstream.may_end.set()
            assert answer.read() == b"end"
        assert [each.text for each in RequestLog([file]).prompts()] == ["<|system|>\nRules.\n<|user|>\nWhy?\n"]
        assert "secret" not in file.read_text() and stat.S_IMODE(file.stat().st_mode) == 0o600

    @pytest.mark.parametrize(("fails", "path"), [("embeddings", "/v1/embeddings"), ("no folder", "/v1/messages")])
    def test_what_is_not_recorded_is_passed_on(self, tmp_path: Path, behind: int, fails: str, path: str) -> None:
        (tmp_path / "folder").mkdir()
        file = tmp_path / "folder" / "requests.jsonl"
        _Upstream.may_end.set()
        with running(proxy(file, f"http://127.0.0.1:{behind}", 0)) as port:
            if fails == "no folder":
                file.unlink(), file.parent.rmdir()
            with answered(port, path, '{"input": ["a"]}') as answer:
                assert answer.read() == b'{"inend'
        assert not file.exists() or not file.read_text()

    def test_a_server_that_is_not_there(self, tmp_path: Path) -> None:
        with (
            running(proxy(tmp_path / "requests.jsonl", "http://127.0.0.1:9", 0)) as port,
            answered(port, "/v1/chat/completions", "{}") as answer,
        ):
            assert answer.status == 502


def test_a_page_of_nothing_but_new_text() -> None:
    prompts = [prompt(text(0))]
    found = list(measured(prompts))
    page = to_html(report(text(0)), found)
    assert "A bar is a request" in page and "Where prefixes break" not in page
