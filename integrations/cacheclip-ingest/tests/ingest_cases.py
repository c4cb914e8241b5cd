"""A corpus, a store, and embeddings that need no download."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cacheclip_ingest.embedding import Embedder, Vectors
from cacheclip_ingest.job import IngestReport, ingest, plan_ingestion
from cacheclip_ingest.library import Library, LibrarySettings
from cacheclip_ingest.plan import IngestPlan

from cacheclip_rag import CacheClipEngine


class OneVector(Embedder):
    def embed(self, texts: Sequence[str]) -> Vectors:
        return np.ones((len(texts), 4), np.float32)


class LetterEmbedder(Embedder):
    """Counts letters: a real, deterministic embedding that needs no download."""

    def embed(self, texts: Sequence[str]) -> Vectors:
        counts = np.array([[text.lower().count(chr(97 + n)) for n in range(26)] for text in texts], dtype=np.float32)
        return counts / np.maximum(1e-6, np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)


class Workshop:
    """A corpus folder, a store and what it takes to ingest."""

    def __init__(self, root: Path, models: dict[str, str]) -> None:
        self.corpus, self.store = root / "corpus", root / "store"
        self.corpus.mkdir()
        names = (models["llama"], models["auxiliary"], "letters")
        self.settings = LibrarySettings(*names, "float32", "default", 32, 0, "prefix")
        self.engine = CacheClipEngine(primary=models["llama"], auxiliary=models["auxiliary"], store=str(self.store))
        self.library = Library(self.store)

    def write(self, name: str, text: str) -> None:
        (self.corpus / name).write_text(text)

    def plan(self) -> IngestPlan:
        return plan_ingestion([self.corpus], library=self.library, engine=self.engine, settings=self.settings)

    def run(self, *files: Path, **changes: object) -> IngestReport:
        settings = dataclasses.replace(self.settings, **changes)
        common: Any = {"library": self.library, "engine": self.engine, "embedder": LetterEmbedder("letters")}
        return ingest([self.corpus, *files], settings=settings, **common)


@pytest.fixture(scope="module", autouse=True)
def embedding_models() -> Iterator[None]:
    """Each command makes an embedder of its own; the weights behind them are read once."""
    loaded: dict[str, Any] = {}
    load: Any = Embedder._model.func  # type: ignore[attr-defined]

    def model(self: Embedder) -> Any:
        if self.name in loaded:
            self._process = os.getpid()
        else:
            loaded[self.name] = load(self)
            gc.freeze()  # `cacheclip ask` collects garbage, and need not search what was imported here
        return loaded[self.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Embedder, "_model", property(model))
        yield
