"""Digests, and store keys. A key identifies chunk ids, model, context ids, rotary embedding and tenant."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

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
    digest = hashlib.sha256()
    frames = "" if FRAME_VERSION == _FIRST_FRAME_VERSION else f".{FRAME_VERSION}"
    fields = (
        f"{FORMAT_VERSION}{frames}".encode(),
        model_fingerprint.encode(),
        ",".join(map(str, prefix_ids)).encode(),
        ",".join(map(str, chunk_ids)).encode(),
        rope_pin.encode(),
        namespace.encode("utf-8", "surrogatepass"),
    )
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
