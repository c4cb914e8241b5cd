"""What a model passes to its attention: an input whose meaning is not known refuses the model."""

from typing import Any

import pytest
import torch

from cacheclip_rag.base.errors import UnsupportedModelError
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers.attention_pattern import causal_pattern
from tests.fusion.cases import EXACT, gap, reference_logits

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
