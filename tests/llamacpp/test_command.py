"""The command takes a GGUF file as primary model, without another option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.test_cli import cacheclip, embedding_models
from tests.conftest import CHUNKS

__all__ = ["cacheclip", "embedding_models"]


def test_the_command(cacheclip: Any, files: dict[str, Path], minilm: str, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "island.txt").write_text("\n\n".join(CHUNKS[:3]))
    models = ("--primary", files["llama"], "--auxiliary", "none", "--embedding", minilm)
    store = ("--store", tmp_path / "store")
    made = cacheclip("ingest", tmp_path / "corpus", *store, *models, "--chunk-tokens", "64", "--json")
    assert made.code == 0, made.err
    assert made.json["computed"] >= 3
    asked = cacheclip("ask", "When was it built?", *store, "--max-tokens", "3", "--json")
    assert asked.code == 0, asked.err
    stats = asked.json["stats"]
    assert stats["hits"] >= 3 and stats["method"] == "epic" and stats["generated_tokens"] <= 3
    assert cacheclip("store", "verify", *store, "--json").code == 0


def test_eval_compares_methods_and_certify_says_why_not(cacheclip: Any, files: dict[str, Path], tmp_path: Path) -> None:
    chunks = [{"title": "a", "text": text} for text in CHUNKS]
    records = [
        {"id": name, "task": "qa", "question": f"Who is {name}?", "answers": ["Ada"], "chunks": chunks, "meta": {}}
        for name in ("Ada", "Ben")
    ]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    models = ("--primary", files["llama"], "--auxiliary", "none")
    arguments = ("--dataset", tmp_path / "records.jsonl", "--methods", "full,direct,epic", "--ratios", "1.0", "--json")
    found = cacheclip("eval", *models, *arguments)
    assert found.code == 0, found.err
    kl = {name: each["first_token_kl"] for name, each in found.json["methods"].items()}
    assert kl["epic@1"] < 0.001 < kl["direct"]
    refused = cacheclip("certify", *models, "--method", "epic")
    assert refused.code != 0 and "expected a transformers model" in refused.err and "cacheclip eval" in refused.err
