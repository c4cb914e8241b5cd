"""A plug-in for pytest: tiny models, an engine on them, and texts, for tests of other distributions.

pytest_plugins = ["cacheclip_testing.plugin"]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .command import CommandRun, run_command
from .tiny import SENTENCES, TINY_MODELS, build_auxiliary, build_model

CHUNKS = [
    " ".join(SENTENCES[0:3]),
    " ".join(SENTENCES[3:5]),
    " ".join(SENTENCES[5:8]),
    " ".join(SENTENCES[i] for i in (6, 1, 4, 0)),
]
QUESTION = "What is the magic number of the harbour master?"

CACHECLIP: dict[str, Any] = {"method": "cacheclip", "chunk_context": "prefix"}
"""Settings of engines in most tests: both models take part, and a chunk right behind the prefix is exact."""


def rag_prompt(chunks: Sequence[str], question: str = QUESTION) -> str:
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

    models: dict[str, Any] = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
    return CacheClipEngine(**models, **CACHECLIP, store=str(tmp_path / "store"))


@pytest.fixture
def chunks() -> list[str]:
    """Four texts, the last of which repeats sentences of the others."""
    return list(CHUNKS)


@pytest.fixture
def question() -> str:
    """A question about them."""
    return QUESTION


@pytest.fixture(params=list(TINY_MODELS))
def primary(request: pytest.FixtureRequest, tiny_models: dict[str, str]) -> str:
    """Every model of the matrix in turn."""
    return tiny_models[request.param]


@pytest.fixture
def cacheclip(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandRun]:
    """Runs ``cacheclip`` with arguments, in this process."""
    return partial(run_command, monkeypatch, capsys)
