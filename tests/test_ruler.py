"""RULER's needle tasks against its specification: strings, needles, depths and lengths."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag.lab.evaluation.records import Record, _record, read_records

SPEC = importlib.util.spec_from_file_location("benchmark_ruler", Path(__file__).parents[1] / "benchmarks/ruler.py")
assert SPEC is not None and SPEC.loader is not None
ruler: Any = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = ruler
SPEC.loader.exec_module(ruler)
sentences = ruler.sentences

HAYSTACK = "\n".join(f"Sentence {n} of the keeper's\n  log is about gulls, fog and rope." for n in range(1000))
DEPTHS = (
    "0 3 5 8 10 13 15 18 21 23 26 28 31 33 36 38 41 44 46 49 51 54 56 59 62 64 67 69 72 74 77 79 82 85 87 90 92 95 97 "
    "100"
)
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
    return [
        _record(json.dumps(each).encode()) for each in ruler.generate(task, num_tokens=num_tokens, count=count, **given)
    ]


def context(record: Record) -> str:
    [chunk] = record.chunks
    return chunk.text


def needles(record: Record) -> list[tuple[str, str]]:
    """Keys and values of every needle in the context."""
    kind = TASKS[record.task].value_type
    return re.findall(rf"One of the special magic {kind} for (.+?) is: (.+?)\.", context(record))


class TestStrings:
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

    @pytest.mark.parametrize("key", ["rare-care", "Some-thing", "shared-area"])
    def test_keys_are_not_put_in_the_singular(self, key: str) -> None:
        assert all(key in part for part in TASKS["niah_single_2"].parts(key)[1:])

    def test_meta(self) -> None:
        [record] = make("niah_multikey_1", count=1)
        assert (record.id, record.task) == ("niah_multikey_1-1500-0", "niah_multikey_1")
        assert record.meta["metric"] == "string_match_all" and record.meta["max_tokens"] == 128
        assert record.meta["num_tokens"] == 1500


class TestNeedles:
    @pytest.mark.parametrize(
        ("task", "placed", "answers"),
        [
            ("niah_single_1", 1, 1),
            ("niah_single_2", 1, 1),
            ("niah_single_3", 1, 1),
            ("niah_multikey_1", 4, 1),
            ("niah_multivalue", 4, 4),
            ("niah_multiquery", 4, 4),
        ],
    )
    def test_how_many(self, task: str, placed: int, answers: int) -> None:
        for record in make(task):
            assert len(needles(record)) == placed and len(record.answers) == answers

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

    def test_values_are_shuffled_alike_in_every_sample(self) -> None:
        orders = {
            tuple(record.answers.index(value) for _, value in needles(record))
            for record in make("niah_multivalue", count=4)
        }
        assert len(orders) == 1 and orders != {(0, 1, 2, 3)}

    @pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3"])
    def test_distractors_are_needles(self, task: str) -> None:
        for record in make(task):
            lines = context(record).split("\n")
            assert len(lines) == len(needles(record)) == len({key for key, _ in needles(record)}) > 10

    def test_noise(self) -> None:
        lines = [context(record).split("\n") for record in make("niah_single_1", count=6)]
        noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
        assert all(len(made) - made.count(noise) == 1 for made in lines)
        assert len({next(n for n, text in enumerate(made) if text != noise) for made in lines}) > 3

    @pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_1"])
    def test_depths_in_essays(self, task: str) -> None:
        seen = set()
        for record in make(task, count=40):
            text = context(record)
            assert "\n" not in text
            total = len(sentences(re.sub(r"One of the special magic .*?: \d+\. ?", "", text).strip()))
            places = [text.count("Sentence ", 0, match.start()) for match in re.finditer("One of the special", text)]
            depths = {total * int(depth) // 100 for depth in DEPTHS.split()}
            assert len(set(places)) == len(places) and depths.issuperset(places)
            seen.update(place * 100 // total for place in places)
        assert min(seen) < 10 and max(seen) > 90 and len(seen) > 20

    def test_the_forty_depths(self) -> None:
        assert tuple(map(int, DEPTHS.split())) == ruler._DEPTHS and len(ruler._DEPTHS) == 40

    def test_essays_begin_at_their_beginning(self) -> None:
        plain = [re.sub(r"One of the special magic .*?: \d+\. ?", "", context(r)) for r in make("niah_multivalue")]
        assert all(" ".join(HAYSTACK.split()).startswith(text.strip()) for text in plain)


class TestLength:
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

    def test_samples_that_do_not_fit_lose_a_step(self) -> None:
        """Where keys differ in tokens, what fits one sample does not fit all."""

        def pairs(text: str) -> Sequence[tuple[int, int]]:
            return [(n, min(n + 2, len(text))) for n in range(0, len(text), 2)]

        made = make("niah_multikey_2", 20_000, count=12, offsets=pairs)
        assert all(record.meta["length"] <= 20_000 for record in made)
        fitted, *fewer = sorted({context(record).count("\n") for record in made}, reverse=True)
        assert fewer == [fitted - 25]

    @pytest.mark.parametrize("task", TASKS)
    def test_few_tokenizations(self, task: str) -> None:
        """Most of the time of long contexts goes there."""
        sizes = []

        def counted(text: str) -> Sequence[tuple[int, int]]:
            sizes.append(len(text))
            return offsets(text)

        [record] = make(task, 12_000, count=1, offsets=counted)
        assert len(sizes) <= 12 and max(sizes) < 1.5 * len(context(record))

    @pytest.mark.parametrize("task", TASKS)
    def test_too_few_tokens(self, task: str) -> None:
        for num_tokens in (1, 200):
            with pytest.raises(SystemExit, match=rf"{task} needs num_tokens of about \d+ or more, got"):
                make(task, num_tokens)
        with pytest.raises(SystemExit) as error:
            make(task, 200)
        least = int(re.findall(r"about (\d+)", str(error.value))[0])
        assert len(make(task, least, count=20)) == 20


class TestChunks:
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

    @pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_3"])
    @pytest.mark.parametrize("token", [r"\w+|\W+", r"\W*\w+|\W+"])
    def test_tokens_that_reach_over_the_ends_of_the_context(self, task: str, token: str) -> None:
        """As a byte pair for a full stop and a line break does."""

        def wide(text: str) -> Sequence[tuple[int, int]]:
            return [match.span() for match in re.finditer(token, text)]

        for record in make(task, offsets=wide):
            prompt = record.meta["opening"] + context(record) + record.meta["closing"]
            assert context(record)[0].isalpha() and context(record)[-1] != "\n"
            assert len(wide(prompt + record.meta["answer_prefix"])) + 128 == record.meta["length"]
        for record in make(task, offsets=wide, chunk_tokens=50, overlap_tokens=0):
            [whole] = [other for other in make(task, offsets=wide) if other.id == record.id]
            assert "".join(chunk.text for chunk in record.chunks) == context(whole)


class TestDraws:
    @pytest.mark.parametrize("task", TASKS)
    def test_same_seed_same_samples(self, task: str) -> None:
        state = random.getstate()
        assert make(task) == make(task) == make(task, count=3)[:2]
        assert make(task)[0].answers != make(task)[1].answers
        assert make(task, seed=7)[0].answers != make(task)[0].answers
        assert random.getstate() == state

    def test_words(self) -> None:
        adjectives, nouns = ruler._word_lists()
        assert len({f"{a}-{n}" for a in adjectives[:50] for n in nouns}) == 50 * len(nouns)
        assert len(adjectives) > 900 and len(nouns) > 6000 and all(map(str.strip, adjectives + nouns))


class TestRefused:
    @pytest.mark.parametrize("haystack", [None, HAYSTACK[:20_000]])
    def test_too_little_text(self, haystack: str | None) -> None:
        with pytest.raises(SystemExit, match=r"needs essays longer than 8000 tokens.*got \d+ words. Pass more"):
            make("niah_single_2", 8000, haystack=haystack)

    @pytest.mark.parametrize("task", LINES)
    def test_text_is_not_needed(self, task: str) -> None:
        assert make(task, haystack=None) == make(task)


class TestSentences:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", []),
            ("No end", ["No end"]),
            ("One. Two! Three? Four.", ["One.", "Two!", "Three?", "Four."]),
            ('He said "Go." She went.', ['He said "Go."', "She went."]),
            ("It grew 2.5 times. 7 stayed.", ["It grew 2.5 times.", "7 stayed."]),
            ("It ends (here.) (Really.) Yes.", ["It ends (here.)", "(Really.)", "Yes."]),
            (
                "Mr. Garrow met J. Thornbury, e.g. Ada. They left.",
                ["Mr. Garrow met J. Thornbury, e.g. Ada.", "They left."],
            ),
            (
                "drafts of this.October 2015When I talk. and so on.",
                ["drafts of this.October 2015When I talk. and so on."],
            ),
        ],
    )
    def test_where_they_end(self, text: str, expected: list[str]) -> None:
        assert sentences(text) == expected
        assert " ".join(sentences(text)) == text


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

    def test_samples_differ_and_come_again(self) -> None:
        first, second = make("vt", num_tokens=1500)
        assert first.answers != second.answers and first.chunks != second.chunks
        assert make("vt", num_tokens=1500, count=1) == [first]

    def test_too_few_tokens(self) -> None:
        with pytest.raises(SystemExit, match="vt needs num_tokens"):
            make("vt", num_tokens=400)


def test_the_command(
    tiny_models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it prints is a file for ``cacheclip eval --dataset``."""
    sizes = ["--length", "1200", "--limit", "2", "--chunk-tokens", "200", "--overlap-tokens", "10"]
    monkeypatch.setattr(sys, "argv", ["ruler", "--primary", tiny_models["llama"], *sizes])
    ruler.main()
    path = tmp_path / "needles.jsonl"
    path.write_text(capsys.readouterr().out)
    found = read_records(path)
    assert [each.task for each in found.records] == ["niah_multikey_2"] * 2 + ["niah_single_1"] * 2
    assert not found.skipped and all(len(each.chunks) > 1 for each in found.records)
