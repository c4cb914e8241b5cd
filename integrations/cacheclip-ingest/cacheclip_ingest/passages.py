"""Documents as passages: read, with notes, and split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from types import MappingProxyType

from cacheclip_rag import DocumentError, MissingExtraError
from cacheclip_rag.plugins import is_url
from cacheclip_rag.runtime import Runtime

from .bucket import read_object
from .documents import TABLE_SUFFIXES, EmptyFileError, Reader, printable, read_document, text_read_by
from .splitting import Splitter
from .survey import DocumentWork
from .text import DocumentText

Told = Callable[[str, str, str], None]
"""Is told what is wrong with a document, as :meth:`~cacheclip_ingest.survey.Survey.tell`."""


class PassageReader:
    """Reads documents for one model.

    Args:
        reader: reads files in place of this package's readers; None: these do.
        texts: documents that are no files, by name.
    """

    def __init__(
        self,
        runtime: Runtime,
        chunk_tokens: int,
        overlap_tokens: int,
        *,
        reader: Reader | None = None,
        texts: Mapping[str, DocumentText] = MappingProxyType({}),
    ) -> None:
        self._runtime, self._reader, self._texts = runtime, reader, texts
        self._splitter = Splitter(runtime.tokenizer, chunk_tokens, overlap_tokens)

    def passages(self, name: str, digest: str, told: Told) -> list[str]:
        """Passages of a file or URL; none if it is empty or cannot be read, which ``told`` hears.

        Args:
            digest: SHA-256 that a file must have; empty: any.
        """
        try:
            text = self._read(name, digest or None)
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

    def _read(self, name: str, digest: str | None) -> DocumentText:
        if name in self._texts:
            return text_read_by(lambda path: self._texts[name], Path(name))
        if is_url(name):
            return read_object(name, self._reader)
        if self._reader is not None:
            return text_read_by(self._reader, Path(name), digest)
        return read_document(Path(name), digest)

    def _split(self, text: DocumentText, suffix: str) -> list[str]:
        passages = self._splitter.split(text, markdown=text.is_markdown, table=suffix in TABLE_SUFFIXES)
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
