"""Only the heads that a head set names are scored, with the numbers that all heads would give."""

from typing import Any

import pytest
import torch

from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers import attention
from cacheclip_rag.runtime.transformers.attention import query_attention
from cacheclip_rag.runtime.transformers.attention_pattern import AttentionRule, Block, SideBySide
from cacheclip_rag.selection.heads import HeadSet
from tests.conftest import CHUNKS, QUESTION, Models, Patch
from tests.selection.test_auxiliary_scores import Scored
from tests.selection.test_heads import SHA, scores

NUM_HEADS, NUM_KV_HEADS, NUM_KEYS, SIZE = 6, 2, 24, 8
SINKS = torch.linspace(-1, 2, NUM_HEADS)
RULES = {
    "plain": AttentionRule(0.3),
    "window": AttentionRule(0.3, window=5),
    "softcap": AttentionRule(0.3, softcap=1.5),
    "sinks": AttentionRule(0.3, sinks=SINKS),
}


def slow_logits(query: torch.Tensor, key: torch.Tensor, rule: AttentionRule, head: int) -> torch.Tensor:
    """``(num_rows, num_keys)`` of one head, without a mask."""
    found = query[head].float() @ key[head // (NUM_HEADS // NUM_KV_HEADS)].float().T * rule.scaling
    return found if rule.softcap is None else (found / rule.softcap).tanh() * rule.softcap


def blocks() -> dict[str, Any]:
    rows, keys, positions = slice(0, 4), slice(0, NUM_KEYS), torch.tensor([3, 9, 15, 22])
    return {"block": Block.of(rows, keys, positions), "side by side": SideBySide(rows, keys, torch.tensor([0, 3]))}


@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("kind", ["block", "side by side"])
@pytest.mark.parametrize("rule", RULES)
def test_some_heads_are_those_of_all_heads(rule: str, kind: str, logits: bool) -> None:
    torch.manual_seed(1)
    query, key = torch.randn(NUM_HEADS, 4, SIZE), torch.randn(NUM_KV_HEADS, NUM_KEYS, SIZE)
    block = blocks()[kind]
    every = query_attention(query, key, block, RULES[rule], logits=logits)
    for heads in ([0], [1, 4], [0, 1, 2], [2, 3, 5], [*range(NUM_HEADS)]):
        some = query_attention(query, key, block, RULES[rule], logits=logits, heads=torch.tensor(heads))
        expected = every[:, heads] if kind == "side by side" else every[heads]
        torch.testing.assert_close(some, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rule", ["plain", "softcap"])
def test_logits_equal_those_of_one_head_at_a_time(rule: str) -> None:
    torch.manual_seed(2)
    query, key = torch.randn(NUM_HEADS, 4, SIZE), torch.randn(NUM_KV_HEADS, NUM_KEYS, SIZE)
    block = blocks()["block"]
    found = query_attention(query, key, block, RULES[rule], logits=True)
    seen = torch.arange(NUM_KEYS) <= block.positions[:, None]
    for head in range(NUM_HEADS):
        expected = slow_logits(query, key, RULES[rule], head)
        torch.testing.assert_close(found[head][seen], expected[seen], atol=1e-6, rtol=1e-6)


def named(runtime: Any, kind: str) -> HeadSet:
    """Two heads of the first layer and one of the last, of unequal weights or of equal ones."""
    heads = ((0, 1), (0, 3), (runtime.num_layers - 1, 2))
    weights = torch.full((3,), 1 / 3) if kind == "equal" else torch.tensor([0.2, 0.5, 0.3])
    return HeadSet(SHA, heads, weights, sinks=1)


def with_all_heads(heads: HeadSet, num_heads: int) -> HeadSet:
    """The same, with a weight of 0 for each other head of its layers."""
    weights = dict(zip(heads.heads, heads.weights.tolist(), strict=True))
    every = tuple((layer, head) for layer in heads.layers for head in range(num_heads))
    found = torch.tensor([weights.get(each, 0.0) for each in every])
    return HeadSet(heads.auxiliary_sha256, every, found, heads.sinks)


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", ["weighted", "equal"])
@pytest.mark.parametrize("name", ["auxiliary", "qwen2", "gemma2", "gpt-oss"])
def test_scores_are_those_of_all_heads(tiny_models: Models, monkeypatch: Patch, name: str, kind: str) -> None:
    """Grouped heads, soft-capped logits, windows and sinks among them."""
    runtime = load_model(tiny_models[name])
    scored = Scored(runtime, list(CHUNKS), QUESTION)
    heads = named(runtime, kind)
    num_heads = runtime.model.config.num_attention_heads
    expected = scores(scored, with_all_heads(heads, num_heads))
    counted: list[int] = []

    def counting(*args: Any, **options: Any) -> torch.Tensor:
        found = query_attention(*args, **options)
        counted.append(found.shape[1])
        return found

    monkeypatch.setattr(attention, "query_attention", counting)
    found = scores(scored, heads)
    assert set(counted) == {1, 2} < {num_heads, 1, 2}, "not for heads that the head set does not name"
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-6, rtol=0)
    other = HeadSet(SHA, ((0, 0), *heads.heads[1:]), heads.weights, heads.sinks)
    assert max(float((a - b).abs().max()) for a, b in zip(found, scores(scored, other), strict=True)) > 1e-4
