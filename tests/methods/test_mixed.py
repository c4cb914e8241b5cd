"""Two selectors mixed by rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.methods import create, spec_of
from cacheclip_rag.methods.mixed import Mixed, _ranks
from tests.conftest import CHUNKS, rag_prompt
from tests.fusion.cases import Case, gap
from tests.methods.spying import plain, spied
from tests.methods.test_matrix import run


@plain
def test_mixed_with_all_the_weight_on_one(case: Case) -> None:
    for weight, part in ((1.0, "cacheclip"), (0.0, "query_attention")):
        _, mixed = spied(case, f"mixed:weight={weight}:window=1:threshold=0")
        _, alone = spied(case, f"{part}:window=1:threshold=0")
        assert all(torch.equal(a, b) for a, b in zip(mixed.masks, alone.masks, strict=True))


def test_mixed_needs_what_its_parts_need(tiny_models: dict[str, str]) -> None:
    engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=None)
    engine.precompute(CHUNKS[:3])
    answer = engine.generate(
        rag_prompt(CHUNKS[:3]), SamplingParams(max_tokens=1), method="mixed:first=qcfuse:second=epic"
    )
    assert answer.stats.method == "mixed" and answer.stats.effective_ratio == pytest.approx(0.2, abs=0.01)
    with pytest.raises(ConfigurationError, match="'mixed' needs an auxiliary model .* full, prefix"):
        engine.generate(rag_prompt(CHUNKS[:3]), method="mixed")


@plain
def test_mixed_is_charged_what_its_parts_cost(case: Case) -> None:
    for spec, references in (
        ("mixed:first=oracle", 1),
        ("mixed:first=oracle:second=oracle", 2),
        ("mixed:first=epic", 0),
    ):
        stats = run(case, spec, 0.3).stats
        assert stats.charged_ratio == pytest.approx(references + stats.effective_ratio), spec
    assert run(case, "oracle", 0.0).stats.charged_ratio == 0.0, "where nothing is chosen, no prefill is run for it"


@plain
def test_parts_of_mixed_score_by_their_own_settings(case: Case) -> None:
    for part, alone in (
        ("query_attention/layers=0/heads=max", "query_attention:layers=0:heads=max"),
        ("prophetkv/alone=true/softmax=chunks", "prophetkv:alone=true:softmax=chunks"),
        ("epic", "epic"),
    ):
        _, mixed = spied(case, f"mixed:first={part}:weight=1.0:window=1:threshold=0")
        _, own = spied(case, f"{alone}:window=1:threshold=0")
        assert all(torch.equal(a, b) for a, b in zip(mixed.masks, own.masks, strict=True)), part
    _, plain_last = spied(case, "query_attention:window=1:threshold=0")
    _, own = spied(case, "query_attention:layers=0:heads=max:window=1:threshold=0")
    assert not all(torch.equal(a, b) for a, b in zip(plain_last.masks, own.masks, strict=True))


@plain
def test_rounds_of_mixed_look_again(case: Case) -> None:
    """Where the primary's attention counts; the auxiliary's scores are asked for once, and stay what they are."""
    spec = "mixed:first=cacheclip:second=query_attention/layers=all:weight={}:rounds={}"
    for weight in (0.5, 0.0):
        once, twice = (run(case, spec.format(weight, rounds), 0.4) for rounds in (1, 2))
        assert once.stats.recomputed_tokens == twice.stats.recomputed_tokens == round(0.4 * once.stats.chunk_tokens)
        assert gap(once.logits, twice.logits) > 0
    mixed, alone = (
        run(case, s, 0.4)
        for s in (
            spec.format(0.0, 2) + ":window=1:threshold=0",
            "query_attention:layers=all:rounds=2:window=1:threshold=0",
        )
    )
    assert gap(mixed.logits, alone.logits) == 0.0
    asked: list[str] = []

    class Counting(Mixed):
        def score(self, request: Any) -> Any:
            asked.append("once")
            return super().score(request)

    run(case, Counting(rounds=3))
    assert asked == ["once"]


def test_equal_scores_have_equal_ranks() -> None:
    assert _ranks(torch.tensor([3.0, 1.0, 3.0, 2.0, 0.0])).tolist() == [0.875, 0.25, 0.875, 0.5, 0.0]
    assert _ranks(torch.tensor([7.0])).tolist() == [0.0]


@plain
def test_what_the_first_is_sure_of_is_taken(case: Case) -> None:
    """All of the budget: the first alone. A part: as many of its best, whatever the second says."""
    _, alone = spied(case, "query_attention:window=1:threshold=0")
    mixed = "mixed:first=query_attention:second=epic:window=1:threshold=0"
    _, all_sure = spied(case, f"{mixed}:sure=1.0")
    assert all(torch.equal(a, b) for a, b in zip(all_sure.masks, alone.masks, strict=True))
    none, half = (spied(case, f"{mixed}{sure}")[1] for sure in ("", ":sure=0.5"))
    common = [sum(int((a & b).sum()) for a, b in zip(each.masks, alone.masks, strict=True)) for each in (none, half)]
    budget = sum(int(mask.sum()) for mask in alone.masks)
    assert common[1] >= max(common[0], budget // 2)
    with pytest.raises(ConfigurationError, match="sure must be between 0 and 1, got 2.0"):
        Mixed(sure=2.0)


@plain
def test_anchored_is_a_mix(case: Case) -> None:
    for spec, alike in (
        ("anchored", "mixed:first=query_attention/layers=upper:second=epic"),
        ("anchored:first=cacheclip:weight=0.8", "mixed:first=cacheclip:second=epic:weight=0.8"),
    ):
        (_, ours), (_, theirs) = spied(case, spec), spied(case, alike)
        assert all(torch.equal(a, b) for a, b in zip(ours.masks, theirs.masks, strict=True))
    assert not create("anchored", {}).needs_auxiliary and create("anchored:first=cacheclip", {}).needs_auxiliary
    assert spec_of(create("anchored:weight=0.8", {})) == "anchored:weight=0.8"
