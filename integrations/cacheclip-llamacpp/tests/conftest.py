"""Engines on tiny GGUF files. ``make test-llamacpp`` runs these tests where llama-cpp-python is installed."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing import build_auxiliary
from cacheclip_testing.plugin import CHUNKS
from tiny_gguf import ARCHITECTURES, MakeEngine, write_gguf

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.models import unload_models

os.environ.setdefault("HF_HUB_OFFLINE", "1")
collect_ignore_glob = [] if find_spec("llama_cpp") else ["test_*.py"]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A GGUF file of each architecture."""
    return {name: write_gguf(tmp_path_factory.mktemp(name), name) for name in ARCHITECTURES}


@pytest.fixture(scope="session")
def auxiliary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_auxiliary(tmp_path_factory.mktemp("auxiliary"))


@pytest.fixture
def chunks() -> list[str]:
    return list(CHUNKS)


@pytest.fixture
def make(files: dict[str, Path], auxiliary: Path, tmp_path: Path) -> MakeEngine:
    def made(architecture: str = "qwen2", **settings: Any) -> CacheClipEngine:
        unload_models()
        options = {"store": tmp_path / "store", "auxiliary": str(auxiliary), "method": "epic", **settings}
        return CacheClipEngine(primary=str(files[architecture]), **options)

    return made
