"""Reading files: what is taken, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import cacheclip_ingest.documents as documents
import pytest
from cacheclip_ingest.documents import find_files, read_document
from pdf_cases import pdf

from cacheclip_rag import DocumentError


def test_folders_give_text_and_markdown_once_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.md", "a.txt", "picture.png", ".hidden.txt", "sub/c.markdown"):
        (tmp_path / name).write_text("x")
    found = [p.relative_to(tmp_path).as_posix() for p in find_files([tmp_path, tmp_path / "a.txt"])]
    assert found == ["a.txt", "b.md", "sub/c.markdown"]


def test_pdf_files_give_the_text_of_their_pages(tmp_path: Path) -> None:
    file = tmp_path / "a.PDF"
    file.write_bytes(pdf("The lighthouse was built in 1847.", "", "Its lamp burned whale oil."))
    assert list(find_files([tmp_path])) == [file]
    assert read_document(file) == "The lighthouse was built in 1847.\n\nIts lamp burned whale oil."
    file.write_bytes(pdf("", ""))
    with pytest.raises(DocumentError, match="no text on its 2 pages; if they are scanned"):
        read_document(file)
    file.write_bytes(b"%PDF-1.4 and nothing more")
    with pytest.raises(DocumentError, match="is no PDF file that pypdf can read"):
        read_document(file)


def test_skipped_files_are_told_with_their_reason(tmp_path: Path) -> None:
    for name in ("a.txt", "b.odt", "LICENSE", ".hidden"):
        (tmp_path / name).write_text("x")
    told: dict[str, str] = {}
    assert [path.name for path in find_files([tmp_path], lambda path, why: told.update({path.name: why}))] == ["a.txt"]
    assert set(told) == {"b.odt", "LICENSE"}
    assert "of type .odt" in told["b.odt"] and "LibreOffice or pandoc" in told["b.odt"]
    assert "without a type" in told["LICENSE"] and "by its own name" in told["LICENSE"]


def test_missing_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="no such file or folder"):
        list(find_files([tmp_path / "nothing"]))


@pytest.mark.parametrize(
    ("reader", "name"),
    [("html_text", "a.html"), ("without_comments", "a.md"), ("cleaned", "a.txt"), ("decoded", "a.txt")],
)
def test_a_fault_of_a_reader_fails_one_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, name: str
) -> None:
    """Only too little memory ends a run: no other file may be read then either."""

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(documents, reader, fail)
    (tmp_path / name).write_text("Lease.")
    error: Exception = RecursionError("too deep")
    with pytest.raises(DocumentError, match=rf"{name} cannot be read \(RecursionError: too deep\)\. Save it"):
        read_document(tmp_path / name)
    error = MemoryError()
    with pytest.raises(MemoryError):
        read_document(tmp_path / name)
