"""Attention of a decoded token, against the definition."""

import pytest
import torch

from cacheclip_rag.runtime.transformers.attention import row_attention
from cacheclip_rag.runtime.transformers.attention_pattern import AttentionRule

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
