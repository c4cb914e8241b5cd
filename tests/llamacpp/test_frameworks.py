"""Both frameworks and the command take a GGUF file as primary model, without another option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_cacheclip import ChatCacheClip
from langchain_core.messages import AIMessage
from llama_index.llms.cacheclip import CacheClipLLM

from tests.cli.test_cli import cacheclip, embedding_models
from tests.conftest import CHUNKS

__all__ = ["cacheclip", "embedding_models"]


def test_the_command(cacheclip: Any, gguf_files: dict[str, Path], minilm: str, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "island.txt").write_text("\n\n".join(CHUNKS[:3]))
    models = ("--primary", gguf_files["llama"], "--auxiliary", "none", "--embedding", minilm)
    store = ("--store", tmp_path / "store")
    made = cacheclip("ingest", tmp_path / "corpus", *store, *models, "--chunk-tokens", "64", "--json")
    assert made.code == 0, made.err
    assert made.json["computed"] >= 3
    asked = cacheclip("ask", "When was it built?", *store, "--max-tokens", "3", "--json")
    assert asked.code == 0, asked.err
    stats = asked.json["stats"]
    assert stats["hits"] >= 3 and stats["method"] == "epic" and stats["generated_tokens"] <= 3
    assert cacheclip("store", "verify", *store, "--json").code == 0


@pytest.mark.parametrize("kind", [ChatCacheClip, CacheClipLLM])
def test_a_framework(kind: Any, gguf_files: dict[str, Path]) -> None:
    llm = kind(primary=str(gguf_files["llama"]), auxiliary=None, method="epic", max_tokens=4)
    prompt = "\n\n".join([*CHUNKS, "Who?"])
    llm.engine.precompute(CHUNKS, method="epic")
    assert isinstance(llm.invoke(prompt) if kind is ChatCacheClip else llm.complete(prompt).text, AIMessage | str)
    stats = llm.engine.generate(prompt, max_tokens=2, method="epic").stats
    assert stats.hits == len(CHUNKS) and stats.method == "epic"
