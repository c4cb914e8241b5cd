"""Damaged libraries: nothing damaged is used, and every message names the file and the way out."""

from __future__ import annotations

import logging
import random
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from cacheclip_ingest.care import check_library, repair_library
from cacheclip_ingest.embedding import Vectors
from cacheclip_ingest.library import FILE_NAME, Library, LibrarySettings

from cacheclip_rag import ConfigurationError, StoreError

SETTINGS = LibrarySettings("primary", None, "letters", "float32", "default", 32, 0, "prefix")
DIMENSIONS = 8


def vectors(*numbers: int) -> Vectors:
    """Unit vectors; equal numbers give equal vectors."""
    return np.eye(DIMENSIONS, dtype=np.float32)[list(numbers)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A library of two documents with three passages each."""
    library = Library(tmp_path / "store")
    library.fix_settings(SETTINGS)
    for number, name in enumerate(("a.txt", "b.txt")):
        texts = [f"Passage {n} of {name}." for n in range(3)]
        library.replace(name, f"digest of {name}", texts, vectors(*range(3 * number, 3 * number + 3)))
    library.close()
    return tmp_path / "store"


def change(folder: Path, sql: str, *arguments: object) -> None:
    connection = sqlite3.connect(folder / FILE_NAME)
    with connection:
        assert connection.execute(sql, arguments).rowcount == 1
    connection.close()


DAMAGE = {
    "text": ("UPDATE passages SET text = 'Something else.' WHERE path = 'a.txt' AND ordinal = 1", ()),
    "not UTF-8": ("UPDATE passages SET text = CAST(x'ff41' AS TEXT) WHERE path = 'a.txt' AND ordinal = 1", ()),
    "number": ("UPDATE passages SET ordinal = 7 WHERE path = 'a.txt' AND ordinal = 1", ()),
    "vector": ("UPDATE passages SET vector = ? WHERE path = 'a.txt' AND ordinal = 1", (vectors(5)[0].tobytes(),)),
    "length of the vector": ("UPDATE passages SET vector = x'00' WHERE path = 'a.txt' AND ordinal = 1", ()),
    "type of the vector": ("UPDATE passages SET vector = 'text' WHERE path = 'a.txt' AND ordinal = 1", ()),
    "digest": ("UPDATE passages SET digest = x'00' WHERE path = 'a.txt' AND ordinal = 1", ()),
}


@pytest.mark.parametrize("damage", DAMAGE)
class TestDamagedPassage:
    def test_it_is_left_out_with_one_warning(self, folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
        sql, arguments = DAMAGE[damage]
        change(folder, sql, *arguments)
        library = Library.open(folder)
        for _ in range(2):
            for number in range(6):
                found = library.search(vectors(number), 6)
                assert len(found) == 5 and all(passage.text.startswith("Passage") for passage in found)
                if number != 1:
                    assert (found[0].score, found[0].text) == (1.0, f"Passage {number % 3} of {'ab'[number // 3]}.txt.")
                assert "Passage 1 of a.txt." not in [passage.text for passage in found]
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "a.txt" in record.getMessage()

    def test_its_document_is_done_again(self, folder: Path, damage: str) -> None:
        sql, arguments = DAMAGE[damage]
        change(folder, sql, *arguments)
        library = Library.open(folder)
        assert list(library.damaged()) == ["a.txt"]
        library.replace("a.txt", "digest", [f"Passage {n} of a.txt." for n in range(3)], vectors(0, 1, 2))
        assert library.damaged() == {} and library.search(vectors(1), 1)[0].text == "Passage 1 of a.txt."

    @pytest.mark.some(3)
    def test_repair_removes_the_document_and_nothing_else(self, folder: Path, damage: str) -> None:
        assert check_library(folder) == []
        sql, arguments = DAMAGE[damage]
        change(folder, sql, *arguments)
        (problem,) = check_library(folder)
        assert problem.startswith("a.txt: ")
        (done,) = repair_library(folder)
        assert "a.txt was removed" in done and "ingest it again" in done
        assert check_library(folder) == [] and repair_library(folder) == []
        assert list(Library.open(folder).documents()) == ["b.txt"]
        assert len(Library.open(folder).search(vectors(0), 9)) == 3


@pytest.mark.parametrize(
    ("sql", "path"),
    [
        ("DELETE FROM passages WHERE path = 'a.txt' AND ordinal = 2", "a.txt"),
        ("DELETE FROM documents WHERE path = 'a.txt'", "a.txt"),
        ("UPDATE documents SET path = CAST(x'ff' AS TEXT) WHERE path = 'a.txt'", "a.txt"),
        ("UPDATE documents SET num_passages = 9 WHERE path = 'a.txt'", "a.txt"),
    ],
)
def test_rows_that_are_missing(folder: Path, sql: str, path: str) -> None:
    change(folder, sql)
    assert path in Library.open(folder).damaged()
    assert any(problem.startswith(path) for problem in check_library(folder))
    assert repair_library(folder) != []
    assert check_library(folder) == [] and list(Library.open(folder).documents()) == ["b.txt"]


def noise(data: bytes) -> bytes:
    return random.Random(0).randbytes(len(data))


def foreign(data: bytes) -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE meta (id INTEGER)")
    connection.execute("PRAGMA user_version = 4")
    made: bytes = connection.serialize()
    connection.close()
    return made


DAMAGED_FILES = {
    "random bytes": noise,
    "cut": lambda data: data[: len(data) // 2],
    "cut in the first page": lambda data: data[:1000],
    "random pages": lambda data: data[:4096] + noise(data[4096:]),
    "another program's": foreign,
}


@pytest.mark.parametrize("damage", DAMAGED_FILES)
def test_a_damaged_file(folder: Path, damage: str) -> None:
    """The message names the file and the way out; repair makes room for a new library and keeps the old file."""
    file = folder / FILE_NAME
    file.write_bytes(DAMAGED_FILES[damage](file.read_bytes()))
    damaged = file.read_bytes()
    with pytest.raises(StoreError, match=f"{FILE_NAME}(.|\\n)*cacheclip (store repair|ingest PATH)"):
        Library.open(folder).search(vectors(0), 3)
    (problem, *_) = check_library(folder)
    assert FILE_NAME in problem
    (done,) = repair_library(folder)
    assert f"{FILE_NAME}.damaged" in done and "ingest the documents again" in done
    assert (folder / f"{FILE_NAME}.damaged").read_bytes() == damaged
    assert check_library(folder) == [] and repair_library(folder) == []
    (folder / f"{FILE_NAME}.damaged").unlink()
    (folder / f"{FILE_NAME}.damaged").mkdir()  # somebody's own
    file.write_bytes(damaged)
    (done,) = repair_library(folder)
    assert f"{FILE_NAME}.damaged~" in done and (folder / f"{FILE_NAME}.damaged~").read_bytes() == damaged
    library = Library(folder)
    library.fix_settings(SETTINGS)
    library.replace("a.txt", "digest", ["Some text."], vectors(0))
    assert [passage.text for passage in Library.open(folder).search(vectors(0), 3)] == ["Some text."]


@pytest.mark.parametrize(
    "sql",
    [
        """UPDATE meta SET value = replace(value, 'primary', 'primarz') WHERE name = 'settings'""",
        "UPDATE meta SET value = 'no json' WHERE name = 'settings'",
        "DELETE FROM meta WHERE name = 'settings'",
        "DELETE FROM meta WHERE name = 'settings_digest'",
    ],
)
def test_damaged_settings(folder: Path, sql: str) -> None:
    change(folder, sql)
    with pytest.raises(StoreError, match="cacheclip store repair"):
        Library.open(folder)
    assert len(check_library(folder)) == 1
    assert len(repair_library(folder)) == 1
    assert check_library(folder) == []


def test_a_locked_library_is_not_moved_aside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheclip_rag.base.database._BUSY_TIMEOUT_S", 0.01)
    change(folder, "UPDATE passages SET text = 'x' WHERE path = 'a.txt' AND ordinal = 1")
    other = sqlite3.connect(folder / FILE_NAME, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="locked"):
        repair_library(folder)
    other.close()
    assert not (folder / f"{FILE_NAME}.damaged").exists()


def test_no_library_is_no_problem(tmp_path: Path) -> None:
    assert check_library(tmp_path) == [] and repair_library(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


class TestVectors:
    def test_other_dimensions_than_the_library(self, folder: Path) -> None:
        library = Library.open(folder)
        other = np.ones((1, 5), np.float32)
        with pytest.raises(ConfigurationError, match="5 dimensions, but the passages .* have 8"):
            library.search(other, 1)
        with pytest.raises(ConfigurationError, match="5 dimensions"):
            library.replace("c.txt", "digest", ["Text."], other)
        assert "c.txt" not in library.documents()

    @pytest.mark.parametrize("wrong", [vectors(0), np.ones(2), np.full((2, DIMENSIONS), np.nan, np.float32)])
    def test_vectors_that_do_not_fit_the_texts(self, folder: Path, wrong: Vectors) -> None:
        with pytest.raises(ConfigurationError, match="expected 2 finite vectors"):
            Library(folder).replace("c.txt", "digest", ["One.", "Two."], wrong)


def test_changes_of_another_process_are_seen(folder: Path) -> None:
    library, other = Library.open(folder), Library.open(folder)
    assert library.search(vectors(7), 1)[0].score == 0
    other.replace("c.txt", "digest", ["New."], vectors(7))
    assert library.search(vectors(7), 1)[0].text == "New."
    other.remove("c.txt")
    assert library.search(vectors(7), 1)[0].score == 0
