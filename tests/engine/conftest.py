"""Engines on the tiny llama, which never ends its turn here."""

from collections.abc import Sequence
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.models.load import load_model
from tests.conftest import CACHECLIP, Make, Models, Patch


@pytest.fixture(autouse=True)
def endless(tiny_models: Models, monkeypatch: Patch) -> None:
    """A random model may end its turn at the first token, and empty answers are all alike."""
    monkeypatch.setattr(load_model(tiny_models["llama"]), "eos_ids", frozenset())


@pytest.fixture
def make(tiny_models: Models) -> Make:
    def build(*, stored: Sequence[str] = (), **options: Any) -> CacheClipEngine:
        models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"], "store": None}
        engine = CacheClipEngine(**{**models, **CACHECLIP, **options})
        if stored:
            engine.precompute(stored)
        return engine

    return build
