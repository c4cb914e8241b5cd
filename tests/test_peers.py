"""The comparison with peers, on tiny models and with the systems that need only transformers. Plain transformers is
tested in this process, because a process more takes seconds."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import ROOT, script

MEASURED = ["transformers-prefix", "cacheclip-rag", "cacheclip-rag idle"]


class FakeTokenizer:
    chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


@pytest.fixture
def peers() -> Any:
    return script("benchmarks/peers.py")


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="stands in for interpreters with shell scripts")
@pytest.mark.long
def test_the_same_prompts_and_what_each_system_reuses(
    peers: Any, tiny_models: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    broken = program(tmp_path / "broken", "echo no such engine >&2; exit 3")
    bare = program(tmp_path / "bare", f'exec {sys.executable} -S "$@"')
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    models = ["--primary", tiny_models["llama"], "--auxiliary", tiny_models["auxiliary"]]
    sizes = ["--tokens", "200", "--chunk-tokens", "40", "--rounds", "1", "--threads", "1"]
    others = ["--python", f"llama.cpp={bare}", "--python", f"vllm={broken}"]
    sizes += ["--new", "3", "--dtype", "float32", "--log", f"{tmp_path}/peers.log"]
    files = ["--json", str(tmp_path / "peers.json"), "--plot", str(tmp_path / "peers.png")]
    asked = ["--systems", "transformers-prefix,llama.cpp,vllm,cacheclip-rag,cacheclip-rag idle"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *models, *sizes, *others, *files, *asked])
    peers.main()
    found = json.loads((tmp_path / "peers.json").read_text())
    table = capsys.readouterr().out

    systems = {one["name"]: one for one in found["systems"]}
    assert list(systems) == ["transformers-prefix", "llama.cpp", "vllm", *MEASURED[1:]]
    assert [name for name, one in systems.items() if one["status"] == "measured"] == MEASURED, systems
    assert all(systems[name]["versions"]["transformers"] for name in MEASURED)
    assert systems["llama.cpp"]["status"] == "not installed"
    assert "pip install llama-cpp-python" in systems["llama.cpp"]["install"]
    assert systems["vllm"]["status"] == "failed" and systems["vllm"]["reason"] == "ended with 3: no such engine"
    assert all(f"- {name}: {one['status']}" in table for name, one in systems.items())
    assert "OTHER TOKEN IDS" not in table

    rows = {(row["system"], row["case"]): row for row in found["rows"]}
    assert set(rows) == {(name, case) for name in MEASURED for case in peers.CASES}
    assert all(row["same_tokens"] and 0 < row["ttft_s"]["min"] < row["answer_s"]["min"] for row in rows.values())
    assert rows["cacheclip-rag idle", "same order"]["reused"] > 200, "the exact KV was completed meanwhile"
    for case in peers.CASES:
        assert len({rows[name, case]["prompt_tokens"] for name in MEASURED}) == 1
    kept = {case: rows["transformers-prefix", case]["reused"] for case in peers.CASES}
    assert kept["first"] == 0 and kept["same order"] > 200, "all chunks"
    ours = [answer for answer in found["answers"] if answer["system"] == "cacheclip-rag"]
    assert len(ours) == 2 and all(answer["hits"] == 5 and answer["reused"] > 140 for answer in ours)
    assert [(one["tokens"], one["chunks"]) for one in found["ingestion"]] == [(200, 5)]
    assert found["ingestion"][0]["seconds"] > 0 and found["processor"] and found["threads"] == 1
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(sys, "argv", ["peers.py", "--from", str(tmp_path / "peers.json")])
    peers.main()
    assert capsys.readouterr().out == table, "from the file"
    monkeypatch.setattr(sys, "argv", ["peers.py", *models, *sizes, "--systems", ",".join(MEASURED)])
    again = peers.compare(peers.parse())
    assert again["answers"] == found["answers"], "from the log"


def test_a_cropped_cache_gives_what_plain_prefill_gives(peers: Any, tiny_models: dict[str, str]) -> None:
    from transformers import AutoTokenizer

    made = peers.Prompts(AutoTokenizer.from_pretrained(tiny_models["llama"]), 200, 40)
    settings = {"model": tiny_models["llama"], "threads": torch.get_num_threads(), "dtype": "float32"}
    plain, kept = peers.Transformers(settings), peers.TransformersPrefix(settings)
    tokens = []
    for number in range(4):
        kept.clear()
        for prompt in made.of_round(number):
            expected, found = (system.answer(prompt.message, prompt.text, 2) for system in (plain, kept))
            assert found["token"] == expected["token"] and expected["reused"] == 0
            assert (found["reused"] > 0) == (prompt.case != "first")
            assert {peers.digest(each["ids"]) for each in (expected, found)} == {prompt.digest}
            tokens.append(found["token"])
    assert len(set(tokens)) > 1, "tokens that tell prompts apart"


def test_orders_of_a_round(peers: Any) -> None:
    made = peers.Prompts.__new__(peers.Prompts)
    made.texts, made._tokenizer = list("abcdef"), FakeTokenizer()
    for number, order in ((0, "abcdef"), (7, "bcdefa")):
        first, second = (prompt.message.split("\n\n") for prompt in made.of_round(number))
        assert first[:-1] == second[:-1] == list(order) and first[-1] != second[-1]


def test_a_system_that_fails_later_does_not_stop_the_others(
    peers: Any, tiny_models: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """With a worker of a few lines for each system: one ends at its second answer."""
    text = """
import json, sys
name, answers = sys.argv[-1], 0
print(json.dumps({"versions": {name: "1"}}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    answers += "text" in order
    if name == "vllm" and answers == 2:
        sys.exit("out of memory")
    result = {"seconds": 1}
    if "text" in order:
        result = {"ttft_s": answers, "answer_s": answers, "prompt_tokens": 9, "digest": "another", "reused": 0}
    print(json.dumps(result), flush=True)
"""
    (tmp_path / "worker.py").write_text(text)
    monkeypatch.setattr(peers, "__file__", str(tmp_path / "worker.py"))
    sizes = ["--tokens", "200", "--chunk-tokens", "40", "--rounds", "3"]
    models = ["--primary", tiny_models["llama"], "--systems", "vllm,transformers"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *models, *sizes])
    found = peers.compare(peers.parse())
    vllm, plain = found["systems"]
    assert vllm["status"] == "failed" and vllm["reason"] == "ended with 1: out of memory"
    assert plain["status"] == "measured" and {row["system"] for row in found["rows"]} == {"transformers"}
    first = next(row for row in found["rows"] if row["case"] == "first")
    assert first["ttft_s"] == {"median": 4, "min": 2, "max": 6}, "the warming answer does not count"
    assert "transformers: measured; transformers 1; OTHER TOKEN IDS" in peers.markdown(found)
