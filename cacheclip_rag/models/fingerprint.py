"""Fingerprints of checkpoints: which weights and which config a model was loaded from.

Hashing gigabytes takes seconds, so the digest of the weights is cached. Neither a file's place nor its times prove its
content: archives and image layers set times, and inodes are used again. So the cached digest is only taken if a sample
of every tensor, read at each load, is the one from which the digest was made.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from ..base.paths import cache_home, write_json

logger = logging.getLogger(__name__)

_PIECES = 8
_PIECE_BYTES = 512
"""A tensor's sample: so many pieces of so many bytes, evenly spread. Smaller tensors are read in full."""

_HEAD_BYTES = 1 << 16
_SPREAD_BYTES = 1 << 18
"""Of a file whose tensors are not looked up: its first bytes, and a piece every so many."""

_READ_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja", ".tiktoken")
_OTHER_WEIGHTS = (".bin", ".gguf", ".npz", ".onnx", ".pt", ".pth")

FileState = tuple[str, int, int, int, int]
"""Path, inode, size, time of change and of modification (ns)."""


def file_states(folder: Path, suffixes: tuple[str, ...] = _READ_SUFFIXES) -> tuple[FileState, ...]:
    """States of the files that a model is loaded from: config, weights, tokenizer, chat templates."""
    files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    return states_of(sorted(file for file in files if file.suffix in suffixes and file.is_file()))


def states_of(files: Iterable[Path]) -> tuple[FileState, ...]:
    """The same of some files."""
    stats = ((file, file.stat()) for file in files)
    return tuple((os.fspath(f), s.st_ino, s.st_size, s.st_ctime_ns, s.st_mtime_ns) for f, s in stats)


def states_in(place: Path) -> tuple[FileState, ...]:
    """The same of a file; of a folder as :func:`file_states`, and weights of other runtimes. None if there is nothing,
    or it cannot be read."""
    try:
        return file_states(place, _READ_SUFFIXES + _OTHER_WEIGHTS) if place.is_dir() else states_of([place])
    except (OSError, ValueError):
        return ()


def fingerprint(folder: Path) -> str:
    """``WEIGHTS:CONFIG``, the SHA-256 of each. Head sets refer to the weights only, because a config may change without
    them."""
    config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    identity = repr(states_of(_weight_files(folder))).encode()
    memo = cache_home() / "fingerprints" / f"{hashlib.sha256(identity).hexdigest()}.json"
    sample = _sample(folder)
    weights = _remembered(memo, sample)
    if weights is None:
        weights = _hash_weights(folder)
        if sample is not None:
            _remember(memo, {"folder": os.fspath(folder), "weights": weights, "sample": sample})
    return f"{weights}:{config}"


def file_digest(file: Path) -> str:
    """SHA-256 of a file of weights. The cached digest is taken if the file's size, times and a sample of its
    bytes are those of which it was made."""
    (state,) = states_of([file])
    _, _, size, _, _ = state
    memo = cache_home() / "fingerprints" / f"{hashlib.sha256(repr(state).encode()).hexdigest()}.json"
    sampled = hashlib.sha256()
    with file.open("rb", buffering=0) as handle:
        pieces = [(_SPREAD_BYTES * number, _PIECE_BYTES) for number in range(size // _SPREAD_BYTES)]
        for offset, count in [(0, min(size, _HEAD_BYTES)), *pieces]:
            sampled.update(_read_exactly(handle, offset, min(count, size - offset)))
    sample = sampled.hexdigest()
    digest = _remembered(memo, sample)
    if digest is None:
        with file.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        _remember(memo, {"folder": os.fspath(file), "weights": digest, "sample": sample})
    return digest


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _hash_weights(folder: Path) -> str:
    weights = hashlib.sha256()
    for file in _weight_files(folder):
        with file.open("rb") as handle:
            weights.update(hashlib.file_digest(handle, "sha256").digest())
    return weights.hexdigest()


def _sample(folder: Path) -> str | None:
    """SHA-256 over every file's header and a sample of every tensor; None if a file has no readable header."""
    digest = hashlib.sha256()
    try:
        for file in _weight_files(folder):
            with file.open("rb", buffering=0) as handle:
                size = file.stat().st_size
                (length,) = struct.unpack("<Q", handle.read(8))
                if length > size:
                    return None
                header = _read_exactly(handle, 8, length)
                digest.update(struct.pack("<QQ", size, length) + header)
                tensors = [entry["data_offsets"] for key, entry in json.loads(header).items() if key != "__metadata__"]
                for start, stop in sorted(tensors):
                    for offset, count in _pieces(start, stop):
                        digest.update(_read_exactly(handle, 8 + length + offset, count))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None
    return digest.hexdigest()


def _pieces(start: int, stop: int) -> list[tuple[int, int]]:
    """Offset and length of the pieces of a tensor that are read."""
    if stop - start <= _PIECES * _PIECE_BYTES:
        return [(start, stop - start)]
    last = stop - start - _PIECE_BYTES
    return [(start + last * number // (_PIECES - 1), _PIECE_BYTES) for number in range(_PIECES)]


def _read_exactly(handle: FileIO, offset: int, count: int) -> bytes:
    handle.seek(offset)
    data = b""
    while len(data) < count:
        piece = handle.read(count - len(data))
        if not piece:
            raise ValueError("the file ends too early")
        data += piece
    return data


def _remembered(memo: Path, sample: str | None) -> str | None:
    """The cached digest of the weights; None if there is none, it is damaged, or it belongs to another sample."""
    try:
        content = json.loads(memo.read_text())
        return str(content["weights"]) if sample is not None and content["sample"] == sample else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(memo: Path, content: dict[str, str]) -> None:
    try:
        write_json(memo, content)
    except OSError as error:
        logger.debug("the fingerprint of %s is not cached: %s", content["folder"], error)
