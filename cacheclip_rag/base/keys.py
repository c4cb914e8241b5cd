"""Store keys. A key identifies chunk ids, model, context ids, rotary embedding and tenant."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

__all__ = ["FORMAT_VERSION", "chunk_key", "is_key", "text_digest"]

FORMAT_VERSION = 1
"""Increase this number when stored tensors change meaning. Entries of other versions are then never found."""
_KEY = re.compile("[0-9a-f]{64}")


def chunk_key(
    *,
    model_fingerprint: str,
    prefix_ids: Sequence[int],
    chunk_ids: Sequence[int],
    rope_pin: str,
    namespace: str,
) -> str:
    """Key of a chunk cache: 64 hexadecimal digits, safe as a file name.

    Every field is preceded by its length, so that two different inputs never give the same byte string.
    """
    digest = hashlib.sha256()
    fields = (
        str(FORMAT_VERSION).encode(),
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
    """Whether a value has the form of a store key."""
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def text_digest(text: str) -> bytes:
    """Digest by which the catalog identifies a text: 16 bytes."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
