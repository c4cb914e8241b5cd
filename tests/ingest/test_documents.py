"""Reading files: what is taken, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheclip_rag.errors import DocumentError
from cacheclip_rag.ingest.documents import find_files, read_document


def test_folders_give_text_and_markdown_once_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.md", "a.txt", "picture.png", ".hidden.txt", "sub/c.markdown"):
        (tmp_path / name).write_text("x")
    found = [p.relative_to(tmp_path).as_posix() for p in find_files([tmp_path, tmp_path / "a.txt"])]
    assert found == ["a.txt", "b.md", "sub/c.markdown"]


def test_a_named_file_is_taken_whatever_its_suffix(tmp_path: Path) -> None:
    log = tmp_path / "notes.log"
    log.write_text("hello")
    assert list(find_files([log])) == [log]


def test_missing_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="no such file or folder"):
        list(find_files([tmp_path / "nothing"]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"  \n\t ", "is empty"),
        (b"PK\x03\x04\x00\x00\x00", "binary"),
        ("caf\u00e9 na\u00efve".encode("latin-1"), "is not UTF-8"),
    ],
    ids=["empty", "blank", "binary", "latin-1"],
)
def test_bad_files_are_refused_with_a_reason(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    with pytest.raises(DocumentError, match=message):
        read_document(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_byte_order_marks_and_line_ends_are_understood(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "good.txt"
    path.write_bytes("one \u2603\r\ntwo".encode(encoding))
    assert read_document(path) == "one \u2603\ntwo"
