"""Two scorers mixed by rank."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, ConfigurationError, SamplingParams
from cacheclip_rag.measuring import ModelRuntime
from cacheclip_rag.methods import Recompute
from cacheclip_rag.selection.budget import Budget, Tokens
from cacheclip_rag.selection.scorers import AuxiliaryAttention, ChunkStart, QueryAttention, RankMix, Scorer
from tests.conftest import CHUNKS, Patch, rag_prompt, spied as spied_calls
from tests.fusion.cases import Case, gap
from tests.methods.spying import plain, run, same, spied

TOKENS = Budget(grouping=Tokens())


@pytest.mark.some(3)
@plain
@pytest.mark.parametrize("scorer", [AuxiliaryAttention(), QueryAttention(layers="0"), ChunkStart()])
def test_all_the_weight_on_one(case: Case, scorer: Scorer) -> None:
    """On either side, whenever the scorer works."""
    other = QueryAttention()
    _, alone = spied(case, Recompute(scorer, TOKENS))
    for mix in (RankMix(scorer, other, weight=1.0), RankMix(other, scorer, weight=0.0)):
        _, mixed = spied(case, Recompute(mix, TOKENS))
        assert same(mixed.masks, alone.masks)
    _, otherwise = spied(case, Recompute(other, TOKENS))
    assert not same(alone.masks, otherwise.masks)


@plain
def test_ranks_by_brute_force(case: Case) -> None:
    mix = RankMix(QueryAttention(), ChunkStart(), weight=0.3)
    view, mixed = scores(case, mix)
    (_, first), (_, second) = scores(case, mix.first), scores(case, mix.second)

    def ranks(values: torch.Tensor) -> torch.Tensor:
        below = (values[None] < values[:, None]).sum(1) + ((values[None] == values[:, None]).sum(1) - 1) / 2
        return below / (len(values) - 1)

    assert gap(mixed, 0.3 * ranks(first) + 0.7 * ranks(second)) < 1e-6


def scores(case: Case, scorer: Scorer) -> tuple[Any, torch.Tensor]:
    """The view that a scorer had, and its scores of all tokens."""
    _, spy = spied(case, Recompute(scorer))
    view = replace(spy.view, cache=case.assembled())
    with torch.inference_mode():
        return view, torch.cat(scorer.after_read(view, scorer.before_read(view)))


def test_it_needs_what_its_parts_need(tiny_models: dict[str, str]) -> None:
    engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=None)
    engine.precompute(CHUNKS[:3])
    mine = Recompute(RankMix(QueryAttention(), ChunkStart()), name="mine")
    answer = engine.generate(rag_prompt(CHUNKS[:3]), SamplingParams(max_tokens=1), method=mine)
    assert answer.stats.method == "mine" and answer.stats.effective_ratio == pytest.approx(0.2, abs=0.01)
    asking = Recompute(RankMix(QueryAttention(), AuxiliaryAttention(heads="other")), name="asking")
    assert asking.head_sets == ("other",) and mine.head_sets == ()
    with pytest.raises(ConfigurationError, match="'asking' needs an auxiliary model .* full, prefix"):
        engine.generate(rag_prompt(CHUNKS[:3]), method=asking)


@plain
def test_the_auxiliary_is_asked_before_the_primarys_kv_is_read(case: Case, monkeypatch: Patch) -> None:
    order: list[str] = []

    def note(name: str, owner: Any) -> None:
        if not isinstance(owner, ModelRuntime) or owner is case.runtime:
            order.append(name)

    for cls, method in ((AuxiliaryAttention, "score"), (QueryAttention, "score"), (type(case.runtime), "new_cache")):
        spied_calls(monkeypatch, cls, method, lambda owner, *_, name=cls.__name__, **__: note(name, owner))
    run(case, Recompute(RankMix(QueryAttention(), AuxiliaryAttention())), 0.3)
    assert order == ["AuxiliaryAttention", "ModelRuntime", "QueryAttention"]


@plain
def test_a_place_beyond_the_starts_says_nothing(case: Case) -> None:
    """There the other part alone decides; before it, the nearer to the start of the chunk the better."""

    def mix(within: int) -> RankMix:
        return RankMix(QueryAttention(), ChunkStart(within=within), weight=0.3)

    view, attention = scores(case, QueryAttention())
    _, mixed = scores(case, mix(2))
    deep = torch.cat([torch.arange(len(span.tokens)) >= 2 for span in view.spans])
    assert torch.equal(attention[deep].argsort(stable=True), mixed[deep].argsort(stable=True))
    assert not torch.equal(attention.argsort(stable=True), mixed.argsort(stable=True))
    assert torch.equal(scores(case, mix(10_000))[1], scores(case, mix(0))[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RankMix(ChunkStart(), QueryAttention(), weight=3), "weight must be a share of the ranking, 0 to 1"),
        (lambda: RankMix(ChunkStart(), "epic"), "second must be a scorer"),
        (lambda: RankMix(RankMix(ChunkStart(), ChunkStart()), ChunkStart()), "must be a scorer other than RankMix"),
        (lambda: ChunkStart(within=-1), "within must be a whole number of tokens, 0 or more"),
        (lambda: Recompute("epic"), "scorer must be a Scorer such as ChunkStart"),
        (lambda: Recompute(ChunkStart(), 0.2), "budget must be a TokenBudget such as"),
    ],
)
def test_wrong_parts(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
