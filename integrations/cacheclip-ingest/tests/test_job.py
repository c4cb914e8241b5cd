"""Ingestion runs on tiny models: incremental, resumable, and nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cacheclip_ingest import job, passages
from cacheclip_ingest.documents import find_files
from cacheclip_ingest.embedding import Embedder, Vectors
from cacheclip_ingest.job import ingest, plan_ingestion
from cacheclip_ingest.library import Library, LibrarySettings
from cacheclip_ingest.plan import IngestPlan
from cacheclip_ingest.splitting import Splitter
from ingest_cases import LetterEmbedder, Workshop

from cacheclip_rag import (
    CacheClipEngine,
    ConfigurationError,
    DocumentError,
    DownloadError,
    SamplingParams,
    StoreError,
    UnknownModelError,
)
from cacheclip_rag.models import checkpoints


def test_everything_once_then_nothing(workshop: Workshop) -> None:
    first = workshop.run()
    assert (first.documents, first.added, first.failed) == (2, 2, [])
    assert first.computed == first.chunks == len(workshop.library.passages()) >= 4
    assert all(workshop.engine.is_stored(text) for _, _, text in workshop.library.passages())
    again = workshop.run()
    assert (again.unchanged, again.added, again.changed, again.computed) == (2, 0, 0, 0)


def test_a_plan_says_what_a_run_then_does(workshop: Workshop) -> None:
    def planned() -> IngestPlan:
        return plan_ingestion(
            [workshop.corpus], library=workshop.library, engine=workshop.engine, settings=workshop.settings
        )

    before = planned()
    assert (before.added, before.changed, before.unchanged, before.removed) == (2, 0, 0, 0)
    assert workshop.engine.store.stats().entries == 0 and not workshop.library.documents(), "nothing was stored"
    report = workshop.run()
    assert (before.chunks, before.computed) == (report.chunks, report.computed)
    texts = [text for _, _, text in workshop.library.passages()]
    primary = workshop.engine.chunk_caches()[0]
    assert before.tokens == sum(len(primary.tokenize(text)) for text in texts) and before.seconds > 0
    store = workshop.engine.store
    for caches in workshop.engine.chunk_caches():
        store.delete([caches._key((), caches.prefix_ids)])  # the shared prefix is no chunk
    assert store.stats().bytes == before.bytes
    after = planned()
    assert (after.unchanged, after.chunks, after.computed, after.bytes, after.seconds) == (2, 0, 0, 0, 0.0)
    workshop.write("c.txt", "A short text about the weather on the coast, which changes often in spring.")
    (workshop.corpus / "b.md").unlink()
    third = planned()
    assert (third.added, third.unchanged, third.removed, third.computed) == (1, 1, 1, third.chunks)


def test_only_the_changed_document_is_done_again_and_old_chunks_go(workshop: Workshop) -> None:
    workshop.run()
    old = [text for path, _, text in workshop.library.passages() if path.endswith("b.md")]
    workshop.write("b.md", "# Ships\n\nA frigate anchored off the eastern cliffs for three days in October.")
    report = workshop.run()
    assert (report.changed, report.unchanged, report.added) == (1, 1, 0)
    assert report.released == len(old)
    assert not any(workshop.engine.is_stored(text) for text in old)


def test_text_shared_by_two_documents_survives_the_removal_of_one(workshop: Workshop, chunks: list[str]) -> None:
    workshop.write("copy.txt", "\n\n".join(chunks[:2]))
    workshop.run()
    (workshop.corpus / "copy.txt").unlink()
    report = workshop.run()
    assert (report.removed, report.released) == (1, 0)
    assert all(workshop.engine.is_stored(text) for _, _, text in workshop.library.passages())


def test_bad_documents_are_reported_and_the_others_go_on(workshop: Workshop) -> None:
    (workshop.corpus / "bad.txt").write_bytes(b"\x00\x01\x02")
    report = workshop.run()
    assert report.added == 2
    assert [Path(f["path"]).name for f in report.failed] == ["bad.txt"]
    assert "binary" in report.failed[0]["error"]


@pytest.mark.parametrize("name", ["report.docx", "table.xlsx", "slides.pptx", "text.odt"])
def test_office_files_stop_no_others(workshop: Workshop, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing reads them, in a folder they are skipped, and named they fail; both say what to do."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    with zipfile.ZipFile(workshop.corpus / name, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("word/document.xml", "<w:t>The boiler has four valves.</w:t>")
    report = workshop.run()
    assert report.added == 2 and not report.failed
    assert [Path(each["path"]).name for each in report.skipped] == [name]
    assert "Save it as text" in report.skipped[0]["error"]
    named = workshop.run(workshop.corpus / name)
    assert named.unchanged == 2 and [Path(each["path"]).name for each in named.failed] == [name]
    assert re.search(rf"{name} looks binary: it is an Office file.*Save it as text", named.failed[0]["error"])


def test_a_document_that_turns_unreadable_keeps_its_last_good_version(workshop: Workshop) -> None:
    workshop.run()
    before = workshop.library.passages()
    (workshop.corpus / "a.txt").write_bytes(b"\x00")
    report = workshop.run()
    assert len(report.failed) == 1 and report.removed == 0
    assert workshop.library.passages() == before


def test_a_run_stopped_in_the_middle_is_resumed_without_computing_again(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheclip_rag.chunks.batches._TEXTS", 1)
    primary, calls = workshop.engine.primary, []
    real = primary.encode_many

    def stops_at_the_third(*chunks: Any) -> Any:
        calls.append(chunks)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*chunks)

    monkeypatch.setattr(primary, "encode_many", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        workshop.run()
    monkeypatch.setattr(primary, "encode_many", real)
    report = workshop.run()
    # the second text may not have been written for the auxiliary yet
    assert report.chunks >= 4 and report.computed in (report.chunks - 1, report.chunks - 2)
    assert len(workshop.library.documents()) == 2


def test_a_document_is_written_while_it_is_computed_and_progress_counts_what_is_written(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheclip_rag.chunks.batches._TEXTS", 1)
    (workshop.corpus / "b.md").unlink()
    primary, tiers, meeting = workshop.engine.primary, workshop.engine.store.chunk_store.tiers, threading.Barrier(2)
    auxiliary = workshop.engine.chunk_caches()[1]
    for caches in workshop.engine.chunk_caches():
        _ = caches.prefix_kv
    real, put, shares = primary.encode_many, tiers.put, []
    keys = []

    def encode_many(*chunks: Any) -> Any:
        if keys:
            meeting.wait(20)  # for the auxiliary's KV of the passage before
        return real(*chunks)

    def waiting_put(key: str, data: Any) -> None:
        keys.append(key)
        if len(keys) % 2 == 0 and threading.current_thread() is not threading.main_thread():
            meeting.wait(20)
        put(key, data)

    @contextmanager
    def progress_bar(title: str, total: float) -> Iterator[Callable[[float], None]]:
        yield lambda done: shares.append((round(done / total, 3), len(keys)))

    monkeypatch.setattr(primary, "encode_many", encode_many)
    monkeypatch.setattr(tiers, "put", waiting_put)
    monkeypatch.setattr(job, "progress_bar", progress_bar)
    report = workshop.run()
    texts = workshop.library.passages_of(str(workshop.corpus / "a.txt"))
    assert report.computed == report.chunks == len(texts) >= 3 and all(text in auxiliary for text in texts)
    assert shares == [(round((number + 1) / len(texts), 3), 2 * (number + 1)) for number in range(len(texts))]


def test_other_settings_than_the_store_was_made_with_are_refused(workshop: Workshop) -> None:
    workshop.run()
    with pytest.raises(ConfigurationError, match="chunk_tokens 32, not 64"):
        workshop.run(chunk_tokens=64)


def test_a_document_that_was_named_stays_when_its_folder_skips_its_type(workshop: Workshop) -> None:
    workshop.write("notes.log", "Some notes of some length about the harbour.")
    common: Any = {"library": workshop.library, "engine": workshop.engine, "settings": workshop.settings}
    ingest([workshop.corpus / "notes.log"], embedder=LetterEmbedder("letters"), **common)
    report = workshop.run()
    assert (report.added, report.removed, report.documents) == (2, 0, 3)
    assert [Path(each["path"]).name for each in report.skipped] == ["notes.log"]


def test_a_run_goes_on_from_a_first_one_that_failed(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    embed = LetterEmbedder.embed

    def refuse(self: LetterEmbedder, texts: Sequence[str]) -> Vectors:
        if texts != ["text"]:  # the check before the first chunk is computed
            raise StoreError("the disk is full")
        return embed(self, texts)

    with monkeypatch.context() as patch:
        patch.setattr(LetterEmbedder, "embed", refuse)
        with pytest.raises(StoreError):
            workshop.run()
    assert workshop.library.settings is None and workshop.engine.store.catalog.total().entries > 0
    found = workshop.run()
    assert found.documents == 2 and found.computed < found.chunks


@pytest.mark.parametrize("lacks", ["embedding", "auxiliary"])
@pytest.mark.parametrize("dry", [False, True], ids=["run", "dry run"])
def test_a_model_that_cannot_be_had_is_an_error_before_anything_is_computed(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, lacks: str, dry: bool
) -> None:
    """Also one that is needed at the end of a run."""
    computed: list[Any] = []
    runtime = type(workshop.engine.primary)
    monkeypatch.setattr(runtime, "encode_many", lambda *given: computed.append(given))
    nowhere = "nobody/nowhere"

    def without_network(name: str) -> Path:
        raise DownloadError(f"{name} cannot be fetched")

    monkeypatch.setattr(checkpoints, "_from_hub", without_network)
    embedder = Embedder(nowhere) if lacks == "embedding" else LetterEmbedder("letters")
    engine = CacheClipEngine(
        primary=workshop.settings.primary,
        auxiliary=nowhere if lacks == "auxiliary" else workshop.settings.auxiliary,
        store=workshop.store,
    )
    run: Any = plan_ingestion if dry else ingest
    common = {"library": workshop.library, "engine": engine, "settings": workshop.settings}
    with pytest.raises(DownloadError, match=nowhere):
        run([workshop.corpus], embedder=embedder, **common)
    assert not computed


def test_nothing_to_ingest_is_an_error(tmp_path: Path, tiny_models: dict[str, str]) -> None:
    with pytest.raises(DocumentError, match=r"no documents in .* Expected .markdown, .md, .pdf"):
        Workshop(tmp_path, tiny_models).run()


def test_search_finds_the_nearest_passage(workshop: Workshop) -> None:
    workshop.run()
    for _, _, text in workshop.library.passages():
        found = Library.open(workshop.store).search(LetterEmbedder("letters").embed([text]), 2)
        assert found[0].text == text and found[0].score == pytest.approx(1.0, abs=1e-5)
        assert found[0].score >= found[1].score


def test_opening_a_library_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cacheclip ingest"):
        Library.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("overlap", [0, 8])
def test_passages_are_within_size_and_cover_the_text(
    tiny_models: dict[str, str], chunks: list[str], overlap: int
) -> None:
    from cacheclip_rag.models import load_model

    runtime = load_model(tiny_models["llama"])
    text = "\n\n".join(chunks)
    passages = Splitter(runtime.tokenizer, 32, overlap).split(text)
    assert all(0 < len(runtime.tokenize(passage)) <= 32 for passage in passages)
    if overlap == 0:
        assert "".join("".join(passages).split()) == "".join(text.split())
    else:
        assert sum(map(len, passages)) > len(text)


@pytest.mark.parametrize(("size", "overlap"), [(8, 0), (32, 32), (32, -1)])
def test_senseless_sizes_are_refused(size: int, overlap: int) -> None:
    with pytest.raises(ConfigurationError, match="expected chunk size"):
        Splitter(None, size, overlap)


def test_a_lost_index_is_made_again(workshop: Workshop, chunks: list[str]) -> None:
    """As its error message advises: move a damaged index away, ingest again; chunks are found in prompts as before."""
    workshop.run()
    workshop.engine.close()
    for file in workshop.store.glob("catalog.sqlite3*"):
        file.unlink()
    workshop.engine = CacheClipEngine(workshop.engine.config)
    assert workshop.run().unchanged == 2
    prompt = "\n\n".join(text for _, _, text in workshop.library.passages())
    assert workshop.engine.generate(prompt, SamplingParams(max_tokens=1)).stats.hits >= 3


def test_a_library_made_anew_is_searched_anew(workshop: Workshop, chunks: list[str]) -> None:
    workshop.run()
    workshop.library.close()
    for file in workshop.store.glob("library.sqlite3*"):
        file.unlink()
    for name in ("a.txt", "b.md"):
        (workshop.corpus / name).unlink()
    workshop.write("c.txt", "Iron melts at one thousand five hundred and thirty-eight degrees.")
    workshop.write("d.txt", "The parliament of Norway sits in Oslo.")
    workshop.library = Library(workshop.store)
    workshop.run()
    found = workshop.library.search(LetterEmbedder("letters").embed(["iron melts at degrees"]), 5)
    assert {Path(passage.path).name for passage in found} == {"c.txt", "d.txt"}


def test_a_file_that_its_folder_passes_over_is_not_gone(workshop: Workshop) -> None:
    """Named on its own a file may have any suffix; a later run over its folder leaves it alone while it is there."""
    log = workshop.corpus / "notes.log"
    log.write_text("A log of the harbour, of some length.")
    common = {"library": workshop.library, "engine": workshop.engine, "settings": workshop.settings}
    ingest([log, workshop.corpus], embedder=LetterEmbedder("letters"), **common)
    assert (workshop.run().removed, str(log) in workshop.library.documents()) == (0, True)
    log.unlink()
    assert (workshop.run().removed, str(log) in workshop.library.documents()) == (1, False)


def test_a_renamed_file_costs_nothing(workshop: Workshop) -> None:
    workshop.run()
    (workshop.corpus / "a.txt").rename(workshop.corpus / "z.txt")
    report = workshop.run()
    assert (report.added, report.removed, report.computed, report.released) == (1, 1, 0, 0)


def test_a_link_is_not_a_second_document(workshop: Workshop) -> None:
    (workshop.corpus / "link.txt").symlink_to(workshop.corpus / "a.txt")
    assert workshop.run().documents == 2


def test_identical_passages_do_not_crowd_out_others(workshop: Workshop) -> None:
    for number in range(10):
        workshop.write(f"copy{number}.txt", "The same words in every one of these files.")
    workshop.run()
    found = workshop.library.search(LetterEmbedder("letters").embed(["the same words"]), 3)
    assert len({passage.text for passage in found}) == 3


def test_a_file_name_that_is_not_utf8(workshop: Workshop) -> None:
    with open(os.fsencode(workshop.corpus) + b"/bad\xff.txt", "wb") as file:
        file.write(b"Some text.")
    workshop.write("two\nlines \u00e9.txt", "Some other text of some length.")
    report = workshop.run()
    assert report.added == 3 and "not UTF-8" in report.failed[0]["error"]
    json.dumps(report.to_dict()).encode()


def test_a_model_that_cannot_load_binds_the_store_to_nothing(workshop: Workshop, tmp_path: Path) -> None:
    """The first run fails for a wrong model's name; the next one, with the right name, goes on in the same folder."""
    wrong = CacheClipEngine(primary=str(tmp_path / "no-model"), auxiliary=None, store=str(workshop.store))
    right, workshop.engine = workshop.engine, wrong
    with pytest.raises(UnknownModelError):
        workshop.run(primary=wrong.config.primary)
    assert workshop.library.settings is None
    workshop.engine = right
    assert workshop.run().added == 2
    assert workshop.library.settings == workshop.settings


def test_a_document_is_read_when_its_turn_comes(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are not kept in memory: each is read after the one before was recorded."""
    events: list[str] = []
    read, replace = passages.read_document, workshop.library.replace
    monkeypatch.setattr(
        passages, "read_document", lambda path, digest: events.append(f"read {path.name}") or read(path, digest)
    )
    monkeypatch.setattr(
        workshop.library, "replace", lambda path, *rest: events.append("recorded") or replace(path, *rest)
    )
    workshop.run()
    assert events == ["read a.txt", "recorded", "read b.md", "recorded"]


def test_files_that_change_or_vanish_during_a_run_are_reported(workshop: Workshop, chunks: list[str]) -> None:
    workshop.write("c.txt", chunks[3])
    workshop.write("d.txt", "A text that makes room for a pipe of the same name.")
    precompute = workshop.engine.precompute

    def meanwhile(texts: list[str], **options: Any) -> int:
        (workshop.corpus / "b.md").unlink(missing_ok=True)
        workshop.write("c.txt", "Something else, written while the run was going on.")
        if not (workshop.corpus / "d.txt").is_fifo():
            (workshop.corpus / "d.txt").unlink()
            os.mkfifo(workshop.corpus / "d.txt")
        return precompute(texts, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workshop.engine, "precompute", meanwhile)
        report = workshop.run()
    assert report.added == 1
    errors = {Path(failure["path"]).name: failure["error"] for failure in report.failed}
    assert sorted(errors) == ["b.md", "c.txt", "d.txt"]
    assert "No such file" in errors["b.md"] and "was changed" in errors["c.txt"] and "pipe" in errors["d.txt"]
    (workshop.corpus / "d.txt").unlink()
    assert workshop.run().added == 1


def test_a_limit_that_evicts_this_runs_chunks_is_reported(workshop: Workshop) -> None:
    def planned(max_bytes: int | None) -> IngestPlan:
        return plan_ingestion(
            [workshop.corpus],
            library=workshop.library,
            engine=workshop.engine,
            settings=workshop.settings,
            max_bytes=max_bytes,
        )

    cost = planned(None)
    assert cost.excess_bytes == 0
    assert planned(cost.bytes // 2).excess_bytes == cost.bytes - cost.bytes // 2
    assert planned(4 * cost.bytes).excess_bytes == 0
    workshop.engine.store.chunk_store.set_limit(cost.bytes // 2)
    report = workshop.run()
    stored = [workshop.engine.is_stored(text) for _, _, text in workshop.library.passages()]
    assert report.evicted == stored.count(False) > 0
    workshop.engine.store.chunk_store.set_limit(None)
    workshop.write("a.txt", "Another text, which is short enough to be stored.")
    assert workshop.run().evicted == 0


class TestLinks:
    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        folder = tmp_path / "outside"
        folder.mkdir()
        (folder / "secret.txt").write_text("The combination of the safe is not for everybody.")
        return folder

    def test_links_out_of_the_folder_are_skipped_and_reported(self, workshop: Workshop, outside: Path) -> None:
        (workshop.corpus / "file.txt").symlink_to(outside / "secret.txt")
        (workshop.corpus / "folder").symlink_to(outside)
        report = workshop.run()
        assert report.added == 2 and report.failed == []
        assert {Path(skipped["path"]).name for skipped in report.skipped} == {"file.txt", "folder"}
        assert all("leads out of" in skipped["error"] for skipped in report.skipped)
        planned = plan_ingestion(
            [workshop.corpus], library=workshop.library, engine=workshop.engine, settings=workshop.settings
        )
        assert planned.skipped == report.skipped

    def test_a_file_that_became_a_link_to_the_outside_is_removed(self, workshop: Workshop, outside: Path) -> None:
        workshop.run()
        (workshop.corpus / "a.txt").unlink()
        (workshop.corpus / "a.txt").symlink_to(outside / "secret.txt")
        report = workshop.run()
        assert (report.removed, report.documents, len(report.skipped)) == (1, 1, 1)

    def test_a_given_path_may_be_a_link(self, workshop: Workshop, outside: Path, tmp_path: Path) -> None:
        link = tmp_path / "link"
        link.symlink_to(outside)
        common = {"library": workshop.library, "engine": workshop.engine, "settings": workshop.settings}
        report = ingest([link], embedder=LetterEmbedder("letters"), **common)
        assert report.added == 1 and report.skipped == []

    def test_loops_devices_and_pipes_stop_nothing(self, workshop: Workshop) -> None:
        (workshop.corpus / "self").symlink_to(workshop.corpus)
        (workshop.corpus / "loop.txt").symlink_to(workshop.corpus / "loop.txt")
        (workshop.corpus / "zero.txt").symlink_to("/dev/zero")
        os.mkfifo(workshop.corpus / "pipe.txt")
        report = workshop.run()
        assert report.added == 2
        assert {Path(skipped["path"]).name for skipped in report.skipped} == {"loop.txt", "zero.txt", "pipe.txt"}
        with pytest.raises(DocumentError, match="neither a file nor a folder"):
            list(find_files([workshop.corpus / "pipe.txt"]))


def test_a_folder_that_cannot_be_read_is_reported_and_keeps_its_documents(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = workshop.corpus / "inner"
    inner.mkdir()
    (inner / "c.txt").write_text("Some text of some length in an inner folder.")
    assert workshop.run().added == 3
    scandir, stat = os.scandir, os.stat

    def refused(path: Any, *, also_itself: bool = False) -> None:
        path = Path(os.fsdecode(path))
        if inner in path.parents or (also_itself and path == inner):
            raise PermissionError(13, "Permission denied", str(inner))

    with monkeypatch.context() as patch:  # permissions do not stop root
        patch.setattr(os, "scandir", lambda path: refused(path, also_itself=True) or scandir(path))
        patch.setattr(os, "stat", lambda path, **rest: (isinstance(path, int) or refused(path)) or stat(path, **rest))
        report = workshop.run()
    assert (report.removed, report.documents) == (0, 3)
    assert [Path(failure["path"]).name for failure in report.failed] == ["inner"]


def test_a_packaged_model_is_the_same_with_and_without_its_prefix(tmp_path: Path) -> None:
    """Older stores name it without."""
    known = LibrarySettings("smollm2-135m", None, "all-MiniLM-L6-v2", "float32", "default", 32, 0, "prefix")
    library = Library(tmp_path)
    library.fix_settings(known)
    library.check_settings(
        dataclasses.replace(known, primary="packaged:smollm2-135m", embedding="packaged:all-MiniLM-L6-v2")
    )
    with pytest.raises(ConfigurationError, match="was made with primary 'smollm2-135m', not 'packaged:gemma-3-270m'"):
        library.check_settings(dataclasses.replace(known, primary="packaged:gemma-3-270m"))


@pytest.mark.parametrize(
    ("made", "now"),
    [
        ("/old/tiny-llama", "/new/place/tiny-llama"),
        ("/old/tiny.Q4_K_M.gguf", "./tiny.Q4_K_M.gguf"),
    ],
)
def test_a_model_that_was_moved_is_the_same(tmp_path: Path, made: str, now: str) -> None:
    """By the last part of its path: KV is found by digests."""
    known = dataclasses.replace(LibrarySettings(), primary=made, auxiliary=made)
    Library(tmp_path).fix_settings(known)
    Library(tmp_path).check_settings(dataclasses.replace(known, primary=now, auxiliary=now))
    for other in (now.replace("tiny", "other"), "owner/tiny-llama", None):
        with pytest.raises(ConfigurationError, match=re.escape(f"auxiliary {made!r}, not {other!r}. Leave")):
            Library(tmp_path).check_settings(dataclasses.replace(known, auxiliary=other))
    library = Library(tmp_path / "another")
    library.fix_settings(dataclasses.replace(known, namespace="/a/b"))
    with pytest.raises(ConfigurationError, match="was made with namespace '/a/b', not '/c/b'"):
        library.check_settings(dataclasses.replace(known, namespace="/c/b"))
