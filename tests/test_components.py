"""The benchmark of stock components, on a tiny model and without an embedding model."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from llama_index.core import MockEmbedding
from scripts import ROOT, script

TEXT = (ROOT / "examples" / "corpus" / "apache-2.0.txt").read_text(encoding="utf-8")


@pytest.fixture
def components(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module, with short documents."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    module = script("benchmarks/components.py")
    (tmp_path / "a.txt").write_text(TEXT[2000:3200])
    (tmp_path / "b.txt").write_text(TEXT[5000:6200])
    monkeypatch.setattr(module, "CORPUS", tmp_path)
    monkeypatch.setattr(module, "FILES", ("a.txt", "b.txt"))
    monkeypatch.setattr(module, "LlamaIndexMiniLM", lambda: MockEmbedding(embed_dim=8))
    monkeypatch.setattr(module, "LangChainMiniLM", lambda: DeterministicFakeEmbedding(size=8))
    yield module
    sys.modules.pop("common", None)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_component_reuses_the_documents(
    components: Any, tool_model: str, tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(*options: str) -> dict[str, dict[str, Any]]:
        models = ["--primary", tool_model, "--auxiliary", tiny_models["auxiliary"]]
        monkeypatch.setattr(sys, "argv", ["components.py", *models, "--json", str(tmp_path / "table.json"), *options])
        components.main()
        return {row["component"]: row for row in json.loads((tmp_path / "table.json").read_text())}

    found = rows()
    assert len(found) >= 22 and {row["framework"] for row in found.values()} == {"LlamaIndex", "LangChain", "server"}
    assert {name: row for name, row in found.items() if row["reused"] < 0.9 or not row["hits"]} == {}
    assert found["`FunctionAgent`"]["prompts"] == 2, "a call, then an answer"
    assert found["`create_agent`, two questions"]["prompts"] == 4
    assert all(row["prompts"] == 3 for name, row in found.items() if "three turns" in name and "condense" not in name)
    assert all(row["sooner"] > 0 for row in found.values())
    for ratio in ("later_over_prefix", "later_over_prefix_after_pauses"):
        assert all((row[ratio] is not None) is (row["prompts"] > 1) for row in found.values())
    assert list(rows("--only", "crossencoder")) == ["`CrossEncoderReranker`"]
