"""Sentence embeddings for retrieval, with a sentence-transformers model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..base.errors import MissingExtraError, ModelError
from ..models.load import DEVICE_MAPS, check_device, choose_device, resolve

DEFAULT_EMBEDDING = "sentence-transformers/all-MiniLM-L6-v2"

Vectors = np.ndarray[tuple[int, int], np.dtype[np.float32]]


class Embedder:
    """Unit-length vectors for texts; the model loads at first use."""

    def __init__(self, name: str = DEFAULT_EMBEDDING, device: str = "auto") -> None:
        self.name = name
        self._device = device

    @cached_property
    def _model(self) -> Any:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingExtraError("sentence-transformers", "ingest") from error
        from ..runtime.transformers.text import quiet_transformers
        from ..runtime.transformers.weight_files import copy_mapped

        self._process = os.getpid()
        check_device(device := choose_device(self._device))
        if device in DEVICE_MAPS:
            device = choose_device("auto")  # a small model is not spread
        folder = resolve(self.name)
        try:
            with quiet_transformers():
                options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
                model = SentenceTransformer(str(folder), device=device, **options)
        except (OSError, ValueError, KeyError) as error:
            if "trust_remote_code" in str(error):
                raise ModelError(
                    f"{self.name!r} needs Python code that is no part of sentence-transformers or transformers, and "
                    f"such code is never run. Use another model, for instance {DEFAULT_EMBEDDING!r}."
                ) from error
            raise ModelError(
                f"{self.name!r} cannot be loaded as a sentence-transformers model: {error}. Expected a folder or hub "
                f"id of one, for instance {DEFAULT_EMBEDDING!r}."
            ) from error
        copy_mapped(model)
        return model

    def embed(self, texts: Sequence[str]) -> Vectors:
        """``(num_texts, dimensions)`` float32; each row has length 1, so that the inner product is the cosine."""
        from ..runtime.transformers.text import check_process

        model = self._model
        check_process(self.name, self._process)
        vectors = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False, batch_size=16)
        return np.asarray(vectors, dtype=np.float32)
