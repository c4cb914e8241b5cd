"""The last layer computes KV of all rows, and its output of those that need it only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cacheclip_rag.models.load import load_model
from tests.conftest import TINY_MODELS
from tests.fusion.cases import BROKEN, EXACT, gap, reference_logits, reference_model


@pytest.fixture(params=TINY_MODELS)
def model(request: pytest.FixtureRequest, tiny_models: dict[str, str]) -> str:
    return tiny_models[request.param]


@contextmanager
def outputs(runtime: Any) -> Iterator[list[int]]:
    """Rows of which each decoder layer gave its output."""
    rows: list[int] = []
    hooks = [
        layer.register_forward_hook(
            lambda _, __, found: rows.append((found[0] if type(found) is tuple else found).shape[1])
        )
        for layer in runtime.model.base_model.layers
    ]
    yield rows
    for hook in hooks:
        hook.remove()


def ids(count: int) -> torch.Tensor:
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.some(2)
@pytest.mark.parametrize("kept", [1, 3])
def test_only_the_rows_whose_logits_are_asked_for(model: str, kept: int) -> None:
    runtime, tokens = load_model(model), ids(90)
    cache = runtime.prefill(tokens[:40], 100)[0]
    with outputs(runtime) as rows:
        logits = runtime.extend(cache, tokens[40:], 40, logits_to_keep=kept)
    assert rows == [50] * (runtime.num_layers - 1) + [kept]
    assert logits is not None
    for number, found in enumerate(logits.unflatten(0, (-1, runtime.vocab_size)) if kept == 1 else logits):
        assert gap(found, reference_logits(model, tokens[: 91 - kept + number])) < EXACT
    assert cache.get_seq_length() == 90
    more = runtime.decode_step(cache, 7)  # reads the last layer's KV of all rows
    assert gap(more, reference_logits(model, torch.cat((tokens, torch.tensor([7]))))) < EXACT


def test_no_output_if_only_kv_is_needed(model: str) -> None:
    runtime, tokens = load_model(model), ids(60)
    with outputs(runtime) as rows:
        kv = runtime.encode(tokens.tolist())
    assert rows == [60] * (runtime.num_layers - 1)
    exact = runtime.extract(runtime.prefill(tokens, 60)[0], 0, 60)
    assert gap(kv, exact) < EXACT
    assert reference_model(model).config.num_hidden_layers == len(kv)


def test_a_mistake_in_the_last_layer_would_show(model: str) -> None:
    """Twin: KV of the last layer that lacks rows changes the next token's logits."""
    runtime, tokens = load_model(model), ids(90)
    cache = runtime.prefill(tokens, 100)[0]
    with torch.inference_mode():
        for kept in (cache.layers[-1].keys, cache.layers[-1].values):
            kept[:, :, 40:89] = 0
    changed = runtime.decode_step(cache, 7)
    assert gap(changed, reference_logits(model, torch.cat((tokens, torch.tensor([7]))))) > BROKEN
