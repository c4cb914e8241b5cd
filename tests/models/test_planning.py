"""A model without its weights says of itself what the loaded model says."""

import pytest
import torch

from cacheclip_rag.base.errors import ModelError
from cacheclip_rag.models.load import load_model, load_planning


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_the_loaded_model(primary: str, dtype: str) -> None:
    loaded, planning = load_model(primary, dtype=dtype), load_planning(primary, dtype=dtype)
    for name in ("fingerprint", "rope_pin", "eos_ids", "num_layers", "num_kv_heads", "head_dim", "dtype"):
        assert getattr(planning, name) == getattr(loaded, name), name
    for name in ("context_tokens", "reuse_tokens", "pinned_rope", "tokenizer_sha256", "opening"):
        assert getattr(planning, name) == getattr(loaded, name), name
    positions = torch.tensor([0, 3, 200])
    for own, other in zip(planning.rotary.tables(positions), loaded.rotary.tables(positions), strict=True):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            assert torch.equal(own[0], other[0]) and torch.equal(own[1], other[1])


def test_has_no_weights(tiny_models: dict[str, str]) -> None:
    planning = load_planning(tiny_models["llama"])
    assert load_planning(tiny_models["llama"]) is planning
    assert all(parameter.is_meta for parameter in planning.model.parameters())
    with pytest.raises(ModelError, match="without its weights"):
        planning.encode([1, 2])
    with pytest.raises(ModelError, match="without its weights"):
        planning.prefill(torch.tensor([1, 2]), 4)
