"""An entry of a catalog, and its row in a store folder's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import StoreError
from ..finding.texts import WRITE as WRITE_TEXT, TextRow
from .codecs import Frame
from .eviction import Run

COLUMNS = "key, namespace, digest, CAST(bytes AS INTEGER), num_tokens, codec"
"""Of a row of entries, in the order of :class:`Entry`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One payload of the store."""

    key: str
    namespace: str
    digest: bytes | None
    """Digest of the entry's text; None if it has no text (the shared prefix)."""
    num_bytes: int
    """Bytes on the medium, in whole disk blocks."""
    num_tokens: int
    codec: str
    text: TextRow | None = field(default=None, compare=False)
    """The text's row in the text index, which is written with the entry. None if there is none, or in an entry that was
    read from the catalog."""

    @classmethod
    def of(cls, frame: Frame, num_bytes: int) -> Entry:
        """The entry of a payload that takes so many bytes on the medium."""
        return cls(frame.key, frame.namespace, frame.digest, num_bytes, frame.num_tokens, frame.codec, frame.text)


@dataclass(frozen=True, slots=True)
class Total:
    """What a tenant, or the whole store, holds."""

    entries: int
    bytes: int
    """Bytes on the medium, including writes that are not complete."""


def take_uses(run: Run, count: int) -> int:
    """The first of ``count`` numbers for uses. Uses are numbered, because a clock may be set back."""
    sql = (
        "INSERT INTO meta VALUES ('uses', ?) ON CONFLICT DO UPDATE SET value = ifnull(value, 0) + excluded.value "
        "RETURNING CAST(value AS INTEGER)"
    )
    ((last,),) = run(sql, (count,)).fetchall()
    return int(last) - count + 1


def correct(run: Run, key: str, measure: Callable[[str], Entry | None]) -> None:
    """Record what the medium holds under a key, as ``measure`` says."""
    entry = measure(key)
    run("DELETE FROM entries WHERE key = ?", (key,))
    if entry is not None:
        record(run, entry)


def record(run: Run, entry: Entry) -> None:
    """Record an entry and its text, as the most recently used."""
    run("DELETE FROM entries WHERE key = ?", (entry.key,))  # not REPLACE, which fires no triggers
    values = (entry.key, entry.namespace, entry.digest, entry.num_bytes, entry.num_tokens, entry.codec)
    run("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, take_uses(run, 1)))
    if entry.text is not None:
        run(WRITE_TEXT, (entry.namespace, *entry.text))


def next_row(last: Any, row: Any) -> Any:
    """The last row read. Raises StoreError unless it comes after the one before: asking on would never end."""
    if row <= last:
        raise StoreError("the catalog is damaged: its rows are out of order. Run cacheclip store repair.")
    return row
