"""What the tests of both frameworks share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.guards.base import Observer


class Seen(Observer):
    """The plans of an engine, and the threads that they were made in."""

    def __init__(self) -> None:
        self.questions: list[str | None] = []
        self.threads: list[threading.Thread] = []

    def on_plan(self, plan: Any, sources: Any) -> None:
        self.questions.append(plan.question)
        self.threads.append(threading.current_thread())


@pytest.fixture(autouse=True)
def no_shared_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """LlamaIndex counts with what the test's own models set."""
    monkeypatch.setattr("llama_index.core.global_tokenizer", None)


@pytest.fixture
def observed() -> Callable[[CacheClipEngine], Seen]:
    """Watch an engine from now on."""

    def observe(engine: CacheClipEngine) -> Seen:
        seen = Seen()
        engine.observers.append(seen)
        return seen

    return observe
