"""What this distribution takes from the core, and what it gives to others."""

from __future__ import annotations

from pathlib import Path

import langchain_cacheclip
import pytest
from adapter_cases import run_readme
from cacheclip_testing import names_outside_the_door

EXPECTED_ALL = ["CacheClipDocumentStore", "CacheClipDocumentTransformer", "CacheClipLLM", "CacheClipStatsHandler"]
EXPECTED_ALL += ["CacheClipVectorStore", "ChatCacheClip", "collect_cacheclip_stats", "create_cacheclip_documents_chain"]
EXPECTED_ALL += ["with_cacheclip_stats"]


def test_it_takes_names_of_public_modules_only() -> None:
    assert names_outside_the_door(Path(langchain_cacheclip.__file__).parent) == set()


def test_all_imports() -> None:
    assert sorted(langchain_cacheclip.__all__) == EXPECTED_ALL


def test_readme(tiny_models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its program, on tiny models."""
    run_readme(Path(__file__).parents[2], tiny_models, tmp_path)
    assert capsys.readouterr().out.split()[-1] == "1", "the document is a hit"
