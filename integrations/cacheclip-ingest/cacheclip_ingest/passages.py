"""Documents as passages: read, with notes, and split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath

from cacheclip_rag import DocumentError, MissingExtraError
from cacheclip_rag.plugins import is_url
from cacheclip_rag.runtime import Runtime

from .bucket import read_object
from .documents import MARKDOWN_SUFFIXES, TABLE_SUFFIXES, EmptyFileError, printable, read_document
from .splitting import Splitter
from .survey import DocumentWork
from .text import HTML_SUFFIXES, DocumentText

Told = Callable[[str, str, str], None]
"""Is told what is wrong with a document, as :meth:`~cacheclip_ingest.survey.Survey.tell`."""


class PassageReader:
    """Reads documents for one model."""

    def __init__(self, runtime: Runtime, chunk_tokens: int, overlap_tokens: int) -> None:
        self._runtime = runtime
        self._splitter = Splitter(runtime.tokenizer, chunk_tokens, overlap_tokens)

    def passages(self, name: str, digest: str, told: Told) -> list[str]:
        """Passages of a file or URL; none if it is empty or cannot be read, which ``told`` hears.

        Args:
            digest: SHA-256 that a file must have; empty: any.
        """
        try:
            text = read_object(name) if is_url(name) else read_document(Path(name), digest or None)
        except EmptyFileError as error:
            told("empty", name, str(error))
            for note in error.notes:
                told("note", name, note)
            return []
        except (DocumentError, MissingExtraError) as error:
            told("failed", name, str(error))
            return []
        passages = self._split(text, PurePath(name).suffix.lower())
        if not passages:
            told("empty", name, f"{printable(name)} has no text that the model's tokenizer keeps.")
        for note in text.notes:
            told("note", name, note)
        return passages

    def _split(self, text: DocumentText, suffix: str) -> list[str]:
        markdown, table = suffix in MARKDOWN_SUFFIXES | HTML_SUFFIXES, suffix in TABLE_SUFFIXES
        passages = self._splitter.split(text, markdown=markdown, table=table)
        # some tokenizers drop all characters of a text, for instance invisible characters
        return [passage for passage in passages if len(self._runtime.tokenize(passage))]


def read_each(
    work: Iterable[DocumentWork], reader: Callable[[], PassageReader], told: Told
) -> Iterator[tuple[DocumentWork, list[str]]]:
    """Each document that has passages, read when its turn comes. The reader is made for the first one."""
    made: PassageReader | None = None
    for item in work:
        made = made or reader()
        if passages := made.passages(item.name, item.digest, told):
            yield item, passages
