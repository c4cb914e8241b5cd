"""Finds GGUF files by name and loads them. This module imports neither torch nor llama.cpp."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from cacheclip_rag import CacheClipError, ConfigurationError, UnknownModelError
from cacheclip_rag.models import DEVICE_MAPS, FileState, choose_device, file_digest, states_of, uses_tools
from cacheclip_rag.plugins import ModelLoader, expanded

if TYPE_CHECKING:
    from cacheclip_rag.runtime import Runtime

    from .weights import GgufWeights

_SUFFIX = ".gguf"
_SCHEME = re.compile(r"[a-z][a-z0-9_]+:")
_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)


class GgufLoader(ModelLoader):
    """A GGUF file, which runs in llama.cpp. Weights and KV have types of their own, whatever the dtype."""

    can_score = takes_dtype = False
    choice = (
        "{name} runs in llama.cpp on {device}: its weights have the types of the file, its KV is float16. "
        "The setting device chooses another device; dtype and codec are for the auxiliary model alone."
    )

    @classmethod
    def matches(cls, name: str) -> bool:
        """Whether a name ends as a GGUF file's does. ``SCHEME:REST`` is another loader's."""
        return name.lower().endswith(_SUFFIX) and (not _SCHEME.match(name) or os.path.isfile(expanded(name)))

    def check(self) -> None:
        if not self.is_here:
            raise UnknownModelError(f"there is no GGUF file {self.name!r}. Give the path of a file that exists.")

    @property
    def is_here(self) -> bool:
        return os.path.isfile(expanded(self.name))

    @property
    def path(self) -> Path | None:
        """Not where a link leads: by its name the file is known as GGUF, and its parts are found."""
        return expanded(self.name).absolute() if self.is_here else None

    @property
    def bare_name(self) -> str:
        return expanded(self.name).name

    @cached_property
    def place(self) -> str:
        self.check()
        file = expanded(self.name)
        # of a model in parts, not where a link leads: llama.cpp finds the other parts by the name
        return str(file.parent.resolve() / file.name if _PART.search(file.name) else file.resolve())

    @property
    def files(self) -> tuple[FileState, ...]:
        return states_of(parts_of(Path(self.place)))

    # -- what its header says -------------------------------------------------------------------------------------

    @property
    def context_tokens(self) -> int | None:
        header = self._header
        return int((header and header.meta("{}.context_length")) or 0) or None

    @property
    def knows_tools(self) -> bool | None:
        header = self._header
        return None if header is None else uses_tools(header.template)

    @property
    def _header(self) -> GgufWeights | None:
        """None if it cannot be read: loading the model reports the reason."""
        from .weights import read_header

        try:
            return read_header(Path(self.place), self.name, states_of([Path(self.place)]))
        except CacheClipError:
            return None

    def tokenizer(self) -> Callable[[str], list[int]]:
        file = Path(self.place)
        return _encoder(file, self.name, states_of([file]))

    # -- loading --------------------------------------------------------------------------------------------------

    @property
    def own_dtype(self) -> str:
        """That of the auxiliary model, which only ranks tokens."""
        return "bfloat16"

    def choose_device(self, device: str) -> str:
        """Raises ConfigurationError unless llama.cpp can put a model there."""
        import torch

        has_gpu = _has_gpu()  # also finds out whether the library is there
        if device == "auto":
            return choose_device(device) if has_gpu else "cpu"
        try:
            is_device = device in DEVICE_MAPS or bool(torch.device(device))
        except RuntimeError:
            is_device = False
        if device != "cpu" and not (is_device and has_gpu):
            why = "the llama-cpp-python here was built without a GPU" if is_device else "it is no name of a device"
            raise ConfigurationError(
                f"device must be one that llama.cpp can use for a GGUF file, got {device!r}: {why}. Use 'cpu' (and "
                "auxiliary_device for the auxiliary model), or build llama-cpp-python for your GPU."
            )
        return device

    def load(self, *, dtype: str, device: str) -> Runtime:
        from cacheclip_rag.models import check_room, free_bytes

        from .model import LlamaRuntime
        from .weights import GgufWeights, check_header

        file = Path(self.place)
        parts = parts_of(file)
        check_room(sum(part.stat().st_size for part in parts), self.name, device)
        digest = digest_of(parts)
        check_header(file, self.name, digest)
        weights = GgufWeights(file, self.name, device=device)
        return LlamaRuntime(weights, digest=digest, name=self.name, free_bytes=partial(free_bytes, device))


@lru_cache(8)
def _encoder(file: Path, name: str, files: tuple[FileState, ...]) -> Callable[[str], list[int]]:
    from .vocabulary import Vocabulary
    from .weights import read_header

    vocabulary = Vocabulary(read_header(file, name, files))
    return lambda text: list(vocabulary.tokenize(text, control=False).ids)


def _has_gpu() -> bool:
    from .library import library

    return bool(library().llama_supports_gpu_offload())


def parts_of(file: Path) -> list[Path]:
    """The files of a model that is split into several (``…-00001-of-00003.gguf``), the given one first; else only the
    given one. llama.cpp looks for the others itself, and says if one is missing."""
    part = _PART.search(file.name)
    if part is None:
        return [file]
    stem, of = file.name[: part.start()], part[2]
    names = (f"{stem}-{number:05d}-of-{of}{part[3]}" for number in range(1, int(of) + 1))
    return [file, *(other for name in names if (other := file.with_name(name)) != file and other.is_file())]


def digest_of(parts: Sequence[Path]) -> str:
    """SHA-256 of a GGUF file; of one that is split, of the digests of its parts."""
    digests = [file_digest(part) for part in parts]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
