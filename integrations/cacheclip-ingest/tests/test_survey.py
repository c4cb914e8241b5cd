"""What an ingestion finds and what is gone, for a store folder and for a shared store alike."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest
from cacheclip_ingest import survey
from cacheclip_ingest.job import ingest, plan_ingestion
from cacheclip_ingest.library import Library, LibrarySettings
from cacheclip_ingest.removal import remove_documents
from cacheclip_ingest.survey import IngestCounts, is_in
from cacheclip_shared.table import TextTable
from ingest_cases import OneVector

from cacheclip_rag import CacheClipEngine, ConfigurationError, DocumentError, StoreError

PICTURE = "\n\n![plan](data:image/png;base64," + "iVBORw0KGgoAAAANSUhEUg" * 40 + ")\n"


class Door:
    """A store, and a folder ``documents`` with ``a.md`` and ``sub/b.md``."""

    def __init__(self, root: Path, models: dict[str, str]) -> None:
        self.documents, self.store = root / "documents", self.place(root)
        self.write("a.md", "The lighthouse of Brindle Point was built in 1847.")
        self.write("sub/b.md", "Its lamp burned whale oil until 1871.")
        names = {"primary": models["llama"], "auxiliary": models["auxiliary"], "dtype": "float32"}
        self.settings = LibrarySettings(**names, chunk_context="prefix")
        self.config = self.settings.engine_config(self.store, device="cpu")

    def place(self, root: Path) -> str:
        raise NotImplementedError

    def write(self, name: str, text: str | bytes) -> Path:
        file = self.documents / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    def run(self, *paths: Path | str, confirmed: bool = False, dry: bool = False, **changes: Any) -> Any:
        raise NotImplementedError

    def texts(self) -> dict[str, str]:
        """What is stored, by document; paths below the folder are relative to it."""
        found: dict[str, str] = {}
        for name, text in self.rows():
            name = name.removeprefix(f"{self.documents}/")
            found[name] = found.get(name, "") + text
        return found

    def rows(self) -> Sequence[tuple[str, str]]:
        raise NotImplementedError

    def remove(self, *documents: str, **options: Any) -> list[str]:
        return remove_documents(self.store, documents, **options)


class FolderDoor(Door):
    def place(self, root: Path) -> str:
        return str(root / "store")

    def run(self, *paths: Path | str, confirmed: bool = False, dry: bool = False, **changes: Any) -> IngestCounts:
        settings = LibrarySettings(**{**vars_of(self.settings), **changes})
        engine, library = CacheClipEngine(self.config), Library(self.store)
        common: dict[str, Any] = {"library": library, "engine": engine, "settings": settings, "confirmed": confirmed}
        run = plan_ingestion if dry else ingest
        try:
            return run(paths or [self.documents], embedder=OneVector("one"), **common)
        finally:
            engine.close()
            library.close()

    def rows(self) -> list[tuple[str, str]]:
        return [(name, text) for name, _, text in Library(self.store).passages()]


class SharedDoor(Door):
    def place(self, root: Path) -> str:
        from cacheclip_shared.care import create

        create(url := f"file://{root}/shared")
        return url

    def run(self, *paths: Path | str, confirmed: bool = False, dry: bool = False, **changes: Any) -> IngestCounts:
        from cacheclip_ingest.shared import ingest_shared, plan_shared

        settings = LibrarySettings(**{**vars_of(self.settings), **changes})
        run: Any = plan_shared if dry else ingest_shared
        found = run([*map(str, paths or [self.documents])], self.config, settings, confirmed=confirmed)
        assert isinstance(found, IngestCounts)
        return found

    def rows(self) -> list[tuple[str, str]]:
        from cacheclip_ingest import Commit

        rows = Commit(self.store).table("default").rows(["document", "text"]).to_pylist()
        return [(row["document"], row["text"]) for row in rows]


def vars_of(settings: LibrarySettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in LibrarySettings.__dataclass_fields__}


@pytest.fixture(params=["folder", "shared"])
def door(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Door:
    if request.param == "folder":
        return FolderDoor(tmp_path, tiny_models)
    for name in ("pyarrow", "obstore", "deltalake"):
        pytest.importorskip(name, reason="the extra shared is not installed: pip install -e '.[shared]'")
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    return SharedDoor(tmp_path, tiny_models)


@contextmanager
def failing(function: str, code: int, *names: str) -> Iterator[None]:
    """``os.FUNCTION`` fails for paths with these last parts: rights do not stop root."""
    real: Callable[..., Any] = getattr(os, function)

    def fails(path: Any, *rest: Any, **options: Any) -> Any:
        if not isinstance(path, int) and Path(os.fsdecode(path)).name in names:
            raise OSError(code, os.strerror(code), os.fsdecode(path))
        return real(path, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, function, fails)
        yield


def names_of(problems: Sequence[dict[str, str]]) -> list[str]:
    return [Path(each["path"]).name for each in problems]


class TestWhatCannotBeLookedAt:
    """It is a failure, its documents stay, and the others are ingested."""

    @pytest.mark.some(4)
    @pytest.mark.parametrize(
        ("function", "name", "failed", "code"),
        [
            ("scandir", "sub", "sub", errno.EACCES),
            ("lstat", "sub", "sub", errno.EIO),
            ("lstat", "b.md", "b.md", errno.ESTALE),
            ("open", "b.md", "b.md", errno.EACCES),
            ("scandir", "documents", "documents", errno.EIO),
            ("stat", "documents", "documents", errno.ESTALE),
        ],
    )
    def test_a_file_or_folder(self, door: Door, function: str, name: str, failed: str, code: int) -> None:
        door.run()
        before = door.texts()
        door.write("c.md", "A keeper and two assistants lived on the rock.")
        for confirmed in (False, True):
            with failing(function, code, name):
                report = door.run(confirmed=confirmed)
            assert names_of(report.failed) == [failed] and (report.removed, report.unconfirmed) == (0, [])
            assert door.texts().items() >= before.items()
        assert ("c.md" in door.texts()) == (failed != "documents")
        assert door.run().failed == []

    def test_a_folder_that_lost_its_files_while_it_could_not_be_read(self, door: Door) -> None:
        door.run()
        (door.documents / "sub" / "b.md").unlink()
        with failing("scandir", errno.EIO, "sub"):
            assert door.run(confirmed=True).removed == 0 and "sub/b.md" in door.texts()
        assert door.run().removed == 1

    @pytest.mark.parametrize(("failing_name", "code"), [("c.md", errno.ENOTCONN), (".hidden", errno.ETIMEDOUT)])
    def test_a_document_in_a_hidden_folder(self, door: Door, code: int, failing_name: str) -> None:
        """It was given by its own name; its folder is not read."""
        door.run(door.documents, door.write(".hidden/c.md", "A keeper and two assistants lived on the rock."))
        for dry in (True, False):
            with failing("lstat", code, failing_name):
                report = door.run(dry=dry, confirmed=True)
            assert report.removed == 0 and names_of(report.failed) == ["c.md"]
            assert "cannot be looked at" in report.failed[0]["error"]
        (door.documents / ".hidden" / "c.md").unlink()
        assert door.run().removed == 1

    def test_a_name_that_begins_like_a_home_folder(self, door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(door.documents)
        door.write("~$a.md", "Somebody edits this document.")
        assert door.run("~$a.md", "a.md").added == 2
        with pytest.raises(DocumentError, match="no such file or folder: ~gone/x.md"):
            door.run("~gone/x.md")
        with pytest.raises(DocumentError, match="no document ~gone/x.md"):
            door.remove("~gone/x.md")
        with pytest.raises(DocumentError, match="no documents under ~gone"):
            door.remove(under="~gone")
        assert door.remove("~$a.md") == [str(door.documents / "~$a.md")] and [*door.texts()] == ["a.md"]

    def test_a_link_that_cannot_be_followed(self, door: Door) -> None:
        (door.documents / "link.md").symlink_to(door.documents / "far" / "c.md")
        with failing("stat", errno.EACCES, "link.md"):
            report = door.run()
        assert report.added == 2 and names_of(report.failed) == ["link.md"]

    def test_a_name_that_is_not_utf8(self, door: Door) -> None:
        with open(os.fsencode(door.documents) + b"/bad\xff.md", "wb") as file:
            file.write(b"Some text.")
        report = door.run()
        assert report.added == 2 and "not UTF-8" in report.failed[0]["error"]
        assert door.run(dry=True).failed == report.failed

    def test_a_given_folder_that_is_not_there(self, door: Door) -> None:
        door.run()
        door.documents.rename(door.documents.with_name("away"))
        with pytest.raises(DocumentError, match="cacheclip store remove"):
            door.run(confirmed=True)
        assert len(door.texts()) == 2


class TestDocumentsThatAreTakenBack:
    def test_an_emptied_document(self, door: Door) -> None:
        """Its text goes, and later runs are good."""
        door.run()
        door.write("a.md", " \n")
        planned, report, again = door.run(dry=True), door.run(), door.run()
        assert planned.removed == report.removed == 1 and [*door.texts()] == ["sub/b.md"]
        for each in (planned, report, again):
            assert each.failed == [] and names_of(each.skipped) == ["a.md"] and each.unchanged == 1
        assert again.removed == 0

    @pytest.mark.some(2)
    @pytest.mark.parametrize(
        ("name", "after", "note"),
        [
            ("a.html", "<script>x()</script>", ""),
            ("a.html", "<img src=plan.png>", "picture"),
            ("a.html", "<p hidden>Out of order.</p>", "switched off"),
            ("b.md", "<!-- Out of order. -->\n", "comment"),
            ("c.pdf", "", ""),
        ],
    )
    def test_a_document_without_visible_text(self, door: Door, name: str, after: str, note: str) -> None:
        from pdf_cases import pdf

        said = "The tide mill grinds at night."
        file = door.write(name, pdf(said) if name.endswith(".pdf") else said)
        door.run(door.documents, file)
        door.write(name, after)
        planned, report, again = (door.run(door.documents, file, dry=dry) for dry in (True, False, False))
        assert sorted(door.texts()) == ["a.md", "sub/b.md"] and (planned.removed, report.removed) == (1, 1)
        for each in (planned, report, again):
            assert each.failed == [] and {*names_of(each.skipped)} == {name} and each.unchanged == 2
            assert note in str(each.notes) and len(each.notes) == bool(note)

    def test_what_may_hold_text_that_cannot_be_read(self, door: Door) -> None:
        """A scanned page: its old text stays, and every run says so."""
        from pdf_cases import pdf

        door.write("c.pdf", pdf("The tide mill grinds at night."))
        door.run()
        door.write("c.pdf", pdf(""))
        door.write("new.pdf", pdf(""))
        for dry in (True, False, False):
            told = {Path(each["path"]).name: each["error"] for each in door.run(dry=dry).failed}
            assert "still stored; cacheclip store remove" in told["c.pdf"] and "still" not in told["new.pdf"]
        assert "c.pdf" in door.texts() and "new.pdf" not in door.texts()

    def test_a_folder_that_was_moved_and_a_link_in_its_place(self, door: Door, tmp_path: Path) -> None:
        door.run()
        (door.documents / "sub").rename(tmp_path / "elsewhere")
        (door.documents / "sub").symlink_to(tmp_path / "elsewhere")
        report = door.run()
        assert report.removed == 1 and [*door.texts()] == ["a.md"] and names_of(report.skipped) == ["sub"]

    @pytest.mark.parametrize("moved", ["sub", "."])
    def test_a_folder_that_was_moved_to_where_it_is_read(self, door: Door, tmp_path: Path, moved: str) -> None:
        """Nothing is lost: nobody is asked, and no document is there twice."""
        door.run()
        old = (door.documents / moved).resolve()
        new = door.documents / "new" if moved == "sub" else tmp_path / "new"
        old.rename(new)
        old.symlink_to(new)
        report = door.run()
        assert report.removed == report.added == (1 if moved == "sub" else 2) and report.unconfirmed == []
        assert len(door.texts()) == 2 and report.computed == 0

    @pytest.mark.some(2)
    @pytest.mark.parametrize(("link", "file"), [("a_link.md", "sub/b.md"), ("0.md", "notes.log"), ("sub/0.md", "a.md")])
    def test_a_link_beside_its_file(self, door: Door, link: str, file: str) -> None:
        """The file is read, and its text is never an old one."""
        given = [door.documents, door.write(file, "The tide mill grinds at night.")]
        door.run(*given)
        (door.documents / link).symlink_to(given[1])
        assert door.run(*given).added == 0
        door.write(file, "The tide mill stands still.")
        assert door.run(*given).changed == 1
        assert link not in door.texts() and door.texts()[file] == "The tide mill stands still."


class TestMostIsGone:
    def test_an_empty_mount_point(self, door: Door) -> None:
        """A run asks, a dry run shows it, and a confirmed run removes."""
        door.run()
        files = [*door.documents.rglob("*.md")]
        for file in files:
            file.unlink()
        for dry in (True, False):
            report = door.run(dry=dry)
            assert report.removed == 0 and report.unconfirmed == sorted(map(str, files)) and len(door.texts()) == 2
        assert door.run(dry=True, confirmed=True).removed == 2 == len(door.texts())
        report = door.run(confirmed=True)
        assert (report.removed, report.unconfirmed, door.texts()) == (2, [], {})

    def test_of_one_given_folder(self, door: Door, tmp_path: Path) -> None:
        """Fewer than half of all documents; nothing at all is removed then, and new ones are ingested."""
        other = tmp_path / "other"
        other.mkdir()
        for number in range(4):
            (other / f"{number}.md").write_text(f"The foghorn could be heard {number} miles away.")
        door.run(door.documents, other)
        (door.documents / "a.md").unlink()
        (door.documents / "sub" / "b.md").unlink()
        (other / "0.md").unlink()
        (other / "new.md").write_text("Seabirds nest on the eastern cliffs.")
        report = door.run(door.documents, other)
        assert (report.added, report.removed, len(report.unconfirmed)) == (1, 0, 3) and len(door.texts()) == 7

    @pytest.mark.some(3)
    @pytest.mark.parametrize("by_name", [False, True])
    def test_several_that_were_emptied(self, door: Door, by_name: bool) -> None:
        """A disk was full while they were written."""
        for number in range(3):
            door.write(f"{number}.md", f"The foghorn could be heard {number} miles away.")
        given = sorted(door.documents.rglob("*.md")) if by_name else [door.documents]
        door.run(*given)
        for name in ("a.md", "0.md", "1.md"):
            door.write(name, "")
        for dry in (True, False):
            report = door.run(*given, dry=dry)
            assert (report.removed, len(report.unconfirmed), len(door.texts())) == (0, 3, 5)
        assert door.run(*given, confirmed=True).removed == 3

    @pytest.mark.parametrize("new", [0, 1])
    def test_a_text_that_was_always_elsewhere_too(self, door: Door, tmp_path: Path, new: int) -> None:
        """It is not where they were moved to."""
        said = "The foghorn could be heard two miles away."
        for name in ("template.md", "all/0.md", "all/1.md", "all/2.md"):
            door.write(name, said)
        given = door.documents / "all"
        door.run(door.documents, given)
        for number in range(3):
            (given / f"{number}.md").unlink()
        for number in range(new):
            door.write(f"new{number}.md", said)
        report = door.run(door.documents, given)
        assert (report.removed, len(report.unconfirmed), len(door.texts())) == (0, 3, 6 + new)

    def test_an_empty_mount_point_below_a_given_folder(self, door: Door) -> None:
        for number in range(4):
            door.write(f"mount/far/{number}.md", f"The foghorn could be heard {number} miles away.")
            door.write(f"{number}.md", f"Seabirds nest on cliff {number}.")
        door.run()
        (door.documents / "mount" / "far").rename(away := door.documents.parent / "away")
        for dry in (True, False):
            report = door.run(dry=dry)
            assert (report.removed, len(report.unconfirmed), len(door.texts())) == (0, 4, 10)
        away.rename(door.documents / "mount" / "far")
        assert door.run().unchanged == 10
        (door.documents / "mount" / "far" / "0.md").unlink()
        assert door.run().removed == 1, "one of them"

    def test_a_folder_that_was_deleted(self, door: Door) -> None:
        """Not with all that is in its own folder, nor is it most of a given one: nobody is asked."""
        for number in range(2):
            door.write(f"sub/old/{number}.md", f"The foghorn could be heard {number} miles away.")
            door.write(f"{number}.md", f"Seabirds nest on cliff {number}.")
        door.run()
        shutil.rmtree(door.documents / "sub" / "old")
        assert door.run().removed == 2

    def test_renamed_documents_are_not_gone(self, door: Door) -> None:
        door.run()
        door.write("z.md", (door.documents / "a.md").read_bytes())
        (door.documents / "a.md").unlink()
        (door.documents / "sub").rename(door.documents / "tub")
        report = door.run()
        assert (report.added, report.removed, report.computed) == (2, 2, 0)
        assert sorted(door.texts()) == ["tub/b.md", "z.md"]

    def test_what_stands_elsewhere_and_cannot_be_read_there_is_gone(self, door: Door) -> None:
        door.run()
        for name in ("a.md", "sub/b.md"):
            (door.documents / name).rename(door.documents / name.replace(".", "2."))
        with pytest.MonkeyPatch.context() as patch:
            read = "cacheclip_ingest.passages.read_document"
            patch.setattr(read, lambda path, digest: (_ for _ in ()).throw(DocumentError(f"{path} is gone")))
            report = door.run()
        assert len(report.failed) == len(report.unconfirmed) == 2 == len(door.texts())


class TestWhatIsLeftOut:
    def test_notes_and_skipped_paths_are_reported(self, door: Door) -> None:
        door.write("a.md", "The lighthouse of Brindle Point was built in 1847." + PICTURE)
        door.write("c.odt", "x")
        door.write(".hidden.md", "Nobody reads this.")
        door.write("bad.md", b"\x00\x01\x02")
        for dry in (True, False):
            report = door.run(dry=dry)
            assert names_of(report.notes) == ["a.md"] and "picture" in report.notes[0]["note"]
            assert names_of(report.skipped) == ["c.odt"] and names_of(report.failed) == ["bad.md"]
            assert (report.added, report.chunks) == (2, 2) and report.computed == 2
        assert sorted(door.texts()) == ["a.md", "sub/b.md"]

    def test_a_document_whose_type_is_skipped_now_stays(self, door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
        """It was given by its own name, or could be read by another installation."""
        from pdf_cases import pdf

        log = door.write("notes.log", "Some notes of some length about the harbour.")
        hidden = door.write(".kept.md", "Some notes that only who knows them gives.")
        door.write("c.pdf", pdf("The harbour master keeps a parrot."))
        assert door.run(door.documents, log, hidden).added == 5
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "pypdf" else find_spec(name))
        report = door.run(confirmed=True)
        assert (report.removed, sorted(names_of(report.skipped))) == (0, ["c.pdf", "notes.log"])
        assert len(door.texts()) == 5
        for file in (log, hidden):
            file.unlink()
        assert door.run().removed == 2

    @pytest.mark.some(2)
    def test_a_document_that_no_model_takes_stops_no_other(self, door: Door) -> None:
        door.write("long.md", "word " * 5000)
        planned, report = (door.run(dry=dry, chunk_tokens=6000) for dry in (True, False))
        for each in (planned, report):
            assert each.added == 2 and names_of(each.failed) == ["long.md"] and "smaller" in each.failed[0]["error"]
        assert sorted(door.texts()) == ["a.md", "sub/b.md"]


class TestRemoval:
    def test_by_name_and_under_a_path(self, door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
        door.write("sub/c.md", "A keeper and two assistants lived on the rock.")
        door.run()
        monkeypatch.chdir(door.documents)
        (door.documents / "a.md").unlink()
        assert door.remove("a.md") == [str(door.documents / "a.md")]
        assert sorted(door.texts()) == ["sub/b.md", "sub/c.md"]
        assert len(door.remove(under=f"{door.documents}/sub/")) == 2 and door.texts() == {}
        assert door.run().added == 2, "what is still there comes back"

    def test_kv_that_no_document_needs_goes_too(self, door: Door) -> None:
        door.write("copy.md", (door.documents / "a.md").read_bytes())
        door.run()
        text = door.texts()["a.md"]
        for name, is_stored in (("a.md", True), ("copy.md", False)):
            door.remove(str(door.documents / name))
            engine = CacheClipEngine(door.config)
            if isinstance(door, FolderDoor):
                assert engine.is_stored(text) == is_stored
            assert (text in door.texts().values()) == is_stored
            engine.close()

    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        ("documents", "under", "error"),
        [
            (["{}/a.md", "{}/aa.md"], None, DocumentError),
            (["{}/a.md"], "{}/su", DocumentError),
            ([], None, ConfigurationError),
            (["{}/a.md"], "", ConfigurationError),
        ],
    )
    def test_what_it_refuses(self, door: Door, documents: list[str], under: str | None, error: type[Exception]) -> None:
        """Nothing is removed then."""
        door.run()
        named = [name.format(door.documents) for name in documents]
        with pytest.raises(error) as raised:
            door.remove(*named, under=under and under.format(door.documents))
        assert len(door.texts()) == 2
        assert error is ConfigurationError or "the store has no document" in str(raised.value)

    def test_of_another_tenant(self, door: Door) -> None:
        door.run()
        for named in ({"under": str(door.documents)}, {"documents": [str(door.documents / "a.md")]}):
            with pytest.raises((ConfigurationError, DocumentError), match="'default', not|'other' .* no documents"):
                remove_documents(door.store, namespace="other", **named)
        assert len(door.texts()) == 2

    def test_a_folder_by_its_name(self, door: Door) -> None:
        door.run()
        with pytest.raises(DocumentError, match=f"folder of 1 documents: .*--under {door.documents}/sub/"):
            door.remove(f"{door.documents}/sub/")
        assert len(door.texts()) == 2

    def test_a_store_that_fails_midway(self, door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was removed is told, nothing stays open, and another call removes the others. A shared store removes
        all at once."""
        door.run()
        closed: list[object] = []
        for kind in (CacheClipEngine, Library):
            monkeypatch.setattr(kind, "close", lambda self, close=kind.close: (closed.append(self), close(self)))
        is_folder = isinstance(door, FolderDoor)
        place = CacheClipEngine.release if is_folder else TextTable.commit
        calls = iter([place] if is_folder else [])

        def fails(*arguments: Any) -> Any:
            if real := next(calls, None):
                return real(*arguments)
            raise StoreError("the disk is full.")

        with monkeypatch.context() as patch:
            patch.setattr(CacheClipEngine if is_folder else TextTable, place.__name__, fails)
            told = rf"the disk is full\.( Removed already: {door.documents}/a.md\.)?"
            with pytest.raises(StoreError, match=told) as raised:
                door.remove(under=str(door.documents))
        assert ("already" in str(raised.value)) == is_folder and len(closed) == 2 * is_folder
        assert len(door.texts()) == 2 - is_folder
        assert len(door.remove(under=str(door.documents))) == 2 - is_folder and door.texts() == {}


def test_a_document_and_its_folders() -> None:
    assert is_in("/docs/sub/a.md", "/docs") and is_in("/docs/a.md", "/") and is_in("s3://b/docs/a.md", "s3://b")
    assert not is_in("/docs", "/docs") and not is_in("/docs2/a.md", "/docs") and not is_in("s3://bb/a.md", "s3://b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "PurePath", PureWindowsPath)
        assert is_in(r"C:\docs\sub\a.md", r"C:\docs") and is_in(r"C:\a.md", "C:\\")
        assert not is_in(r"C:\docs2\a.md", r"C:\docs") and is_in("s3://b/docs/a.md", "s3://b/docs")
