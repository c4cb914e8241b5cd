"""The byte format of a chunk's KV: one frame, in which every layer has its own checksum.

A frame::

    magic, frame version, length and checksum of the header     24 bytes
    header: JSON, padded with blanks to a multiple of 64 bytes  key, namespace, text, codec, shape, checksums
    layer 0, layer 1, ...                                       each as its codec lays it out

The header identifies payload and text, so that the catalog can be rebuilt from headers. To add a codec: a subclass of
:class:`Codec`, an entry in ``CODECS``, a row in the round-trip test.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xxhash

from ..base.checks import check_namespace
from ..base.errors import ConfigurationError
from ..base.keys import FRAME_VERSION
from ..finding.texts import TextRow
from .backend import Sink

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MAGIC = b"\x89CCKV\r\n\x1a"  # as in PNG: transfers that change line ends or drop the eighth bit damage it
_PREAMBLE = struct.Struct("<8sIIQ")
_ROW = struct.Struct("<16s6q")
_ALIGNMENT = 64
_HUGE_PAGE = 1 << 21
HEAD_BYTES = 1 << 15
"""Enough for the header of a frame with 180 layers of 8 KV heads; a payload with a longer one is read as a whole."""


class FrameError(ValueError):
    """A payload is damaged, or belongs to another key."""


class OtherVersionError(FrameError):
    """A payload of another version of this package, which may be intact: a miss, and nobody's to delete."""


class LayerKV(NamedTuple):
    """KV of one layer, keys before RoPE: ``(num_kv_heads, num_tokens, head_dim)`` each."""

    keys: torch.Tensor
    values: torch.Tensor
    scale: torch.Tensor | None = None
    """``(num_kv_heads, num_tokens, 1)`` float32: the values are to be multiplied by it. None: they are final."""

    def tensor(self) -> torch.Tensor:
        """``(2, num_kv_heads, num_tokens, head_dim)``."""
        return torch.stack((self.keys, self.values if self.scale is None else self.values * self.scale))


class ArrayPart(NamedTuple):
    """One array of numbers in the bytes of a layer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    axis: int
    """The axis of tokens. Its size is 1 for numbers that hold for all tokens of a chunk. The axis before is that of KV
    heads."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Codec(ABC):
    """Turns the KV of one layer, ``(2, num_kv_heads, num_tokens, head_dim)``, into bytes and back."""

    bits: int
    """Bits per number, to compare the precision of codecs."""

    @abstractmethod
    def parts(self, shape: Sequence[int]) -> tuple[ArrayPart, ...]:
        """The arrays of a layer of this shape, one after the other in its bytes."""

    @abstractmethod
    def encode(self, layer: torch.Tensor) -> torch.Tensor:
        """The layer's bytes: a uint8 tensor of one dimension, on the CPU."""

    @abstractmethod
    def combine(self, arrays: Sequence[torch.Tensor]) -> LayerKV:
        """The layer from its arrays, one for each of :meth:`parts`, on their device. The result may share memory with
        them. If tokens of several chunks stand side by side, an array that holds for all tokens of a chunk has one
        entry per token, too."""

    def head_ranges(self, shape: Sequence[int], heads: slice) -> Iterator[slice]:
        """Where the bytes of neighbouring heads stand in a layer of this shape."""
        offset = 0
        for part in self.parts(shape):
            of_head = math.prod(part.shape[part.axis :]) * part.dtype.itemsize
            of_all = of_head * part.shape[part.axis - 1]
            for start in range(offset, offset := offset + part.num_bytes, of_all):
                yield slice(start + heads.start * of_head, start + heads.stop * of_head)

    def head_checksums(self, layer: memoryview, shape: Sequence[int]) -> str:
        """xxh3 of each head of a layer, 16 hexadecimal digits each."""
        checksums = [xxhash.xxh3_64() for _ in range(shape[1])]
        for number, checksum in enumerate(checksums):
            for place in self.head_ranges(shape, slice(number, number + 1)):
                checksum.update(layer[place])
        return "".join(checksum.hexdigest() for checksum in checksums)

    def num_bytes(self, shape: Sequence[int]) -> int:
        return sum(part.num_bytes for part in self.parts(shape))

    def arrays(self, data: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
        """The arrays in the bytes of a layer, on the device of ``data``, in the same memory."""
        parts = self.parts(shape)
        pieces = zip(data.split([part.num_bytes for part in parts]), parts, strict=True)
        return [piece.view(part.dtype).view(part.shape) for piece, part in pieces]

    def decode(self, data: torch.Tensor, shape: Sequence[int]) -> LayerKV:
        """The layer from its bytes, on the device of ``data``. The result may share memory with ``data``."""
        return self.combine(self.arrays(data, shape))


@dataclass(frozen=True, slots=True)
class FloatCodec(Codec):
    """Stores numbers as they are. Lossless if the dtype is at least as wide as the compute dtype."""

    dtype: torch.dtype

    @property
    def bits(self) -> int:  # type: ignore[override]
        return self.dtype.itemsize * 8

    def parts(self, shape: Sequence[int]) -> tuple[ArrayPart, ...]:
        return (ArrayPart(self.dtype, tuple(shape), 2),)

    def encode(self, layer: torch.Tensor) -> torch.Tensor:
        stored = layer.to("cpu", self.dtype)
        if torch.finfo(self.dtype).max < torch.finfo(layer.dtype).max and not stored.isfinite().all():
            name, largest = str(self.dtype).removeprefix("torch."), float(layer.abs().max())
            raise ConfigurationError(
                f"KV up to {largest:g} cannot be stored with codec {name}: it would be infinite. Use codec bfloat16 or "
                "float32."
            )
        return stored.contiguous().flatten().view(torch.uint8)

    def combine(self, arrays: Sequence[torch.Tensor]) -> LayerKV:
        return LayerKV(*arrays[0])


class Int8Codec(Codec):
    """8-bit integers: keys before RoPE per channel with an offset, values per token.

    Source: KIVI (arXiv:2402.02750), section 3: keys have outlier channels, values do not. A key channel may be far from
    0 in all tokens (models with a bias on keys), so that its middle is stored too. Error at most half a step, a step
    being 1/254 of a channel's range (keys) or 1/127 of a token's largest absolute value (values).
    Infinity and NaN are refused with ConfigurationError.

    A layer: keys and values int8, then float32 middle and step of each key channel, then float32 step of each value
    token.
    """

    bits = 8

    def parts(self, shape: Sequence[int]) -> tuple[ArrayPart, ...]:
        _, heads, tokens, width = shape
        return (
            ArrayPart(torch.int8, (2, heads, tokens, width), 2),
            ArrayPart(torch.float32, (2, heads, 1, width), 2),
            ArrayPart(torch.float32, (heads, tokens, 1), 1),
        )

    def encode(self, layer: torch.Tensor) -> torch.Tensor:
        layer = layer.to("cpu", torch.float32)
        if not layer.isfinite().all():
            raise ConfigurationError(
                "KV that is not finite (infinity or NaN) cannot be stored with codec int8: it would spoil the numbers "
                "beside it. Use the codec float32, or run the model with another dtype."
            )
        keys, values = layer
        low, high = (bound / 2 for bound in keys.aminmax(dim=-2, keepdim=True))  # their sum and range cannot overflow
        middle = low + high
        key_step = (high - low) / 127
        value_step = values.abs().amax(-1, keepdim=True) / 127
        parts = (
            _quantise(keys - middle, key_step),
            _quantise(values, value_step),
            torch.stack((middle, key_step)),
            value_step,
        )
        return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])

    def combine(self, arrays: Sequence[torch.Tensor]) -> LayerKV:
        (keys, values), (middle, key_step), value_step = arrays
        keys = keys.float()  # converting first is 1.5 times as fast as multiplying integers with floats
        torch.addcmul(middle, keys, key_step, out=keys)
        return LayerKV(keys, values, value_step)


def _quantise(numbers: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return (numbers / step.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-127, 127).to(torch.int8)


class BytesCodec(Codec):
    """Bytes of a runtime whose KV no code here looks into, as they are. The shape is ``(1, 2, 1, num_tokens,
    num_bytes)``: the runtime says how many bytes of each token stand in each half of the layer."""

    bits = 1 << 10  # no number is more precise

    def parts(self, shape: Sequence[int]) -> tuple[ArrayPart, ...]:
        return (ArrayPart(torch.uint8, tuple(shape), 2),)

    def encode(self, layer: torch.Tensor) -> torch.Tensor:
        assert layer.dtype == torch.uint8, f"opaque KV is bytes, got {layer.dtype}"
        return layer.contiguous().flatten()

    def combine(self, arrays: Sequence[torch.Tensor]) -> LayerKV:
        return LayerKV(*arrays[0])


CODECS: dict[str, Codec] = {
    "float32": FloatCodec(torch.float32),
    "bfloat16": FloatCodec(torch.bfloat16),
    "float16": FloatCodec(torch.float16),
    "int8": Int8Codec(),
    "opaque": BytesCodec(),
}


@dataclass(frozen=True, slots=True)
class StoredKV:
    """One chunk cache as it was stored, or some of its tokens. Layers are decoded when they are asked for."""

    frame: Frame
    tokens: slice = field(default_factory=lambda: slice(None))
    """The tokens that :meth:`layer` gives."""
    tier: int = 0
    """Number of the store's tier from which it is read."""

    @property
    def codec(self) -> str:
        return self.frame.codec

    @property
    def shape(self) -> tuple[int, ...]:
        """``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``."""
        *before, num_tokens, head_dim = self.frame.shape
        return (*before, len(range(num_tokens)[self.tokens]), head_dim)

    def layer(self, number: int, device: torch.device | str = "cpu") -> LayerKV:
        """KV of one layer, in the codec's dtype, or float32 from integers. It may share memory with the store: do not
        write to it."""
        data = self.frame.layer_bytes(number).to(device)  # before decoding, because fewer bytes move
        keys, values, scale = CODECS[self.codec].decode(data, self.frame.shape[1:])
        chosen = self.tokens
        return LayerKV(keys[:, chosen], values[:, chosen], None if scale is None else scale[:, chosen])

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """The codec's arrays (:meth:`Codec.parts`) of all layers, cut to the chosen tokens: each ``(num_layers,
        *shape)`` integers of the size of its numbers, in the memory of the store."""
        frame = self.frame
        views, offset = [], frame.start
        for part in CODECS[self.codec].parts(frame.shape[1:]):
            size = part.dtype.itemsize
            steps = [size * math.prod(part.shape[axis + 1 :]) for axis in range(len(part.shape))]
            view: np.ndarray[Any, Any] = np.ndarray(
                (frame.shape[0], *part.shape), f"i{size}", frame.data, offset, (frame.layer_size, *steps)
            )
            # one number may hold for all tokens
            views.append(view[(*(slice(None),) * (part.axis + 1), self.tokens)] if part.shape[part.axis] > 1 else view)
            offset += part.num_bytes
        return views

    def tensor(self) -> torch.Tensor:
        """KV of all layers, in memory of its own."""
        return torch.stack([self.layer(number).tensor() for number in range(self.shape[0])])


KV = torch.Tensor | StoredKV
"""KV of a chunk, ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, computed or stored."""


def part_of(kv: KV, start: int, stop: int) -> KV:
    """The KV of tokens ``[start, stop)``, in the same memory."""
    assert 0 <= start < stop <= kv.shape[3], f"tokens {start} to {stop} of {kv.shape[3]}"
    if isinstance(kv, StoredKV):
        first = kv.tokens.start or 0
        return StoredKV(kv.frame, slice(first + start, first + stop))
    return kv[:, :, :, start:stop]


def bytes_of(kv: KV) -> torch.Tensor:
    """``(num_bytes,)`` uint8: opaque KV, in the same memory."""
    return kv.frame.layer_bytes(0) if isinstance(kv, StoredKV) else kv.flatten()


def layer_of(kv: KV, number: int, device: torch.device | str) -> LayerKV:
    """KV of one layer on a device."""
    return kv.layer(number, device) if isinstance(kv, StoredKV) else LayerKV(*kv[number].to(device))


@dataclass(frozen=True, slots=True)
class Frame:
    """A payload with a checked header. :meth:`verify` checks the layers."""

    data: memoryview
    """The whole frame, or at least its header."""
    key: str
    namespace: str
    text: TextRow | None
    """The chunk's text in the catalog's text index; None if there is no text, or a text too short to be found."""
    digest: bytes | None
    """Digest of the chunk's text (see :func:`~cacheclip_rag.base.keys.text_digest`); None if there is no text."""
    codec: str
    shape: tuple[int, ...]
    """Shape of the KV: ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``."""
    checksums: tuple[str, ...]
    """xxh3 of each layer. They detect damage, not forgery."""
    start: int
    """Offset of layer 0 in bytes."""
    heads: tuple[str, ...] = ()
    """xxh3 of each head, in one text a layer, so that a part of the heads can be read alone. Empty: there is one head,
    or the payload is of an older version."""
    layer_size: int = 0
    """Bytes of each layer, by codec and shape. :meth:`parse` sets it."""

    @classmethod
    def parse(cls, data: Buffer, key: str, *, num_bytes: int | None = None) -> Frame:
        """Read the header of ``data``, the payload of ``key`` or its beginning, of ``num_bytes`` in all. Layers are not
        read. Raises FrameError if the payload is damaged, of another version, or of another key."""
        view = memoryview(data)
        if view.readonly:  # torch warns about tensors over read-only memory
            view = memoryview(bytearray(view))
        header, start = _read_header(view)
        try:
            row = header["text"]
            frame = cls(
                view,
                header["key"],
                header["namespace"],
                TextRow(*_ROW.unpack(bytes.fromhex(row))) if row else None,
                bytes.fromhex(header["digest"]) if header["digest"] else None,
                header["codec"],
                tuple(header["shape"]),
                tuple(header["checksums"]),
                start,
                tuple(header.get("heads", ())),
            )
            whole = len(frame.shape) == 5 and all(type(size) is int and size > 0 for size in frame.shape)
            if not whole or frame.shape[1] != 2 or len(frame.checksums) != frame.shape[0]:
                raise FrameError("its header contradicts itself")
            check_namespace(frame.namespace)
            if {*map(type, frame.checksums)} != {str}:
                raise FrameError("its header is not understood")
            if frame.heads and [len(of_layer) for of_layer in frame.heads] != [16 * frame.shape[2]] * frame.shape[0]:
                raise FrameError("its header contradicts itself")
            if (frame.digest is not None and len(frame.digest) != 16) or (
                frame.text is not None and frame.text.digest != frame.digest
            ):
                raise FrameError("its header contradicts itself")
            frame = replace(frame, layer_size=CODECS[frame.codec].num_bytes(frame.shape[1:]))
        except (
            ConfigurationError,
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
            struct.error,
        ) as error:
            if isinstance(error, FrameError):
                raise
            raise FrameError(f"its header is not understood ({error})") from error
        if frame.key != key:
            raise FrameError("it belongs to another entry")
        size = view.nbytes if num_bytes is None else num_bytes
        if size != frame.num_bytes:
            raise FrameError(f"it has {size} bytes, not {frame.num_bytes}")
        return frame

    @staticmethod
    def header_bytes(data: Buffer) -> int:
        """Bytes of preamble and header, as the first bytes of a payload say."""
        view = memoryview(data)
        return _PREAMBLE.size + (_PREAMBLE.unpack_from(view)[2] if view.nbytes >= _PREAMBLE.size else 0)

    @property
    def num_tokens(self) -> int:
        return self.shape[3]

    def layer_bytes(self, number: int) -> torch.Tensor:
        """Bytes of one layer: a uint8 view of the frame's memory."""
        size = self.layer_size
        return torch.frombuffer(self.data, dtype=torch.uint8, count=size, offset=self.start + number * size)

    def verify(self, first: int = 0, num_bytes: int | None = None) -> int:
        """Compare layers from ``first`` on, within the first ``num_bytes`` bytes of the frame (default all), with their
        checksums; returns the number of the first layer that was not compared. Raises FrameError if one is damaged."""
        size = self.layer_size
        stop = len(self.checksums) if num_bytes is None else max(first, (num_bytes - self.start) // size)
        for number in range(first, stop):
            layer = self.data[self.start + number * size : self.start + (number + 1) * size]
            if xxhash.xxh3_128_hexdigest(layer) != self.checksums[number]:
                raise FrameError(f"layer {number} does not match its checksum")
        return stop

    def of_heads(self, heads: slice) -> tuple[Frame, list[tuple[int, memoryview]]]:
        """A frame of some heads alone, without a header, and what is to be read into its memory: bytes of this payload,
        by where they begin. Then it must be compared by :meth:`verify_heads`."""
        codec, (num_layers, two, _, *rest) = CODECS[self.codec], self.shape
        shape = (num_layers, two, heads.stop - heads.start, *rest)
        layer_size = codec.num_bytes(shape[1:])
        memory = new_memory(num_layers * layer_size)
        places, done = [*codec.head_ranges(self.shape[1:], heads)], 0
        ranges = list[tuple[int, memoryview]]()
        for number, place in product(range(num_layers), places):
            size = place.stop - place.start
            ranges.append((self.start + number * self.layer_size + place.start, memory[done : done + size]))
            done += size
        own = slice(16 * heads.start, 16 * heads.stop)
        checksums = tuple(of_layer[own] for of_layer in self.heads)
        return replace(
            self, data=memory, shape=shape, checksums=(), start=0, heads=checksums, layer_size=layer_size
        ), ranges

    def verify_heads(self) -> None:
        """Compare the layers of :meth:`of_heads` with their checksums. Raises FrameError if one is damaged."""
        size, shape = self.layer_size, self.shape[1:]
        for number, expected in enumerate(self.heads):
            layer = self.data[number * size : (number + 1) * size]
            if CODECS[self.codec].head_checksums(layer, shape) != expected:
                raise FrameError(f"heads of layer {number} do not match their checksums")

    @property
    def num_bytes(self) -> int:
        return self.start + self.shape[0] * self.layer_size


class FrameSink(Sink):
    """Takes the payload of a key, and compares its layers with their checksums while they arrive."""

    def __init__(self, key: str, shape: Sequence[int] | None = None) -> None:
        """``shape``: that the KV must have; None: any."""
        self.key, self.shape = key, shape
        self.memory = memoryview(b"")
        self.frame: Frame | None = None
        self.verified = 0
        """Layers compared."""

    def allocate(self, num_bytes: int) -> memoryview:
        self.memory = new_memory(num_bytes)
        return self.memory

    def received(self, num_bytes: int) -> None:
        if self.frame is None:
            if num_bytes < min(self.memory.nbytes, Frame.header_bytes(self.memory[:num_bytes])):
                return  # a short read
            self.frame = checked_frame(Frame.parse(self.memory, self.key), self.shape)
        self.verified = self.frame.verify(self.verified, num_bytes)


def pins_memory() -> bool:
    """Whether memory for payloads is page-locked: in a process that computes on CUDA, which copies from such memory
    several times as fast, and without waiting. PyTorch keeps it for the next payload."""
    return bool(torch.cuda.is_initialized())


def new_memory(num_bytes: int) -> memoryview:
    """Memory for a payload, not cleared. Raises MemoryError. Large memory is in huge pages, where the system has them:
    page faults for every 4 kB take longer than reading and checking."""
    pins = pins_memory()
    try:
        if pins or num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            return memoryview(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pins).numpy())  # type: ignore[arg-type]
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (RuntimeError, OSError, OverflowError) as error:  # of torch, and of the system
        raise MemoryError(str(error)) from error
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def checked_frame(frame: Frame, shape: Sequence[int] | None) -> Frame:
    """The frame. Raises FrameError if its KV has another shape."""
    if shape is not None and frame.shape != tuple(shape):
        raise FrameError(f"it has the shape {frame.shape}, but KV of this model has {tuple(shape)}")
    return frame


def encode_frame(
    kv: torch.Tensor,
    codec: str,
    key: str,
    *,
    namespace: str,
    digest: bytes | None = None,
    text: TextRow | None = None,
) -> bytearray:
    """The frame of a KV tensor ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, keys before RoPE.

    Args:
        digest: digest of the chunk's text; None for KV without a text (the shared prefix).
        text: the text's row in the text index, if it has one.

    Raises:
        ConfigurationError: an unknown codec, or numbers that the codec cannot store.
    """
    if codec not in CODECS:
        raise ConfigurationError(f"codec must be one of {', '.join(CODECS)}, got {codec!r}.")
    assert kv.ndim == 5 and kv.numel(), (
        f"KV must have five dimensions and at least one token, got shape {tuple(kv.shape)}"
    )
    layers = [memoryview(CODECS[codec].encode(layer).numpy()) for layer in kv]  # type: ignore[arg-type]
    checksums = [xxhash.xxh3_128_hexdigest(layer) for layer in layers]
    shape, several = kv.shape[1:], kv.shape[2] > 1
    heads = [CODECS[codec].head_checksums(layer, shape) for layer in layers if several]
    frame = _write_header(key, namespace, digest, text, codec, kv.shape, checksums, heads)
    for layer in layers:
        frame += layer
    return frame


def frame_bytes(shape: Sequence[int], codec: str, *, namespace: str) -> int:
    """Size in bytes of the frame that :func:`encode_frame` makes of a chunk's KV of this shape."""
    row = TextRow(*_ROW.unpack(bytes(_ROW.size)))
    heads = ["0" * 16 * shape[2]] * shape[0] if shape[2] > 1 else []
    header = _write_header("0" * 64, namespace, bytes(16), row, codec, shape, ["0" * 32] * shape[0], heads)
    return len(header) + shape[0] * CODECS[codec].num_bytes(shape[1:])


def most_bytes(shape: Sequence[int]) -> int:
    """The most bytes that the layers of KV of this shape take, whatever the codec."""
    return shape[0] * max(codec.num_bytes(shape[1:]) for codec in CODECS.values())


def decode_frame(data: Buffer, key: str) -> StoredKV:
    """The KV in a frame, with all checksums verified. Raises FrameError if it is damaged or of another key."""
    frame = Frame.parse(data, key)
    frame.verify()
    return StoredKV(frame)


def keeps(codec: str, wanted: str) -> bool:
    """Whether ``codec`` is at least as precise as ``wanted``."""
    return codec == wanted or CODECS[codec].bits > CODECS[wanted].bits


def _write_header(
    key: str,
    namespace: str,
    digest: bytes | None,
    text: TextRow | None,
    codec: str,
    shape: Sequence[int],
    checksums: Sequence[str],
    heads: Sequence[str],
) -> bytearray:
    header = {
        "key": key,
        "namespace": namespace,
        "digest": digest.hex() if digest else "",
        "text": _ROW.pack(*text).hex() if text else "",
        "codec": codec,
        "shape": list(shape),
        "checksums": list(checksums),
        **({"heads": list(heads)} if heads else {}),
    }
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-(_PREAMBLE.size + len(written)) % _ALIGNMENT)
    return bytearray(_PREAMBLE.pack(_MAGIC, FRAME_VERSION, len(written), xxhash.xxh3_64_intdigest(written)) + written)


def _read_header(view: memoryview) -> tuple[dict[str, Any], int]:
    """The header, and the offset of its end."""
    if view.nbytes < _PREAMBLE.size:
        raise FrameError("it is cut off")
    magic, version, length, checksum = _PREAMBLE.unpack_from(view)
    if magic != _MAGIC:
        raise FrameError("it is no chunk cache")
    if version != FRAME_VERSION:
        raise OtherVersionError(f"it has format {version}, and this version of cacheclip-rag reads {FRAME_VERSION}")
    start = _PREAMBLE.size + length
    text = view[_PREAMBLE.size : start]
    if text.nbytes != length or xxhash.xxh3_64_intdigest(text) != checksum:
        raise FrameError("its header does not match its checksum")
    try:
        header = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"its header is not understood ({error})") from error
    if not isinstance(header, dict):
        raise FrameError("its header is not understood")
    return header, start
