"""The command takes a GGUF file as primary model, without another option."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_ingest.commands.settings import given_settings
from cacheclip_lab.evaluation.exactness import DIRECT, check_exactness
from cacheclip_lab.evaluation.prompts import EvaluationPrompt
from cacheclip_lab.training.finetune import open_engine
from cacheclip_testing.plugin import CHUNKS, QUESTION
from ingest_cases import embedding_models  # noqa: F401
from tiny_gguf import MakeEngine

from cacheclip_rag import CacheClipEngine, ConfigurationError, EngineConfig
from cacheclip_rag.fusion import in_order
from cacheclip_rag.models import loader_of
from cacheclip_rag.plugins import PlacedKV


def test_the_command(cacheclip: Any, files: dict[str, Path], minilm: str, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "island.txt").write_text("\n\n".join(CHUNKS[:3]))
    models = ("--primary", files["llama"], "--auxiliary", "none", "--embedding", minilm)
    store = ("--store", tmp_path / "store")
    made = cacheclip("ingest", tmp_path / "corpus", *store, *models, "--chunk-tokens", "64", "--json")
    assert made.code == 0, made.err
    assert made.json["computed"] >= 3
    (settings := tmp_path / "settings.toml").write_text("min_confidence = 0.0")
    asked = cacheclip("ask", "When was it built?", *store, "--settings", settings, "--max-tokens", "3", "--json")
    assert asked.code == 0, asked.err
    stats = asked.json["stats"]
    assert stats["hits"] >= 3 and stats["method"] == "epic-corrected" and stats["generated_tokens"] <= 3
    assert cacheclip("store", "verify", *store, "--json").code == 0


@pytest.mark.parametrize("command", [("ask", "Who?"), ("ingest", ".")])
def test_no_such_file(cacheclip: Any, tmp_path: Path, command: tuple[str, str]) -> None:
    refused = cacheclip(*command, "--store", tmp_path, "--primary", "gone.gguf")
    assert refused.code == 2 and "there is no GGUF file 'gone.gguf'" in refused.err


def test_a_file_is_kept_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by that of the file to which a link leads, as in the cache of a model hub: it has no such name."""
    monkeypatch.chdir(tmp_path)
    Path("blob").touch()
    Path("tiny.gguf").symlink_to("blob")
    assert given_settings({"primary": "tiny.gguf"}) == {"primary": str(tmp_path / "tiny.gguf")}
    assert given_settings({"primary": "gone.gguf"}) == {"primary": "gone.gguf"}
    assert loader_of("old/tiny.gguf").bare_name == loader_of("/new/tiny.gguf").bare_name == "tiny.gguf"


def test_no_fine_tuning(files: dict[str, Path], auxiliary: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"attention can be read, got .*unquantised checkpoint"):
        open_engine(EngineConfig(primary=str(files["llama"]), auxiliary=str(auxiliary)))


def test_eval_compares_methods(cacheclip: Any, files: dict[str, Path], tmp_path: Path) -> None:
    chunks = [{"title": "a", "text": text} for text in CHUNKS]
    record = {"task": "qa", "answers": ["Ada"], "chunks": chunks, "meta": {}}
    records = [json.dumps({**record, "id": name, "question": f"Who is {name}?"}) for name in ("Ada", "Ben")]
    (tmp_path / "records.jsonl").write_text("\n".join(records))
    models = ("--primary", files["llama"], "--auxiliary", "none")
    arguments = ("--dataset", tmp_path / "records.jsonl", "--methods", "full,direct,epic", "--ratios", "1.0", "--json")
    found = cacheclip("eval", *models, *arguments)
    assert found.code == 0, found.err
    kl = {name: each["first_token_kl"] for name, each in found.json["methods"].items()}
    assert kl["epic@1"] < 0.001 < kl["direct"]
    [where] = found.json["measured_on"]
    assert "llama.cpp 0." in where and "transformers" not in where


@pytest.mark.parametrize("methods", [(), ("--methods", "all")], ids=["default", "all"])
def test_eval_runs_what_can_run(cacheclip: Any, files: Any, auxiliary: Path, tmp_path: Path, methods: Any) -> None:
    record = {"id": "a", "task": "qa", "question": "Who?", "answers": ["Ada"], "chunks": [{"title": "a", "text": "A"}]}
    (tmp_path / "records.jsonl").write_text(json.dumps(record))
    models = ("--primary", files["llama"], "--auxiliary", auxiliary)
    found = cacheclip("eval", *models, "--dataset", tmp_path / "records.jsonl", *methods, "--json")
    assert found.code == 0, found.err
    assert {"full", "direct", "epic-corrected@0.2", "cacheclip@0.2"} < set(found.json["methods"])


def test_bench_measures(cacheclip: Any, files: dict[str, Path], auxiliary: Path) -> None:
    models = ("--primary", files["llama"], "--auxiliary", auxiliary)
    sizes = ("--context-tokens", "256", "--chunk-tokens", "64", "--runs", "1")
    found = cacheclip("bench", *models, *sizes, "--json")
    assert found.code == 0, found.err
    assert list(found.json["methods"]) == ["full", "direct", "epic-corrected"]


def test_a_certificate(cacheclip: Any, files: dict[str, Path]) -> None:
    """It is of llama.cpp, and covers an engine on this file."""
    models = ("--primary", files["llama"], "--auxiliary", "none")
    made = cacheclip("certify", *models, "--method", "epic", "--quick", "--json")
    assert made.code in (0, 1), made.err
    found = made.json
    assert found["identity"]["backend"].startswith("llama.cpp")
    assert found["exactness"]["passed"] and found["exactness"]["checks"]["ratio_1"]["passed"]
    assert found["exactness"]["not_measured"] and 0 < found["exactness"]["noise_floor"]["logits"] < 0.5
    engine = CacheClipEngine(primary=str(files["llama"]), auxiliary=None, method="epic")
    assert engine.parts.certificates.identity(engine.make_method()).digest() in made.json["path"]


def test_the_checks_see_that_kv_is_missing(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = make(chunk_context="prefix"), EvaluationPrompt(tuple(CHUNKS[:2]), QUESTION, None)
    engine.precompute(prompt.chunks, method=DIRECT)
    assert check_exactness(engine, prompt)["passed"]

    def shorter(data: torch.Tensor, num_tokens: int, first: int, count: int, at: int) -> PlacedKV:
        return PlacedKV(data, num_tokens, first + 8, count - 8, at + 8)

    monkeypatch.setattr(in_order, "PlacedKV", shorter)
    assert not check_exactness(engine, prompt)["checks"]["first_chunk"]["passed"]
