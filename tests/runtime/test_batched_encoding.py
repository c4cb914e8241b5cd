"""Several chunks in one pass have the KV that each has alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers import batched_encoding
from cacheclip_rag.runtime.transformers.attention_pattern import Block
from cacheclip_rag.runtime.transformers.batched_encoding import batches_of
from cacheclip_rag.runtime.transformers.model import ModelRuntime
from tests.conftest import CHUNKS, SENTENCES, TINY_MODELS

TOLERANCE = 2e-4
NAMES = list(TINY_MODELS)


@pytest.fixture(params=NAMES)
def runtime(request: pytest.FixtureRequest, tiny_models: dict[str, str]) -> ModelRuntime:
    return load_model(tiny_models[request.param])


def ids_of(runtime: ModelRuntime) -> list[tuple[int, ...]]:
    """Chunks of different lengths: one of a single token, one longer than a block of rows and every window."""
    texts = [*SENTENCES[:4], "a", " ".join(CHUNKS), SENTENCES[5]]
    return [runtime.tokenize(text).ids for text in texts]


def context_of(runtime: ModelRuntime) -> torch.Tensor:
    return runtime.encode(runtime.tokenize(" ".join(SENTENCES[2:5])).ids)


def furthest(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> list[float]:
    return [float((a - b).abs().max()) for a, b in zip(one, other, strict=True)]


@pytest.mark.some(2)
@pytest.mark.parametrize("behind", [True, False], ids=["context", "alone"])
def test_batched_equals_single(runtime: ModelRuntime, behind: bool) -> None:
    chunks, context = ids_of(runtime), context_of(runtime) if behind else None
    assert max(map(len, chunks)) > 128
    alone = [runtime.encode(ids, context) for ids in chunks]
    for batched in (runtime.encode_many(chunks, context), batched_encoding.encode_batch(runtime, chunks, context)):
        assert [kv.shape for kv in batched] == [kv.shape for kv in alone]
        assert all(kv.is_contiguous() for kv in batched)
        scale = max(float(kv.abs().max()) for kv in alone)
        assert max(furthest(batched, alone)) <= TOLERANCE * scale


right_blocks = batched_encoding._blocks


def shifted(firsts: Sequence[int], lengths: Sequence[int], start: int, device: torch.device) -> list[Block]:
    """Blocks whose keys begin in the chunk before."""
    right = right_blocks(firsts, lengths, start, device)
    moved = [slice(max(0, block.keys.start - 7), block.keys.stop - 7 * bool(block.keys.start)) for block in right]
    return [Block.of(block.rows, keys, block.positions.cpu(), device) for block, keys in zip(right, moved, strict=True)]


def blind(firsts: Sequence[int], lengths: Sequence[int], start: int, device: torch.device) -> list[Block]:
    """Blocks whose rows do not see themselves."""
    right = right_blocks(firsts, lengths, start, device)
    return [Block.of(block.rows, block.keys, (block.positions.cpu() - 1).clamp(min=0), device) for block in right]


@pytest.mark.some(2)
@pytest.mark.parametrize("wrong", [shifted, blind])
def test_a_wrong_block_is_seen(runtime: ModelRuntime, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: without it, a comparison that compares nothing would pass."""
    chunks, context = ids_of(runtime), context_of(runtime)
    alone = [runtime.encode(ids, context) for ids in chunks]
    monkeypatch.setattr(batched_encoding, "_blocks", wrong)
    batched = batched_encoding.encode_batch(runtime, chunks, context)
    scale = max(float(kv.abs().max()) for kv in alone)
    differ = [each > 5 * TOLERANCE * scale for each in furthest(batched, alone)]
    assert sum(differ) >= len(chunks) - 2, differ


def test_packs_keep_the_order_and_the_limits() -> None:
    lengths = [600, 10, 20, 500, 30, *[5] * 400]
    passes = list(batches_of(lengths, 100))
    assert [each.start for each in passes] == [0, *(each.stop for each in passes[:-1])] and passes[-1].stop == 405
    assert passes[0] == slice(0, 1), "a chunk that fills a pass is alone"
    for each in passes[1:]:
        own = lengths[each]
        assert sum(own) <= 512 or len(own) == 1
        assert sum(own) + 100 * len(own) <= 8192 or len(own) == 1
    assert list(batches_of([], 3)) == []
