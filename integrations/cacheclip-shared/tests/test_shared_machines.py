"""Stores in object storage: what machines share, and what becomes of answers when storage fails."""

import http.server
import io
import re
import shutil
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from cacheclip_shared import place
from cacheclip_shared.care import create, gc, stats, verify
from cacheclip_shared.objects import ObjectBackend, Objects
from cacheclip_shared.place import SharedPlace, need, object_name, tenant_folder
from cacheclip_shared.store import SharedStore
from cacheclip_shared.table import Removal, SharedText, TextTable, rows_of, schema
from cacheclip_shared.testing import Machine, Relay, hits, shared
from cacheclip_testing import BackendConformance
from cacheclip_testing.plugin import CHUNKS, rag_prompt

from cacheclip_rag import CacheClipEngine, ConfigurationError, MissingExtraError, SamplingParams, StoreError
from cacheclip_rag.base import keys
from cacheclip_rag.store import Backend, FrameError, StoreReader, codecs, text_digest
from cacheclip_rag.store.erasures import look_at_all


class TestObjectBackend(BackendConformance):
    replaces = False

    @pytest.fixture
    def folder(self, bucket: str) -> Path:  # type: ignore[override]
        return bucket  # type: ignore[return-value]

    def make_backend(self, folder: Path) -> Backend:
        return ObjectBackend(SharedPlace(str(folder)))

    def read_raw(self, backend: Backend, key: str) -> bytes | None:
        assert isinstance(backend, ObjectBackend)
        try:
            return bytes(obstore.get(backend.place.objects, object_name("default", key, "raw")).bytes())
        except FileNotFoundError:
            return None

    def write_raw(self, backend: Backend, key: str, data: bytes) -> None:
        assert isinstance(backend, ObjectBackend)
        obstore.put(backend.place.objects, object_name("default", key, "raw"), data)


class TestMachines:
    def test_another_machine_finds_and_reuses_what_one_stored(self, machine: Machine) -> None:
        one = machine()
        assert one.precompute(CHUNKS) == len(CHUNKS) and hits(one) == len(CHUNKS)
        other = machine()
        assert other.precompute(CHUNKS) == 0
        assert hits(other) == len(CHUNKS)
        for key in one.store.keys():  # noqa: SIM118 - not a dict
            expected, found = one.store.get(key), other.store.get(key)
            assert expected is not None and found is not None and torch.equal(expected.tensor(), found.tensor())

    def test_new_texts_are_seen_after_a_poll_and_parts_of_them_too(self, machine: Machine) -> None:
        one, other = machine(), machine()
        assert other.store.stats().entries == 0
        one.precompute(CHUNKS)
        assert len(other.texts.index.find(rag_prompt(CHUNKS))) == 0
        assert shared(other).poll() == (len(CHUNKS), 0)
        assert len(other.texts.index.find(rag_prompt(CHUNKS))) == len(CHUNKS)
        assert len(other.texts.index.find(rag_prompt([CHUNKS[0][20:]]))) == 1

    @pytest.mark.some(3)
    @pytest.mark.parametrize("sees", ["poll", "another process's poll", "new copy"])
    def test_what_another_machine_erases_leaves_memory(
        self, machine: Machine, tmp_path: Path, monkeypatch: Any, sees: str
    ) -> None:
        """With the next poll, also if another process of this machine took the rows already, or if the copy of the
        catalog was made anew since."""
        one, other = machine(), machine(memory_bytes=1 << 26)
        one.precompute(CHUNKS)
        shared(other).poll()
        assert hits(other) == len(CHUNKS)
        stats, (memory, *_) = other.prefixes.stats, other.store.chunk_store.tiers.backends
        key = other.parts.models.primary_caches(other.context_of()).key(CHUNKS[0])
        assert stats.continued_bytes > 0 and key in memory.list()
        one.release(CHUNKS[:1])
        if sees != "another process's poll":
            if sees == "new copy":
                shared(other).catalog.database.close()
                (shared(other).place.replica / "replica.sqlite3").write_bytes(b"damaged")
                shared(other).poll()
            shared(other).poll()
        else:
            monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home 1"))
            beside = SharedStore.at(SharedPlace(str(one.config.store)))
            beside.catalog.text_index("default")
            beside.poll()
            look_at_all()
            beside.close()
        stats = other.prefixes.stats
        assert (stats.bytes, stats.continued_bytes) == (0, 0) and key not in memory.list()

    def test_a_commit_costs_no_prefix_cache(self, machine: Machine) -> None:
        one, other = machine(), machine()
        one.precompute(CHUNKS[:2])
        assert hits(one, CHUNKS[:2]) == 2
        before = one.prefixes.stats
        other.precompute(CHUNKS[2:])
        one.precompute(CHUNKS)
        shared(one).poll()
        look_at_all()
        assert one.prefixes.stats.continued_bytes == before.continued_bytes > 0

    def test_a_given_document_is_found_without_its_row(self, machine: Machine) -> None:
        one, other = machine(), machine()
        shared(one).commits = False
        one.precompute(CHUNKS)
        assert hits(other, documents=CHUNKS) == len(CHUNKS)

    @pytest.mark.parametrize("kind", ["no database", "pages", "another version", "thrown away"])
    def test_a_copy_that_is_damaged_is_made_anew(self, machine: Machine, kind: str) -> None:
        one = machine()
        one.precompute(CHUNKS)
        one.close()
        file = shared(one).place.replica / "replica.sqlite3"
        data = file.read_bytes()
        if kind == "another version":
            with sqlite3.connect(file) as database:
                database.execute("PRAGMA user_version = 1")
        elif kind == "thrown away":
            shutil.rmtree(file.parent.parent)
        else:
            file.write_bytes(b"x" * 16 + data[16:] if kind == "no database" else data[:100] + b"x" * 16)
        other = CacheClipEngine(one.config)
        for _ in range(2):
            shared(other).poll()
        assert len(other.texts.index.find(rag_prompt(CHUNKS))) == hits(other) == len(CHUNKS)
        other.close()

    def test_a_released_text_is_gone_for_all_and_its_payload_after_a_cleaning(
        self, machine: Machine, store_url: str
    ) -> None:
        one, other = machine(), machine(memory_bytes=1 << 24)
        one.precompute(CHUNKS)
        shared(other).poll()
        assert hits(other) == len(CHUNKS)
        assert one.release(CHUNKS[:1]) == 1
        assert shared(other).poll() == (0, 1)
        assert other.texts.index.find(CHUNKS[0], parts=False) == [] and not other.store.holds_text(CHUNKS[0])
        assert gc(store_url)["deleted"] == 0 and gc(store_url, grace_s=0)["deleted"] == 1
        assert verify(store_url)["missing"] == 0
        assert one.release(CHUNKS[1:]) == shared(other).poll()[1] == len(CHUNKS) - 1
        with sqlite3.connect(shared(other).place.replica / "replica.sqlite3") as copy:
            for table in ("texts", "contents", "sources", "rows"):
                assert copy.execute(f"SELECT * FROM {table}").fetchall() == [], table

    @pytest.mark.some(2)
    @pytest.mark.parametrize("released", ["while it is answered", "before the commit"])
    def test_what_another_machine_releases_is_not_stored_again(self, machine: Machine, released: str) -> None:
        """By an answer that found the text, but not its KV."""
        one, other = machine(), machine()
        one.precompute(CHUNKS)
        shared(other).poll()
        shared(one).objects.delete([one.chunk_caches()[0].key(CHUNKS[1])])
        assert hits(other) == len(CHUNKS) - 1 and not other.is_stored(CHUNKS[1]), "stored at the second use"
        other.prefixes.clear()
        answer = other.stream(rag_prompt(CHUNKS), SamplingParams(max_tokens=4))
        next(answer)
        if released == "before the commit":
            assert [*answer] and other.is_stored(CHUNKS[1])
        one.release([CHUNKS[1]])
        shared(other).poll()
        assert released == "before the commit" or [*answer]
        shared(other).commit()
        shared(one).poll()
        for engine in (one, other):
            assert [engine.texts.index.known(chunk) for chunk in CHUNKS] == [True, False, True, True]

    def test_sources_and_documents_are_shared(self, machine: Machine) -> None:
        one, other = machine(), machine()
        one.precompute({CHUNKS[0]: [("page 1", "book")], CHUNKS[1]: [("page 2", "book")]})
        shared(other).poll()
        assert sorted(other.texts.sources()) == ["page 1", "page 2"]
        assert other.release(sources=["book"]) == 2
        shared(one).poll()
        assert one.texts.sources() == [] and not one.store.holds_text(CHUNKS[0])

    @pytest.mark.some(3)
    @pytest.mark.parametrize("kind", ["rows", "file", "columns"])
    def test_what_somebody_made_up_is_not_taken_and_changes_nothing_else(
        self, machine: Machine, store_url: str, kind: str
    ) -> None:
        """Rows; a file of the table that is damaged; a file of another table."""
        one, other = machine(), machine()
        one.precompute(CHUNKS)
        shared(other).poll()
        table, payload = TextTable(SharedPlace(store_url), "default"), ("../../a", "int8", 1, 1)
        (row,) = rows_of("default", [SharedText("Nobody stored this text.", "x", "x", kv=(payload,))]).to_pylist()
        made = [row, *({**row, "kv": [], "digest": each} for each in ("' OR '1'='1", text_digest(CHUNKS[0]).hex()))]
        empty = [{**row, "kv": [None, {**row["kv"][0], "key": None}]}, dict.fromkeys(row), {**row, "reach": None}]
        made += [*empty, *({**row, "kv": None, name: None} for name in ("text", "source", "digest", "start"))]
        rows = need("pyarrow").Table.from_pylist([{**each, "namespace": "default"} for each in made], schema=schema())
        before, options = {*table.files()}, SharedPlace(store_url).delta_options
        need("deltalake").write_deltalake(table.address, rows, mode="append", storage_options=options)
        (new,) = {*table.files()} - before
        if kind != "rows":
            data = io.BytesIO()
            need("pyarrow.parquet").write_table(need("pyarrow").table({"x": [1]}), data)
            obstore.put(shared(one).objects.place.objects, new, data.getvalue() if kind == "columns" else b"PAR1")
        one.precompute(["A text that is committed after it. " * 4])
        assert shared(other).poll() == (1, 0) and other.texts.sources() == []
        if kind == "rows":
            table.commit(rows_of("default", []), Removal(names={"x"}))
            assert stats(store_url)["payloads"] and gc(store_url, grace_s=0)["deleted"] == 0
        else:
            with pytest.raises(StoreError, match="1 tenants could not be looked after.* store verify"):
                gc(store_url, grace_s=0)
            assert verify(store_url)["damaged"] == [new] and new not in table.files()
            assert verify(store_url)["damaged"] == [] and gc(store_url, grace_s=0)["deleted"] == 0
        assert hits(machine()) == len(CHUNKS)

    @pytest.mark.parametrize("is_there", [True, False])
    def test_committers_at_the_same_time_add_a_text_once(
        self, store_url: str, is_there: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each has read the table before the other one commits."""
        tables = [TextTable(SharedPlace(store_url), "default") for _ in range(3)]
        rows = rows_of("default", [SharedText(text, "a", "a") for text in CHUNKS])
        assert not is_there or tables[0].commit(rows_of("default", [SharedText("Another text.")])) == 1
        both, indexed, waited = threading.Barrier(3), TextTable._indexed, set[int]()

        def together(self: TextTable) -> Any:
            found = indexed(self)
            if id(self) not in waited:
                waited.add(id(self))
                both.wait(60)
            return found

        monkeypatch.setattr(TextTable, "_indexed", together)
        with ThreadPoolExecutor(3) as pool:
            assert sum(pool.map(lambda table: table.commit(rows), tables)) == len(CHUNKS)
        assert sorted(tables[0].rows(["text"])["text"].to_pylist()) == sorted([*CHUNKS, *is_there * ["Another text."]])

    def test_tenants_have_folders_of_their_own(self, machine: Machine, store_url: str) -> None:
        one, other = machine(namespace="one"), machine(namespace="other")
        assert one.precompute(CHUNKS) == other.precompute(CHUNKS) == len(CHUNKS)
        folders = {each["path"].split("/")[1] for each in shared(one).objects.objects_of("tenants/")}
        assert len(folders) == 2 and stats(store_url)["texts"] == 2 * len(CHUNKS)
        assert one.release(CHUNKS[:1]) == 1 and shared(other).poll() == (0, 0)
        assert not one.store.holds_text(CHUNKS[0]) and other.store.holds_text(CHUNKS[0])
        shared(one).poll()
        assert one.texts.index.find(CHUNKS[0], parts=False) == []
        one.precompute(CHUNKS)
        asked, ask = list[str](), Objects._ask

        def watched(self: Objects, request: str, *arguments: Any, **options: Any) -> Any:
            asked.extend(arguments[0] if isinstance(arguments[0], list) else arguments[:1])
            return ask(self, request, *arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Objects, "_ask", watched)
            assert hits(machine(namespace="one"), documents=CHUNKS) == len(CHUNKS)
        folders = {"/".join(name.split("/")[:2]) for name in asked if name.startswith("tenants/")}
        assert folders == {tenant_folder("one")}


def payloads(engine: CacheClipEngine, part: str = ".kv") -> dict[str, str]:
    """Tags of payloads, by name."""
    found = shared(engine).objects.objects_of("tenants/")
    return {each["path"]: each["e_tag"] for each in found if part in each["path"]}


class TestPayloadsNeverChange:
    def test_another_codec_writes_beside(self, machine: Machine, store_url: str) -> None:
        coarse, fine = machine(codec="int8"), machine(codec="float32")
        coarse.precompute(CHUNKS)
        before = payloads(coarse, "int8")
        assert fine.precompute(CHUNKS) == len(CHUNKS)
        after = payloads(coarse)
        assert before and before.items() <= after.items() and len(before) == len(CHUNKS)
        shared(coarse).poll()
        for engine, codec in ((coarse, "int8"), (fine, "float32")):
            kept = [engine.chunk_caches()[0].read(chunk) for chunk in CHUNKS]
            assert [each.codec for each in kept if each is not None] == [codec] * len(CHUNKS)
            assert hits(engine) == len(CHUNKS) and engine.precompute(CHUNKS) == 0
        assert gc(store_url, grace_s=0)["deleted"] == 0

    def test_damaged_is_a_miss_and_stays_until_it_is_verified(self, machine: Any, store_url: str, caplog: Any) -> None:
        one = machine(on_miss="ignore")
        one.precompute(CHUNKS)
        objects, key = shared(one).objects, one.chunk_caches()[0].key(CHUNKS[0])
        [found] = objects.locate("default", [key])[key]
        data = bytearray(obstore.get(objects.place.objects, found.name).bytes())
        data[-1] ^= 1
        obstore.put(objects.place.objects, found.name, bytes(data))
        assert hits(one) == len(CHUNKS) - 1 and "damaged" in caplog.text
        assert objects.locate("default", [key])
        report = verify(store_url)
        assert report["damaged"] == [found.name] and report["missing"] == 1 and not objects.locate("default", [key])
        assert verify(store_url) == {**verify(store_url), "missing": 0, "damaged": []}
        assert machine().precompute(CHUNKS) == 1 and hits(machine()) == len(CHUNKS)

    @pytest.mark.some(2)
    @pytest.mark.parametrize("kind", ["empty", "layer"])
    def test_answers_write_a_damaged_one_again(self, machine: Machine, kind: str) -> None:
        """The second one that misses it, as it does for a text that lost its KV."""
        one = machine()
        one.precompute(CHUNKS)
        objects, key = shared(one).objects, one.chunk_caches()[0].key(CHUNKS[0])
        [found] = objects.locate("default", [key])[key]
        whole = bytes(obstore.get(objects.place.objects, found.name).bytes())
        obstore.put(objects.place.objects, found.name, b"" if kind == "empty" else whole[:-1] + bytes([whole[-1] ^ 1]))
        answers = []
        for _ in range(3):
            one.prefixes.clear()
            answers.append(hits(one))
        assert answers == [len(CHUNKS) - 1, len(CHUNKS) - 1, len(CHUNKS)]
        assert not objects.breaker.is_open and hits(machine()) == len(CHUNKS)
        assert bytes(obstore.get(objects.place.objects, found.name).bytes()) == whole

    def test_a_payload_that_is_gone_is_a_miss(self, machine: Machine) -> None:
        one, other = machine(), machine(on_miss="ignore")
        one.precompute(CHUNKS)
        shared(other).poll()
        shared(one).objects.delete([one.chunk_caches()[0].key(CHUNKS[1])])
        assert hits(other) == len(CHUNKS) - 1

    def test_garbage_waits_and_what_is_found_again_stays(self, machine: Machine, store_url: str) -> None:
        one = machine()
        shared(one).commits = False  # as a run that was killed before its commit
        one.precompute(CHUNKS)
        assert gc(store_url, grace_s=60)["waiting"] == len(CHUNKS) + 1
        other = machine()
        assert other.precompute(CHUNKS) == 0
        assert gc(store_url, grace_s=0)["deleted"] == 0
        assert hits(machine()) == len(CHUNKS)


def test_two_versions_of_the_package_leave_each_others_payloads(machine: Any, store_url: str, monkeypatch: Any) -> None:
    """They are misses, also for those who may delete."""
    one = machine()
    one.precompute(CHUNKS)

    before = payloads(one)
    number = keys.FRAME_VERSION + 1
    with monkeypatch.context() as next_version:
        next_version.setattr(keys, "FRAME_VERSION", number)
        next_version.setattr(codecs, "FRAME_VERSION", number)
        next_version.setattr(place, "_ENDING", f".f{number}.kv")
        other = machine()
        assert other.precompute(CHUNKS) == hits(other) == len(CHUNKS)
        other.close()
        report = verify(store_url)
        assert (gc(store_url, grace_s=0)["deleted"], report["damaged"], report["missing"]) == (0, [], 0)
    both, report = payloads(one), verify(store_url)
    assert before.items() < both.items() and report["other_versions"] == len(both) - len(before)
    assert (report["damaged"], report["missing"], gc(store_url, grace_s=0)["deleted"]) == ([], 0, 0)
    assert payloads(one) == both and hits(machine()) == len(CHUNKS)


# -- outages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gone", "silent"])
def test_without_storage_an_answer_is_plain_prefills_and_waits_once(machine: Machine, relay: Relay, kind: str) -> None:
    """The second question asks nothing of storage."""
    one = machine(on_miss="ignore")
    one.precompute(CHUNKS)
    expected = one.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=4), method="full").text
    one.prefixes.clear()
    assert hits(one) == len(CHUNKS)
    one.prefixes.clear()
    shared(one)._stop.set()  # the thread would notice the outage first
    relay.go() if kind == "gone" else setattr(relay, "is_silent", True)
    answer = one.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=4))
    one.prefixes.clear()
    asked = relay.connections
    again = one.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=4))
    assert (answer.text, again.text) == (expected, expected) and answer.stats.hits == again.stats.hits == 0
    assert relay.connections == asked


@pytest.mark.parametrize("num_bytes", [1000, 6_000_000])
def test_a_long_upload_is_no_outage(relay: Relay, store_url: str, num_bytes: int) -> None:
    """It may take longer than the wait for an answer."""
    backend, data = ObjectBackend(SharedPlace(store_url)), bytes(num_bytes)
    relay.upload_s = 1.5e6 / (num_bytes + 1000)
    backend.put("0" * 64, data)
    relay.upload_s = 0.0
    assert backend.get_many(["0" * 64]) == {"0" * 64: data} and not backend.breaker.is_open


_XML = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message><HostId>" + "x" * 900 + "</HostId></Error>"
_FOUND = {"ETag": '"x"', "Last-Modified": "Thu, 26 Nov 2026 06:24:38 GMT"}


class Saying(http.server.BaseHTTPRequestHandler):
    """Says the same to everything."""

    says: tuple[int, str, dict[str, str]]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, text, headers = self.says
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text.encode())

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("says", "words"),
    [
        ((403, _XML.format("AccessDenied", "Not for you."), {}), "AccessDenied: Not for you"),
        ((404, _XML.format("NoSuchBucket", "There is no such bucket."), {}), "NoSuchBucket: There is no such bucket"),
        ((503, _XML.format("SlowDown", "Ask less."), {}), "SlowDown: Ask less"),
        ((500, "", {}), "500 Internal Server Error"),
        ((301, "", {"Location": "/elsewhere"}), "redirect|301"),
        ((200, "<html>Log in to the network</html>", _FOUND), "DeleteObjects"),
        ((200, '{"layout": 1, "codec": "../../x"}', _FOUND), "DeleteObjects"),
        ((200, "", {}), "ETag"),
    ],
)
def test_what_is_no_answer_of_storage_is_one_line(
    machine: Machine, monkeypatch: Any, caplog: Any, says: Any, words: str
) -> None:
    """For who makes or cleans a store. A server that was started before goes on by plain prefill."""
    one = machine()
    one.precompute(CHUNKS)
    monkeypatch.setattr(Saying, "says", says, raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Saying) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        for run in (create, stats, gc, verify):
            with pytest.raises(StoreError) as failed:
                run("s3://bucket/x")
            said = str(failed.value)
            assert len(said) < 500 and "\n" not in said and "Debug" not in said
            assert run is not create or re.search(words, said)
        table = TextTable(SharedPlace("s3://bucket/x"), "default")
        with pytest.raises(StoreError) as failed:
            table.commit(rows_of("default", [SharedText(CHUNKS[0])]))
        assert len(str(failed.value)) < 600 and "\x1b" not in str(failed.value)
        for each in ("objects", "patient"):
            shared(one).place.__dict__.pop(each, None)  # the client knows the other address
        one.prefixes.clear()
        assert shared(one).place.objects and hits(one) == 0
        server.shutdown()
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("url", ["s3://b/p?x=1", "s3://b/p#x", "s3:///p", "s3://", "file://host/p", "s3://b/p?hot"])
def test_urls_that_name_no_place_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"s3://bucket/prefix"):
        SharedPlace(url)


def test_storage_that_ignores_conditions_is_refused(relay: Relay, store_url: str) -> None:
    """Nothing of the probe stays, and no store is made."""
    url = f"{store_url}-anew"
    relay.hides = b"if-none-match"
    with pytest.raises(StoreError, match="with If-None-Match, so that writers would replace one another's"):
        create(url)
    relay.hides = b""
    assert [*Objects(SharedPlace(url)).objects_of("")] == []
    assert create(url) == create(url) and len([*Objects(SharedPlace(url)).objects_of("")]) == 1


def test_a_process_that_carries_out_plans_reads_it_without_a_catalog(machine: Machine, store_url: str) -> None:
    """Each from its tenant's folder, in the codec that it wants."""
    coarse, fine = machine(codec="int8"), machine(codec="float32")
    for engine in (coarse, fine):
        engine.precompute(CHUNKS[:1])
    key = fine.chunk_caches()[0].key(CHUNKS[0])
    for codec in ("int8", "float32"):
        assert StoreReader(store_url, "default", codec).get(key, codec=codec).codec == codec
    with pytest.raises(FrameError, match="is not in s3://"):
        StoreReader(store_url, "another", "int8").get(key, codec="int8")


def test_without_the_extra_one_error_says_what_to_install(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtraError, match="pip install -e './integrations/cacheclip-shared'"):
        _ = CacheClipEngine(store=bucket).store
