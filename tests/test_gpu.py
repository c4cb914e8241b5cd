"""``make test-gpu``: on a GPU the engine computes what it computes on the processor, for every architecture."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.runtime.transformers.attention import parts_merge
from tests.conftest import SENTENCES, rag_prompt

DEVICE = os.environ.get("CACHECLIP_TEST_GPU", "cuda")
METHODS = (("full", None), ("direct", None), ("epic", 1.0), ("cacheclip", 0.2), ("cacheblend", 0.2), ("ape", None))
CODECS = ("float32", "int8")
CHUNKS = [" ".join(SENTENCES[(start + step) % 8] for step in range(6)) for start in range(8)]
"""About 1,700 tokens: enough that most keys are multiplied apart, without a mask."""
LARGEST = 2e-3
"""Of the difference of float32 logits; the kernels sum in another order."""


def logits(engine: CacheClipEngine, method: str, ratio: float | None) -> list[torch.Tensor]:
    """Logits of the first tokens of one answer, given the same tokens on both devices."""
    chosen = engine.make_method(method)
    found = engine.prefill(
        rag_prompt(CHUNKS), SamplingParams(max_tokens=8), method=chosen if ratio is None else chosen.at(ratio)
    )
    rows, step = [found.logits], found.logits
    with torch.inference_mode():
        for token in (5, 17, 40):
            step = engine.primary.decode_step(found.cache, token)
            rows.append(step)
    return [row.float().cpu() for row in rows]


@pytest.mark.parametrize("codec", CODECS)
def test_logits(primary: str, tiny_models: dict[str, str], codec: str) -> None:
    models: dict[str, Any] = {"primary": primary, "auxiliary": tiny_models["auxiliary"], "codec": codec}
    of_devices = []
    for device in ("cpu", DEVICE):
        engine = CacheClipEngine(**models, chunk_context="prefix", device=device, prefix_cache_bytes=0)
        assert engine.primary.device.type == torch.device(device).type
        engine.precompute(CHUNKS)
        of_devices.append({method: logits(engine, method, ratio) for method, ratio in METHODS})
    for method, _ in METHODS:
        for here, there in zip(of_devices[0][method], of_devices[1][method], strict=True):
            assert float((here - there).abs().max()) < LARGEST * max(1.0, float(here.abs().max())), method


def test_methods_differ(tiny_models: dict[str, str]) -> None:
    """More than the rounding that is allowed, so that one in place of another shows."""
    engine = CacheClipEngine(
        primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], device=DEVICE, prefix_cache_bytes=0
    )
    engine.precompute(CHUNKS)
    found = [logits(engine, method, 0.2 if method == "epic" else ratio)[0] for method, ratio in METHODS]
    assert min(float((a - b).abs().max()) for a, b in pairwise(found)) > 10 * LARGEST


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_merge(dtype: torch.dtype, head_dim: int) -> None:
    assert parts_merge(torch.device(DEVICE), dtype, head_dim)
