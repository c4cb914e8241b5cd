"""Readers and documents of others: functions, LangChain, LlamaIndex."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cacheclip_ingest import DocumentText, Reader, ingest, plan_ingestion, read_document, remove_documents
from cacheclip_ingest.frameworks import texts_by_name
from cacheclip_ingest.job import IngestReport
from ingest_cases import LetterEmbedder, Workshop
from langchain_core.documents import Document as LangChainDocument
from llama_index.core.schema import Document as LlamaIndexDocument, TextNode

from cacheclip_rag import ConfigurationError, DocumentError

SAID = ("The lighthouse was built in 1847.", "Its keeper was called Ana.")


def run(shop: Workshop, *paths: Any, **options: Any) -> IngestReport:
    common = {"library": shop.library, "engine": shop.engine, "settings": shop.settings}
    return ingest(paths or [shop.corpus], embedder=LetterEmbedder("letters"), **common, **options)


def texts(shop: Workshop) -> list[str]:
    return [text for _, _, text in shop.library.passages()]


@pytest.fixture
def shop(tmp_path: Path, tiny_models: dict[str, str]) -> Iterator[Workshop]:
    """A corpus with one file of a type that nobody knows."""
    shop = Workshop(tmp_path, tiny_models)
    shop.write("log.odd", "\n".join(SAID))
    yield shop
    shop.engine.close()


READERS: list[Reader] = [
    lambda path: " ".join(path.read_text().split("\n")),
    lambda path: DocumentText(" ".join(path.read_text().split("\n"))),
    lambda path: LangChainDocument(page_content=" ".join(path.read_text().split("\n"))),
    lambda path: [LlamaIndexDocument(text=" ".join(path.read_text().split("\n")))],
]


@pytest.mark.parametrize("reader", READERS)
def test_whatever_a_reader_returns(shop: Workshop, reader: Reader) -> None:
    options: dict[str, Any] = {"reader": reader, "types": {".odd"}}
    common = {"library": shop.library, "engine": shop.engine, "settings": shop.settings}
    planned = plan_ingestion([shop.corpus], **common, **options)
    report = run(shop, **options)
    assert (planned.added, report.added, report.failed) == (1, 1, [])
    assert texts(shop) == [" ".join(SAID)] and all(map(shop.engine.is_stored, texts(shop)))
    assert run(shop, **options).unchanged == 1


def test_without_types_a_folder_has_those_of_ours_and_a_named_file_any(shop: Workshop) -> None:
    shop.write("a.txt", "The boiler is in hall 4.")
    report = run(shop, reader=lambda path: f"Read by me: {path.name}")
    assert texts(shop) == ["Read by me: a.txt"] and "is a file of type .odd" in report.skipped[0]["error"]
    run(shop, shop.corpus / "log.odd", reader=lambda path: f"Read by me: {path.name}")
    assert "Read by me: log.odd" in texts(shop)


def test_markdown_of_a_reader_is_read_as_markdown(shop: Workshop) -> None:
    text = "# One\n\nThe boiler is in hall 4. <!-- secret -->\n\n# Two\n\n![](a.png)"
    report = run(shop, reader=lambda path: DocumentText(text, ["a note."], is_markdown=True), types={".odd"})
    assert not any("secret" in each for each in texts(shop))
    assert [each["note"].split(": ")[1] for each in report.notes] == [
        "a note.",
        "1 hidden part(s) were left out (comment).",
        "1 picture(s) are not read; the text has what the page says in their place.",
    ]
    run(shop, reader=lambda path: text, types={".odd"})
    assert not any("secret" in each for each in texts(shop)), "the file did not change"


def failing(path: Path) -> str:
    raise KeyError("no such layer")


def refusing(path: Path) -> str:
    raise DocumentError(f"{path} is encrypted.")


def changing(path: Path) -> str:
    path.write_text("Another text.")
    return SAID[0]


WORDS = {failing: "log.odd cannot be read (KeyError", refusing: "is encrypted.", changing: "was changed while the run"}


@pytest.mark.parametrize(("reader", "words"), WORDS.items())
def test_a_file_that_cannot_be_read_ends_no_run(shop: Workshop, reader: Reader, words: str) -> None:
    shop.write("a.txt", "The boiler is in hall 4.")
    own: Reader = lambda path: reader(path) if path.suffix == ".odd" else read_document(path)  # noqa: E731
    report = run(shop, reader=own, types={".odd", ".txt"})
    assert words in report.failed[0]["error"] and texts(shop) == ["The boiler is in hall 4."]


@pytest.mark.parametrize("empty", ["", " \n\u200b", []])
def test_an_empty_text_is_skipped(shop: Workshop, empty: Any) -> None:
    report = run(shop, reader=lambda path: empty, types={".odd"})
    assert (report.failed, texts(shop)) == ([], []) and "log.odd is empty" in report.skipped[0]["error"]


@pytest.mark.parametrize("wrong", [None, b"bytes", 7, [SAID[0]], {"text": "a"}])
def test_a_reader_that_returns_something_else_is_refused(shop: Workshop, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected a reader that returns a text, or documents of LangChain"):
        run(shop, reader=lambda path: wrong, types={".odd"})


class TestDocumentsOfFrameworks:
    """In place of paths."""

    def documents(self, said: str = SAID[1]) -> list[Any]:
        return [
            LangChainDocument(page_content=SAID[0], metadata={"source": "https://example.org/light", "page": 1}),
            LangChainDocument(page_content=said, metadata={"source": "https://example.org/light", "page": 2}),
            LangChainDocument(page_content="A record of a database.", id="record-7"),
            LlamaIndexDocument(text="A page of a wiki.", metadata={"file_path": "wiki/page.md"}),
            TextNode(text="A node.", id_="node-1"),
        ]

    def test_they_are_known_by_place_or_id(self, shop: Workshop) -> None:
        first = run(shop, *self.documents())
        assert (first.added, first.failed) == (4, []) and {*shop.library.documents()} == {
            *("https://example.org/light", "record-7", "wiki/page.md", "node-1")
        }
        assert "\n\n".join(shop.library.passages_of("https://example.org/light")) == "\n\n".join(SAID)
        assert run(shop, *self.documents()).unchanged == 4
        changed = run(shop, *self.documents("Its keeper was called Ben."))
        assert (changed.changed, changed.unchanged) == (1, 3) and not shop.engine.is_stored("\n\n".join(SAID))

    def test_they_stay_beside_files_until_they_are_removed(self, shop: Workshop) -> None:
        shop.write("a.txt", "The boiler is in hall 4.")
        run(shop, *self.documents(), shop.corpus)
        (shop.corpus / "a.txt").unlink()
        assert run(shop, shop.corpus, confirmed=True).removed == 1
        assert len(shop.library.documents()) == 4
        assert remove_documents(shop.store, ["record-7"]) == ["record-7"]
        assert "record-7" not in shop.library.documents()

    def test_one_that_nobody_knows_again_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="set its metadata 'source' or its id"):
            texts_by_name([LangChainDocument(page_content="A text.")])
