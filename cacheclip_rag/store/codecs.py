"""The byte format of a chunk's KV: one frame, in which every layer has its own checksum.

A frame::

    magic, frame version, length and checksum of the header     24 bytes
    header: JSON, padded with blanks to a multiple of 64 bytes  key, namespace, text, codec, shape, checksums
    layer 0, layer 1, ...                                       (2, num_kv_heads, num_tokens, head_dim) each

The header identifies the payload, so that a missing catalog entry can be restored from it. To add a codec: an entry in
``CODECS`` and a row in the round-trip test.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from ..errors import ConfigurationError
from .keys import text_digest

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["CODECS", "Frame", "FrameError", "StoredKV", "decode", "encode", "frame_bytes", "keeps"]

CODECS: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Float codecs: lossless when the codec is at least as wide as the compute dtype."""

FRAME_VERSION = 1
"""Increase this number when the frame format changes; frames of other versions are misses."""
_MAGIC = b"\x89CCKV\r\n\x1a"  # as in PNG: transfers that change line ends or drop the eighth bit damage it
_PREAMBLE = struct.Struct("<8sIIQ")
_ALIGNMENT = 64


class FrameError(ValueError):
    """A payload is damaged, or belongs to another key."""


@dataclass(frozen=True, slots=True)
class StoredKV:
    """One chunk cache as it was stored."""

    kv: torch.Tensor
    """``(num_layers, 2, num_kv_heads, num_tokens, head_dim)`` in the codec's dtype, keys before RoPE. The tensor may
    share memory with the store: do not write to it. The reader casts it to the compute dtype."""
    codec: str
    """Name in :data:`CODECS`."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A payload with a checked header. Layers are checked when they are read."""

    data: memoryview
    """The whole frame."""
    key: str
    namespace: str
    text: bytes | None
    """Digest of the chunk's text (see :func:`~cacheclip_rag.store.keys.text_digest`); None if there is no text."""
    codec: str
    shape: tuple[int, ...]
    """Shape of the KV: ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``."""
    checksums: tuple[str, ...]
    """xxh3 of each layer. They detect damage, not forgery."""
    start: int
    """Offset of layer 0 in bytes."""

    @classmethod
    def parse(cls, data: Buffer, key: str) -> Frame:
        """Read the header of ``data``, the payload of ``key``. Layers are not read.

        Raises:
            FrameError: the payload is damaged, of another version, or of another key.
        """
        view = memoryview(data)
        if view.readonly:  # torch warns about tensors over read-only memory
            view = memoryview(bytearray(view))
        header, start = _read_header(view)
        try:
            frame = cls(
                view,
                header["key"],
                header["namespace"],
                bytes.fromhex(header["text"]) if header["text"] else None,
                header["codec"],
                tuple(header["shape"]),
                tuple(header["checksums"]),
                start,
            )
            expected = start + math.prod(frame.shape) * CODECS[frame.codec].itemsize
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"its header is not understood ({error})") from error
        if frame.key != key:
            raise FrameError("it belongs to another entry")
        whole = len(frame.shape) == 5 and all(type(size) is int and size > 0 for size in frame.shape)
        if not whole or len(frame.checksums) != frame.shape[0]:
            raise FrameError("its header contradicts itself")
        if view.nbytes != expected:
            raise FrameError(f"it has {view.nbytes} bytes, not {expected}")
        return frame

    @property
    def num_tokens(self) -> int:
        return self.shape[3]

    def layer(self, number: int) -> torch.Tensor:
        """KV of one layer, ``(2, num_kv_heads, num_tokens, head_dim)``. Raises FrameError if it is damaged."""
        self._verify(number)
        return self._tensor(number, number + 1)[0]

    def kv(self, *, verify: bool = True) -> torch.Tensor:
        """KV of all layers, as a view of the frame's memory. Raises FrameError if a layer is damaged.

        Args:
            verify: False skips the checksums, for frames made or verified in this process.
        """
        for number in range(self.shape[0] if verify else 0):
            self._verify(number)
        return self._tensor(0, self.shape[0])

    def _verify(self, number: int) -> None:
        size = self._layer_bytes
        layer = self.data[self.start + number * size : self.start + (number + 1) * size]
        if xxhash.xxh3_128_hexdigest(layer) != self.checksums[number]:
            raise FrameError(f"layer {number} does not match its checksum")

    def _tensor(self, first: int, stop: int) -> torch.Tensor:
        count = (stop - first) * math.prod(self.shape[1:])
        offset = self.start + first * self._layer_bytes
        flat = torch.frombuffer(self.data, dtype=CODECS[self.codec], count=count, offset=offset)
        return flat.view(stop - first, *self.shape[1:])

    @property
    def _layer_bytes(self) -> int:
        return math.prod(self.shape[1:]) * CODECS[self.codec].itemsize


def encode(kv: torch.Tensor, codec: str, key: str, *, namespace: str = "default", text: str | None = None) -> bytearray:
    """The frame of a KV tensor ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, keys before RoPE.

    Args:
        text: the chunk's text, of which only the digest is stored; None for KV without a text (the shared prefix).

    Raises:
        ConfigurationError: an unknown codec.
    """
    if codec not in CODECS:
        raise ConfigurationError(f"codec must be one of {', '.join(CODECS)}, got {codec!r}.")
    assert kv.ndim == 5 and kv.numel(), (
        f"KV must have five dimensions and at least one token, got shape {tuple(kv.shape)}"
    )
    layers = kv.to("cpu", CODECS[codec]).contiguous().flatten(1).view(torch.uint8).numpy()  # (num_layers, num_bytes)
    checksums = [xxhash.xxh3_128_hexdigest(layer) for layer in layers]
    digest = text_digest(text).hex() if text is not None else ""
    return _write_header(key, namespace, digest, codec, kv.shape, checksums) + layers.data.cast("B")


def frame_bytes(shape: Sequence[int], codec: str, *, namespace: str = "default") -> int:
    """Size in bytes of the frame that :func:`encode` makes of KV of this shape."""
    header = _write_header("0" * 64, namespace, text_digest("").hex(), codec, shape, ["0" * 32] * shape[0])
    return len(header) + math.prod(shape) * CODECS[codec].itemsize


def decode(data: Buffer, key: str) -> StoredKV:
    """The KV in a frame, with all checksums verified. Raises FrameError if it is damaged or of another key."""
    frame = Frame.parse(data, key)
    return StoredKV(frame.kv(), frame.codec)


def keeps(codec: str, wanted: str) -> bool:
    """Whether ``codec`` is at least as precise as ``wanted``."""
    return codec in (wanted, "float32")


def _write_header(
    key: str, namespace: str, digest: str, codec: str, shape: Sequence[int], checksums: Sequence[str]
) -> bytearray:
    """Preamble and header. ``digest`` is the text's digest in hexadecimal digits; empty if there is no text."""
    header = {
        "key": key,
        "namespace": namespace,
        "text": digest,
        "codec": codec,
        "shape": list(shape),
        "checksums": list(checksums),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_PREAMBLE.size + len(text)) % _ALIGNMENT)
    return bytearray(_PREAMBLE.pack(_MAGIC, FRAME_VERSION, len(text), xxhash.xxh3_64_intdigest(text)) + text)


def _read_header(view: memoryview) -> tuple[dict[str, Any], int]:
    """The header, and the offset of its end."""
    if view.nbytes < _PREAMBLE.size:
        raise FrameError("it is cut off")
    magic, version, length, checksum = _PREAMBLE.unpack_from(view)
    if magic != _MAGIC or version != FRAME_VERSION:
        raise FrameError("it is no chunk cache of this version")
    start = _PREAMBLE.size + length
    text = view[_PREAMBLE.size : start]
    if text.nbytes != length or xxhash.xxh3_64_intdigest(text) != checksum:
        raise FrameError("its header does not match its checksum")
    try:
        header = json.loads(bytes(text))
    except ValueError as error:
        raise FrameError(f"its header is not understood ({error})") from error
    if not isinstance(header, dict):
        raise FrameError("its header is not understood")
    return header, start
