"""A connection to a file that something else may have written: what SQLite does with it has bounds."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from cacheclip_rag.base import database as module, sqlite_file
from cacheclip_rag.base.database import ANSWER_WAIT_S, Database, waiting_at_most
from cacheclip_rag.base.errors import StoreError

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "file.sqlite3", "CREATE TABLE IF NOT EXISTS t (x);", 1)


@pytest.mark.parametrize("hurried", [False, True])
def test_no_statement_runs_for_ever(database: Database, hurried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HURRIED_S" if hurried else "LONGEST_S", 0.05)
    with waiting_at_most(ANSWER_WAIT_S) if hurried else nullcontext(), pytest.raises(StoreError, match="interrupted"):
        database.query(ENDLESS)


def test_what_a_file_cannot_do(database: Database) -> None:
    with pytest.raises(StoreError, match="too big"):
        database.query(f"SELECT LENGTH(zeroblob({sqlite_file._MOST_BYTES + 1}))")
    assert database.query("PRAGMA trusted_schema") == [(0,)], "a schema calls no function that does something"
    database.execute("INSERT INTO t VALUES ('whole'), (CAST(X'FF41' AS TEXT))")
    assert database.query("SELECT x FROM t") == [("whole",), ("\ufffdA",)], "text that is not UTF-8 spoils no other row"
