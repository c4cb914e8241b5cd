"""Shared parts of the examples: models, store folder, and the embedding model for both frameworks.

``PRIMARY``, ``AUXILIARY`` (hub ids or folders), ``STORE`` and ``CORPUS`` in the environment choose others; the packaged
models are the default because they need no model hub. One chunk-cache store serves all
examples.
"""

from __future__ import annotations

import os
from pathlib import Path

from cacheclip_ingest import Embedder
from langchain_core.embeddings import Embeddings
from llama_index.core.embeddings import BaseEmbedding

HERE = Path(__file__).resolve().parent
CORPUS = Path(os.environ.get("CORPUS", HERE / "corpus"))
PRIMARY = os.environ.get("PRIMARY", "packaged:qwen2.5-coder-0.5b")
AUXILIARY = os.environ.get("AUXILIARY", "packaged:smollm2-135m")
EMBEDDING = "packaged:all-MiniLM-L6-v2"
STORE = os.environ.get("STORE", str(HERE.parent / ".demo" / "examples"))
FILES = ("apache-2.0.txt", "mpl-2.0.txt")
"""Two licences of the corpus, enough for the examples."""
DIMENSIONS = 384

_embedder = Embedder(EMBEDDING)


class LlamaIndexMiniLM(BaseEmbedding):
    """The embedding model for LlamaIndex."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return [float(x) for x in _embedder.embed([text])[0]]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return [[float(x) for x in row] for row in _embedder.embed(texts)]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class LangChainMiniLM(Embeddings):
    """The embedding model for LangChain."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[float(x) for x in row] for row in _embedder.embed(texts)]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]
