"""The working folder of a fine-tuning. Each file holds a result and the digest of its inputs.

A file with other inputs, or an unreadable file, is ignored, and its result is computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ... import __version__
from ...base.tensor_files import read_tensors, write_tensors
from ...chunks.caches import ChunkCaches
from ...engine import CacheClipEngine
from ..models import auxiliary_caches
from .families import Sample
from .features import Seen, look

__all__ = [
    "Interrupted",
    "Kept",
    "digest_of",
    "engine_inputs",
    "load",
    "resumable",
    "save",
]

_FORMAT = 3
"""Version of the files; part of every digest."""


class Interrupted(KeyboardInterrupt):
    """The user stopped a job that can continue from a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"the work so far is saved in {folder}")
        self.folder = folder


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Turn KeyboardInterrupt into :class:`Interrupted`, for a job that saves its results in ``folder``."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as stop:
        raise Interrupted(folder) from stop


def digest_of(about: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps([_FORMAT, about], sort_keys=True).encode()).hexdigest()


def engine_inputs(engine: CacheClipEngine) -> dict[str, Any]:
    """Everything of an engine on which its models' outputs depend, without names and folders of models."""
    config, auxiliary = engine.config, auxiliary_caches(engine)
    return {
        "primary_sha256": engine.primary.fingerprint,
        "primary_tokenizer_sha256": engine.primary.tokenizer_sha256,
        "auxiliary_sha256": auxiliary.runtime.fingerprint,
        "auxiliary_tokenizer_sha256": auxiliary.runtime.tokenizer_sha256,
        "prefix_ids": list(auxiliary.prefix_ids),
        "system_prompt": config.system_prompt,
        "chunk_context": config.chunk_context,
        "codecs": [config.codec, config.auxiliary_codec],
        "device": [config.device, config.auxiliary_device],
        "cacheclip_rag": __version__,
    }


@dataclass(frozen=True, slots=True)
class Kept:
    """Saved results of one engine's models. Each file is named after the digest of its inputs, so that all runs with
    this folder can use it."""

    folder: Path
    inputs: dict[str, Any]
    """:func:`engine_inputs`."""

    def outcome(self, about: Any) -> tuple[float, ...] | None:
        """Saved figures for ``about``; None if there are none."""
        path, digest = self._path_of("outcome", about)
        loaded = load(path, digest)
        return None if loaded is None else tuple(loaded[0]["figures"].tolist())

    def keep_outcome(self, about: Any, figures: Sequence[float]) -> None:
        path, digest = self._path_of("outcome", about)
        save({"figures": torch.tensor(figures, dtype=torch.float64)}, {"digest": digest}, path)

    def tensors(self, kind: str, about: Any, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Saved tensors for ``about``, or new ones from ``make``."""
        path, digest = self._path_of(kind, about)
        loaded = load(path, digest)
        if loaded is not None:
            return loaded[0]
        made = make()
        save(made, {"digest": digest}, path)
        return made

    def look(self, caches: ChunkCaches, sample: Sample, layers: Sequence[int], *, sinks: int = 0) -> Seen:
        """The saved result of :func:`~cacheclip_rag.lab.training.features.look`, or a new one."""
        path, digest = self._path_of("look", {"sample": sample.as_read(), "look": [list(layers), sinks]})
        loaded = load(path, digest)
        if loaded is not None:
            return _seen(*loaded)
        seen = look(caches, sample, layers, sinks=sinks)
        numbers = {"lengths": seen.lengths, "layers": seen.layers}
        tensors = {"scores": seen.scores, "evidence": seen.evidence, "values": seen.values}
        save(tensors, {"digest": digest, "numbers": json.dumps(numbers)}, path)
        return seen

    def _path_of(self, kind: str, about: Any) -> tuple[Path, str]:
        digest = digest_of({"inputs": self.inputs, "about": about})
        return self.folder / f"{kind}-{digest[:20]}.safetensors", digest


def _seen(tensors: dict[str, torch.Tensor], header: dict[str, str]) -> Seen:
    numbers = json.loads(header["numbers"])
    lengths, layers = tuple(numbers["lengths"]), tuple(numbers["layers"])
    return Seen(lengths, tensors["scores"], tensors["evidence"], tensors["values"], layers)


def save(tensors: dict[str, torch.Tensor], header: dict[str, str], path: Path) -> None:
    """Write one safetensors file atomically."""
    write_tensors(path, tensors, header)


def load(path: Path, digest: str) -> tuple[dict[str, torch.Tensor], dict[str, str]] | None:
    """Tensors and header of a file; None if it is missing, unreadable, or has another digest."""
    try:
        tensors, header = read_tensors(path)
    except (OSError, SafetensorError):
        return None
    return (tensors, header) if header.get("digest") == digest else None
