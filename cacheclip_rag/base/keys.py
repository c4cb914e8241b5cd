"""Digests, and store keys. A key identifies chunk ids, model, context ids, rotary embedding and tenant."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence

FORMAT_VERSION = 1
"""Increase this number when stored tensors change meaning. Entries of other versions are then never found."""
FRAME_VERSION = 2
"""Increase this number when the byte format of frames changes. It is part of every key: versions of the package that
share a store have entries of their own, and neither reads nor replaces the other's."""
_FIRST_FRAME_VERSION = 2
"""The version whose keys do not name it."""
_KEY = re.compile("[0-9a-f]{64}")


def chunk_key(
    *, model_fingerprint: str, prefix_ids: Sequence[int], chunk_ids: Sequence[int], rope_pin: str, namespace: str
) -> str:
    """Key of a chunk cache: 64 hexadecimal digits, safe as a file name.

    Every field is preceded by its length, so that two different inputs never give the same byte string.
    """
    prefix, chunk = ",".join(map(str, prefix_ids)), ",".join(map(str, chunk_ids))
    return _digest(map(_encoded, (_versions(), model_fingerprint, prefix, chunk, rope_pin, namespace)))


def prompt_keys(about: Sequence[str], pieces: Iterable[bytes], count: int) -> list[list[str]]:
    """Keys of the KV of a prompt's pieces, ``count`` of each piece. They say what stands before it.

    Args:
        about: all else on which the KV depends.
    """
    keys, before = list[list[str]](), _digest(map(_encoded, ("prompt", _versions(), *about)))
    for piece in pieces:
        before = _digest((before.encode(), piece))
        keys.append([_digest((before.encode(), bytes([number]))) for number in range(count)])
    return keys


def _versions() -> str:
    return f"{FORMAT_VERSION}{'' if FRAME_VERSION == _FIRST_FRAME_VERSION else f'.{FRAME_VERSION}'}"


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(fields: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for content in fields:
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def is_key(value: object) -> bool:
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def text_digest(text: str) -> bytes:
    """Digest by which the catalog identifies a text: 16 bytes."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def json_digest(value: object) -> str:
    """SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def weights_digest(fingerprint: str) -> str:
    """The part of a model's fingerprint that identifies its weights, without the compute dtype."""
    return fingerprint.partition(":")[0]
