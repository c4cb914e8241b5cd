"""Methods on a GGUF file: exact where they must be, close to plain llama.cpp, and refused where KV must be read."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.base.errors import ConfigurationError, ModelError
from cacheclip_rag.methods import PRESET_NAMES, preset, reads_kv
from cacheclip_rag.models.load import load_any
from cacheclip_rag.runtime.llamacpp.model import LlamaRuntime, PlacedKV
from cacheclip_rag.store import bytes_of
from tests.conftest import CHUNKS, QUESTION
from tests.llamacpp.tiny_gguf import ARCHITECTURES

PROMPT = "\n\n".join([*CHUNKS, QUESTION])
SUPPORTED = [name for name in PRESET_NAMES if not reads_kv(preset(name))]
WITH_RATIO = [name for name in SUPPORTED if (m := preset(name)).has_ratio and not m.min_confidence]


def kl(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Divergence of next-token distributions, in nats."""
    p, q = exact.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def logits(engine: CacheClipEngine, method: str, ratio: float | None = None) -> torch.Tensor:
    found = engine.prefill(PROMPT, method=engine.make_method(method, recompute_ratio=ratio))
    assert found.stats.fallback is None
    assert found.stats.hits == (len(CHUNKS) if preset(method).reuses_chunks else 0)
    return found.logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("method", WITH_RATIO)
def test_ratio_one_is_plain_prefill(architecture: str, method: str, make: Callable[..., CacheClipEngine]) -> None:
    engine = make(architecture, method=method)
    engine.precompute(CHUNKS)
    full = logits(engine, "full")
    assert kl(full, logits(engine, method, 1.0)) < 0.001
    assert kl(full, logits(engine, method, 0.0)) > 0.002  # the twin: stale KV shows


def test_the_methods_are_told_apart(make: Callable[..., CacheClipEngine]) -> None:
    assert {"full", "prefix", "direct", "epic", "cacheclip"} <= set(SUPPORTED)
    assert {"cacheblend", "ape"}.isdisjoint(SUPPORTED)


@pytest.mark.parametrize("method", [name for name in PRESET_NAMES if name not in SUPPORTED])
def test_methods_that_look_at_kv_are_refused(method: str, make: Callable[..., CacheClipEngine]) -> None:
    engine = make()
    engine.precompute(CHUNKS)
    with pytest.raises(ConfigurationError, match=r"cannot be read \(llama\.cpp .*cacheclip"):
        engine.generate(PROMPT, method=method, max_tokens=2)


@pytest.mark.parametrize("method", SUPPORTED)
def test_every_other_method_answers(method: str, make: Callable[..., CacheClipEngine]) -> None:
    engine = make(method=method)
    engine.precompute(CHUNKS)
    answer = engine.generate(PROMPT, method=method, max_tokens=4)
    stats = answer.stats
    assert len(answer.token_ids) == 4 and stats.hits == (len(CHUNKS) if preset(method).reuses_chunks else 0)
    assert stats.method == method or (stats.gated and preset(method).min_confidence)
    if method in WITH_RATIO:
        assert 0 < stats.recomputed_tokens <= round(preset(method).nominal_ratio * stats.chunk_tokens)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("seed", range(4))
def test_any_spans_equal_a_plain_prefill_of_what_they_hold(
    architecture: str, seed: int, make: Callable[..., CacheClipEngine]
) -> None:
    """Random pieces of KV at random places, whose tokens were computed where they now stand: whatever spans are
    computed again, the prompt's logits are those of plain prefill."""
    runtime = make(architecture).primary
    assert isinstance(runtime, LlamaRuntime)
    chance = random.Random(seed)
    ids = [chance.randrange(16, runtime.vocab_size - 16) for _ in range(chance.randrange(60, 140))]
    cuts = sorted(chance.sample(range(1, len(ids) - 1), 5))
    pieces = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        kv = runtime.encode(ids[start:stop], runtime.encode(ids[:start]))
        first = chance.randrange(stop - start)
        pieces.append(PlacedKV(bytes_of(kv), stop - start, first, stop - start - first, start + first))
    computed = set(range(len(ids))) - {piece.at + n for piece in pieces for n in range(piece.count)}
    for _ in range(chance.randrange(4)):
        begin = chance.randrange(len(ids))
        computed |= set(range(begin, min(len(ids), begin + chance.randrange(1, 20))))
    runs: list[tuple[int, int]] = []
    for row in sorted(computed | {len(ids) - 1}):
        runs[-1:] = [(runs[-1][0], row + 1)] if runs and runs[-1][1] == row else [*runs[-1:], (row, row + 1)]
    expected = runtime.prefill(torch.tensor(ids), len(ids))[1]

    held, unread = runtime.place(pieces)
    assert not unread
    assert kl(expected, runtime.compute_in_order(ids, held, runs, len(ids))[1]) < 0.01


def test_a_piece_one_place_off_shows(make: Callable[..., CacheClipEngine]) -> None:
    """The twin of the test above."""
    runtime, chance = make().primary, random.Random(1)
    assert isinstance(runtime, LlamaRuntime)
    ids = [chance.randrange(16, runtime.vocab_size - 16) for _ in range(90)]
    kv, expected = runtime.encode(ids[:80]), runtime.prefill(torch.tensor(ids), len(ids))[1]
    found = []
    for first in (0, 1):
        held, _ = runtime.place([PlacedKV(bytes_of(kv), 80, first, 60, 0)])
        found.append(kl(expected, runtime.compute_in_order(ids, held, [(60, 90)], 90)[1]))
    assert found[0] < 0.01 < found[1]


def test_a_damaged_state_is_computed_anew(make: Callable[..., CacheClipEngine]) -> None:
    """Bytes that llama.cpp cannot read are no KV."""
    engine = make()
    runtime = engine.primary
    assert isinstance(runtime, LlamaRuntime)
    ids = list(range(20, 60))
    kv = bytes_of(runtime.encode(ids))
    broken = kv.clone()
    broken[:64] = 255
    good, bad = (PlacedKV(data, len(ids), 0, len(ids), 0) for data in (kv, broken))
    assert runtime.place([good])[1] == [] and runtime.place([bad])[1] == [bad]
    cut = PlacedKV(kv[: len(kv) // 2], len(ids), 0, len(ids), 0)
    assert runtime.place([cut])[1] == [cut]
    assert runtime.place([PlacedKV(kv, len(ids) - 1, 0, len(ids) - 1, 0)])[1] != []  # of other tokens than was said


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelError, match="cannot read the GGUF file"):
        load_any(str(file))
