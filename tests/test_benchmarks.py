"""The benchmarks run: on tiny models, whose figures mean nothing. ``test_peers.py`` has the largest of them."""

import json
import runpy
import subprocess
import sys
from contextlib import nullcontext, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cacheclip_ingest import Embedder
from scripts import ROOT, script

from cacheclip_rag import CacheClipEngine
from tests.conftest import CHUNKS, QUESTION, rag_prompt

BENCHMARKS = ROOT / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # as for a program that is started there
    return script(f"benchmarks/{name}.py")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tiny_models: dict[str, str], tmp_path: Path) -> Any:
    """Runs a benchmark with arguments; returns what it wrote with ``--json``."""
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    models = ["--primary", tiny_models["llama"], "--auxiliary", tiny_models["auxiliary"], "--dtype", "float32"]

    def run(name: str, *arguments: str, may_fail: bool = False) -> Any:
        module = load(name, monkeypatch)
        out = tmp_path / f"{name}.json"
        monkeypatch.setattr(sys, "argv", [name, *models, "--json", str(out), *arguments])
        with suppress(SystemExit) if may_fail else nullcontext():
            module.main()
        return json.loads(out.read_text())

    return run


@pytest.mark.long
def test_launches(run: Any) -> None:
    sizes = ("--layers", "2", "--tokens", "80", "--chunk-tokens", "40")
    rows = {row["state"]: row for row in run("launches", *sizes, "--methods", "direct")["rows"]}
    assert rows["cold"]["kernels"] >= rows["warm"]["kernels"] > 100 and rows["cold"]["copies"] > 4


@pytest.mark.long
def test_cold_reads(run: Any) -> None:
    found = run("cold_reads", "--tokens", "120", "--chunk-tokens", "40", "--speeds", "1", "--repeats", "1")
    [row] = found["rows"]
    assert row["megabytes_per_s"] == 1
    assert row["in turn ttft_s"] > row["warm ttft_s"], "a slow store costs time"
    sizes = ("--tokens", "120", "--chunk-tokens", "40", "--repeats", "1")
    [row] = run("cold_reads", *sizes, "--lines", "1:1", "--method", "epic")
    assert all(map(all, row["ttft_s"].values())) and {*row["ttft_s"]} >= {"plain", "one by one", "at once", "chosen"}
    assert row["media"]["throttled"]["constant"] > 0.0005, "the latency is found"


@pytest.mark.long
def test_limits(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its question in a process of its own is asked in this one, by the same command."""

    def here(command: list[str], **_: Any) -> Any:
        with monkeypatch.context() as patch, redirect_stdout(StringIO()) as said:
            patch.setattr(sys, "argv", command[1:])
            runpy.run_path(command[1], run_name="__main__")
        return SimpleNamespace(stdout=said.getvalue())

    monkeypatch.setattr("subprocess.run", here)
    sizes = ["--prompt-tokens", "100", "--new-tokens", "4", "--chunks", "3", "--chunk-tokens", "40"]
    more = ["--repeats", "1", "--memory-tokens", "120"]
    found = run("limits", *sizes, *more, may_fail=True)  # a figure may miss its limit
    whats = " ".join(row["what"] for row in found["rows"])
    assert all(word in whats for word in ("decode", "ingest", "memory")), found
    assert "(4 equal)" in whats


@pytest.mark.long
def test_an_ingestion_that_is_killed(tmp_path: Path) -> None:
    """``store_attack.py shared``."""
    pytest.importorskip("moto", reason="the extra shared is not installed: pip install -e '.[shared]' --group test")
    options = ["--kills", "2", "--texts", "16", "--seed", "7", "--folder", str(tmp_path), "--json"]
    command = [sys.executable, str(BENCHMARKS / "store_attack.py"), "shared", *options]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    found = json.loads(ran.stdout)["shared"]
    assert found["broken"] == [] and found["figures"]["kills"] == 2 and found["figures"]["payloads"] == 17


@pytest.mark.long
def test_clients_whose_texts_do_not_recur(tiny_models: dict[str, str], monkeypatch: Any, capsys: Any) -> None:
    models = ["--primary", tiny_models["llama"], "--auxiliary", tiny_models["auxiliary"], "--dtype", "float32"]
    sizes = ["--tokens", "140", "--chunks", "2", "--max-tokens", "2", "--method", "epic-corrected"]
    monkeypatch.setattr(sys, "argv", ["clients", *models, *sizes, "--new", "2"])
    load("clients", monkeypatch).main()
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["prompts"] == 2 and row["first_s"] > 0 and -1 < row["later_than_plain"] < 20
    assert row["most_bytes"] > row["most_bytes_of_plain"] / 2 > 2**25


@pytest.mark.long
def test_latency(run: Any) -> None:
    found = run("latency", "--tokens", "150", "--chunk-tokens", "50,500", "--rounds", "1")
    assert [row["way"] for row in found] == ["full", "auto", "limited"]  # chunks of 500 tokens do not fit
    assert found[0]["predicted_ttft_s"] is None and found[1]["predicted_ttft_s"] > 0


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """Two questions on the same passages, the second with them in another order."""
    texts = [{"title": "", "text": text} for text in CHUNKS]
    records = [
        {"id": f"{n}", "task": "qa", "question": QUESTION, "answers": ["seven"], "chunks": chunks, "meta": meta}
        for n, (chunks, meta) in enumerate([(texts, {"gold_chunks": [1]}), (texts[::-1], {})])
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def test_choices(run: Any, questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    module = load("choices", monkeypatch)
    taus = [module.kendall([3, 2, 1], other) for other in ([9, 5, 1], [1, 5, 9], [5, 9, 1], [2, 2, 2])]
    assert taus == pytest.approx([1, -1, 1 / 3, 0])
    assert module.kendall([3, 3, 1], [3, 3, 1]) == pytest.approx(1.0), "ties"
    arguments = ["--dataset", questions, "--ratio", "1.0", "--log", str(tmp_path / "log")]
    found = run("choices", *arguments)
    for item in found:
        full = item["ways"]["full"][0]
        for way in ("again", "cacheclip"):  # equal up to rounding; of ratio 1.0, too
            assert item["ways"][way][0] == pytest.approx(full, abs=1e-3)
        assert item["ways"]["direct"][0] != pytest.approx(full, abs=1e-3) != item["ways"]["reordered"][0]
    assert "+1.00" in capsys.readouterr().out
    assert run("choices", *arguments) == found, "the log is read again"


@pytest.mark.long
def test_rivals(run: Any, questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun_as = load("rivals", monkeypatch).begun_as
    assert begun_as([], ["a", "b"]) == [0, 1]
    assert begun_as([["c", "a", "x"], ["a", "c", "x", "b"], ["x", "a"]], ["a", "b", "c"]) == [2, 0, 1]
    letters = [[float(text.count(letter)) for letter in "aeiou"] for text in CHUNKS]
    found_by = dict(zip([*CHUNKS, QUESTION], [*letters, letters[1]], strict=True))
    monkeypatch.setattr(Embedder, "embed", lambda _, texts: np.array([found_by[text] for text in texts]))
    log = ["--dataset", questions, "--log", str(tmp_path / "log")]
    found = run("rivals", *log, "--keep", "1,9", "--ratio", "1.0", "--ranker", "letters,auxiliary")
    first, second = (item["ways"] for item in found)
    pruned = {f"{way} 1 {ranker}" for way in ("prune", "both") for ranker in ("letters", "auxiliary")}
    assert set(first) == {"full", "cacheclip", *pruned, "ordered"}
    for ways in (first, second):
        assert ways["cacheclip"]["text"] == ways["full"]["text"], "ratio 1.0"
        assert ways["prune 1 letters"]["tokens"] == ways["both 1 letters"]["tokens"] < ways["full"]["tokens"]
    # the second question's passages are put into the order of the first one's
    assert first["ordered"]["text"] == first["full"]["text"] == second["ordered"]["text"] != second["full"]["text"]


SLOWER = "it was slower than plain prefill"


@pytest.mark.long
def test_negative(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("negative", monkeypatch)
    found = run("negative", "--prompts", "3", "--words", "60", may_fail=True)
    assert {*found.pop("broken")} <= {SLOWER} and found["hi"]["outcomes"] == ["full", "prefix"]
    for times, said in ((1.0, []), (2.0, [SLOWER]), (1.0, [])):  # of tiny models they mean nothing
        found["nothing shared"]["over_plain"] = [times] * 3
        assert module.broken(found, 99) == said
    planted = {
        ("nothing shared", "hits"): "a prompt that shares nothing found KV",
        ("nothing shared", "most_cached_tokens"): "it took more of earlier prompts than the chat template",
        ("nothing shared", "learned_texts"): "a text was learned",
        ("hi", "moved_tokens"): "a greeting found KV",
    }
    for (control, figure), named in planted.items():
        assert module.broken({**found, control: {**found[control], figure: 100}}, 99) == [named]
    said = {**found["doctor"], "hi": {**found["doctor"]["hi"], "recurring": 0.5}}
    assert module.broken({**found, "doctor": said}, 99) == ["the doctor sees more than a prefix in greetings"]
    slow = {**found["nothing shared"], "over_plain": [1001.5, 1001.0, 1002.0]}
    assert module.broken({**found, "nothing shared": slow}, 99) == ["it was slower than plain prefill"]


@pytest.mark.long
def test_lm_harness(
    questions: str, tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("lm_harness", monkeypatch).write(tmp_path, questions, 1, tiny_models["llama"], None)
    [line] = (tmp_path / "data.jsonl").read_text().splitlines()
    assert all(text in json.loads(line)["prompt"] for text in (CHUNKS[0], QUESTION))
    assert f"test: {tmp_path}/data.jsonl" in (tmp_path / "passages.yaml").read_text()
    engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=None, store=str(tmp_path / "store"))
    assert engine.is_stored(CHUNKS[0])
    judge = runpy.run_path(str(tmp_path / "judging.py"))["judge"]
    assert judge({"answers": ["no", "the Lamp."]}, ["A lamp!"]) == {"f1": 1.0, "contains": 1.0}
    assert judge({"answers": ["old lamp"]}, ["new lamp"]) == {"f1": 0.5, "contains": 0.0}


def test_where_an_answer_differs(monkeypatch: pytest.MonkeyPatch, tiny_models: dict[str, str]) -> None:
    """What ``serving.py --only equality`` asks of the engine; the whole of it runs in cacheclip-vllm's tests."""
    first_difference = load("serving", monkeypatch).first_difference
    engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=None, method="epic")
    engine.precompute(CHUNKS)
    prompt = rag_prompt(CHUNKS)
    ids = list(engine.generate(prompt, max_tokens=6, temperature=0).token_ids)
    assert len(ids) > 3 and first_difference(engine, prompt, ids) is None
    other = next(token for token in range(5, 99) if token != ids[3])
    found = first_difference(engine, prompt, [*ids[:3], other, *ids[4:]])
    assert (found["token"], found["chosen"]) == (3, engine.primary.decode_ids([ids[3]])) and found["margin"] > 1e-3
    assert found["given"] == engine.primary.decode_ids([other])
