"""Sentence embeddings for retrieval, with a sentence-transformers model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cacheclip_rag.base.errors import MissingExtraError, ModelError
from cacheclip_rag.models import DEVICE_MAPS, check_device, choose_device, resolve
from cacheclip_rag.models.memory import tensor_dtypes
from cacheclip_rag.runtime.transformers.text import quiet_transformers
from cacheclip_rag.runtime.transformers.weight_files import copy_mapped

DEFAULT_EMBEDDING = "sentence-transformers/all-MiniLM-L6-v2"

Vectors = np.ndarray[tuple[int, int], np.dtype[np.float32]]


def _check_tensors(model: Any, name: str) -> None:
    """Raise ModelError if a checkpoint lacks tensors of its model: transformers fills them with random numbers, other
    ones in each process, so that no question would find what another process embedded."""
    from transformers import AutoModel

    inner = getattr(model[0], "auto_model", None)
    known = tensor_dtypes(Path(inner.name_or_path)) if inner is not None else {}
    if inner is None or {name for name, _ in inner.named_parameters()} <= {*known, *map(_without_prefix, known)}:
        return
    # names that transformers knows by others, and a last layer that embeddings do not use, are none that are missing
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
    with quiet_transformers():
        _, found = AutoModel.from_pretrained(inner.name_or_path, **options)
    if missing := sorted(tensor for tensor in found["missing_keys"] if not tensor.startswith("pooler.")):
        raise ModelError(
            f"expected all tensors of embedding model {name!r}, which lacks {', '.join(missing[:3])}. Fetch the model "
            "again."
        )


def _without_prefix(tensor: str) -> str:
    return tensor.partition(".")[2]


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
        _check_tensors(model, self.name)
        copy_mapped(model)
        return model

    def embed(self, texts: Sequence[str]) -> Vectors:
        """``(num_texts, dimensions)`` float32; each row has length 1, so that the inner product is the cosine."""
        from cacheclip_rag.runtime.transformers.text import check_process

        model = self._model
        check_process(self.name, self._process)
        vectors = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False, batch_size=16)
        return np.asarray(vectors, dtype=np.float32)
