"""Records are read whole or left out with a reason; nothing in between."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.evaluation.records import Record, RecordChunk, SkippedRecord, read_records, read_together

from cacheclip_rag import ConfigurationError

GOOD: dict[str, Any] = {
    "id": "q1",
    "task": "harbours",
    "question": "Who built the lighthouse?",
    "answers": ["Ada Thornbury", "Thornbury"],
    "chunks": [{"title": "Brindle Point", "text": "Built by Ada Thornbury."}, {"text": "Seabirds nest here."}],
    "meta": {"gold_chunks": [0]},
}


def line(**changes: Any) -> str:
    """A good record with changes; None removes a field."""
    return json.dumps({key: value for key, value in {**GOOD, **changes}.items() if value is not None})


def write(folder: Path, *lines: str, name: str = "harbours.dev.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_record(tmp_path: Path) -> None:
    found = read_records(write(tmp_path, line()))
    assert (found.name, found.skipped) == ("harbours.dev", ())
    passages = (RecordChunk("Brindle Point", "Built by Ada Thornbury."), RecordChunk("", "Seabirds nest here."))
    assert found.records == (
        Record("q1", "harbours", GOOD["question"], ("Ada Thornbury", "Thornbury"), passages, {"gold_chunks": [0]}),
    )


@pytest.mark.parametrize("name", ["packed.jsonl.gz", "packed.jsonl"])
def test_gzip_is_told_by_content(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(f"{line()}\n\n{line(id='q2')}".encode()))
    found = read_records(tmp_path / name)
    assert found.name == "packed" and [record.id for record in found.records] == ["q1", "q2"]


def test_limit_counts_usable_records(tmp_path: Path) -> None:
    path = write(tmp_path, line(answers=[]), line(), line(id="q2"), line(id="q3"), "{")
    found = read_records(str(path), limit=2)
    assert [record.id for record in found.records] == ["q1", "q2"]
    assert found.skipped == (SkippedRecord("line 1", "no answers"),)


def test_answers_in_lists_of_lists_are_joined_and_meta_and_title_may_be_absent(tmp_path: Path) -> None:
    odd = line(answers=[["Ozalj", " "], ["Ozalj town"]], meta=None, chunks=[{"title": None, "text": "Built."}])
    [record] = read_records(write(tmp_path, odd)).records
    assert record.answers == ("Ozalj", "Ozalj town")
    assert record.meta == {} and record.chunks == (RecordChunk("", "Built."),)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (line(answers=None), "no answers"),
        (line(answers=[]), "no answers"),
        (line(answers=[[]]), "no answers"),
        (line(answers=["", " "]), "no answers"),
        (line(answers="Ada"), "answers: expected a list, got text"),
        (line(answers=[1847]), "answers: expected text, got a number"),
        (line(chunks=None), "no chunks"),
        (line(chunks=[]), "no chunks"),
        (line(chunks=["Built."]), "chunks[0]: expected an object, got text"),
        (line(chunks=[{"text": "Built."}, {"title": "a"}]), "chunks[1].text: expected text, got nothing"),
        (line(chunks=[{"title": 7, "text": "Built."}]), "chunks[0].title: expected text, got a number"),
        (line(chunks=[{"text": " "}]), "chunks[0].text: expected text, got an empty one"),
        (line(id=7), "id: expected text, got a number"),
        (line(task=None), "task: expected text, got nothing"),
        (line(question=True), "question: expected text, got true or false"),
        (line(question=""), "question: expected text, got an empty one"),
        (line(question="Who \ud83d?"), "question: half a character"),
        (line(meta=[]), "meta: expected an object, got a list"),
        (line(), "id 'q1' was there before"),
        ('["q2"]', "expected a JSON object, got a list"),
        ("null", "expected a JSON object, got nothing"),
        ('{"id": ', "not JSON: Expecting value"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_cannot_be_used_is_counted_with_its_reason(tmp_path: Path, content: str, reason: str) -> None:
    found = read_records(write(tmp_path, line(), "", content, line(id="q3")))
    assert [record.id for record in found.records] == ["q1", "q3"]
    [skipped] = found.skipped
    assert skipped.where == "line 3" and skipped.reason.startswith(reason)


def test_not_one_usable_record(tmp_path: Path) -> None:
    path = write(tmp_path, *[line(answers=[])] * 5)
    with pytest.raises(ConfigurationError, match=r"got 5 that cannot.*line 1: no answers; .*line 3.*and 2 more.*Write"):
        read_records(path)
    with pytest.raises(ConfigurationError, match="an empty file"):
        read_records(write(tmp_path, "", " "))


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="got nothing there"):
        read_records(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigurationError, match="got a folder"):
        read_records(tmp_path)
    with pytest.raises(ConfigurationError, match="at least 1"):
        read_records(write(tmp_path, line()), limit=0)


@pytest.mark.parametrize("damage", ["cut", "checksum", "body", "header"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress("\n".join(line(id=f"q{n}") for n in range(200)).encode()))
    if damage == "cut":
        del packed[-20:]
    else:
        packed[{"checksum": -6, "body": 12, "header": 2}[damage]] ^= 0xFF
    (tmp_path / "damaged.jsonl.gz").write_bytes(packed)
    with pytest.raises(ConfigurationError, match="unreadable file.*Fetch or pack it again"):
        read_records(tmp_path / "damaged.jsonl.gz")


def test_several_files_as_one(tmp_path: Path) -> None:
    first = write(tmp_path, line(), line(id="other"), "{", name="first.jsonl")
    second = write(tmp_path, "{", line(), name="second.jsonl")
    found = read_together([first, second])
    assert found.name == "first+second" and len({record.id for record in found.records}) == 3
    assert {record.id.partition("/")[0] for record in found.records} == {"first", "second"}
    assert [skipped.where for skipped in found.skipped] == ["first, line 3", "second, line 1"]
    assert len(read_together([first, second], limit=1).records) == 2
    assert read_together([first]) == read_records(first), "one alone keeps its ids"
    (tmp_path / "below").mkdir()
    with pytest.raises(ConfigurationError, match="two named 'first'"):
        read_together([first, write(tmp_path / "below", line(), name="first.jsonl")])


class TestHalves:
    def test_every_second_usable_record(self, tmp_path: Path) -> None:
        path = write(tmp_path, line(id="a"), "{", line(id="b"), line(id="c"), line(id="c"), line(id="d"), line(id="e"))
        halves = {half: read_records(path, half=half) for half in ("dev", "test")}
        assert [record.id for record in halves["dev"].records] == ["a", "c", "e"]
        assert [record.id for record in halves["test"].records] == ["b", "d"]
        assert {len(each.skipped) for each in halves.values()} == {2}

    def test_refusals(self, tmp_path: Path) -> None:
        path = write(tmp_path, line())
        with pytest.raises(ConfigurationError, match="half must be one of dev, test"):
            read_records(path, half="train")
        with pytest.raises(ConfigurationError, match="at least 2 records .* for its half 'test', got 1"):
            read_records(path, half="test")
