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
from tests.methods.spying import Spy, plain, spied
from tests.methods.test_matrix import run


@plain
def test_mixed_with_all_the_weight_on_one(case: Case) -> None:
    for weight, part in ((1.0, "cacheclip:anchor=0"), (0.0, "query_attention")):
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


def rated(case: Case, spec: str) -> tuple[Any, torch.Tensor]:
    """The chunks that a method rates, and what it makes of their tokens."""

    class Rating(Spy):
        def select(self, request: Any, scores: Any) -> Any:
            found.append((request.spans, torch.cat(self.inner.rate(request, scores))))
            return super().select(request, scores)

    found: list[tuple[Any, torch.Tensor]] = []
    run(case, Rating(create(spec, {"recompute_ratio": 0.3})))
    return found[0]


@plain
def test_a_place_beyond_its_reach_says_nothing(case: Case) -> None:
    """There the other part alone decides; before it, the nearer to the start of the chunk the better."""
    spec = "mixed:first=query_attention:second=epic/reach={}:weight=0.3"
    spans, attention = rated(case, "query_attention")
    _, mixed = rated(case, spec.format(2))
    deep = torch.cat([torch.arange(len(span.tokens)) >= 2 for span in spans])
    assert torch.equal(attention[deep].argsort(stable=True), mixed[deep].argsort(stable=True))
    assert not torch.equal(attention.argsort(stable=True), mixed.argsort(stable=True))
    assert torch.equal(rated(case, spec.format(10_000))[1], rated(case, spec.format(0))[1])
    with pytest.raises(ConfigurationError, match="reach"):
        create("epic:reach=-1", {})


@plain
def test_anchored_is_a_mix(case: Case) -> None:
    for spec, alike in (
        ("anchored", "mixed:first=query_attention/layers=upper:second=epic/reach=64"),
        ("anchored:first=cacheclip:weight=0.8", "mixed:first=cacheclip:second=epic/reach=64:weight=0.8"),
    ):
        (_, ours), (_, theirs) = spied(case, spec), spied(case, alike)
        assert all(torch.equal(a, b) for a, b in zip(ours.masks, theirs.masks, strict=True))
    assert not create("anchored", {}).needs_auxiliary and create("anchored:first=cacheclip", {}).needs_auxiliary
    assert spec_of(create("anchored:weight=0.8", {})) == "anchored:weight=0.8"
