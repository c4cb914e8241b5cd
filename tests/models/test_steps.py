"""Several answers decoded in one pass: each has the logits and the KV that it has alone."""

from typing import Any

import pytest
import torch

from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers.cache import FusedCache, FusedLayer
from cacheclip_rag.runtime.transformers.model import ModelRuntime
from tests.conftest import TINY_MODELS
from tests.fusion.cases import EXACT, gap

LENGTHS = (1, 37, 8, 70)
"""Of the prompts; some are longer than the windows of the tiny models."""


def states(runtime: ModelRuntime) -> list[FusedCache]:
    def ids(count: int) -> torch.Tensor:
        return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(count))

    return [runtime.prefill(ids(count), count + 2)[0] for count in LENGTHS]  # so that the caches must grow


def kv(cache: FusedCache) -> torch.Tensor:
    return torch.cat([each.flatten() for layer in cache.layers for each in (layer.keys, layer.values)])


@pytest.mark.parametrize("architecture", sorted(TINY_MODELS))
def test_as_each_alone(architecture: str, tiny_models: dict[str, str]) -> None:
    runtime = load_model(tiny_models[architecture])
    together, alone = states(runtime), states(runtime)
    for step in range(6):
        tokens = [(7 * step + 11 * number) % 300 + 3 for number in range(len(LENGTHS))]
        found = runtime.decode_steps(together, tokens)
        for number, token in enumerate(tokens):
            assert gap(found[number], runtime.decode_step(alone[number], token)) < EXACT
    for one, other in zip(together, alone, strict=True):
        assert one.get_seq_length() == other.get_seq_length() and gap(kv(one), kv(other)) < EXACT
    one_by_one = runtime.decode_steps(together[:1], [5])
    assert gap(one_by_one[0], runtime.decode_step(alone[0], 5)) < EXACT


def test_a_pass_that_fails_changes_no_state(tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load_model(tiny_models["llama"])
    caches = states(runtime)
    before = [kv(cache).clone() for cache in caches]
    update, calls = FusedLayer.update, 0

    def failing(layer: FusedLayer, *given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:  # in the second layer
            raise MemoryError
        return update(layer, *given, **named)

    monkeypatch.setattr(FusedLayer, "update", failing)
    with pytest.raises(MemoryError):
        runtime.decode_steps(caches, [5, 6, 7, 8])
    assert all(torch.equal(kv(cache), kept) for cache, kept in zip(caches, before, strict=True))
