"""An index of stored texts, which finds them in a prompt, as a whole or in part.

A framework passes one string to its language model, and the chunks are somewhere in it: as they are, cut, joined or
rewritten. The catalog holds hashes of some windows of every text, its anchors, and where they stand in it. A search
looks the prompt's anchors up; equal ones say how a text lies on the prompt, and there both are compared
(:mod:`~cacheclip_rag.finding.search`). So a match is never wrong, and nothing is kept in memory.

A text has anchors of two kinds. One is of its characters, in a row that needs no words: the smallest hash among its
first ``reach`` windows, with the hash and digest by which the whole text is known. Payloads and tables of shared stores
hold these rows, so that a text whose words the catalog has lost is still found as a whole, and so is one of a few
words. The others are of its folded form (:mod:`~cacheclip_rag.finding.common_parts`): 1 for about 20 bytes of prose, 1
for 5 to 10 bytes of numbers, tables or Chinese, and 1 more for about 100 characters, by which texts are counted that
were rewritten. They lead to the text itself, which is compressed.

(Source: winnowing, Schleimer et al., SIGMOD 2003. An automaton over all texts was rejected: 60 kB per chunk, and a
rebuild at each insert. A table in memory was rejected: every process would read all of it before its first answer.)
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..base.database import Database, OutageWarning
from ..base.errors import StoreError
from ..base.keys import text_digest
from .common_parts import WINDOW, AnchorPlaces, Compared, TextMatch, ranks, smallest, window_hashes
from .folding import Column, code_points
from .search import MOST_PAIRS, SHARED_BY, Search, decoded, slice_sums, whole_matches
from .skeleton import loose_anchors, skeleton

logger = logging.getLogger(__name__)

REACH = 256
"""Most windows at a text's start and at its end from which its anchor and its ending are chosen."""
_POPULAR = 512
"""Texts with the same anchor. From here on rows are looked up by anchor and ending, not read one by one."""
_MOST_NEAR = 1 << 13
"""Most pairs of a message and a given text that are compared for one request."""
_BATCH = 256
"""Texts that are added in one transaction: other processes wait meanwhile."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS contents (
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, digest BLOB NOT NULL, text BLOB NOT NULL,
    UNIQUE (namespace, digest)
);
CREATE TABLE IF NOT EXISTS anchors (
    anchor INTEGER NOT NULL, content INTEGER NOT NULL, place INTEGER NOT NULL, PRIMARY KEY (anchor, content, place)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS texts (
    namespace TEXT NOT NULL, reach INTEGER NOT NULL, anchor INTEGER NOT NULL, ending INTEGER NOT NULL,
    digest BLOB NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL, whole INTEGER NOT NULL,
    PRIMARY KEY (namespace, reach, anchor, ending, digest)
) WITHOUT ROWID;
"""
_COLUMNS = "digest, reach, anchor, start, length, ending, whole"
WRITE = f"INSERT OR IGNORE INTO texts (namespace, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
"""Adds a text: namespace, then the fields of its :class:`TextRow`."""
_THIS_ROW = "FROM texts WHERE namespace = ? AND reach = ? AND anchor = ? AND ending = ? AND digest = ?"
_REACHES = "SELECT value FROM json_each(?) WHERE EXISTS (SELECT 1 FROM texts WHERE namespace = ? AND reach = value)"
_ANCHORS = (
    "SELECT value, (SELECT count(*) FROM (SELECT 1 FROM texts WHERE namespace = ? AND reach = ? AND anchor = value "
    "LIMIT ?)) AS num_texts FROM json_each(?) WHERE num_texts"
)
# "+": the endings of the rows are tested. Without it, SQLite looks up each pair of anchor and ending.
_ROWS, _ROWS_OF_POPULAR = (
    f"SELECT {_COLUMNS} FROM texts WHERE namespace = ? AND reach = ? AND anchor IN (SELECT value FROM json_each(?)) "
    f"AND {ending} IN (SELECT value FROM json_each(?)) AND length <= ? LIMIT ?"
    for ending in ("+ending", "ending")
)
_OF_CONTENT = "SELECT id FROM contents WHERE namespace = ? AND digest = ?"
_WRITE_ANCHORS = (
    "INSERT OR IGNORE INTO anchors SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), "
    "json_extract(value, '$[2]') FROM json_each(?)"
)
_PLACES = "SELECT anchor, content, place FROM json_each(?) CROSS JOIN anchors ON anchor = value LIMIT ?"
_FIRST_PLACES = (
    "SELECT value, (SELECT json_group_array(json_array(content, place)) FROM "
    "(SELECT content, place FROM anchors WHERE anchor = value LIMIT ?)) FROM json_each(?)"
)
# "+": without it, SQLite reads all of the tenant's digests
_CONTENTS = "SELECT id, text FROM contents WHERE +namespace = ? AND id IN (SELECT value FROM json_each(?))"


class TextRow(NamedTuple):
    """What the index stores of a text as a whole. Hashes are signed 64-bit numbers."""

    digest: bytes
    """16 bytes, see :func:`~cacheclip_rag.base.keys.text_digest`."""
    reach: int
    """The largest power of two up to ``REACH`` and up to the text's number of windows."""
    anchor: int
    """The smallest hash among the first ``reach`` windows."""
    start: int
    """Start of the first window with that hash."""
    length: int
    """Characters."""
    ending: int
    """The smallest hash among the last ``reach`` windows."""
    whole: int
    """Hash of the text."""


def text_row(text: str) -> TextRow | None:
    """The row of a text; None if the text is shorter than ``WINDOW``."""
    hashes = window_hashes(code_points(text))
    if not len(hashes):
        return None
    reach = min(REACH, 1 << (len(hashes).bit_length() - 1))
    start = int(hashes[:reach].argmin())
    ending = int(hashes[-reach:].min())
    _, sums = slice_sums(hashes)
    return TextRow(text_digest(text), reach, int(hashes[start]), start, len(text), ending, int(sums[-1]))


class GivenTexts:
    """Documents of one request, whose messages are searched one by one. Each document is hashed once, and searched for
    only in messages that hold an anchor of it."""

    def __init__(self, texts: Iterable[str], is_wanted: Callable[[], None] = lambda: None) -> None:
        """``texts`` are normalised. ``is_wanted`` is called before each search; raises if nobody waits for the request
        any more."""
        self.texts = list(dict.fromkeys(texts))
        self._is_wanted = is_wanted
        self._room = _MOST_NEAR
        # one table of anchors for texts as a whole, one for parts of them
        rows = [(row.anchor, number) for number, text in enumerate(self.texts) for row in _rows_of([text])]
        anchors = [(number, Compared(text).anchors[0]) for number, text in enumerate(self.texts)]
        of_parts = [np.stack([hashes, np.full(len(hashes), number)], 1) for number, hashes in anchors]
        self._of_wholes = np.array(rows, np.int64).reshape(-1, 2)
        self._of_parts = np.concatenate([np.empty((0, 2), np.int64), *of_parts])

    def near(self, prompt: str, hashes: Column) -> list[str]:
        """The texts that may stand in ``prompt``, as a whole or in part; ``hashes`` are those of its windows."""
        self._is_wanted()
        if not self.texts or not len(hashes):
            return []
        wanted = ((self._of_wholes, hashes), (self._of_parts, Compared(prompt).anchors[0]))
        numbers = [table[np.isin(table[:, 0], of_prompt), 1] for table, of_prompt in wanted]
        near = np.unique(np.concatenate(numbers)).tolist()
        if len(near) > self._room:
            logger.warning("too many documents look like too many messages; some are computed as fresh text")
        near = near[: max(0, self._room)]
        self._room -= len(near)
        return [self.texts[number] for number in near]


class TextIndex:
    """Texts of one namespace, shared by processes through the store's catalog. Keeps nothing in memory."""

    def __init__(self, database: Database, namespace: str) -> None:
        """``database``: has the tables of ``SCHEMA``."""
        self._database, self._namespace = database, namespace
        # tenants have other anchors, so that none of them makes an anchor of another one popular
        self._salt = np.int64(xxhash.xxh3_64_intdigest(namespace.encode("utf-8", "surrogatepass")) >> 1)
        self._outage = OutageWarning(
            logger, "stored texts are not found in prompts, and are computed as fresh text: %s"
        )
        self._outage_of_parts = OutageWarning(logger, "parts of stored texts are not found in prompts: %s")

    # -- changes --------------------------------------------------------------------------------------------------

    def add(self, texts: Iterable[str]) -> None:
        """Add texts. Texts shorter than ``WINDOW`` are left out. Raises StoreError if the catalog cannot be used."""
        self._write(list(texts))

    def add_rows(self, rows: Iterable[TextRow]) -> None:
        """Add texts by their rows. They are found as a whole, but not in part."""
        self._database.execute_many([(WRITE, (self._namespace, *row)) for row in rows])

    def mend(self, texts: Iterable[str]) -> None:
        """Remove what is damaged, write the anchors of all other texts again, and add ``texts`` again. Raises
        StoreError if the catalog cannot be used."""
        for rows in self._batches():
            undamaged = []
            for content, digest, written in rows:
                text = decoded(written)
                if text is not None and text_digest(text) == digest:
                    undamaged.append(text)
                else:
                    self._database.execute("DELETE FROM contents WHERE id = ?", (content,))
            self._write(undamaged, again=True)
        self._database.execute("DELETE FROM anchors WHERE content NOT IN (SELECT id FROM contents)")
        self.add(texts)

    def remove(self, texts: Iterable[str]) -> None:
        """Remove texts, for every process. Raises StoreError if the catalog cannot be used."""
        for text in texts:
            with self._database.transaction() as run:
                for row in _rows_of([text]):
                    run(f"DELETE {_THIS_ROW}", self._name(row))
                for content in run(_OF_CONTENT, (self._namespace, text_digest(text))).fetchall():
                    anchors = json.dumps((_anchors_of(text)[0] ^ self._salt).tolist())
                    sql = "DELETE FROM anchors WHERE content = ? AND anchor IN (SELECT value FROM json_each(?))"
                    run(sql, (*content, anchors))
                    run("DELETE FROM contents WHERE id = ?", content)

    def _write(self, texts: list[str], *, again: bool = False) -> None:
        """Write rows, and texts that have anchors. ``again``: also the anchors of texts that are there."""
        made = [(text, text_row(text), *_anchors_of(text)) for text in texts]
        for first in range(0, len(made), _BATCH):
            with self._database.transaction() as run:
                anchors_of_all: list[tuple[int, int, int]] = []
                for text, row, anchors, places in made[first : first + _BATCH]:
                    if row is None:
                        continue
                    run(WRITE, (self._namespace, *row))
                    known = run(_OF_CONTENT, (self._namespace, row.digest)).fetchone() if len(anchors) else None
                    if not len(anchors) or (known is not None and not again):
                        continue
                    if known is None:
                        written = zlib.compress(text.encode("utf-8", "surrogatepass"), 1)
                        sql = "INSERT INTO contents (namespace, digest, text) VALUES (?, ?, ?) RETURNING id"
                        known = run(sql, (self._namespace, row.digest, written)).fetchone()
                    salted = (anchors ^ self._salt).tolist()
                    anchors_of_all += zip(salted, [known[0]] * len(salted), places.tolist(), strict=True)
                if anchors_of_all:
                    run(_WRITE_ANCHORS, (json.dumps(sorted(anchors_of_all)),))  # neighbours are written together

    # -- what is there --------------------------------------------------------------------------------------------

    def texts(self) -> Iterator[str]:
        """All texts of the namespace that can be found in part, so not those of a few words. Raises StoreError if the
        catalog cannot be used."""
        for rows in self._batches():
            yield from (text for *_, written in rows if (text := decoded(written)) is not None)

    def known(self, text: str) -> bool:
        """Whether a text was added and not removed since."""
        return any(self.holds(row) for row in _rows_of([text]))

    def holds(self, row: TextRow) -> bool:
        """Whether the text of a row was added and not removed since."""
        return bool(self._database.query(f"SELECT 1 {_THIS_ROW}", self._name(row)))

    # -- search ---------------------------------------------------------------------------------------------------

    def find(self, prompt: str, documents: Iterable[str] | GivenTexts = (), *, parts: bool = True) -> list[TextMatch]:
        """Stored texts and ``documents`` that occur in ``prompt``, as a whole or in part, in its order: of those that
        overlap, the longest. Without ``parts``, whole texts only: of those that overlap, the leftmost, then the
        longest.

        A document that is not stored is no match where stored texts and parts of them cover it: they can be reused now.
        If the catalog cannot be used, only ``documents`` are found, and the first search says so in a warning."""
        hashes = window_hashes(code_points(prompt))
        near = documents.near(prompt, hashes) if isinstance(documents, GivenTexts) else documents
        others = list(dict.fromkeys(near))
        if not len(hashes):
            return []  # too short for any
        least = dict(smallest(hashes, REACH))
        rows = self._rows(hashes, least)
        if not parts:
            return whole_matches(prompt, hashes, least, [*_rows_of(others), *rows])
        whole = whole_matches(prompt, hashes, least, rows)
        search = Search(prompt, whole, self._places, self._contents)
        if others:
            whole_texts = {prompt[match.start : match.stop] for match in whole}
            stored = dict[str, None]()
            with suppress(StoreError):  # if the catalog cannot be used, none is known to be stored
                stored = dict.fromkeys(text for text in others if text not in whole_texts and self.known(text))
            new = [text for text in others if text not in whole_texts and text not in stored]
            search.take([*stored], new, whole_matches(prompt, hashes, least, [*_rows_of(new)]))
        return search.matches()

    def _name(self, row: TextRow) -> tuple[str, int, int, int, bytes]:
        return self._namespace, row.reach, row.anchor, row.ending, row.digest

    def _rows(self, hashes: Column, least: dict[int, Column]) -> list[TextRow]:
        """Rows of stored texts whose anchor and ending are both among the smallest hashes of a prompt."""
        query, rows = self._database.query, list[tuple[Any, ...]]()
        try:
            with self._database.lock:  # of a document that is replaced meanwhile, one version is found
                for (reach,) in query(_REACHES, (json.dumps([*least]), self._namespace)):
                    places = least[reach]  # they ascend
                    places = places[np.append(True, places[1:] != places[:-1])]
                    written = json.dumps(np.unique(hashes[places]).tolist())
                    counts = query(_ANCHORS, (self._namespace, reach, _POPULAR, written))
                    popular = [anchor for anchor, count in counts if count == _POPULAR]
                    others = [anchor for anchor, count in counts if count < _POPULAR]
                    for sql, anchors in ((_ROWS, others), (_ROWS_OF_POPULAR, popular)):
                        most = len(hashes) + WINDOW - 1
                        arguments = (self._namespace, reach, json.dumps(anchors), written, most, MOST_PAIRS)
                        rows += query(sql, arguments) if anchors else ()
        except StoreError as error:
            self._outage.failed(error)
            return []
        self._outage.worked()
        # a catalog that something else wrote to may hold anything
        return [TextRow(*row) for row in rows if [*map(type, row)] == [bytes, *[int] * (len(row) - 1)]]

    def _places(self, anchors: Column) -> AnchorPlaces:
        """Where anchors of folded forms stand in stored texts."""
        salted = np.unique(anchors ^ self._salt)  # in order: neighbours are read together
        written, most = json.dumps(salted.tolist()), SHARED_BY * len(salted)
        try:
            rows = self._database.query(_PLACES, (written, most + 1))
            if len(rows) > most:  # of some, more texts have it than are looked at
                first = self._database.query(_FIRST_PLACES, (SHARED_BY, written))
                rows = [(anchor, *place) for anchor, places in first for place in json.loads(places)]
        except StoreError as error:
            self._outage_of_parts.failed(error)
            return _NOWHERE
        self._outage_of_parts.worked()
        if not {type(number) for row in rows for number in row} <= {int}:
            logger.warning("the catalog holds something else than places of anchors. Run cacheclip store repair.")
            return _NOWHERE
        salted, contents, places = np.array(rows, np.int64).reshape(-1, 3).T
        kept = ranks(salted) < SHARED_BY
        return AnchorPlaces(salted[kept] ^ self._salt, contents[kept], places[kept])

    def _contents(self, wanted: set[int]) -> dict[int, object]:
        """Compressed texts, by number."""
        try:
            return dict(self._database.query(_CONTENTS, (self._namespace, json.dumps(sorted(wanted)))))
        except StoreError as error:
            self._outage_of_parts.failed(error)
            return {}

    def _batches(self) -> Iterator[list[Any]]:
        """Id, digest and compressed text of all contents of the namespace, some at a time."""
        sql, last = "SELECT id, digest, text FROM contents WHERE namespace = ? AND id > ? ORDER BY id LIMIT ?", 0
        while rows := self._database.query(sql, (self._namespace, last, _BATCH)):
            yield rows
            last = max(last + 1, rows[-1][0])


_NOWHERE = AnchorPlaces(*np.empty((3, 0), dtype=np.int64))


def _rows_of(texts: Iterable[str]) -> Iterator[TextRow]:
    """Rows of texts; short texts are left out."""
    return (row for text in texts if (row := text_row(text)) is not None)


def _anchors_of(text: str) -> tuple[Column, Column]:
    """Anchors of a text's folded form, and those by which it is found if it was rewritten, with their places; of each,
    as many as are looked at."""
    anchors, places = Compared(text).anchors
    if len(anchors):
        loose, others = loose_anchors(skeleton(text)[0])
        anchors, places = np.concatenate([anchors, loose]), np.concatenate([places, others])
    order = np.argsort(anchors, kind="stable")
    kept = np.sort(order[ranks(anchors[order]) < SHARED_BY])
    return anchors[kept], places[kept]
