"""``benchmarks/gguf.py`` runs, on a tiny file whose figures mean nothing."""

import json
import sys
from pathlib import Path

import pytest
from cacheclip_testing.plugin import CHUNKS

from cacheclip_rag.models import unload_models
from tests.test_benchmarks import load


def test_gguf(files: dict[str, Path], auxiliary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unload_models()
    chunks = [{"title": f"Number {number}", "text": text} for number, text in enumerate(CHUNKS)]
    records = [{"id": str(n), "task": "qa", "question": "Who?", "answers": ["She"], "chunks": chunks} for n in range(3)]
    dataset, out = tmp_path / "few.jsonl", tmp_path / "gguf.json"
    dataset.write_text("\n".join(map(json.dumps, records)))
    arguments = ["--primary", str(files["qwen2"]), "--auxiliary", str(auxiliary), "--json", str(out)]
    few = ["--limit", "1", "--tokens", "300", "--rounds", "1", "--new", "4"]
    monkeypatch.setattr(sys, "argv", ["gguf", str(dataset), *arguments, *few])
    load("gguf", monkeypatch).main()
    found = json.loads(out.read_text())
    by_method = {row["method"]: row for row in found["closeness"]}
    assert by_method["ratio 1.0"]["kl"] < 1e-3 < by_method["direct"]["kl"]
    assert {row["method"] for row in found["times"]} == {"full", "direct", "epic 0.2", "cacheclip 0.2"}
    monkeypatch.setattr(sys, "argv", ["gguf", str(dataset), "--exact", *arguments, "--limit", "1"])
    load("gguf", monkeypatch).main()
    exact = json.loads(out.read_text())
    assert [row["method"] for row in exact] == ["full again", "ratio 1.0", "ratio 1.0 in spans"]
    assert max(row["kl_max"] for row in exact) < 1e-3
