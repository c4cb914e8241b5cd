"""Head sets: the heads of an auxiliary model that find evidence, their weights, and trained low-rank updates.

A head set takes a few kilobytes, belongs to one auxiliary model, and does not depend on the primary's tokenizer.
Low-rank updates act on queries and keys before RoPE: ``q + up @ down @ q`` over all heads of the layer, and the same
for keys. If the model has no norm between projection and RoPE, this equals a low-rank update of the projections. Keys
are stored before RoPE, so that training changes no chunk cache.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigurationError, ModelError
from ..paths import cache_home
from ..runtime.base import weights_digest
from ..tensor_files import READ_ERRORS, read_tensors, write_tensors
from .question import pick_layers

__all__ = [
    "HEADS_FILE",
    "HeadSet",
    "LowRank",
    "check_head_set_name",
    "find_head_set",
    "head_set_path",
    "load_named",
    "shipped_path",
    "weights_digest",
]

FORMAT_VERSION = 1
HEADS_FILE = "cacheclip-heads.st"
"""File name of a head set in its model's folder. It does not end in ``.safetensors``, as the model's weights do."""
_SHIPPED = Path(__file__).parent / "shipped"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """``x + up @ down @ x``; x holds the vectors of all heads of a layer, concatenated."""

    down: torch.Tensor
    """``(rank, num_heads * head_dim)`` float32."""
    up: torch.Tensor
    """``(num_heads * head_dim, rank)`` float32."""

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Update ``heads``, ``(num_heads, num_tokens, head_dim)``; returns the same shape in float32."""
        flat = heads.float().transpose(0, 1).flatten(1)
        changed = flat + flat @ self.down.to(flat.device).T @ self.up.to(flat.device).T
        by_head: torch.Tensor = changed.unflatten(1, (heads.shape[0], heads.shape[2]))
        return by_head.transpose(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class HeadSet:
    """Scores tokens by ``sum_h weight_h * mean_q softmax(logits_h,q)``, with one softmax over all chunks."""

    auxiliary_sha256: str
    """SHA-256 of the auxiliary's weights, independent of the compute dtype."""
    heads: tuple[tuple[int, int], ...]
    """``(layer, head)``, in increasing order."""
    weights: torch.Tensor
    """``(num_heads,)`` float32, 0 or more, sum 1."""
    queries: LowRank | None = None
    """Update of the queries of the last layer in use; None for none."""
    keys: LowRank | None = None
    """Update of the keys of that layer; None for none."""
    sinks: int = 0
    """First tokens of each chunk that score 0. They were also left out when the heads were chosen."""
    about: dict[str, Any] = field(default_factory=dict)
    """How the head set was made: command, data, seed, figures. Not part of the digest."""

    def __post_init__(self) -> None:
        assert self.heads and list(self.heads) == sorted(set(self.heads)), (
            "heads must be in increasing order, each once"
        )
        assert self.weights.shape == (len(self.heads),), "each head needs one weight"

    @classmethod
    def of_layers(cls, auxiliary_sha256: str, layers: str, num_layers: int, num_heads: int) -> HeadSet:
        """Every head of the named layers with equal weights, for a model without a head set."""
        heads = tuple((layer, head) for layer in pick_layers(layers, num_layers) for head in range(num_heads))
        return cls(auxiliary_sha256, heads, torch.full((len(heads),), 1.0 / len(heads)))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers in use, in increasing order."""
        return tuple(sorted({layer for layer, _ in self.heads}))

    @property
    def is_updated(self) -> bool:
        return self.queries is not None or self.keys is not None

    def numbers_of(self, layer: int) -> list[int]:
        """Numbers of the heads in use of a layer."""
        return [head for of, head in self.heads if of == layer]

    def weights_of(self, layer: int) -> torch.Tensor:
        """``(num_heads,)``: weight of each of :meth:`numbers_of`."""
        return self.weights[torch.tensor([of == layer for of, _ in self.heads])]

    def check(self, auxiliary: Any, name: str = "") -> None:
        """Raise ModelError unless the head set was made for this model.

        Args:
            auxiliary: a ModelRuntime.
            name: the head set's name for the message, if it has one.
        """
        called = f"the head set {name!r}" if name else "the head set"
        if weights_digest(auxiliary.fingerprint) != self.auxiliary_sha256:
            raise ModelError(
                f"{called} was made for an auxiliary model with digest {self.auxiliary_sha256[:12]}, but "
                f"{auxiliary.name!r} has {weights_digest(auxiliary.fingerprint)[:12]}. Make a head set with 'cacheclip "
                "calibrate', or let the method name none (heads='none' of its scorer)."
            )
        num_heads = auxiliary.model.config.num_attention_heads
        numbers = [head for _, head in self.heads]
        fits = self.layers[0] >= 0 and self.layers[-1] < auxiliary.num_layers
        fits = fits and min(numbers) >= 0 and max(numbers) < num_heads
        for update, of in ((self.queries, num_heads), (self.keys, auxiliary.num_kv_heads)):
            if update is not None:
                width, rank = update.up.shape
                fits = fits and width == of * auxiliary.head_dim and tuple(update.down.shape) == (rank, width)
        if not fits:
            raise ModelError(f"{called} names heads that model {auxiliary.name!r} does not have. Make it again.")
        if not all(bool(tensor.isfinite().all()) for tensor in self._tensors().values()) or bool(
            (self.weights < 0).any()
        ):
            raise ModelError(f"{called} holds invalid weights. Make it again.")

    def digest(self) -> str:
        """SHA-256 of everything that affects scores."""
        found = hashlib.sha256(json.dumps([FORMAT_VERSION, self.auxiliary_sha256, self.heads, self.sinks]).encode())
        for name, tensor in sorted(self._tensors().items()):
            found.update(name.encode())
            found.update(tensor.contiguous().numpy().tobytes())
        return found.hexdigest()

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {"weights": self.weights}
        for name, update in (("queries", self.queries), ("keys", self.keys)):
            if update is not None:
                found |= {f"{name}.down": update.down, f"{name}.up": update.up}
        return {name: tensor.float().contiguous() for name, tensor in found.items()}

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write one safetensors file atomically."""
        header = {
            "format": str(FORMAT_VERSION),
            "auxiliary_sha256": self.auxiliary_sha256,
            "heads": json.dumps(self.heads),
            "sinks": str(self.sinks),
            "about": json.dumps(self.about, sort_keys=True),
            "sha256": self.digest(),
        }
        write_tensors(path, self._tensors(), header)

    @classmethod
    def load(cls, path: Path) -> HeadSet:
        """Read what :meth:`save` wrote.

        Raises:
            ModelError: the file is missing, damaged, of another version, or not a head set.
        """
        try:
            tensors, header = read_tensors(path, version=FORMAT_VERSION)
            heads = tuple((int(layer), int(head)) for layer, head in json.loads(header["heads"]))
            queries, keys = (
                LowRank(tensors[f"{name}.down"], tensors[f"{name}.up"]) if f"{name}.down" in tensors else None
                for name in ("queries", "keys")
            )
            sinks, about = int(header["sinks"]), json.loads(header["about"])
            found = cls(header["auxiliary_sha256"], heads, tensors["weights"], queries, keys, sinks, about)
            if found.digest() != header["sha256"]:
                raise ValueError("it is damaged: its digest does not match")
            return found
        except FileNotFoundError:
            raise ModelError(f"no head set at {path}. Make one with 'cacheclip calibrate'.") from None
        except READ_ERRORS as error:
            raise ModelError(
                f"the head set {path} cannot be read: {error}. Make one with 'cacheclip calibrate'."
            ) from error


def find_head_set(auxiliary: Any, primary_fingerprint: str) -> HeadSet | None:
    """The first of these that exists: the head set that ``cacheclip calibrate`` or ``cacheclip finetune`` wrote for
    this pair of models; :data:`HEADS_FILE` in the auxiliary's folder; the head set that this package ships for the
    auxiliary; none.

    Args:
        auxiliary: runtime of the auxiliary model.

    Raises:
        ModelError: the file cannot be read, or was made for another auxiliary model.
    """
    sha256 = weights_digest(auxiliary.fingerprint)
    of_pair = head_set_path(sha256, weights_digest(primary_fingerprint))
    own, shipped = Path(auxiliary.name).expanduser(), shipped_path(sha256)
    for path in (of_pair, *([own / HEADS_FILE] if (own / "config.json").is_file() else []), shipped):
        if path.is_file():
            found = HeadSet.load(path)
            found.check(auxiliary)
            return found
    return None


def check_head_set_name(heads: str) -> None:
    """Raise ConfigurationError unless ``heads`` is a valid name of a head set, or a path with a slash."""
    if not isinstance(heads, str) or ("/" not in heads and not _NAME.fullmatch(heads)):
        raise ConfigurationError(
            "heads must be auto, none, a name of letters, digits, '-', '_' and '.' that does not begin with '-' or "
            f"'.', or a file with a slash in its path (./{HEADS_FILE}), got {heads!r}."
        )


def load_named(heads: str) -> HeadSet:
    """The head set that a method names: a path if ``heads`` holds a slash, else a file in ``$CACHECLIP_HOME/heads``.
    The caller checks it against the auxiliary model (:meth:`HeadSet.check`).

    Raises:
        ConfigurationError: ``heads`` is neither a valid name nor a path.
        ModelError: the head set is missing or cannot be read.
    """
    check_head_set_name(heads)
    if "/" in heads:
        return HeadSet.load(Path(heads).expanduser())
    folder = cache_home() / "heads"
    path = folder / f"{heads}.safetensors"
    if not path.is_file():
        names = sorted(each.stem for each in folder.glob("*.safetensors") if _NAME.fullmatch(each.stem))
        shown = ", ".join(names[:_NAMES_SHOWN]) + (
            f" and {more} more" if (more := len(names) - _NAMES_SHOWN) > 0 else ""
        )
        raise ModelError(
            f"no head set named {heads!r}: expected {path}, and {folder} holds {shown or 'none'}. Make it with "
            f"'cacheclip calibrate --out {path}', or name a file with a slash in its path."
        )
    return HeadSet.load(path)


def head_set_path(auxiliary_sha256: str, primary_sha256: str) -> Path:
    """Path of the head set of a pair of models."""
    return cache_home() / "heads" / f"{auxiliary_sha256[:16]}-{primary_sha256[:16]}.safetensors"


def shipped_path(auxiliary_sha256: str) -> Path:
    """Path of the head set that this package ships for an auxiliary model; the file may not exist."""
    return _SHIPPED / f"{auxiliary_sha256[:16]}.safetensors"
