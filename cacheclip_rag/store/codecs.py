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
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, product
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

_UNREADABLE = (ConfigurationError, LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error)
"""What taking a damaged header apart may raise."""
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


class LayerShape(NamedTuple):
    """Shape of a layer's KV: keys ``(num_kv_heads, num_tokens, key_width)``, values ``(num_kv_heads, num_tokens,
    value_width)``."""

    num_kv_heads: int
    num_tokens: int
    key_width: int
    value_width: int
    """0: the layer has no values."""

    @property
    def num_numbers(self) -> int:
        """Keys' and values' together."""
        return self.num_kv_heads * self.num_tokens * (self.key_width + self.value_width)


class KVShape(tuple[int, ...]):
    """Shape of KV whose layers differ: ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)`` with the largest number
    of heads and the largest width. A layer uses the first ones; the others are padding, which is not stored."""

    used: tuple[tuple[int, int, int], ...]
    """Per layer its number of heads and the widths of its keys and values."""
    layers: tuple[LayerShape, ...]
    """The same with the number of tokens."""

    def __new__(cls, used: Sequence[tuple[int, int, int]], num_tokens: int) -> KVShape:
        heads, *widths = zip(*used, strict=True)
        shape = super().__new__(cls, (len(used), 2, max(heads), num_tokens, max(map(max, widths))))
        shape.used = tuple(used)
        shape.layers = tuple(LayerShape(heads, num_tokens, *widths) for heads, *widths in used)
        return shape

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.used, self[3]


def shape_of(used: Sequence[tuple[int, int, int]], num_tokens: int) -> tuple[int, ...]:
    """Shape of KV of these layers (:attr:`KVShape.used`)."""
    shape = KVShape(used, num_tokens)
    return shape if {*used} != {(shape[2], shape[4], shape[4])} else tuple(shape)


def layer_shapes(shape: Sequence[int]) -> tuple[LayerShape, ...]:
    """What each layer has of KV of this shape."""
    if isinstance(shape, KVShape):
        return shape.layers
    num_layers, _, num_heads, num_tokens, width = shape
    return (LayerShape(num_heads, num_tokens, width, width),) * num_layers


def widths_of(shape: Sequence[int]) -> object:
    """Equal for KV whose shapes differ in the number of tokens only."""
    return *shape[:3], *shape[4:], shape.used if isinstance(shape, KVShape) else ()


class ArrayPart(NamedTuple):
    """One array of numbers in the bytes of a layer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """``(..., num_kv_heads, num_tokens, width)``, with one token for numbers that hold for all tokens of a chunk."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Codec(ABC):
    """Turns the KV of one layer into bytes and back."""

    bits: int
    """Bits per number, to compare the precision of codecs."""

    @abstractmethod
    def parts(self, shape: LayerShape) -> tuple[ArrayPart, ...]:
        """The arrays of a layer of this shape, one after the other in its bytes."""

    @abstractmethod
    def encode(self, layer: Iterable[torch.Tensor]) -> torch.Tensor:
        """The bytes of a layer's keys and values: a uint8 tensor of one dimension, on the CPU."""

    @abstractmethod
    def combine(self, arrays: Sequence[torch.Tensor]) -> LayerKV:
        """The layer from its arrays, one for each of :meth:`parts`, on their device. The result may share memory with
        them. If tokens of several chunks stand side by side, an array that holds for all tokens of a chunk has one
        entry per token, too."""

    def head_ranges(self, shape: LayerShape, heads: slice) -> Iterator[slice]:
        """Where the bytes of neighbouring heads stand in a layer of this shape."""
        offset = 0
        for part in self.parts(shape):
            of_head = math.prod(part.shape[-2:]) * part.dtype.itemsize
            for _ in range(math.prod(part.shape[:-3])):
                yield slice(offset + heads.start * of_head, offset + heads.stop * of_head)
                offset += of_head * shape.num_kv_heads

    def head_checksums(self, layer: memoryview, shape: LayerShape) -> str:
        """xxh3 of each head of a layer, 16 hexadecimal digits each."""
        checksums = [xxhash.xxh3_64() for _ in range(shape.num_kv_heads)]
        for number, checksum in enumerate(checksums):
            for place in self.head_ranges(shape, slice(number, number + 1)):
                checksum.update(layer[place])
        return "".join(checksum.hexdigest() for checksum in checksums)

    def num_bytes(self, shape: LayerShape) -> int:
        return sum(part.num_bytes for part in self.parts(shape))

    def decode(self, data: torch.Tensor, shape: LayerShape) -> LayerKV:
        """The layer from its bytes, on the device of ``data``. The result may share memory with ``data``."""
        parts = self.parts(shape)
        pieces = zip(data.split([part.num_bytes for part in parts]), parts, strict=True)
        return self.combine([_aligned(piece, part.dtype).view(part.dtype).view(part.shape) for piece, part in pieces])


def _halves(dtype: torch.dtype, shape: LayerShape) -> tuple[ArrayPart, ...]:
    """Keys and values: one array if their widths are equal, which is moved at once."""
    heads, tokens, keys, values = shape
    if keys == values:
        return (ArrayPart(dtype, (2, heads, tokens, keys)),)
    return ArrayPart(dtype, (heads, tokens, keys)), ArrayPart(dtype, (heads, tokens, values))


def _aligned(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes that can be viewed as numbers: behind an odd number of 8-bit integers they are copied."""
    return data.clone() if data.storage_offset() % dtype.itemsize else data


def _bytes_of(*arrays: torch.Tensor) -> torch.Tensor:
    return torch.cat([array.contiguous().flatten().view(torch.uint8) for array in arrays])


@dataclass(frozen=True, slots=True)
class FloatCodec(Codec):
    """Stores numbers as they are. Lossless if the dtype is at least as wide as the compute dtype."""

    dtype: torch.dtype

    @property
    def bits(self) -> int:  # type: ignore[override]
        return self.dtype.itemsize * 8

    def parts(self, shape: LayerShape) -> tuple[ArrayPart, ...]:
        return _halves(self.dtype, shape)

    def encode(self, layer: Iterable[torch.Tensor]) -> torch.Tensor:
        return _bytes_of(*map(self._stored, layer))

    def _stored(self, numbers: torch.Tensor) -> torch.Tensor:
        stored = numbers.to("cpu", self.dtype)
        if torch.finfo(self.dtype).max < torch.finfo(numbers.dtype).max and not stored.isfinite().all():
            name, largest = str(self.dtype).removeprefix("torch."), float(numbers.abs().max())
            raise ConfigurationError(
                f"KV up to {largest:g} cannot be stored with codec {name}: it would be infinite. Use codec bfloat16 or "
                "float32."
            )
        return stored

    def combine(self, arrays: Sequence[torch.Tensor]) -> LayerKV:
        return LayerKV(*(arrays[0] if len(arrays) == 1 else arrays))


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

    def parts(self, shape: LayerShape) -> tuple[ArrayPart, ...]:
        heads, tokens, keys, values = shape
        return (
            *_halves(torch.int8, shape),
            ArrayPart(torch.float32, (2, heads, 1, keys)),
            ArrayPart(torch.float32, (heads, tokens, min(1, values))),
        )

    def encode(self, layer: Iterable[torch.Tensor]) -> torch.Tensor:
        keys, values = (numbers.to("cpu", torch.float32) for numbers in layer)
        if not (keys.isfinite().all() and values.isfinite().all()):
            raise ConfigurationError(
                "KV that is not finite (infinity or NaN) cannot be stored with codec int8: it would spoil the numbers "
                "beside it. Use the codec float32, or run the model with another dtype."
            )
        low, high = (bound / 2 for bound in keys.aminmax(dim=-2, keepdim=True))  # their sum and range cannot overflow
        middle = low + high
        key_step = (high - low) / 127
        value_step = values.abs().amax(-1, keepdim=True) / 127 if values.numel() else values
        return _bytes_of(
            _quantise(keys - middle, key_step), _quantise(values, value_step), middle, key_step, value_step
        )

    def combine(self, arrays: Sequence[torch.Tensor]) -> LayerKV:
        *quantised, (middle, key_step), value_step = arrays
        keys, values = quantised[0] if len(quantised) == 1 else quantised
        keys = keys.float()  # converting first is 1.5 times as fast as multiplying integers with floats
        torch.addcmul(middle, keys, key_step, out=keys)
        return LayerKV(keys, values, value_step)


def _quantise(numbers: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return (numbers / step.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-127, 127).to(torch.int8)


class BytesCodec(Codec):
    """Bytes of a runtime whose KV no code here looks into, as they are. The shape is ``(1, 2, 1, num_tokens,
    num_bytes)``: the runtime says how many bytes of each token stand in each half of the layer."""

    bits = 1 << 10  # no number is more precise

    def parts(self, shape: LayerShape) -> tuple[ArrayPart, ...]:
        return _halves(torch.uint8, shape)

    def encode(self, layer: Iterable[torch.Tensor]) -> torch.Tensor:
        halves = [*layer]
        assert halves[0].dtype == torch.uint8, f"opaque KV is bytes, got {halves[0].dtype}"
        return _bytes_of(*halves)

    def combine(self, arrays: Sequence[torch.Tensor]) -> LayerKV:
        return LayerKV(*(arrays[0] if len(arrays) == 1 else arrays))


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
    resident: object = None
    """A :class:`~.arena.Resident`: where it stands in the memory of a GPU, or may be copied to; its bytes may be
    nowhere else then. None: it has no place there."""

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
        keys, values, scale = CODECS[self.codec].decode(data, self.frame.layers[number])
        chosen = self.tokens
        return LayerKV(keys[:, chosen], values[:, chosen], None if scale is None else scale[:, chosen])

    def arrays(self) -> list[tuple[np.ndarray[Any, Any], ...]]:
        """Of each layer the codec's arrays (:meth:`Codec.parts`), of all tokens: integers of the size of their numbers,
        in the memory of the store."""
        frame, layers = self.frame, self.frame.layers
        arrays = list[tuple[np.ndarray[Any, Any], ...]]()
        for shape, run in groupby(range(len(layers)), key=layers.__getitem__):  # one view for neighbours that are alike
            first, *others = run
            offset, step = frame.bounds[first], frame.bounds[first + 1] - frame.bounds[first]
            views = []
            for part in CODECS[self.codec].parts(shape):
                size = part.dtype.itemsize
                steps = (step, *(size * math.prod(part.shape[axis + 1 :]) for axis in range(len(part.shape))))
                view: np.ndarray[Any, Any] = np.ndarray(
                    (1 + len(others), *part.shape), f"i{size}", frame.data, offset, steps
                )
                views.append(view)
                offset += part.num_bytes
            arrays += zip(*views, strict=True)
        return arrays

    def tensor(self) -> torch.Tensor:
        """KV of all layers, in memory of its own."""
        layers = [self.layer(number) for number in range(self.shape[0])]
        if not isinstance(self.frame.shape, KVShape):
            return torch.stack([layer.tensor() for layer in layers])
        padded = torch.zeros(self.shape, dtype=(layers[0].keys).dtype)
        for target, (keys, values, scale) in zip(padded, layers, strict=True):
            target[0, : len(keys), :, : keys.shape[2]] = keys
            target[1, : len(values), :, : values.shape[2]] = values if scale is None else values * scale
        return padded


KV = torch.Tensor | StoredKV
"""KV of a chunk, ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, computed or stored."""


def part_of(kv: KV, start: int, stop: int) -> KV:
    """The KV of tokens ``[start, stop)``, in the same memory."""
    assert 0 <= start < stop <= kv.shape[3], f"tokens {start} to {stop} of {kv.shape[3]}"
    if isinstance(kv, StoredKV):
        first = kv.tokens.start or 0
        return replace(kv, tokens=slice(first + start, first + stop))
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
    """Shape of the KV: ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``; a :class:`KVShape` if layers differ."""
    checksums: tuple[str, ...]
    """xxh3 of each layer. They detect damage, not forgery."""
    start: int
    """Offset of layer 0 in bytes."""
    heads: tuple[str, ...] = ()
    """xxh3 of each head, in one text a layer, so that a part of the heads can be read alone. Empty: there is one head,
    or the payload is of an older version."""
    bounds: tuple[int, ...] = ()
    """Where each layer begins, and where the last one ends, in bytes, by codec and shape. :meth:`parse` sets them."""

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
                _read_shape(header),
                tuple(header["checksums"]),
                start,
                tuple(header.get("heads", ())),
            )
            num_layers, _, num_heads, *_ = frame.shape
            contradicts = (
                len(frame.checksums) != num_layers
                or (frame.heads and [*map(len, frame.heads)] != [16 * num_heads] * num_layers)
                or (frame.digest is not None and len(frame.digest) != 16)
                or (frame.text is not None and frame.text.digest != frame.digest)
            )
            if contradicts:
                raise FrameError("its header contradicts itself")
            check_namespace(frame.namespace)
            if {*map(type, frame.checksums)} != {str}:
                raise FrameError("its header is not understood")
            frame = replace(frame, bounds=_bounds(frame.shape, frame.codec, start))
        except FrameError:
            raise
        except _UNREADABLE as error:
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

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return layer_shapes(self.shape)

    @property
    def layer_size(self) -> int:
        """Mean bytes of a layer."""
        return (self.num_bytes - self.start) // self.shape[0]

    def layer_bytes(self, number: int) -> torch.Tensor:
        """Bytes of one layer: a uint8 view of the frame's memory."""
        begin, end = self.bounds[number : number + 2]
        return torch.frombuffer(self.data, dtype=torch.uint8, count=end - begin, offset=begin)

    def verify(self, first: int = 0, num_bytes: int | None = None) -> int:
        """Compare layers from ``first`` on, within the first ``num_bytes`` bytes of the frame (default all), with their
        checksums; returns the number of the first layer that was not compared. Raises FrameError if one is damaged."""
        stop = len(self.checksums)
        if num_bytes is not None:
            stop = max(first, bisect_right(self.bounds, num_bytes) - 1)
        for number in range(first, stop):
            layer = self.data[self.bounds[number] : self.bounds[number + 1]]
            if xxhash.xxh3_128_hexdigest(layer) != self.checksums[number]:
                raise FrameError(f"layer {number} does not match its checksum")
        return stop

    def of_heads(self, heads: slice) -> tuple[Frame, list[tuple[int, memoryview]]]:
        """A frame of some heads alone, without a header, and what is to be read into its memory: bytes of this payload,
        by where they begin. Then it must be compared by :meth:`verify_heads`."""
        codec, (num_layers, two, _, *rest) = CODECS[self.codec], self.shape
        shape = (num_layers, two, heads.stop - heads.start, *rest)
        bounds = _bounds(shape, self.codec, 0)
        memory = new_memory(bounds[-1])
        places, done = [*codec.head_ranges(self.layers[0], heads)], 0
        ranges = list[tuple[int, memoryview]]()
        for begin, place in product(self.bounds[:-1], places):
            size = place.stop - place.start
            ranges.append((begin + place.start, memory[done : done + size]))
            done += size
        own = slice(16 * heads.start, 16 * heads.stop)
        checksums = tuple(of_layer[own] for of_layer in self.heads)
        return replace(self, data=memory, shape=shape, checksums=(), start=0, heads=checksums, bounds=bounds), ranges

    def verify_heads(self) -> None:
        """Compare the layers of :meth:`of_heads` with their checksums. Raises FrameError if one is damaged."""
        for number, (expected, shape) in enumerate(zip(self.heads, self.layers, strict=True)):
            layer = self.data[self.bounds[number] : self.bounds[number + 1]]
            if CODECS[self.codec].head_checksums(layer, shape) != expected:
                raise FrameError(f"heads of layer {number} do not match their checksums")

    @property
    def num_bytes(self) -> int:
        return self.bounds[-1]


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


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A small tensor on a device. A tensor of the CPU goes to a GPU without waiting for the GPU's queue."""
    if torch.device(device).type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def checked_frame(frame: Frame, shape: Sequence[int] | None) -> Frame:
    """The frame. Raises FrameError if its KV has another shape."""
    if shape is not None and (frame.shape != tuple(shape) or frame.layers != layer_shapes(shape)):
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
    shape: Sequence[int] | None = None,
) -> bytearray:
    """The frame of a KV tensor ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, keys before RoPE.

    Args:
        shape: of the KV; a :class:`KVShape` if it is padded. Default: the tensor's.
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
    shape = kv.shape if shape is None else shape
    assert kv.shape == tuple(shape), f"KV has the shape {tuple(kv.shape)}, expected {tuple(shape)}"
    encoder, shapes = CODECS[codec], layer_shapes(shape)
    layers = [memoryview(encoder.encode(_used(*each)).numpy()) for each in zip(kv, shapes, strict=True)]  # type: ignore[arg-type]
    checksums = [xxhash.xxh3_128_hexdigest(layer) for layer in layers]
    heads = [encoder.head_checksums(*each) for each in zip(layers, shapes, strict=True) if _has_heads(shape)]
    frame = _write_header(key, namespace, digest, text, codec, shape, checksums, heads)
    for layer in layers:
        frame += layer
    return frame


def _used(layer: torch.Tensor, shape: LayerShape) -> Iterator[torch.Tensor]:
    """Keys and values without padding."""
    return (numbers[: shape.num_kv_heads, :, :width] for numbers, width in zip(layer, shape[2:], strict=True))


def _has_heads(shape: Sequence[int]) -> bool:
    """Whether each head has a checksum of its own."""
    return shape[2] > 1 and not isinstance(shape, KVShape)


def _bounds(shape: Sequence[int], codec: str, start: int) -> tuple[int, ...]:
    layers = layer_shapes(shape)
    sizes = {each: CODECS[codec].num_bytes(each) for each in {*layers}}  # most models have one kind of layer
    return tuple(accumulate((sizes[each] for each in layers), initial=start))


def frame_bytes(shape: Sequence[int], codec: str, *, namespace: str) -> int:
    """Size in bytes of the frame that :func:`encode_frame` makes of a chunk's KV of this shape."""
    row = TextRow(*_ROW.unpack(bytes(_ROW.size)))
    heads = ["0" * 16 * shape[2]] * shape[0] if _has_heads(shape) else []
    header = _write_header("0" * 64, namespace, bytes(16), row, codec, shape, ["0" * 32] * shape[0], heads)
    return _bounds(shape, codec, len(header))[-1]


def most_bytes(shape: Sequence[int]) -> int:
    """The most bytes that the layers of KV of this shape take, whatever the codec."""
    return max(_bounds(shape, codec, 0)[-1] for codec in CODECS)


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
        **({"layers": shape.used} if isinstance(shape, KVShape) else {}),
        "checksums": list(checksums),
        **({"heads": list(heads)} if heads else {}),
    }
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-(_PREAMBLE.size + len(written)) % _ALIGNMENT)
    return bytearray(_PREAMBLE.pack(_MAGIC, FRAME_VERSION, len(written), xxhash.xxh3_64_intdigest(written)) + written)


def _read_shape(header: dict[str, Any]) -> tuple[int, ...]:
    """Raises FrameError: it is none."""
    shape, used = tuple(header["shape"]), header.get("layers", ())
    whole = len(shape) == 5 and all(type(size) is int and size > 0 for size in shape)
    if whole and used:
        numbers = [number for each in used for number in each]
        whole = all(type(number) is int and number >= 0 for number in numbers)
        padded = KVShape([(heads, keys, values) for heads, keys, values in used], shape[3])
        whole, shape = whole and padded == shape and min(heads * keys for heads, keys, _ in padded.used) > 0, padded
    if not whole or shape[1] != 2:
        raise FrameError("its header contradicts itself")
    return shape


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
