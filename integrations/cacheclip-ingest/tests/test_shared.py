"""Ingestion into a shared store: by this process, by Ray, as stages of a pipeline, by the command."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.testing
from cacheclip_shared.testing import bucket, s3_address, set_environment  # noqa: F401
from cacheclip_testing.plugin import CHUNKS, rag_prompt
from ingest_cases import OneVector

from cacheclip_rag import CacheClipEngine, CacheClipError, ConfigurationError, DocumentError, EngineConfig, StoreError
from cacheclip_rag.cli import app

pa = pytest.importorskip("pyarrow", reason="the extra shared is not installed: pip install -e '.[shared]'")
obstore = pytest.importorskip("obstore", reason="the extra shared is not installed: pip install -e '.[shared]'")

from cacheclip_ingest import Commit, Encode, encode_table, shared  # noqa: E402
from cacheclip_ingest.job import ingest  # noqa: E402
from cacheclip_ingest.library import Library, LibrarySettings  # noqa: E402
from cacheclip_ingest.removal import remove_documents  # noqa: E402
from cacheclip_ingest.shared import ingest_shared, plan_shared  # noqa: E402
from cacheclip_shared.care import create, gc, room, set_quota, stats, verify  # noqa: E402
from cacheclip_shared.objects import Objects  # noqa: E402
from cacheclip_shared.place import SharedPlace, tenant_folder  # noqa: E402
from cacheclip_shared.table import TextTable  # noqa: E402


@pytest.fixture
def config(tiny_models: dict[str, str], bucket: str) -> EngineConfig:  # noqa: F811
    create(bucket)
    own: Any = {"primary": tiny_models["llama"], "auxiliary": None, "method": "epic-corrected"}
    return EngineConfig(**own, store=bucket, device="cpu", dtype="float32")


@pytest.fixture
def settings(config: EngineConfig) -> LibrarySettings:
    return LibrarySettings(primary=config.primary, auxiliary=None, dtype="float32", chunk_tokens=64)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "documents"
    folder.mkdir()
    for number, text in enumerate(CHUNKS):
        (folder / f"{number}.txt").write_text(text)
    return folder


def texts_of(config: EngineConfig) -> dict[str, list[str]]:
    """Texts by document, as the table has them."""
    texts: dict[str, list[str]] = {}
    for row in TextTable(SharedPlace(str(config.store)), config.namespace).rows(["document", "text"]).to_pylist():
        texts.setdefault(row["document"], []).append(row["text"])
    return texts


def table(*rows: tuple[str, str, str]) -> Any:
    return pa.table({name: [row[n] for row in rows] for n, name in enumerate(("document", "text", "version"))})


def each_text() -> Any:
    """A table with a document of each text."""
    return table(*((f"d{n}", text, "1") for n, text in enumerate(CHUNKS)))


@pytest.fixture
def encode(config: EngineConfig) -> Iterator[Encode]:
    encode = Encode(config)
    yield encode
    encode.engine.close()


class TestStages:
    def test_encode_and_commit(self, config: EngineConfig, encode: Encode) -> None:
        """A batch that runs again computes nothing and adds nothing."""
        commit = Commit(str(config.store))
        rows = encode(each_text())
        assert texts_of(config) == {} and commit(rows).to_pylist() == [{"texts": 4, "new": 4, "computed": 4}]
        assert commit(encode(each_text())).to_pylist() == [{"texts": 4, "new": 0, "computed": 0}]
        assert texts_of(config) == {f"d{n}": [text] for n, text in enumerate(CHUNKS)}

    def test_a_document_is_replaced_in_one_commit(self, config: EngineConfig, encode: Encode) -> None:
        """Its rows of another version go, those of other documents stay, in every order of batches."""
        commit = Commit(str(config.store))
        commit(encode(table(("a", CHUNKS[0], "1"), ("a", CHUNKS[1], "1"), ("b", CHUNKS[1], "1"))))
        before = commit.table("default")._open().version()
        commit(encode(table(("a", CHUNKS[2], "2"))))
        assert commit.table("default")._open().version() == before + 1
        commit(encode(table(("a", CHUNKS[3], "2"))))  # the rest of it
        texts = {name: sorted(each) for name, each in texts_of(config).items()}
        assert texts == {"a": sorted(CHUNKS[2:]), "b": [CHUNKS[1]]}

    def test_a_batch_that_storage_fails_runs_again(
        self, config: EngineConfig, encode: Encode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The pauses are longer than that of the breaker. A storage that stays away is an error."""
        monkeypatch.setattr(shared, "_PAUSES_S", (0.0, 0.0))
        create, failures = Objects.create, [2]

        def failing(self: Objects, name: str, data: bytes) -> bool:
            failures[0] -= 1
            if failures[0] >= 0:
                raise OSError("503")
            return create(self, name, data)

        monkeypatch.setattr(Objects, "create", failing)
        assert Commit(str(config.store))(encode(each_text()))["new"].to_pylist() == [4] and "503" in caplog.text
        failures[0] = 3
        with pytest.raises(StoreError, match="503"):
            encode(table(("other", "A text that was not there before. " * 3, "1")))

    @pytest.mark.parametrize("is_cleaned", [True, False])
    def test_a_later_run_on_the_machine_of_a_killed_one(
        self, config: EngineConfig, encode: Encode, monkeypatch: pytest.MonkeyPatch, is_cleaned: bool
    ) -> None:
        """Its payloads are looked for again: what a cleaning took is computed, and what one might take made young."""
        url = str(config.store)
        killed = Encode(config)
        killed(each_text())
        killed.engine.close()
        if is_cleaned:
            assert gc(url, grace_s=0)["deleted"] == len(CHUNKS)
        replaced, made_anew = list[str](), Objects.replace

        def noted(self: Objects, name: str, data: bytes) -> None:
            replaced.append(name)
            made_anew(self, name, data)

        monkeypatch.setattr(Objects, "replace", noted)
        monkeypatch.setattr("cacheclip_shared.store.GRACE_S", -10.0)  # it is old by now
        rows = encode(each_text())
        assert sum(rows["computed"].to_pylist()) == (len(CHUNKS) if is_cleaned else 0)
        assert {name.endswith(".kv") for name in replaced} == {True} and len({*replaced}) == len(CHUNKS)
        Commit(url)(rows)
        encode.engine.close()
        assert verify(url)["missing"] == 0 and gc(url, grace_s=0)["deleted"] == 0

    def test_threads_that_share_an_engine_get_the_rows_of_their_tables(
        self, encode: Encode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        precompute = CacheClipEngine.precompute

        def slow(self: CacheClipEngine, *texts: Any, **options: Any) -> int:
            count = precompute(self, *texts, **options)
            time.sleep(0.05)  # others may store meanwhile
            return count

        monkeypatch.setattr(CacheClipEngine, "precompute", slow)
        tables = [table((f"d{n}", text, f"version {n}")) for n, text in enumerate(CHUNKS)]
        with ThreadPoolExecutor(len(CHUNKS)) as pool:
            made = [*pool.map(lambda each: encode_table(each, encode.engine).to_pylist(), tables)]
        rows = [[(row["document"], row["version"], row["computed"]) for row in rows] for rows in made]
        assert rows == [[(f"d{n}", f"version {n}", 1)] for n in range(len(CHUNKS))]

    def test_what_is_wrong_with_documents_comes_back(
        self, config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As rows that are committed as nothing; a document that failed has no other rows."""
        good, long = f"{CHUNKS[0]}\n\n![plan](plan.png)\n", "word " * 2700  # one text too long, and one that is not
        contents = {"long.md": long, "good.md": good, "bad.md": "\0\1", "empty.md": ""}
        for name, text in contents.items():
            (tmp_path / name).write_text(text)
        paths = [str(tmp_path / name) for name in contents]
        encode = Encode(config, chunk_tokens=8000)
        rows = encode(pa.table({"path": paths, "version": ["1"] * len(paths)}))
        told = {Path(row["document"]).name: row["problem"] for row in rows.to_pylist() if row["problem"]}
        assert told == {"good.md": "note", "bad.md": "failed", "empty.md": "empty", "long.md": "failed"}
        assert Commit(str(config.store))(rows).to_pylist() == [{"texts": 1, "new": 1, "computed": 2}]
        assert {*texts_of(config)} == {paths[1]} and "bad.md looks binary" in caplog.text
        encode.engine.close()

    def test_a_folder_is_refused(self, config: EngineConfig, tmp_path: Path) -> None:
        engine = CacheClipEngine(config, store=str(tmp_path / "folder"))
        with pytest.raises(ConfigurationError, match="s3://bucket/prefix"):
            encode_table(table(("a", CHUNKS[0], "1")), engine)


class Job:
    """A store, and a bucket with documents."""

    def __init__(self, config: EngineConfig, settings: LibrarySettings) -> None:
        self.config, self.settings, self.root = config, settings, f"{config.store}-documents"
        self.url, self.objects = str(config.store), SharedPlace(self.root).objects

    def put(self, *texts: str, name: str = "{}.txt") -> None:
        """Objects with these texts, called ``0.txt``, ``1.txt``, …"""
        for number, text in enumerate(texts):
            obstore.put(self.objects, name.format(number), text.encode())

    def delete(self, *names: str) -> None:
        obstore.delete(self.objects, [*names])

    def run(self, *paths: str | Path, run: Any = ingest_shared, **options: Any) -> Any:
        return run([*map(str, paths or [self.root])], self.config, self.settings, **options)

    @property
    def texts(self) -> dict[str, list[str]]:
        return texts_of(self.config)


@pytest.fixture
def job(config: EngineConfig, settings: LibrarySettings) -> Job:
    return Job(config, settings)


class TestJob:
    def test_documents_in_object_storage(self, job: Job) -> None:
        job.put(*CHUNKS, name="folder/{}.txt")
        assert job.run().documents == 4 and job.run().unchanged == 4
        job.delete("folder/0.txt")
        assert job.run().removed == 1
        assert job.run(f"{job.root}/folder/1.txt").unchanged == 1
        job.delete(*(f"folder/{number}.txt" for number in range(1, 4)))
        assert len(job.run().unconfirmed) == 3 == len(job.texts)
        assert job.run(confirmed=True).removed == 3 and job.texts == {}
        with pytest.raises(DocumentError, match="no documents in s3://"):
            job.run()

    @pytest.mark.some(3)
    @pytest.mark.parametrize("name", ["a#1/b ?.txt", "100%/a%20b.txt", "a&b=c+d.md", "\U0001f389 \u00fc.txt"])
    def test_names_of_documents_mean_nothing_in_urls(self, job: Job, name: str) -> None:
        job.put(CHUNKS[0], name=name)
        folder = f"{job.root}/{name}".rpartition("/")[0]
        assert job.run(folder).failed == [] and {*job.texts} == {f"{job.root}/{name}"}
        assert job.run(folder).unchanged == 1

    def test_a_name_that_no_client_can_ask_for_is_said(self, job: Job) -> None:
        address = f"{os.environ['AWS_ENDPOINT_URL']}/{job.root.removeprefix('s3://')}/a//b.txt"
        httpx.put(address, content=b"text").raise_for_status()
        [failure] = job.run().failed
        assert failure["path"] == job.root and re.search("cannot be listed: .*a//b.txt", failure["error"])

    def test_what_a_folder_leaves_out_a_bucket_does(self, job: Job) -> None:
        """Hidden and empty objects, markers of folders, other types. What was given by its own name stays."""
        contents = {"a.txt": CHUNKS[0], ".b.txt": CHUNKS[1], ".git/c.txt": CHUNKS[2], "d.odt": "x", "e.log": CHUNKS[3]}
        for name, text in {**contents, "sub": "", "f.txt": ""}.items():
            job.put(text, name=name)
        for run in (plan_shared, ingest_shared):
            report = job.run(run=run)
            assert [each["path"].removeprefix(f"{job.root}/") for each in report.skipped] == ["d.odt", "e.log", "f.txt"]
            assert (report.added, report.failed, report.removed) == (1, [], 0)
        assert {*job.texts} == {f"{job.root}/a.txt"}
        assert job.run(*(f"{job.root}/{name}" for name in ("e.log", ".git", ".b.txt"))).added == 3
        assert job.run(confirmed=True).removed == 0 and len(job.texts) == 4
        job.put("", name="a.txt")
        job.delete("e.log")
        report = job.run()
        assert report.removed == 2 and report.failed == [] and f"{job.root}/a.txt is empty" in str(report.skipped)

    @pytest.mark.some(2)
    @pytest.mark.parametrize("confirmed", [True, False])
    def test_a_listing_that_fails_half_way(
        self, job: Job, documents: Path, monkeypatch: pytest.MonkeyPatch, confirmed: bool
    ) -> None:
        """Nothing is gone; what was listed, and what stands elsewhere, is ingested."""
        job.put(*CHUNKS[:3])
        job.run()
        listed = Objects.objects_of
        job.put("It has changed.")

        def first_only(self: Objects, folder: str) -> Iterator[dict[str, Any]]:
            objects = listed(self, folder)
            yield next(objects)
            if "documents" in folder:
                raise OSError("503 Slow Down")
            yield from objects

        monkeypatch.setattr(Objects, "objects_of", first_only)
        report = job.run(job.root, documents, confirmed=confirmed)
        assert (report.removed, report.unconfirmed, report.added, report.changed) == (0, [], 4, 1)
        assert [each["path"] for each in report.failed] == [job.root] and "503" in report.failed[0]["error"]
        assert len(job.texts) == 7

    def test_an_object_that_cannot_be_fetched(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        fetch = Objects.fetch
        for name, text in (("a.txt", CHUNKS[0]), ("b.txt", CHUNKS[1]), ("c.txt", "\x00\x01\x02")):
            job.put(text, name=name)

        def failing(self: Objects, name: str) -> bytes:
            if name.endswith("a.txt"):
                raise OSError("403 Forbidden")
            return fetch(self, name)

        monkeypatch.setattr(Objects, "fetch", failing)
        report = job.run()
        assert report.added == 1
        assert [each["path"] for each in report.failed] == [f"{job.root}/a.txt", f"{job.root}/c.txt"]
        assert f"{job.root}/a.txt cannot be read: 403" in report.failed[0]["error"]
        assert f"{job.root}/c.txt looks binary" in report.failed[1]["error"]

    def test_removal(self, job: Job) -> None:
        """By URL and under one; the KV goes with the next cleaning."""
        for number, text in enumerate(CHUNKS):
            job.put(text, name=f"{number % 2}/{number}.txt")
        job.run()
        root = job.root
        assert remove_documents(job.url, [f"{root}/0/0.txt"]) == [f"{root}/0/0.txt"]
        assert remove_documents(job.url, under=f"{root}/1/") == [f"{root}/1/1.txt", f"{root}/1/3.txt"]
        assert {*job.texts} == {f"{root}/0/2.txt"} and gc(job.url, grace_s=0)["deleted"] > 0

    def test_a_bucket_into_a_store_folder(self, job: Job, tmp_path: Path) -> None:
        job.put(*CHUNKS)
        engine, library = CacheClipEngine(job.config, store=str(tmp_path / "folder")), Library(tmp_path / "folder")
        common: dict[str, Any] = {"library": library, "engine": engine, "settings": job.settings}

        def run() -> Any:
            return ingest([job.root], embedder=OneVector("1"), **common)

        assert (run().added, run().unchanged) == (4, 4)
        job.delete("0.txt")
        assert run().removed == 1 and len(library.documents()) == 3
        engine.close()

    def test_a_run_that_fails_fixes_no_settings(self, job: Job, documents: Path) -> None:
        """One that succeeds does."""
        config, settings = job.config, job.settings
        job.config = replace(config, auxiliary="no/such model")
        with pytest.raises(CacheClipError, match="no model is called"):
            job.run(documents)
        job.config, job.settings = config, replace(settings, chunk_tokens=32)
        assert job.run(documents).failed == []
        job.settings = settings
        with pytest.raises(ConfigurationError, match="chunk_tokens 32, not 64"):
            job.run(documents)

    def test_a_name_in_the_table_that_no_file_can_have(self, job: Job, encode: Encode, documents: Path) -> None:
        """Other programs write to the bucket."""
        Commit(job.url)(encode(table((f"{documents}/a\0b/c", CHUNKS[0], "1"))))
        assert job.run(documents, confirmed=True).removed == 1

    def test_kv_of_hot_texts_is_stored_at_the_second_use(self, job: Job, documents: Path) -> None:
        """The others have a row only. A second job changes nothing; KV that is there stays."""
        report = job.run(documents, kv="hot")
        assert report.computed == 0 < report.chunks and stats(job.url)["payloads"] == 0
        assert job.run(documents, kv="hot").unchanged == 4
        engine = CacheClipEngine(job.config)
        store = engine.store.chunk_store
        store.poll()  # type: ignore[attr-defined]
        used = job.texts[str(documents / "0.txt")]
        answers = [engine.generate(rag_prompt(used), max_tokens=1).stats for _ in range(3)]
        assert [(each.hits, each.misses) for each in answers] == [(0, len(used)), (0, len(used)), (len(used), 0)]
        store.commit()
        engine.close()
        rows = TextTable(SharedPlace(job.url), "default").rows(["text", "kv"]).to_pylist()
        assert {row["text"] for row in rows if row["kv"]} == {*used}
        assert job.run(documents).computed == len({row["text"] for row in rows}) - len(used)  # now of all

    @pytest.mark.long
    def test_a_tenant_keeps_to_its_quota(self, job: Job, documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A job ends with the commit that reaches it; a cleaning takes the KV of the others that were written first.
        Texts stay, and another tenant's KV."""
        monkeypatch.setattr(shared, "_COMMIT_S", -1.0)
        monkeypatch.setattr(shared, "_DOCUMENTS_AT_ONCE", 1)
        url = job.url
        ingest_shared([str(documents)], replace(job.config, namespace="other"), job.settings)
        set_quota(url, "default", 1)
        for _ in range(2):
            report = job.run(documents)
            assert (report.documents, len(report.failed), report.above_quota) == (1, 3, True)
            assert len(job.texts) == 1 and "quota is reached" in report.failed[0]["error"]
        set_quota(url, "default", None)
        report = job.run(documents)
        assert (report.unchanged, report.failed, report.above_quota) == (1, [], False)
        before, texts = stats(url)["tenants"], {name: {*each} for name, each in job.texts.items()}
        mine, theirs = tenant_folder("default"), tenant_folder("other")
        quota = 100_000  # bytes of seven payloads, beside those of the chunk context, which belong to no text
        command = ["store", "limit", str(quota), "--store", url, "--namespace", "default"]
        assert typer.testing.CliRunner().invoke(app, command).exit_code == 0
        assert stats(url)["tenants"][mine]["max_bytes"] == quota
        objects = Objects(SharedPlace(url))
        age = {each["path"]: each["last_modified"] for each in objects.objects_of(f"{mine}/kv/")}
        cleaned = gc(url, grace_s=0)
        assert cleaned["above_quota"] == cleaned["deleted"] > 1 and room(url, "default") >= 0
        assert {name: {*each} for name, each in job.texts.items()} == texts
        assert stats(url)["tenants"][theirs] == before[theirs]
        left = {each["path"] for each in objects.objects_of(f"{mine}/kv/")}
        gone = [written for path, written in age.items() if path not in left]
        assert max(gone) <= sorted(age.values())[len(gone)], "the oldest ones, but for the chunk context"
        assert verify(url)["missing"] == 0 and gc(url, grace_s=0)["above_quota"] == 0


@pytest.mark.long
def test_the_commands(config: EngineConfig, documents: Path) -> None:
    """What a stranger types."""
    runner, url = typer.testing.CliRunner(), f"{config.store}-anew"

    def run(*arguments: str) -> dict[str, Any]:
        found = runner.invoke(app, [*arguments, "--json"])
        assert found.exit_code == 0, (found.output, found.exception)
        return dict(json.loads(found.stdout))

    assert run("store", "create", url, "--codec", "int8")["codec"] == "int8"
    options = ["--store", url, "--primary", config.primary, "--auxiliary", "none", "--dtype", "float32"]
    first = run("ingest", str(documents), *options)
    assert first["documents"] == 4 and first["computed"] > 0
    (documents / "picture.md").write_text(f"{CHUNKS[0]}\n\n![plan](plan.png)\n")
    planned = runner.invoke(app, ["ingest", str(documents), "--store", url, "--dry-run", "--strict", "--json"])
    assert planned.exit_code == 1 and json.loads(planned.stdout)["dry_run"] is True
    assert (json.loads(planned.stdout)["added"], len(json.loads(planned.stdout)["notes"])) == (1, 1)
    (documents / "picture.md").unlink()
    assert run("ingest", str(documents), "--store", url, "--dry-run")["added"] == 0
    assert run("ingest", str(documents), "--store", url)["unchanged"] == 4
    assert run("store", "stats", "--store", url)["documents"] == 4
    assert run("store", "verify", "--store", url)["damaged"] == []
    assert run("store", "gc", "--store", url, "--grace", "0")["deleted"] == 0
    assert run("store", "compact", "--store", url)["files"] == 1
    engine = CacheClipEngine(config, store=url, device="cpu")
    assert engine.chunk_caches()[0].codec == "int8"
    assert engine.generate(rag_prompt(CHUNKS), max_tokens=2).stats.hits >= len(CHUNKS)
    engine.close()
    for words, command in (
        ("folder", ["store", "limit", "--store", url, "5"]),
        ("without --engine ray", ["ingest", str(documents), "--store", url, "--workers", "2"]),
        ("--embedding works on", ["ingest", str(documents), "--store", url, "--embedding", config.primary]),
    ):
        refused = runner.invoke(app, command)
        assert isinstance(refused.exception, ConfigurationError) and words in str(refused.exception)


class DyingEncode(Encode):
    """Dies once, in the midst of a batch of which something is stored."""

    def __call__(self, given: Any) -> Any:
        flag = Path(os.environ["DYING_FLAG"])
        if not flag.exists():
            flag.touch()
            super().__call__(given.slice(0, 2))
            os._exit(137)
        return super().__call__(given)


@pytest.fixture(scope="module")
def ray_cluster(s3_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:  # noqa: F811
    """Started once: it takes seconds. Yields a folder of its workers."""
    ray = pytest.importorskip("ray", reason="the extra ray is not installed: pip install -e '.[ray]'")
    folder = tmp_path_factory.mktemp("ray")
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, s3_address, folder)
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # helpers of tests
        patch.setenv("DYING_FLAG", str(folder / "died"))
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init(num_cpus=2, object_store_memory=80_000_000, **quiet)
    yield folder
    ray.shutdown()


def on_ray(test: Callable[..., None]) -> Callable[..., None]:
    """Marks of a test that starts Ray, which leaves warnings behind."""
    ignored = ["DeprecationWarning:ray", "FutureWarning:ray", "ResourceWarning"]
    ignored.append("pytest.PytestUnraisableExceptionWarning")
    marked: Callable[..., None] = pytest.mark.filterwarnings(*(f"ignore::{each}" for each in ignored))(test)
    return pytest.mark.long(marked)


@on_ray
def test_a_job_on_ray_survives_a_killed_worker(
    ray_cluster: Path, job: Job, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch runs again, and every text is there once."""
    for number in range(12):
        (documents / f"more {number}.txt").write_text(f"{number} is another number. {CHUNKS[number % 4]}")
    monkeypatch.setattr("cacheclip_ingest.shared.Encode", DyingEncode)
    report = job.run(documents, engine="ray")
    assert (ray_cluster / "died").exists() and report.documents == 16 and report.failed == []
    assert {*job.texts} == {str(path) for path in documents.iterdir()}
    rows = [(name, text) for name, texts in job.texts.items() for text in texts]
    assert len(rows) == len(set(rows)) and verify(job.url)["missing"] == 0
    assert job.run(documents, engine="ray").unchanged == 16


class FailingEncode(Encode):
    def __call__(self, given: Any) -> Any:
        raise ConfigurationError("planted, over\nlines")


@on_ray
def test_what_is_wrong_with_documents_comes_back_from_ray(ray_cluster: Path, job: Job, documents: Path) -> None:
    (documents / "a.md").write_text(f"{CHUNKS[0]}\n\n![plan](plan.png)\n")
    (documents / "b.md").write_text("It will be emptied.")
    (documents / "c.md").write_bytes(b"\x00\x01\x02")
    job.run(documents, engine="ray", workers=2)
    (documents / "a.md").write_text(f"{CHUNKS[1]}\n\n![plan](plan.png)\n")
    (documents / "b.md").write_text("")
    report = job.run(documents, engine="ray", workers=2)
    names = [[Path(each["path"]).name for each in told] for told in (report.notes, report.skipped, report.failed)]
    assert names == [["a.md"], ["b.md"], ["c.md"]]
    assert (report.changed, report.removed, report.unchanged) == (1, 1, 4)
    assert str(documents / "b.md") not in job.texts


@on_ray
def test_what_a_worker_of_ray_raises_is_one_line(
    ray_cluster: Path, job: Job, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheclip_ingest.shared.Encode", FailingEncode)
    with pytest.raises(CacheClipError, match=r"^a worker of Ray failed: planted, over. What is committed stays"):
        job.run(documents, engine="ray", workers=4)
