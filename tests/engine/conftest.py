"""Engines on the tiny llama, which never ends its turn here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.models.load import load_model
from tests.conftest import CACHECLIP


@pytest.fixture(autouse=True)
def endless(tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model may end its turn at the first token, and empty answers are all alike."""
    monkeypatch.setattr(load_model(tiny_models["llama"]), "eos_ids", frozenset())


@pytest.fixture
def make(tiny_models: dict[str, str]) -> Callable[..., CacheClipEngine]:
    def build(**options: Any) -> CacheClipEngine:
        return CacheClipEngine(
            **{
                "primary": tiny_models["llama"],
                "auxiliary": tiny_models["auxiliary"],
                "store": None,
                **CACHECLIP,
                **options,
            }
        )

    return build
