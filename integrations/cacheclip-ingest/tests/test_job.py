"""Ingestion runs on tiny models: incremental, resumable, and nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cacheclip_ingest import passages
from cacheclip_ingest.documents import find_files
from cacheclip_ingest.embedding import Embedder
from cacheclip_ingest.job import ingest, plan_ingestion
from cacheclip_ingest.library import Library, LibrarySettings
from cacheclip_ingest.splitting import Splitter
from ingest_cases import LetterEmbedder, Workshop

from cacheclip_rag import CacheClipEngine, ConfigurationError, DocumentError, DownloadError, StoreError
from cacheclip_rag.models import checkpoints


def test_everything_once_then_nothing(workshop: Workshop) -> None:
    first = workshop.run()
    assert (first.documents, first.added, first.failed) == (2, 2, [])
    assert first.computed == first.chunks == len(workshop.library.passages()) >= 4
    assert all(workshop.engine.is_stored(text) for _, _, text in workshop.library.passages())
    again = workshop.run()
    assert (again.unchanged, again.added, again.changed, again.computed) == (2, 0, 0, 0)


def test_a_plan_says_what_a_run_then_does(workshop: Workshop) -> None:
    planned = workshop.plan
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
        store.delete([caches.prefix.key])  # the shared prefix is no chunk
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


def test_other_settings_than_the_store_was_made_with_are_refused(workshop: Workshop) -> None:
    workshop.run()
    with pytest.raises(ConfigurationError, match="chunk_tokens 32, not 64"):
        workshop.run(chunk_tokens=64)


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
    auxiliary = nowhere if lacks == "auxiliary" else workshop.settings.auxiliary
    engine = CacheClipEngine(primary=workshop.settings.primary, auxiliary=auxiliary, store=workshop.store)
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


def test_identical_passages_do_not_crowd_out_others(workshop: Workshop) -> None:
    for number in range(10):
        workshop.write(f"copy{number}.txt", "The same words in every one of these files.")
    workshop.run()
    found = workshop.library.search(LetterEmbedder("letters").embed(["the same words"]), 3)
    assert len({passage.text for passage in found}) == 3


def test_a_document_is_read_when_its_turn_comes(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are not kept in memory: each is read after the one before was recorded."""
    events: list[str] = []
    read, replace = passages.read_document, workshop.library.replace
    monkeypatch.setattr(passages, "read_document", lambda path, digest: events.append(path.name) or read(path, digest))
    monkeypatch.setattr(workshop.library, "replace", lambda path, *rest: events.append("kept") or replace(path, *rest))
    workshop.run()
    assert events == ["a.txt", "kept", "b.md", "kept"]


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
        planned = workshop.plan()
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


def test_a_packaged_model_is_the_same_with_and_without_its_prefix(tmp_path: Path) -> None:
    """Older stores name it without."""
    known = LibrarySettings("smollm2-135m", None, "all-MiniLM-L6-v2", "float32", "default", 32, 0, "prefix")
    library = Library(tmp_path)
    library.fix_settings(known)
    packaged = {"primary": "packaged:smollm2-135m", "embedding": "packaged:all-MiniLM-L6-v2"}
    library.check_settings(dataclasses.replace(known, **packaged))
    with pytest.raises(ConfigurationError, match="was made with primary 'smollm2-135m', not 'packaged:gemma-3-270m'"):
        library.check_settings(dataclasses.replace(known, primary="packaged:gemma-3-270m"))


@pytest.mark.parametrize(
    ("made", "now"), [("/old/tiny-llama", "/new/place/tiny-llama"), ("/old/tiny.Q4_K_M.gguf", "./tiny.Q4_K_M.gguf")]
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
