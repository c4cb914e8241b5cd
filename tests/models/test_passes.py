"""Passes of a model: their rows and inputs, several answers in one, many at a time, and the attention of one row."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from planted_faults import Broken, Fault

from cacheclip_rag.base.errors import UnsupportedModelError
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers.attention import row_attention
from cacheclip_rag.runtime.transformers.attention_pattern import AttentionRule, causal_pattern
from cacheclip_rag.runtime.transformers.cache import FusedCache, FusedLayer
from cacheclip_rag.runtime.transformers.model import ModelRuntime
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
            assert gap(found[number], runtime.decode_step(alone[number], token)) < EXACT, (step, number)
    for number, (one, other) in enumerate(zip(together, alone, strict=True)):
        assert one.get_seq_length() == other.get_seq_length() and gap(kv(one), kv(other)) < EXACT, number
    one_by_one = runtime.decode_steps(together[:1], [5])
    assert gap(one_by_one[0], runtime.decode_step(alone[0], 5)) < EXACT


def test_a_pass_that_fails_changes_no_state(tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load_model(tiny_models["llama"])
    caches = states(runtime)
    before = [kv(cache).clone() for cache in caches]
    Fault(monkeypatch, FusedLayer, "update", 6)  # in the second layer
    with pytest.raises(Broken):
        runtime.decode_steps(caches, [5, 6, 7, 8])
    assert all(torch.equal(kv(cache), kept) for cache, kept in zip(caches, before, strict=True))


IDS = torch.arange(20, 40)
ROWS = torch.tensor([3, 7, 19])
PASSES = {
    "prefill": lambda runtime, cache: runtime.prefill(IDS, 24),
    "recompute": lambda runtime, cache: runtime.run_rows(cache, IDS[ROWS], ROWS, causal_pattern(ROWS)),
    "decoding": lambda runtime, cache: runtime.decode_step(cache, 5),
    "several answers": lambda runtime, cache: runtime.decode_steps([cache, runtime.prefill(IDS, 24)[0]], [5, 6]),
}


class Passing:
    """The attention of a model's last layer with one more input, as a later version of its class might have it."""

    def __init__(self, runtime: Any, **inputs: Any) -> None:
        self.attention, self.inputs = runtime.model.model.layers[-1].self_attn, inputs

    def __enter__(self) -> None:
        def add(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, **self.inputs}

        self.hook = self.attention.register_forward_pre_hook(add, with_kwargs=True)

    def __exit__(self, *error: object) -> None:
        self.hook.remove()


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        ({"block_indices": torch.zeros(1)}, "block_indices"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "attention_mask"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_an_unknown_one_is_refused(tiny_models: dict[str, str], kind: str, inputs: dict[str, Any], what: str) -> None:
    runtime = load_model(tiny_models["llama"])
    cache, _ = runtime.prefill(IDS, 24)
    with Passing(runtime, **inputs), pytest.raises(UnsupportedModelError, match=f"LlamaAttention .*passes {what} to"):
        PASSES[kind](runtime, cache)


def test_one_that_is_none_or_changes_nothing_is_accepted(tiny_models: dict[str, str]) -> None:
    runtime = load_model(tiny_models["llama"])
    with Passing(runtime, block_indices=None, position_ids=torch.arange(20)[None], is_causal=True):
        _, logits = runtime.prefill(IDS, 24)
    assert gap(logits, reference_logits(tiny_models["llama"], IDS)) < EXACT


HEADS, KV_HEADS, DIM, KEYS = 6, 2, 8, 9


def by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule, *, own: bool = True
) -> torch.Tensor:
    """Head by head. ``own``: each with the keys of its group, else, wrongly, with those of another one."""
    heads = []
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS) if own else head % KV_HEADS
        first = 0 if rule.window is None else max(0, KEYS - rule.window)
        logits = key[:, group, first:] @ query[:, head, 0, :, None] * rule.scaling  # (batch, num_keys, 1)
        if rule.softcap is not None:
            logits = (logits / rule.softcap).tanh() * rule.softcap
        masses = logits.exp()
        total = masses.sum(1, keepdim=True)
        if rule.sinks is not None:
            total = total + rule.sinks[head].exp()
        heads.append((masses / total * value[:, group, first:]).sum(1))
    return torch.stack(heads, 1)[:, None]


@pytest.mark.some(4)
@pytest.mark.parametrize("window", [None, 1, 4, KEYS, KEYS + 3])
@pytest.mark.parametrize(
    "others", [{}, {"softcap": 1.5}, {"sinks": torch.linspace(-2, 3, HEADS, dtype=torch.float64)}], ids=str
)
@pytest.mark.parametrize("batch", [1, 3])
def test_row(window: int | None, others: dict[str, object], batch: int) -> None:
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(batch, HEADS, 1, DIM, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, batch, KV_HEADS, KEYS, DIM, generator=generator, dtype=torch.float64)
    rule = AttentionRule(0.7, window, **others)  # type: ignore[arg-type]
    found = row_attention(query, key, value, rule)
    assert found.shape == (batch, 1, HEADS, DIM)
    torch.testing.assert_close(found, by_definition(query, key, value, rule), atol=1e-6, rtol=1e-6)
    assert not torch.allclose(found, by_definition(query, key, value, rule, own=False), atol=1e-2)


def run(*jobs: Callable[[], None]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


class TestModels:
    """Which models run one pass at a time: two threads answer, and either meet within a pass or never can."""

    @pytest.mark.parametrize(
        ("name", "meets"),
        # rotary modules that change their frequencies with the length of each pass, and one that does not
        [("llama-rope-dynamic", False), ("phi3-longrope", False), ("llama", True)],
    )
    def test_pinned_rotary_modules_have_each_pass_for_themselves(
        self, tiny_models: dict[str, str], name: str, meets: bool
    ) -> None:
        runtime = load_model(tiny_models[name])  # without an engine, whose prompts take turns
        ids = torch.arange(5, 25)
        barrier = threading.Barrier(2, timeout=30 if meets else 0.5)
        met = []

        def wait(*_: Any) -> None:
            try:
                barrier.wait()
                met.append(True)
            except threading.BrokenBarrierError:
                met.append(False)

        hook = runtime.model.register_forward_pre_hook(wait)
        try:
            run(*[lambda: runtime.prefill(ids, 32)] * 2)
        finally:
            hook.remove()
        assert met == [meets, meets]
