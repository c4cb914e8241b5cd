"""From KV to bytes and back: bit for bit where the codec is lossless, within its bounds where not, never wrong KV."""

import math
from pathlib import Path

import pytest
import torch

from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.base.keys import text_digest
from cacheclip_rag.finding.texts import text_row
from cacheclip_rag.store import (
    CODECS,
    FrameError,
    KVShape,
    LayerKV,
    LayerShape,
    ReadAhead,
    StoredKV,
    bytes_of,
    decode_frame,
    encode_frame,
    frame_bytes,
    joined,
    keeps,
    layer_of,
    layer_shapes,
)
from cacheclip_rag.store.codecs import FloatCodec, Frame, checked_frame
from tests.store.samples import frame, key, kv, opened

FLOATS = [name for name, codec in CODECS.items() if isinstance(codec, FloatCodec)]
INT8 = CODECS["int8"]


def kv_for(codec: str, tokens: int = 4) -> torch.Tensor:
    """Numbers, or bytes for KV that is opaque."""
    numbers = kv(1, tokens=tokens)
    return (numbers.abs() * 60).to(torch.uint8) if codec == "opaque" else numbers


@pytest.mark.parametrize("codec", FLOATS)
@pytest.mark.parametrize("kind", [bytes, bytearray], ids=["read-only", "writable"])
def test_round_trip_is_lossless(codec: str, kind: type) -> None:
    """Bit for bit, odd values included."""
    dtype = getattr(torch, codec)
    written = kv(1, dtype=dtype)
    written[0, 0, 0, 0] = torch.tensor([float("inf"), float("-inf"), -0.0, 6e-8]).to(dtype)
    read = decode_frame(kind(encode_frame(written, codec, key(1), namespace="t")), key(1))
    assert read.codec == codec and read.tensor().dtype == dtype and read.shape == written.shape
    assert torch.equal(read.tensor().view(torch.uint8), written.view(torch.uint8))
    for number in range(2):
        assert torch.equal(read.layer(number).tensor(), written[number])
        assert torch.equal(layer_of(read, number, "cpu").tensor(), layer_of(written, number, "cpu").tensor())


def test_opaque_bytes_and_kv_that_is_not_contiguous() -> None:
    written = kv_for("opaque", tokens=7)
    read = decode_frame(encode_frame(written, "opaque", key(1), namespace="t"), key(1))
    assert torch.equal(read.tensor(), written) and torch.equal(bytes_of(read), bytes_of(written[0]))
    written = kv(1, tokens=7).transpose(2, 4)
    assert torch.equal(decode_frame(encode_frame(written, "float32", key(1), namespace="t"), key(1)).tensor(), written)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_written_its_payload_and_what_is_read_share_no_memory(codec: str) -> None:
    written = kv_for(codec)
    data = encode_frame(written, codec, key(1), namespace="t")
    expected = decode_frame(data, key(1)).tensor()
    written.zero_()
    got = decode_frame(data, key(1)).tensor()
    data[:] = bytes(len(data))
    assert torch.equal(got, expected) and bool(expected.any())


def test_layers_lie_at_a_multiple_of_64_bytes() -> None:
    """Copying from memory that is not aligned is slower."""
    for namespace in ("t", "a longer namespace, é"):
        assert Frame.parse(encode_frame(kv(1), "float32", key(1), namespace=namespace), key(1)).start % 64 == 0


def test_header_says_whose_it_is() -> None:
    """All that the catalog knows of an entry, so that it can be made again from payloads."""
    text = "The keeper lit the lamp at dusk and wrote the hour down."
    row = text_row(text)
    data = encode_frame(kv(1), "float16", key(1), namespace="é \U0001f40b", digest=text_digest(text), text=row)
    parsed = Frame.parse(data, key(1))
    assert (parsed.namespace, parsed.digest, parsed.codec) == ("é \U0001f40b", text_digest(text), "float16")
    assert row is not None and parsed.text == row and parsed.num_tokens == 4
    bare = Frame.parse(encode_frame(kv(1), "float16", key(1), namespace="t"), key(1))
    assert bare.digest is None and bare.text is None


def test_a_header_is_read_without_its_layers() -> None:
    whole = frame(1)
    start = Frame.parse(whole, key(1)).start
    assert Frame.parse(whole[:start], key(1), num_bytes=len(whole)).shape == kv(1).shape
    with pytest.raises(FrameError, match="bytes"):
        Frame.parse(whole[:start], key(1), num_bytes=len(whole) - 1)


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("namespace", ["default", "a longer namespace, é"])
def test_size_is_known_before(codec: str, namespace: str) -> None:
    row, digest = text_row("words that are long enough to be found in a prompt"), text_digest("words")
    data = encode_frame(kv_for(codec, tokens=11), codec, key(1), namespace=namespace, digest=digest, text=row)
    assert row is not None and frame_bytes(kv(1, tokens=11).shape, codec, namespace=namespace) == len(data)


class TestLayers:
    def test_a_layer_is_read_without_the_others(self) -> None:
        data = encode_frame(kv(1), "float32", key(1), namespace="t")
        data[-1] ^= 1  # of the last layer
        parsed = Frame.parse(data, key(1))
        assert torch.equal(parsed.layer_bytes(0), kv(1)[0].contiguous().flatten().view(torch.uint8))
        with pytest.raises(FrameError, match="layer 1"):
            parsed.verify()

    def test_layers_that_changed_their_order_are_found(self) -> None:
        data = encode_frame(kv(1), "float32", key(1), namespace="t")
        start = Frame.parse(data, key(1)).start
        half = start + (len(data) - start) // 2
        with pytest.raises(FrameError, match="layer 0"):
            decode_frame(data[:start] + data[half:] + data[start:half], key(1))


class TestDamage:
    @pytest.mark.parametrize("codec", ["float32", "int8"])
    def test_every_single_flipped_byte_is_caught(self, codec: str) -> None:
        whole = encode_frame(kv(1), codec, key(1), namespace="t", digest=text_digest("words"))
        for position in range(len(whole)):
            data = bytearray(whole)
            data[position] ^= 0x01
            with pytest.raises(FrameError):
                decode_frame(data, key(1))

    def test_every_length_but_its_own_is_caught(self) -> None:
        whole = frame(1)
        for length in (*range(0, len(whole), 7), len(whole) - 1):
            with pytest.raises(FrameError):
                decode_frame(whole[:length], key(1))
        with pytest.raises(FrameError, match="bytes"):
            decode_frame(whole + b"x", key(1))

    def test_payload_of_another_key(self) -> None:
        with pytest.raises(FrameError, match="another entry"):
            decode_frame(frame(1), key(2))


def round_trip(layer: torch.Tensor) -> torch.Tensor:
    """One layer, ``(2, num_kv_heads, num_tokens, head_dim)``, through int8."""
    (shape,) = layer_shapes((1, *layer.shape))
    return INT8.decode(INT8.encode(layer), shape).tensor()


def worst(written: torch.Tensor, read: torch.Tensor, step: torch.Tensor) -> float:
    """Largest error in steps; where the step is 0, there must be none."""
    error = (written - read).abs()
    assert bool((error[(step == 0).expand_as(error)] == 0).all())
    return float((error / step.clamp_min(1e-30)).max())


class TestInt8:
    @pytest.fixture
    def layer(self) -> torch.Tensor:
        """Keys with channels of all sizes, far from zero; values with tokens of all sizes."""
        generator = torch.Generator().manual_seed(0)
        layer = torch.randn(2, 3, 50, 16, generator=generator)
        layer[0] *= torch.logspace(-3, 2, 16)
        layer[0] += torch.linspace(-300, 300, 16)
        layer[1] *= torch.logspace(-3, 2, 50)[:, None]
        return layer

    def test_errors_are_at_most_half_a_step(self, layer: torch.Tensor) -> None:
        """As the codec says: 1/254 of a key channel's range, 1/127 of a value token's largest number."""
        read = round_trip(layer)
        assert read.dtype == torch.float32 and read.shape == layer.shape
        low, high = layer[0].aminmax(dim=-2, keepdim=True)
        rounding = 300 * 2.0**-23  # of float32 numbers of this size
        assert bool(((layer[0] - read[0]).abs() <= 0.5001 * (high - low) / 254 + rounding).all())
        assert worst(layer[1], read[1], layer[1].abs().amax(-1, keepdim=True) / 127) <= 0.5001

    def test_a_key_channel_far_from_zero_loses_nothing_by_it(self, layer: torch.Tensor) -> None:
        """Twin: one step for a channel that holds its distance from zero would be a hundred times coarser."""
        near = layer.clone()
        near[0] -= near[0].mean(-2, keepdim=True)
        far = near.clone()
        far[0] += 50 * near[0].abs().amax(-2, keepdim=True)
        errors = [(kv[0] - round_trip(kv)[0]).abs().amax(-2) for kv in (near, far)]
        assert bool((errors[1] <= 1.1 * errors[0] + 1e-2 * near[0].abs().amax(-2)).all())
        naive = far[0].abs().amax(-2) / 127 / 2
        assert bool((naive > 10 * errors[1]).any())

    def test_a_large_value_of_one_token_spoils_no_other_token(self, layer: torch.Tensor) -> None:
        spoilt = layer.clone()
        spoilt[1, :, 7] *= 1e4
        others = [token for token in range(50) if token != 7]
        assert torch.equal(round_trip(spoilt)[1][:, others], round_trip(layer)[1][:, others])

    @pytest.mark.parametrize("value", [0.0, 1.0, -273.15, 1e-30, 1e30])
    def test_constant_numbers_come_back(self, value: float) -> None:
        layer = torch.full((2, 2, 5, 4), value)
        read = round_trip(layer)
        assert torch.equal(read[0], layer[0])  # all of a channel is its middle
        assert torch.allclose(read[1], layer[1], rtol=1e-6, atol=0)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_other_dtypes_are_encoded_as_their_numbers(self, layer: torch.Tensor, dtype: torch.dtype) -> None:
        layer = (layer / 300).to(dtype)
        assert torch.equal(INT8.encode(layer), INT8.encode(layer.float()))

    def test_the_largest_numbers_of_the_dtype(self) -> None:
        """Neither the middle nor the range of a channel overflows."""
        largest = torch.finfo(torch.bfloat16).max
        layer = torch.tensor([largest, -largest, largest / 2, 0.0]).view(1, 1, 4, 1).repeat(2, 1, 1, 4)
        read = round_trip(layer)
        assert bool(read.isfinite().all())
        assert bool(((read.double() - layer.double()).abs() <= 0.51 * 2 * largest / 254).all())

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
    def test_numbers_that_are_not_finite_are_refused(self, layer: torch.Tensor, value: float, part: int) -> None:
        """One of them would spoil its whole channel, or its whole token, and be gone afterwards."""
        layer[part, 1, 3, 2] = value
        with pytest.raises(ConfigurationError, match=r"not finite.*codec"):
            INT8.encode(layer)

    def test_size(self) -> None:
        """A byte a number, 8 bytes a key channel, 4 bytes a value token: about a quarter of float32."""
        shape = LayerShape(3, 50, 16, 16)
        expected = 2 * 3 * 50 * 16 + 3 * 16 * 8 + 3 * 50 * 4
        assert INT8.num_bytes(shape) == INT8.encode(torch.randn(2, 3, 50, 16)).numel() == expected
        large = LayerShape(8, 512, 128, 128)
        assert INT8.num_bytes(large) < 0.27 * CODECS["float32"].num_bytes(large)

    def test_layers_are_numbers_of_float32(self) -> None:
        stored = decode_frame(encode_frame(kv(1), "int8", key(1), namespace="t"), key(1))
        assert stored.tensor().dtype == stored.layer(0).tensor().dtype == torch.float32
        assert torch.equal(stored.tensor()[1], stored.layer(1).tensor())
        assert torch.equal(stored.layer(1).tensor(), round_trip(kv(1)[1]))

    def test_through_the_store_what_is_refused_leaves_nothing(self, tmp_path: Path) -> None:
        store = opened(tmp_path)
        bad = kv(1)
        bad[1, 0, 0, 0, 0] = math.nan
        with pytest.raises(ConfigurationError, match="not finite"):
            store.put(key(1), bad, "int8")
        assert key(1) not in store and store.stats().bytes == 0


MIXED = ((3, 8, 8), (1, 16, 4), (1, 5, 0))
"""Heads, widths of keys and values of layers that differ; the last one has no values."""


def padded(tokens: int, seed: int = 0) -> torch.Tensor:
    """KV of such layers. Padding is not 0, so that it shows where it is used."""
    kv = torch.full(KVShape(MIXED, tokens), 9e9)
    generator = torch.Generator().manual_seed(seed)
    for layer, (heads, *widths) in zip(kv, MIXED, strict=True):
        for numbers, width in zip(layer, widths, strict=True):
            numbers[:heads, :, :width] = torch.randn(heads, tokens, width, generator=generator)
    return kv


def stored(codec: str, tokens: int) -> StoredKV:
    shape = KVShape(MIXED, tokens)
    data = encode_frame(padded(tokens, tokens), codec, key(tokens), namespace="t", shape=shape)
    return decode_frame(data, key(tokens))


def final(layer: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values if layer.scale is None else layer.values * layer.scale


@pytest.mark.parametrize("codec", [*FLOATS, "int8"])
class TestLayersThatDiffer:
    @pytest.mark.parametrize("tokens", [1, 6])
    def test_what_they_use_comes_back(self, codec: str, tokens: int) -> None:
        written, read = padded(tokens, tokens), stored(codec, tokens)
        assert read.shape == written.shape and float(read.tensor().abs().max()) < 9
        for number, (heads, *widths) in enumerate(MIXED):
            for half, (got, width) in enumerate(zip(final(read.layer(number)), widths, strict=True)):
                expected = written[number, half, :heads, :, :width]
                assert got.shape == expected.shape and torch.allclose(got.float(), expected, atol=0.04)
                assert torch.equal(read.tensor()[number, half, :heads, :, :width], got)

    def test_padding_is_not_stored(self, codec: str) -> None:
        frame, numbers = stored(codec, 6).frame, 6 * (3 * 16 + 20 + 5)
        scales = (3 * 8 + 16 + 5) * 8 + 6 * (3 + 1) * 4 if codec == "int8" else 0
        assert len(frame.data) - frame.start == numbers * CODECS[codec].bits // 8 + scales
        row, digest = text_row("words that are long enough to be found in a prompt"), text_digest("words")
        shape = KVShape(MIXED, 6)
        data = encode_frame(padded(6), codec, key(1), namespace="t", digest=digest, text=row, shape=shape)
        assert frame_bytes(shape, codec, namespace="t") == len(data)

    def test_side_by_side(self, codec: str) -> None:
        pieces = [stored(codec, tokens) for tokens in (3, 1, 5)]
        (together,) = joined.join(zip((0, 3, 4), pieces, strict=True))
        for number in range(len(MIXED)):
            each = [final(piece.layer(number)) for piece in pieces]
            for half, got in enumerate(final(together.layer(number, "cpu"))):
                assert torch.equal(got, torch.cat([kv[half] for kv in each], dim=1))

    def test_another_model_with_the_same_padding_is_refused(self, codec: str) -> None:
        frame = stored(codec, 4).frame
        assert checked_frame(frame, KVShape(MIXED, 4)) is frame
        for other in (KVShape(MIXED[::-1], 4), tuple(frame.shape)):
            with pytest.raises(FrameError, match="shape"):
                checked_frame(frame, other)

    def test_through_the_store(self, codec: str, tmp_path: Path) -> None:
        """Layer by layer, whose sizes differ."""
        store, shape = opened(tmp_path), KVShape(MIXED, 900)
        store.put(key(1), padded(900), codec, shape=shape)
        with ReadAhead(store, [key(1)], codec=codec, shapes={key(1): shape}) as reading:
            reading.wait(len(MIXED) - 1)
            read = reading.kv(0)
            assert read is not None
            expected = decode_frame(encode_frame(padded(900), codec, key(1), namespace="t", shape=shape), key(1))
            assert torch.equal(read.tensor(), expected.tensor())


def test_unknown_codec() -> None:
    with pytest.raises(ConfigurationError, match="float32, bfloat16, float16, int8"):
        encode_frame(kv(1), "int3", key(1), namespace="t")


KEPT = {
    "float32": {*FLOATS, "int8"},
    "bfloat16": {"bfloat16", "int8"},
    "float16": {"float16", "int8"},
    "int8": {"int8"},
}
"""What KV of a codec is good enough for."""


@pytest.mark.parametrize("codec", KEPT)
def test_keeps(codec: str) -> None:
    assert {wanted for wanted in CODECS if keeps(codec, wanted)} == KEPT[codec]


@pytest.mark.parametrize("codec", [*FLOATS, "int8"])
@pytest.mark.parametrize("heads", [slice(None), slice(1, 2)], ids=str)
def test_pieces_move_to_a_device_one_by_one(codec: str, heads: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that copies beside computing: the same numbers as side by side in memory."""
    pieces = [decode_frame(encode_frame(kv(n, tokens=n), codec, key(n), namespace="t"), key(n)) for n in (3, 1, 5)]
    (together,) = joined.join(zip((0, 4, 5), pieces, strict=True))
    expected = [together.layer(number, "cpu", heads).tensor() for number in range(2)]
    monkeypatch.setattr(joined, "COPIES_BESIDE", ("cpu",))
    assert all(torch.equal(together.layer(number, "cpu", heads).tensor(), expected[number]) for number in range(2))
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, dim: cat(parts[::-1], dim))
    assert not torch.equal(together.layer(1, "cpu", heads).tensor(), expected[1]), "the twin"
