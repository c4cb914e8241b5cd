"""A server with tiny models, and the core's fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cacheclip_testing import fake_models
from cacheclip_testing.plugin import CACHECLIP
from serve_cases import Served, running

from cacheclip_rag import EngineConfig


@pytest.fixture(scope="module")
def config(tool_model: str, tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Settings of the server's engine: a model that knows tools, and a store."""
    store = str(tmp_path_factory.mktemp("serving") / "store")
    return EngineConfig(primary=tool_model, auxiliary=tiny_models["auxiliary"], store=store, **CACHECLIP)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def served(config: EngineConfig) -> Iterator[Served]:
    """A server without keys."""
    with running(config) as found:
        yield found


@pytest.fixture(scope="module")
def thinking() -> Iterator[Served]:
    """A server whose model says what it is told."""
    with running(EngineConfig(**fake_models(), method="full")) as found:
        yield found
