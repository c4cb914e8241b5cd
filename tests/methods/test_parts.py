"""What all selectors share: floors, a skipped chunk, correction, scores that can be saved."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cacheclip_rag import SamplingParams
from cacheclip_rag.chunks.context import LEADS
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.fusion import correction
from cacheclip_rag.methods import create
from cacheclip_rag.methods.selective import Selective
from tests.conftest import CHUNKS, LLAMA, build_model
from tests.fusion.cases import EXACT, Case, gap, make_case, make_engine, reference_logits
from tests.methods.spying import Spy, plain, spied
from tests.methods.test_matrix import run


@plain
@pytest.mark.parametrize("spec", ["cacheclip", "prophetkv", "mixed", "query_attention:always_include_first=2"])
def test_saved_scores_choose_the_same(case: Case, spec: str) -> None:
    saved: list[list[torch.Tensor]] = []
    choose = Selective.choose

    def watch(self: Any, request: Any, scores: Any, *arguments: Any, **options: Any) -> Any:
        saved.append([score.clone() for score in scores])
        return choose(self, request, scores, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Selective, "choose", watch)
        first, spy = spied(case, spec)

    class Replay(Selective):
        name = "replay"

        def rate(self, request: Any, scores: Any) -> list[torch.Tensor]:
            return saved[0]

    settings = ("recompute_ratio", "window", "threshold", "always_include_first", "anchor", "correction")
    again: Any = Spy(Replay(**{name: getattr(spy.inner, name) for name in settings}))
    second = run(case, again)
    assert all(torch.equal(a, b) for a, b in zip(spy.masks, again.masks, strict=True))
    assert torch.equal(first.logits, second.logits)


@plain
def test_first_tokens_come_before_all_others(case: Case) -> None:
    _, spy = spied(case, "random:always_include_first=4", 0.4)
    assert all(bool(mask[:4].all()) for mask in spy.masks)
    assert sum(int(m.sum()) for m in spy.masks) == round(0.4 * spy.request.num_chunk_tokens)


@plain
@pytest.mark.parametrize(("anchor", "ratio"), [(0.5, 0.4), (1.0, 0.4), (0.5, 0.9), (0.5, 0.01)])
def test_anchors_are_the_starts_of_all_chunks(case: Case, anchor: float, ratio: float) -> None:
    """As many of each as the share of the budget pays for, 16 at most; the budget is kept to the token."""
    _, spy = spied(case, f"random:anchor={anchor}", ratio)
    budget = round(ratio * spy.request.num_chunk_tokens)
    each = min(16, int(anchor * budget / len(spy.masks)))
    assert all(bool(mask[:each].all()) for mask in spy.masks)
    assert sum(int(m.sum()) for m in spy.masks) == budget
    assert each > 0 or ratio == 0.01


@plain
@pytest.mark.parametrize("rounds", [2, 3])
def test_anchors_do_not_depend_on_rounds(case: Case, rounds: int) -> None:
    _, spy = spied(case, f"query_attention:anchor=0.5:rounds={rounds}", 0.4)
    each = min(16, int(0.5 * round(0.4 * spy.request.num_chunk_tokens) / len(spy.masks)))
    assert each > 0
    for span in spy.request.spans:
        assert bool(spy.request.computed[span.start : span.start + each].all())


@plain
def test_the_papers_own_rule_has_no_anchors(case: Case) -> None:
    (_, with_anchor), (_, without) = (
        spied(case, f"cacheclip:grouping=v1_literal:anchor={anchor}", 0.4) for anchor in (0.5, 0.0)
    )
    assert all(torch.equal(a, b) for a, b in zip(with_anchor.masks, without.masks, strict=True))


@plain
def test_a_skipped_first_chunk(case: Case) -> None:
    _, spy = spied(case, "random:skip_first_chunk=true", 0.3)
    first = int(case.layout.is_exact(case.layout.chunks[0]))
    assert first or not bool(spy.masks[0].any())
    assert sum(int(m.sum()) for m in spy.masks) == round(0.3 * spy.request.num_chunk_tokens)


def test_random_follows_its_seed(case_of: Any) -> None:
    case = case_of("llama")
    masks = [spied(case, f"random:seed={seed}")[1].masks for seed in (0, 0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(masks[0], masks[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(masks[0], masks[2], strict=True))


def changes(case: Case, layer: int, span: Any, fused: Any) -> list[torch.Tensor]:
    """By how much keys (before RoPE) and values of a span differ from the stored ones,
    ``(num_kv_heads, num_tokens, head_dim)`` each."""
    kvs = [case.runtime.extract(cache, span.start, span.stop)[layer] for cache in (fused, case.assembled())]
    return [kvs[0][0] - kvs[1][0], kvs[0][1] - kvs[1][1]]


def nearby(change: torch.Tensor, probes: torch.Tensor, at: torch.Tensor, by_distance: bool) -> torch.Tensor:
    """Mean change of the probes, ``(num_kv_heads, head_dim)``, as the token ``at`` weighs them."""
    places = probes.nonzero().flatten()
    weights = [math.exp(-abs(int(p) - int(at)) / 64) if by_distance else 1.0 for p in places]
    total = torch.stack([w * change[:, p] for w, p in zip(weights, places, strict=True)]).sum(0)
    return total / sum(weights)


@plain
@pytest.mark.parametrize("method", ["cacheclip", "anchored"])
def test_our_own_correct_half_of_the_way(case: Case, method: str) -> None:
    """Unless told otherwise; the paper's own grouping does not."""
    logits = {spec: run(case, f"{method}{spec}", 0.3).logits for spec in ("", ":correction=0.5", ":correction=0")}
    assert torch.equal(logits[""], logits[":correction=0.5"]) and not torch.equal(logits[""], logits[":correction=0"])
    literal = f"{method}:grouping=v1_literal:threshold=2"
    assert torch.equal(run(case, literal, 0.3).logits, run(case, f"{literal}:correction=0", 0.3).logits)


@plain
@pytest.mark.parametrize("probes", [0.0, 0.5])
def test_correction_moves_what_is_not_recomputed(case: Case, probes: float) -> None:
    """By the mean change of what is, or of near probes as far as it is not chance, keys compared before RoPE. In the
    second layer: the first computes its KV from the tokens alone, so that there nothing ever changes."""
    result, spy = spied(case, f"random:probes={probes}:correction=1.0", 0.3)
    bare, _ = spied(case, f"random:probes={probes}", 0.3)
    assert all(
        gap(change, torch.zeros_like(change)) < 1e-5 for change in changes(case, 0, spy.request.spans[0], bare.cache)
    )
    assert not probes or int(spy.request.probes.sum()) < sum(int(mask.sum()) for mask in spy.masks)
    for span, mask in zip(spy.request.spans, spy.masks, strict=True):
        asked = spy.request.probes[span.start : span.stop] if probes else mask
        assert int(asked.sum()) > 1
        corrected, fresh = changes(case, 1, span, result.cache), changes(case, 1, span, bare.cache)
        for moved, change in zip(corrected, fresh, strict=True):
            mean = change[:, asked].mean(1)
            assert float(mean.abs().max()) > 1e-3, "something must change"
            expected = torch.stack([nearby(change, asked, at, probes > 0) for at in (~mask).nonzero().flatten()], 1)
            if probes:
                count = int(asked.sum())
                flat = change[:, asked].transpose(0, 1).reshape(count, -1)
                chance = float(((flat - flat.mean(0)) ** 2).sum()) / (count - 1) / count
                expected = expected * max(0.0, 1 - chance / float((mean**2).sum()))
            assert gap(moved[:, ~mask], expected) < 1e-4
    assert gap(result.logits, bare.logits) > 0
    assert all(layer.before_scatter is None for layer in result.cache.layers)


@plain
@pytest.mark.parametrize(("spec", "expected"), [("random", 0), ("random:probes=0.5", 3)])
def test_weights_are_found_once_a_pass(case: Case, monkeypatch: pytest.MonkeyPatch, spec: str, expected: int) -> None:
    """Not in every layer; and a plain mean needs none, whose number would grow with the square of a chunk."""
    found: list[torch.Size] = []
    weights = correction._weights

    def watch(probes: torch.Tensor, stale: torch.Tensor) -> torch.Tensor:
        found.append(weights(probes, stale).shape)
        return weights(probes, stale)

    monkeypatch.setattr(correction, "_weights", watch)
    result, spy = spied(case, f"{spec}:correction=1.0", 0.3)
    assert len(spy.request.spans) == 3 and case.runtime.num_layers >= 3
    assert len(found) == expected
    assert gap(result.logits, run(case, spec, 0.3).logits) > 1e-3


@plain
@pytest.mark.parametrize("spec", ["random", "epic", "cacheclip:skip_first_chunk=true", "query_attention"])
def test_probes_are_spread_within_the_budget(case: Case, spec: str) -> None:
    """As many as asked for, evenly among the tokens that no score chose."""
    _, spy = spied(case, f"{spec}:probes=0.25", 0.4)
    budget = round(0.4 * spy.request.num_chunk_tokens)
    assert sum(int(m.sum()) for m in spy.masks) == budget
    assert int(spy.request.probes.sum()) == round(0.25 * budget)
    probes = [spy.request.probes[span.start : span.stop] for span in spy.request.spans]
    assert all(bool((mask | ~probe).all()) for mask, probe in zip(spy.masks, probes, strict=True))
    gaps = []
    for mask, probe in zip(spy.masks, probes, strict=True):
        free = (~mask | probe).nonzero().flatten()
        places = torch.isin(free, probe.nonzero().flatten()).nonzero().flatten()
        gaps += places.diff().tolist()
    assert gaps and max(gaps) - min(gaps) <= 1


@plain
@pytest.mark.parametrize("ratio", [0.5, 0.7, 0.8, 0.95])
@pytest.mark.parametrize("probes", [0.0, 0.25, 1.0])
def test_a_budget_larger_than_what_may_be_chosen(case: Case, probes: float, ratio: float) -> None:
    """Beside a skipped chunk, probes and scores together take as many tokens as there are, and no more."""
    result, spy = spied(case, f"query_attention:skip_first_chunk=true:probes={probes}:correction=1.0", ratio)
    first, *others = case.layout.chunks
    assert not case.layout.is_exact(first) and not bool(spy.masks[0].any())
    expected = min(round(ratio * result.stats.chunk_tokens), sum(len(span.tokens) for span in others))
    assert sum(int(mask.sum()) for mask in spy.masks) == result.stats.recomputed_tokens == expected


@plain
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(
    "spec",
    [
        "query_attention:rounds=2:probes=0.5",
        "query_attention:rounds=3",
        "query_attention:rounds=4:probes=1.0",
        "query_attention:rounds=2:always_include_first=9",
    ],
)
def test_choosing_again_spends_the_budget_exactly(case: Case, spec: str, ratio: float) -> None:
    """What was chosen is no candidate: nothing is spent on it a second time."""
    stats = run(case, spec, ratio).stats
    assert stats.recomputed_tokens == round(ratio * stats.chunk_tokens)


@pytest.fixture(scope="module")
def deep(tiny_models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Twelve layers, so that many can choose after each other."""
    folder = build_model(tmp_path_factory.mktemp("deep"), {**LLAMA, "num_hidden_layers": 12})
    return make_case(str(folder), tiny_models["auxiliary"], CHUNKS[:3])


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("parts", ["", ":probes=0.5", ":always_include_first=9"])
def test_choosing_among_what_is_left_spends_every_layers_budget(deep: Case, parts: str, ratio: float) -> None:
    spec = f"cacheblend:schedule=gradual:window=8:threshold=5:check_layer=0{parts}"
    stats, layers = run(deep, spec, ratio).stats, deep.runtime.num_layers
    method: Any = create(spec, {"recompute_ratio": ratio})
    budgets = method.budgets(layers, stats.chunk_tokens, stats.chunk_tokens - stats.exact_tokens)
    assert stats.recomputed_tokens == budgets[-1]
    assert stats.charged_ratio == pytest.approx(sum(budgets) / layers / stats.chunk_tokens)


class TestBehindPassages:
    @pytest.mark.parametrize("name", ["direct", "ape", "epic", "cacheblend", "cacheclip", "query_attention"])
    def test_chunk_caches_are_their_own(self, case_of: Any, name: str) -> None:
        """A chunk stored behind the prefix is a miss for a method that wants it behind passages, and the reverse."""
        case = case_of("llama")
        behind = create(f"{name}:behind=passages", {})
        assert run(case, behind).stats.fallback is not None
        case.engine.precompute([span.segment.text for span in case.layout.chunks], method=behind)
        other = run(case, behind)
        assert other.stats.fallback is None and other.stats.hits == 3 and other.stats.exact_tokens == 0
        assert gap(other.logits, run(case, name).logits) > 0

    @pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "gpt-oss"])
    def test_ratio_one_is_full_prefill(self, case_of: Any, name: str) -> None:
        case = case_of(name)
        epic = create("epic:behind=passages", {"recompute_ratio": 1.0})
        case.engine.precompute([span.segment.text for span in case.layout.chunks], method=epic)
        fused = run(case, epic)
        assert fused.stats.effective_ratio == 1.0
        assert gap(fused.logits, reference_logits(case.folder, case.layout.ids)) < EXACT

    def test_stored_kv_is_that_of_the_chunk_behind_prefix_and_passages(self, case_of: Any) -> None:
        case = case_of("llama")
        direct = create("direct:behind=passages", {})
        chunk = case.layout.chunks[1]
        case.engine.precompute([chunk.segment.text], method=direct)
        caches = case.engine.parts.primary()
        lead = case.runtime.tokenize(LEADS["passages"]).ids
        ids = torch.tensor([*caches.prefix_ids, *lead, *chunk.tokens.ids])
        full, _ = case.runtime.prefill(ids, len(ids))
        stored = case.engine.parts.primary(direct.encoding).read(chunk.segment.text)
        assert gap(stored, case.runtime.extract(full, len(ids) - len(chunk.tokens), len(ids))) < EXACT

    @pytest.mark.parametrize("name", ["block", "link"])
    def test_not_where_chunks_are_encoded_alone(self, name: str) -> None:
        assert create(name, {"behind": "passages"}) == create(name, {})
        with pytest.raises(ConfigurationError, match="written name=value, with names among"):
            create(f"{name}:behind=passages", {})

    def test_as_a_setting_of_the_engine(self, tiny_models: dict[str, str]) -> None:
        """All of its methods then share the chunk caches."""
        engine = make_engine(tiny_models["llama"], tiny_models["auxiliary"], behind="passages")
        engine.precompute(CHUNKS[:3])
        prompt = "\n\n".join(CHUNKS[:3]) + "\n\nQuestion: What is the magic number?"
        for name in ("cacheclip", "direct", "epic"):
            stats = engine.generate(prompt, SamplingParams(max_tokens=2), method=name).stats
            assert (stats.method, stats.hits, stats.exact_tokens) == (name, 3, 0)
        assert engine.generate(prompt, SamplingParams(max_tokens=2), method="direct:behind=prefix").stats.fallback
        with pytest.raises(ConfigurationError, match="behind must be one of prefix, passages"):
            make_engine(tiny_models["llama"], tiny_models["auxiliary"], behind="nothing")

    def test_an_unknown_place(self) -> None:
        with pytest.raises(ConfigurationError, match="behind must be one of prefix, passages"):
            create("direct:behind=nothing", {})
