"""The KV of a prefilled prompt as a file, for an engine that decodes it: a handoff.

A file holds the prompt's token ids and, per layer, keys after RoPE and values of its first tokens. Its name is the
digest of its contents, so that two prompts, models or methods never share one. It is a safetensors file::

    DIGEST.safetensors     ids            (num_prompt_tokens,) int64
                           000.k, 000.v   (num_tokens, num_kv_heads, head_dim), layer 0
    header                 format, digest, model (fingerprint), num_tokens, num_layers
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open

from .tensor_files import READ_ERRORS, write_tensors

__all__ = [
    "FORMAT_VERSION",
    "Handoff",
    "is_handoff_name",
    "path_of",
    "read_handoff",
    "remove_old_handoffs",
    "write_handoff",
]

FORMAT_VERSION = 1
"""Increase this number when tensors change meaning. Files of other versions are refused."""

_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Handoff:
    """A handoff that is open for reading."""

    token_ids: tuple[int, ...]
    """The whole prompt."""
    num_tokens: int
    """Leading tokens whose KV is there; less than the prompt has."""
    num_layers: int
    model: str
    """Fingerprint of the model, dtype included."""
    _file: Any

    def layer(self, number: int, first: int, stop: int, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens ``[first, stop)`` and some heads, each ``(num_tokens, num_kv_heads, head_dim)``."""
        keys, values = (self._file.get_slice(f"{number:03d}.{which}")[first:stop, heads] for which in "kv")
        return keys, values


def write_handoff(
    folder: Path,
    token_ids: Sequence[int],
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
    model: str,
) -> str:
    """Write a handoff atomically, and return its name.

    Args:
        layers: keys after RoPE and values, each ``(num_kv_heads, num_tokens, head_dim)``.
        model: fingerprint of the model.
    """
    num_tokens = layers[0][0].shape[1]
    assert 0 < num_tokens < len(token_ids), f"{num_tokens} tokens of KV for a prompt of {len(token_ids)}"
    tensors = {"ids": torch.tensor(token_ids, dtype=torch.int64)}
    for number, kv in enumerate(layers):
        for which, tensor in zip("kv", kv, strict=True):
            tensors[f"{number:03d}.{which}"] = tensor.transpose(0, 1).cpu().contiguous()
    digest = hashlib.sha256(f"{FORMAT_VERSION}\0{model}".encode())
    for name, tensor in tensors.items():
        digest.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(xxhash.xxh3_128_digest(tensor.flatten().view(torch.uint8).numpy().data))
    name = digest.hexdigest()[:32]
    header = {"format": FORMAT_VERSION, "digest": name, "model": model}
    header |= {"num_tokens": num_tokens, "num_layers": len(layers)}
    write_tensors(folder / f"{name}.safetensors", tensors, {key: str(value) for key, value in header.items()})
    return name


def is_handoff_name(name: object) -> bool:
    """Whether a value can be a handoff's name. Names come from requests and become parts of paths."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def path_of(folder: Path, name: str) -> Path:
    """Path of a handoff. Raises ValueError for a name that is not one."""
    if not is_handoff_name(name):
        raise ValueError(f"a handoff's name is 32 hexadecimal digits, got {name!r:.60}")
    return folder / f"{name}.safetensors"


def remove_old_handoffs(folder: Path, *, older_than_s: float = 3600.0) -> None:
    """Remove handoffs, and unfinished ones, that a killed process left in a folder. Other files stay, and so does what
    cannot be removed. A request whose handoff is gone is answered by plain prefill."""
    for path in folder.glob("*.safetensors"):
        if is_handoff_name(path.stem) or path.name.startswith(".tmp-"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > older_than_s:
                    path.unlink()


@contextmanager
def read_handoff(folder: Path, name: str) -> Iterator[Handoff]:
    """Open a handoff. Layers are read when they are asked for.

    Raises:
        ValueError: no such name, or a file that is damaged or of another version.
        FileNotFoundError: there is no such handoff.
    """
    path = path_of(folder, name)
    if not path.is_file():
        raise FileNotFoundError(f"there is no handoff {name} in {folder}")
    with ExitStack() as stack:
        try:
            found = _opened(stack.enter_context(safe_open(path, framework="pt")), name)
        except READ_ERRORS as error:
            raise ValueError(f"handoff {name} cannot be read: {error}") from error
        yield found


def _opened(file: Any, name: str) -> Handoff:
    header = dict(file.metadata() or {})
    if header.get("format") != str(FORMAT_VERSION):
        raise ValueError(f"its format is {header.get('format')}, this version reads {FORMAT_VERSION}")
    if header.get("digest") != name:
        raise ValueError("it has another name")
    ids = tuple(file.get_tensor("ids").tolist())
    num_tokens, num_layers = int(header["num_tokens"]), int(header["num_layers"])
    if not 0 < num_tokens < len(ids) or file.get_slice("000.k").get_shape()[0] != num_tokens:
        raise ValueError("its header contradicts itself")
    return Handoff(ids, num_tokens, num_layers, header["model"], file)
