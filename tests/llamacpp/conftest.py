"""Tiny GGUF files, written once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.models.load import unload_models
from tests.llamacpp.tiny_gguf import ARCHITECTURES, write_gguf


@pytest.fixture(scope="session")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By architecture."""
    return {name: write_gguf(tmp_path_factory.mktemp(name), name) for name in ARCHITECTURES}


@pytest.fixture
def make(gguf_files: dict[str, Path], tiny_models: dict[str, str]) -> Callable[..., CacheClipEngine]:
    """An engine on a GGUF file, with the tiny auxiliary model of the other tests."""
    unload_models()

    def build(architecture: str = "llama", **options: object) -> CacheClipEngine:
        settings = {"auxiliary": tiny_models["auxiliary"], "method": "cacheclip", "dtype": "float32", **options}
        return CacheClipEngine(primary=str(gguf_files[architecture]), **settings)

    return build
