"""What this distribution takes from the core, and what it gives to others."""

from __future__ import annotations

import re
from pathlib import Path

import langchain_cacheclip
import pytest

from cacheclip_rag.testing.door import names_outside_the_door

EXPECTED_ALL = [
    "CacheClipDocumentStore",
    "CacheClipDocumentTransformer",
    "CacheClipLLM",
    "CacheClipStatsHandler",
    "CacheClipVectorStore",
    "ChatCacheClip",
    "collect_cacheclip_stats",
    "create_cacheclip_documents_chain",
    "with_cacheclip_stats",
]


def test_it_takes_names_of_public_modules_only() -> None:
    assert names_outside_the_door(Path(langchain_cacheclip.__file__).parent) == set()


def test_all_imports() -> None:
    assert sorted(langchain_cacheclip.__all__) == EXPECTED_ALL


def test_readme(tiny_models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its program, on tiny models."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for name, own in (
        ("Qwen/Qwen2.5-0.5B-Instruct", tiny_models["llama"]),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", tiny_models["auxiliary"]),
        ("my-store", str(tmp_path)),
    ):
        assert program.count(name) == 1
        program = program.replace(name, own)
    exec(program, {})
    assert capsys.readouterr().out.split()[-1] == "1", "the document is a hit"
