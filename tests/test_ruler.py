"""RULER's needle tasks against its specification: strings, needles, depths and lengths."""

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

HAYSTACK = "\n".join(f"Sentence {n} of the keeper's\n  log is about gulls, fog and rope." for n in range(1000))
DEPTHS = "0 3 5 8 10 13 15 18 21 23 26 28 31 33 36 38 41 44 46 49 51 54 56 59 62 64 67 69 72 74 77 79 82 85 87 90 92 95"
DEPTHS += " 97 100"
WORD = r"[^\n]+-[^\n]+"
NUMBER = r"[1-9]\d{6}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
TASKS = {name: task for name, task in ruler.TASKS.items() if isinstance(task, ruler.NeedleTask)}
LINES = [name for name, task in TASKS.items() if task.haystack != "essay"]
ONE_CHUNK = 10**6


def offsets(text: str) -> Sequence[tuple[int, int]]:
    """Words and punctuation marks."""
    return [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]


def make(task: str, num_tokens: int = 1500, count: int = 2, **options: Any) -> list[Record]:
    given = {"offsets": offsets, "haystack": HAYSTACK, "chunk_tokens": ONE_CHUNK, **options}
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
            opening, verb, closing = f"A special magic {kind[:-1]} is", "is the", kind[:-1]
            if len(record.answers) > 1:
                opening, verb, closing = f"Some special magic {kind} are", "are all the", kind
            query = f"{key}, {key}, {key}, and {key}" if task == "niah_multiquery" else key
            meta = record.meta
            expected = (
                f"{opening} hidden within the following text\\. Make sure to memorize it\\. I will quiz you about the "
                f"{closing} afterwards\\.\n(?s:.+)\nWhat {verb} special magic {closing} for {query} mentioned in the "
                f"provided text\\?"
            )
            assert re.fullmatch(expected, meta["opening"] + context(record) + meta["closing"])
            prefix = f" The special magic {closing} for {query} mentioned in the provided text {verb.split()[0]}"
            assert re.fullmatch(prefix, meta["answer_prefix"])
            assert record.question == meta["closing"].strip()
            assert all(re.fullmatch(value, answer) for answer in record.answers)
            assert all(re.fullmatch(key, found) and re.fullmatch(value, given) for found, given in needles(record))

    @pytest.mark.parametrize("task", TASKS)
    def test_the_context_answers_the_question(self, task: str) -> None:
        """In the order of the question, which is not always that of the keys."""
        asked_in_order = []
        for record in make(task, count=4):
            [query] = re.findall(r"for (.+) mentioned in", record.question)
            asked = re.split(r", and |, ", query)
            found = [value for key in asked for name, value in needles(record) if name == key]
            if task == "niah_multivalue":
                assert len(asked) == 1 and sorted(found) == sorted(record.answers)
            else:
                assert found == list(record.answers)
            keys = [name for name, _ in needles(record)]
            asked_in_order.append(tuple(keys.index(key) for key in asked))
        if task in ("niah_multikey_1", "niah_multiquery"):
            assert len(set(asked_in_order)) > 1

    @pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_1"])
    def test_depths_in_essays(self, task: str) -> None:
        seen = set()
        for record in make(task, count=40):
            text = context(record)
            assert "\n" not in text
            total = len(ruler.sentences(re.sub(r"One of the special magic .*?: \d+\. ?", "", text).strip()))
            places = [text.count("Sentence ", 0, match.start()) for match in re.finditer("One of the special", text)]
            depths = {total * int(depth) // 100 for depth in DEPTHS.split()}
            assert len(set(places)) == len(places) and depths.issuperset(places)
            seen.update(place * 100 // total for place in places)
        assert min(seen) < 10 and max(seen) > 90 and len(seen) > 20

    @pytest.mark.some(3)
    @pytest.mark.parametrize("num_tokens", [1500, 4096])
    @pytest.mark.parametrize("task", TASKS)
    def test_never_above_and_close(self, task: str, num_tokens: int) -> None:
        step = {"essay": 500 * 1.2, "noise": 25 * 25, "needle": 25 * 26}[TASKS[task].haystack]
        step /= 5 if task in LINES and num_tokens < 4096 else 1
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

    @pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_3"])
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


class TestVariableTracking:
    """RULER's ``vt``: one chain of five variables in lines of noise, after a solved example."""

    def test_prompt(self) -> None:
        for record in make("vt", num_tokens=2000, count=3):
            meta, text = record.meta, context(record)
            example, opening, rest = meta["opening"].partition("\n\nMemorize and track the chain(s) of variable")
            assert opening and rest == " assignment hidden in the following text.\n\n"
            assignments = [line for line in text.split("\n") if line != ruler._NOISE]
            value = assignments[0].rsplit(" ", 1)[1]
            assert re.fullmatch(r"[1-9]\d{4}", value)
            names = list(record.answers)
            assert len(set(names)) == 5 and all(re.fullmatch("[A-Z]{5}", name) for name in names)
            chain = [f"VAR {after} = VAR {name} " for name, after in zip(names, names[1:], strict=False)]
            assert assignments == [f"VAR {names[0]} = {value}", *chain]
            question = f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
            assert meta["closing"] == question and record.question == question.strip()
            assert meta["answer_prefix"] == (
                " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned "
                f"the value {value}, they are: "
            )
            assert (meta["max_tokens"], meta["metric"]) == (30, "string_match_all")
            assert meta["length"] <= 2000 == meta["num_tokens"] and meta["length"] > 2000 - 5 * 25 - 100

            solved = re.fullmatch(
                r"Memorize and track .+ following text\.\n\n(?P<lines>(?s:.+))\nQuestion: .+ (?P<value>\d{5}) in the "
                r"text above\. Answer: .+ 5 variables .+ (?P=value), they are:  (?P<names>[A-Z]{3}(?: [A-Z]{3}){4})",
                example,
            )
            assert solved is not None and len(offsets(example)) <= 500
            found = re.findall(r"VAR ([A-Z]{3}) =", solved["lines"])
            assert " ".join(found) == solved["names"] and f"VAR {found[0]} = {solved['value']}" in solved["lines"]


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
