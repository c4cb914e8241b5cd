"""Sentence embeddings for retrieval, with a sentence-transformers model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cacheclip_rag import ModelError
from cacheclip_rag.runtime import check_process

from .modules import load_module

DEFAULT_EMBEDDING = "sentence-transformers/all-MiniLM-L6-v2"

Vectors = np.ndarray[tuple[int, int], np.dtype[np.float32]]


class Embedder:
    """Unit-length vectors for texts; the model loads at first use."""

    def __init__(self, name: str = DEFAULT_EMBEDDING, device: str = "auto") -> None:
        self.name = name
        self._device = device

    @cached_property
    def _model(self) -> Any:
        from sentence_transformers import SentenceTransformer

        self._process = os.getpid()

        def load(folder: Path, device: str) -> SentenceTransformer:
            try:
                return SentenceTransformer(str(folder), device=device, local_files_only=True, trust_remote_code=False)
            except (OSError, ValueError, KeyError) as error:
                if "trust_remote_code" in str(error):
                    raise ModelError(
                        f"{self.name!r} needs Python code that is no part of sentence-transformers or transformers, "
                        f"and such code is never run. Use another model, for instance {DEFAULT_EMBEDDING!r}."
                    ) from error
                raise ModelError(
                    f"{self.name!r} cannot be loaded as a sentence-transformers model: {error}. Expected a folder or "
                    f"hub id of one, for instance {DEFAULT_EMBEDDING!r}."
                ) from error

        return load_module(self.name, self._device, load, kind="embedding model")

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Tokens of all texts, as far as the model reads them."""
        read = self._model.tokenize(list(texts))
        mask = read.get("attention_mask")  # static embeddings have none, because they are not padded
        return int(read["input_ids"].numel() if mask is None else mask.sum())

    def embed(self, texts: Sequence[str]) -> Vectors:
        """``(num_texts, dimensions)`` float32; each row has length 1, so that the inner product is the cosine."""
        model = self._model
        check_process(self.name, self._process)
        vectors = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False, batch_size=16)
        return np.asarray(vectors, dtype=np.float32)
