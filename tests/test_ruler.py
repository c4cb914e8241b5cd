"""RULER's needle tasks against its specification: strings, needles and lengths."""

import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.evaluation.records import Record, _record, read_records
from scripts import script

ruler = script("benchmarks/ruler.py")

WORD = r"[^\n]+-[^\n]+"
NUMBER = r"[1-9]\d{6}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
TASKS = ruler.TASKS
ONE_CHUNK = 10**6


def offsets(text: str) -> Sequence[tuple[int, int]]:
    """Words and punctuation marks."""
    return [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]


def make(task: str, num_tokens: int = 1500, count: int = 2, **options: Any) -> list[Record]:
    given = {"offsets": offsets, "chunk_tokens": ONE_CHUNK, **options}
    made = ruler.generate(task, num_tokens=num_tokens, count=count, **given)
    return [_record(json.dumps(each).encode()) for each in made]


def context(record: Record) -> str:
    [chunk] = record.chunks
    return chunk.text


def needles(record: Record) -> list[tuple[str, str]]:
    """Keys and values of every needle in the context."""
    kind = TASKS[record.task].value_type
    return re.findall(rf"One of the special magic {kind} for (.+?) is: (.+?)\.", context(record))


class TestNeedles:
    @pytest.mark.parametrize("task", TASKS)
    def test_prompt(self, task: str) -> None:
        for record in make(task):
            kind = TASKS[task].value_type
            key = UUID if TASKS[task].key_type == "uuids" else WORD
            value = UUID if kind == "uuids" else NUMBER
            meta = record.meta
            one = kind[:-1]
            expected = (
                f"A special magic {one} is hidden within the following text\\. Make sure to memorize it\\. I will quiz "
                f"you about the {one} afterwards\\.\n(?s:.+)\nWhat is the special magic {one} for {key} mentioned "
                "in the provided text\\?"
            )
            assert re.fullmatch(expected, meta["opening"] + context(record) + meta["closing"])
            prefix = f" The special magic {one} for {key} mentioned in the provided text is"
            assert re.fullmatch(prefix, meta["answer_prefix"])
            assert record.question == meta["closing"].strip()
            assert all(re.fullmatch(value, answer) for answer in record.answers)
            assert all(re.fullmatch(key, found) and re.fullmatch(value, given) for found, given in needles(record))

    @pytest.mark.parametrize("task", TASKS)
    def test_the_context_answers_the_question(self, task: str) -> None:
        places = []
        for record in make(task, count=20):
            [asked] = re.findall(r"for (.+) mentioned in", record.question)
            assert [value for key, value in needles(record) if key == asked] == list(record.answers)
            places.append(context(record).index(record.answers[0]) / len(context(record)))
        assert min(places) < 0.3 and max(places) > 0.7

    @pytest.mark.some(3)
    @pytest.mark.parametrize("num_tokens", [1500, 4096])
    @pytest.mark.parametrize("task", TASKS)
    def test_never_above_and_close(self, task: str, num_tokens: int) -> None:
        step = 25 * 26 / (5 if num_tokens < 4096 else 1)
        for record in make(task, num_tokens, count=5):
            meta = record.meta
            prompt = meta["opening"] + context(record) + meta["closing"] + meta["answer_prefix"]
            assert meta["length"] == len(offsets(prompt)) + 128
            assert num_tokens - 1.2 * step < meta["length"] <= num_tokens

    @pytest.mark.parametrize("task", TASKS)
    def test_too_few_tokens(self, task: str) -> None:
        for num_tokens in (1, 200):
            with pytest.raises(SystemExit, match=rf"{task} needs num_tokens of about \d+ or more, got"):
                make(task, num_tokens)
        with pytest.raises(SystemExit) as error:
            make(task, 200)
        least = int(re.findall(r"about (\d+)", str(error.value))[0])
        assert len(make(task, least, count=20)) == 20

    @pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_3"])
    @pytest.mark.parametrize("overlap", [0, 20])
    def test_sizes_and_overlap(self, task: str, overlap: int) -> None:
        for whole, cut in zip(make(task), make(task, chunk_tokens=100, overlap_tokens=overlap), strict=True):
            words = [[chunk.text[a:b] for a, b in offsets(chunk.text)] for chunk in cut.chunks]
            assert all(len(chunk) == 100 for chunk in words[:-1]) and overlap < len(words[-1]) <= 100
            for before, after in zip(words, words[1:], strict=False):
                assert before[100 - overlap :] == after[:overlap]
            joined = words[0] + [word for chunk in words[1:] for word in chunk[overlap:]]
            assert joined == [context(whole)[a:b] for a, b in offsets(context(whole))]
            assert all(chunk.title == "" and chunk.text in context(whole) for chunk in cut.chunks)
            assert (cut.meta, cut.answers) == (whole.meta, whole.answers)

    @pytest.mark.some(3)
    @pytest.mark.parametrize("task", TASKS)
    def test_same_seed_same_samples(self, task: str) -> None:
        state = random.getstate()
        assert make(task) == make(task) == make(task, count=3)[:2]
        assert make(task)[0].answers != make(task)[1].answers
        assert make(task, seed=7)[0].answers != make(task)[0].answers
        assert random.getstate() == state


def test_the_command(tiny_models: dict[str, str], tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """What it prints is a file for ``cacheclip eval --dataset``."""
    sizes = ["--length", "1200", "--limit", "2", "--chunk-tokens", "200", "--overlap-tokens", "10"]
    monkeypatch.setattr(sys, "argv", ["ruler", "--primary", tiny_models["llama"], *sizes])
    ruler.main()
    path = tmp_path / "needles.jsonl"
    path.write_text(capsys.readouterr().out)
    found = read_records(path)
    assert [each.task for each in found.records] == ["niah_multikey_2"] * 2 + ["niah_single_1"] * 2
    assert not found.skipped and all(len(each.chunks) > 1 for each in found.records)
