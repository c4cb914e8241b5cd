"""A model on a fake, what LlamaIndex reports, and the core's fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cacheclip_testing import fake_models
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.llms.cacheclip import CacheClipLLM
from llama_index_cases import Events


@pytest.fixture(autouse=True)
def no_shared_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """LlamaIndex counts with what the test's own models set."""
    monkeypatch.setattr("llama_index.core.global_tokenizer", None)


@pytest.fixture
def llm(tmp_path: Path) -> CacheClipLLM:
    """On a fake model: what the framework does does not depend on attention."""
    return CacheClipLLM(**fake_models(), store=str(tmp_path / "store"), max_tokens=8)


@pytest.fixture
def seen() -> Iterator[Events]:
    handler = Events(fusions=[], names=[])
    root = get_dispatcher()
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)
