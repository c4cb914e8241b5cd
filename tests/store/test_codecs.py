"""From KV to bytes and back: bit for bit, and never wrong KV."""

from __future__ import annotations

import pytest
import torch

from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.store import CODECS, FrameError, decode, encode, frame_bytes, keeps
from cacheclip_rag.store.codecs import Frame
from cacheclip_rag.store.keys import text_digest
from tests.store.samples import key, kv


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("kind", [bytes, bytearray], ids=["read-only", "writable"])
def test_round_trip_is_lossless(codec: str, kind: type) -> None:
    """Bit for bit, odd values included."""
    written = kv(1, dtype=CODECS[codec])
    written[0, 0, 0, 0] = torch.tensor([float("inf"), float("-inf"), -0.0, 6e-8]).to(CODECS[codec])
    read = decode(kind(encode(written, codec, key(1))), key(1))
    assert read.codec == codec and read.kv.dtype == CODECS[codec] and read.kv.shape == written.shape
    assert torch.equal(read.kv.view(torch.uint8), written.view(torch.uint8))


def test_kv_that_is_not_contiguous() -> None:
    written = kv(1, tokens=7).transpose(2, 4)
    assert torch.equal(decode(encode(written, "float32", key(1)), key(1)).kv, written)


def test_payload_does_not_share_memory_with_what_was_encoded() -> None:
    written = kv(1)
    data = encode(written, "float32", key(1))
    written.zero_()
    assert torch.equal(decode(data, key(1)).kv, kv(1))


def test_layers_lie_at_a_multiple_of_64_bytes() -> None:
    """Copying from memory that is not aligned is slower."""
    for namespace in ("", "t", "a longer namespace, é"):
        assert Frame.parse(encode(kv(1), "float32", key(1), namespace=namespace), key(1)).start % 64 == 0


def test_header_says_whose_it_is() -> None:
    frame = Frame.parse(encode(kv(1), "float16", key(1), namespace="é \ud800", text="words"), key(1))
    assert (frame.namespace, frame.text, frame.codec) == ("é \ud800", text_digest("words"), "float16")
    assert frame.num_tokens == 4 and Frame.parse(encode(kv(1), "float16", key(1)), key(1)).text is None


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("namespace", ["default", "a longer namespace, é"])
def test_size_is_known_before(codec: str, namespace: str) -> None:
    data = encode(kv(1, tokens=11), codec, key(1), namespace=namespace, text="words")
    assert frame_bytes(kv(1, tokens=11).shape, codec, namespace=namespace) == len(data)


class TestLayers:
    def test_a_layer_is_read_without_the_others(self) -> None:
        data = encode(kv(1), "float32", key(1))
        data[-1] ^= 1  # of the last layer
        frame = Frame.parse(data, key(1))
        assert torch.equal(frame.layer(0), kv(1)[0])
        with pytest.raises(FrameError, match="layer 1"):
            frame.layer(1)

    @pytest.mark.parametrize("layer", [0, 1])
    def test_a_damaged_layer_is_found_in_the_whole(self, layer: int) -> None:
        data = encode(kv(1), "float32", key(1))
        start = Frame.parse(data, key(1)).start
        data[start + layer * (len(data) - start) // 2] ^= 1
        with pytest.raises(FrameError, match=f"layer {layer}"):
            decode(data, key(1))

    def test_layers_that_changed_their_order_are_found(self) -> None:
        data = encode(kv(1), "float32", key(1))
        start = Frame.parse(data, key(1)).start
        half = start + (len(data) - start) // 2
        with pytest.raises(FrameError, match="layer 0"):
            decode(data[:start] + data[half:] + data[start:half], key(1))


class TestDamage:
    def test_every_single_flipped_byte_is_caught(self) -> None:
        whole = encode(kv(1), "float32", key(1), text="words")
        for position in range(len(whole)):
            data = bytearray(whole)
            data[position] ^= 0x01
            with pytest.raises(FrameError):
                decode(data, key(1))

    def test_every_length_but_its_own_is_caught(self) -> None:
        whole = encode(kv(1), "float32", key(1))
        for length in (*range(0, len(whole), 7), len(whole) - 1):
            with pytest.raises(FrameError):
                decode(whole[:length], key(1))
        with pytest.raises(FrameError, match="bytes"):
            decode(whole + b"x", key(1))

    def test_payload_of_another_key(self) -> None:
        with pytest.raises(FrameError, match="another entry"):
            decode(encode(kv(1), "float32", key(1)), key(2))


class TestCodecs:
    def test_unknown_codec(self) -> None:
        with pytest.raises(ConfigurationError, match="float32, bfloat16, float16"):
            encode(kv(1), "int3", key(1))

    @pytest.mark.parametrize(
        ("codec", "wanted", "enough"),
        [
            ("float32", "float32", True),
            ("float32", "bfloat16", True),
            ("float32", "float16", True),
            ("bfloat16", "bfloat16", True),
            ("bfloat16", "float32", False),
            ("bfloat16", "float16", False),
            ("float16", "bfloat16", False),
        ],
    )
    def test_keeps(self, codec: str, wanted: str, enough: bool) -> None:
        assert keeps(codec, wanted) is enough

    @pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
    def test_narrow_values_survive_float32(self, narrow: str) -> None:
        written = kv(1, dtype=CODECS[narrow])
        assert torch.equal(decode(encode(written, "float32", key(1)), key(1)).kv.to(CODECS[narrow]), written)
