"""Trained contexts: KV that was learned to stand before chunks while they are precomputed.

``cacheclip train-context`` learns it for one primary model, by distillation from full prefill. Only ingestion uses it:
the model that reads, answers and decodes stays as it is, and so does its full prefill.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError
from ..paths import cache_home
from ..runtime.base import Runtime, weights_digest
from ..tensor_files import READ_ERRORS, read_tensors, write_tensors

__all__ = ["CONTEXT_FILE", "TrainedContext", "find_trained_context", "no_trained_context", "trained_context_path"]

FORMAT_VERSION = 1
CONTEXT_FILE = "cacheclip-context.st"
"""File name of a trained context in its model's folder. It does not end in ``.safetensors``, as the weights do."""
_SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True, eq=False)
class TrainedContext:
    """Learned KV between the shared prefix and a chunk that is precomputed."""

    primary_sha256: str
    """SHA-256 of the primary's weights, independent of the compute dtype."""
    kv: torch.Tensor
    """``(num_layers, 2, num_kv_heads, num_tokens, head_dim)`` bfloat16, keys before RoPE."""
    about: dict[str, Any] = field(default_factory=dict)
    """How it was made: command, data, seed, figures. Not part of the digest."""

    def __post_init__(self) -> None:
        assert self.kv.dtype == torch.bfloat16 and self.kv.dim() == 5, "kv must have five dimensions, in bfloat16"

    @property
    def num_tokens(self) -> int:
        """Positions that it takes before a chunk."""
        return self.kv.shape[3]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of everything that affects chunks."""
        about = [FORMAT_VERSION, self.primary_sha256, list(self.kv.shape)]
        numbers = self.kv.contiguous().view(torch.int16).numpy().tobytes()
        return hashlib.sha256(json.dumps(about).encode() + numbers).hexdigest()

    def check(self, primary: Runtime) -> None:
        """Raise ModelError unless the context was made for this model."""
        found = weights_digest(primary.fingerprint)
        if found != self.primary_sha256:
            raise ModelError(
                f"the trained context was made for a model with digest {self.primary_sha256[:12]}, but "
                f"{primary.name!r} has {found[:12]}. Make one with 'cacheclip train-context', or set "
                "chunk_context='passages'."
            )
        expected = (primary.num_layers, 2, primary.num_kv_heads, self.num_tokens, primary.head_dim)
        if tuple(self.kv.shape) != expected or not self.num_tokens or not bool(self.kv.isfinite().all()):
            raise ModelError(
                f"the trained context holds invalid KV for model {primary.name!r}: expected finite numbers of shape "
                f"{expected}, got shape {tuple(self.kv.shape)}. Make it again with 'cacheclip train-context'."
            )

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write one safetensors file atomically."""
        header = {
            "format": str(FORMAT_VERSION),
            "primary_sha256": self.primary_sha256,
            "about": json.dumps(self.about, sort_keys=True),
            "sha256": self.sha256,
        }
        write_tensors(path, {"kv": self.kv}, header)

    @classmethod
    def load(cls, path: Path) -> TrainedContext:
        """Read what :meth:`save` wrote.

        Raises:
            ModelError: the file is missing, damaged, of another version, or not a trained context.
        """
        advice = "Make one with 'cacheclip train-context'."
        try:
            tensors, header = read_tensors(path, version=FORMAT_VERSION)
            found = cls(header["primary_sha256"], tensors["kv"], json.loads(header["about"]))
            if found.sha256 != header["sha256"]:
                raise ValueError("it is damaged: its digest does not match")
            return found
        except FileNotFoundError:
            raise ModelError(f"no trained context at {path}. {advice}") from None
        except READ_ERRORS as error:
            raise ModelError(f"the trained context {path} cannot be read: {error}. {advice}") from error


def find_trained_context(primary: Runtime) -> TrainedContext | None:
    """The trained context of a model: the first of these that exists, else None.

    The context that ``cacheclip train-context`` wrote; :data:`CONTEXT_FILE` in the model's folder; the context that
    this package ships for the model.

    Raises:
        ModelError: the file cannot be read, or was made for another model.
    """
    sha256 = weights_digest(primary.fingerprint)
    own = Path(primary.name).expanduser()
    in_folder = [own / CONTEXT_FILE] if (own / "config.json").is_file() else []
    shipped = _SHIPPED / trained_context_path(sha256).name
    for path in (trained_context_path(sha256), *in_folder, shipped):
        if path.is_file():
            found = TrainedContext.load(path)
            found.check(primary)
            return found
    return None


def no_trained_context(primary: Runtime) -> ModelError:
    """The error for a model that should have a trained context."""
    return ModelError(
        f"chunk_context is 'trained', but there is no trained context for model {primary.name!r}: expected "
        f"{trained_context_path(weights_digest(primary.fingerprint))}. Make it with 'cacheclip train-context --primary "
        f"{primary.name}', or set chunk_context='auto'."
    )


def trained_context_path(primary_sha256: str) -> Path:
    """Path of the trained context of a model with these weights."""
    return cache_home() / "contexts" / f"{primary_sha256[:16]}.safetensors"
