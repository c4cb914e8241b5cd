"""A plug-in for pytest: tiny models, an engine on them, and texts, for tests of other distributions.

pytest_plugins = ["cacheclip_rag.testing.plugin"]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .tiny import SENTENCES, TINY_MODELS, build_auxiliary, build_model

CHUNKS = [
    " ".join(SENTENCES[0:3]),
    " ".join(SENTENCES[3:5]),
    " ".join(SENTENCES[5:8]),
    " ".join(SENTENCES[i] for i in (6, 1, 4, 0)),
]
QUESTION = "What is the magic number of the harbour master?"

CACHECLIP = {"method": "cacheclip", "chunk_context": "prefix"}
"""Settings of engines in most tests: both models take part, and a chunk right behind the prefix is exact."""


def rag_prompt(chunks: list[str], question: str = QUESTION) -> str:
    """Chunks first, then the question: as the command line writes it."""
    return "\n\n".join(chunks) + f"\n\nQuestion: {question}"


class Folders(dict[str, str]):
    """Folders of models by name, each built when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __missing__(self, name: str) -> str:
        folder = self._root / name
        self[name] = str(build_auxiliary(folder) if name == "auxiliary" else build_model(folder, TINY_MODELS[name]))
        return self[name]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folder of every model in the matrix, plus ``auxiliary`` with a tokenizer of its own."""
    return Folders(tmp_path_factory.mktemp("models"))


@pytest.fixture
def engine(tiny_models: dict[str, str], tmp_path: Path) -> Any:
    """An engine on the tiny llama with a disk store of its own."""
    from cacheclip_rag import CacheClipEngine

    models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
    return CacheClipEngine(**models, **CACHECLIP, store=str(tmp_path / "store"))


@pytest.fixture(autouse=True)
def own_engines() -> Iterator[None]:
    """The engines that a process shares, with their stores and prefix caches, are a test's own ones."""
    yield
    if engine := sys.modules.get("cacheclip_rag.engine"):
        engine._engines.clear()


@pytest.fixture(params=list(TINY_MODELS))
def primary(request: pytest.FixtureRequest, tiny_models: dict[str, str]) -> str:
    """Every model of the matrix in turn."""
    return tiny_models[request.param]
