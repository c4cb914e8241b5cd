"""What methods of a scorer, a budget and a correction share."""

from typing import Any

import pytest
import torch

from cacheclip_rag import ConfigurationError, SamplingParams
from cacheclip_rag.chunks.context import CONTEXTS
from cacheclip_rag.selection.budget import Budget
from cacheclip_rag.selection.scorers import AuxiliaryAttention
from tests.conftest import CHUNKS, Patch, spied as spied_calls
from tests.fusion.cases import EXACT, Case, gap, make_engine
from tests.methods.spying import made, plain, run, spied


class TestBudget:
    @pytest.mark.some(3)
    @plain
    @pytest.mark.parametrize(("share", "ratio"), [(0.5, 0.4), (0.1, 0.4), (1.0, 0.4), (0.5, 0.9), (0.5, 0.01)])
    def test_the_share_for_chunk_starts(self, case: Case, share: float, ratio: float) -> None:
        """As many first tokens of each as the share pays for, 16 at most; the budget is kept to the token."""
        _, spy = spied(case, "random", ratio, budget={"chunk_starts": share})
        budget = round(ratio * spy.view.num_chunk_tokens)
        each = min(16, int(share * budget / len(spy.masks)))
        assert all(bool(mask[:each].all()) for mask in spy.masks)
        assert sum(int(m.sum()) for m in spy.masks) == budget
        assert each > 0 or ratio == 0.01

    def test_scores_are_spared_where_nothing_is_chosen(self, case_of: Any, monkeypatch: Patch) -> None:
        case, asked = case_of("llama"), spied_calls(monkeypatch, AuxiliaryAttention, "score")
        for ratio in (0.0, 1.0):
            run(case, "cacheclip", ratio)
        assert not asked
        run(case, "cacheclip", 0.3)
        assert len(asked) == 1

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            *(({"ratio": wrong}, "recompute_ratio must be between 0") for wrong in (1.5, True, "0.2")),
            ({"chunk_starts": 1.5}, "chunk_starts must be a share of the budget, 0 to 1, got 1.5"),
            ({"grouping": 8}, "grouping must be a Grouping"),
        ],
    )
    def test_wrong_settings(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            Budget(**changes)


def changes(case: Case, layer: int, span: Any, fused: Any) -> list[torch.Tensor]:
    """By how much keys (before RoPE) and values of a span differ from the stored ones,
    ``(num_kv_heads, num_tokens, head_dim)`` each."""
    kvs = [case.runtime.extract(cache, span.start, span.stop)[layer] for cache in (fused, case.assembled())]
    return [kvs[0][0] - kvs[1][0], kvs[0][1] - kvs[1][1]]


class TestCorrection:
    @plain
    @pytest.mark.parametrize("weight", [0.5, 1.0])
    def test_it_moves_what_is_not_recomputed(self, case: Case, weight: float) -> None:
        """By the mean change of what is, keys compared before RoPE. In the second layer: the first computes its KV from
        the tokens alone, so that there nothing ever changes."""
        result, spy = spied(case, "random", 0.3, correction=weight)
        bare, _ = spied(case, "random", 0.3)
        first = changes(case, 0, spy.view.spans[0], bare.cache)
        assert all(gap(change, torch.zeros_like(change)) < 1e-5 for change in first)
        for span, mask in zip(spy.view.spans, spy.masks, strict=True):
            assert int(mask.sum()) > 1
            corrected, fresh = changes(case, 1, span, result.cache), changes(case, 1, span, bare.cache)
            for moved, change in zip(corrected, fresh, strict=True):
                mean = change[:, mask].mean(1, keepdim=True)
                assert float(mean.abs().max()) > 1e-3, "something must change"
                assert gap(moved[:, ~mask], (weight * mean).expand_as(moved[:, ~mask])) < 1e-4
                assert gap(moved[:, mask], change[:, mask]) < 1e-4, "what is recomputed in this layer is not moved"
        assert gap(result.logits, bare.logits) > 0
        assert all(layer.before_scatter is None for layer in result.cache.layers)

    @plain
    @pytest.mark.parametrize("name", ["cacheclip", "epic-corrected"])
    def test_our_own_presets_go_half_of_the_way(self, case: Case, name: str) -> None:
        found, half, none = (run(case, name, 0.3, **c).logits for c in ({}, {"correction": 0.5}, {"correction": 0.0}))
        assert torch.equal(found, half) and not torch.equal(found, none)

    @pytest.mark.parametrize("wrong", [2, -0.1, True, "0.5"])
    def test_wrong_weights(self, wrong: Any) -> None:
        with pytest.raises(ConfigurationError, match="correction must be a share of the mean change, 0 to 1"):
            made("random", correction=wrong)


class TestChunkContexts:
    def test_certificates_that_are_there_name_them(self) -> None:
        assert {name: context.sha256[:8] for name, context in CONTEXTS.items()} == {
            "prefix": "b970a673",
            "passages": "23d42b1b",
        }

    @pytest.mark.parametrize("name", ["direct", "epic", "cacheclip"])
    def test_chunk_caches_are_their_own(self, case_of: Any, name: str) -> None:
        """A chunk stored behind the prefix is a miss for a method that wants it behind passages, and the reverse."""
        case = case_of("llama")
        method = made(name, chunk_context="passages")
        assert run(case, method).stats.fallback is not None
        case.engine.precompute([span.whole for span in case.layout.chunks], method=method)
        other = run(case, method)
        assert other.stats.fallback is None and other.stats.hits == 3 and other.stats.exact_tokens == 0
        assert gap(other.logits, run(case, name).logits) > 0

    def test_stored_kv_is_that_of_the_chunk_behind_prefix_and_passages(self, case_of: Any) -> None:
        case, chunk = case_of("llama"), case_of("llama").layout.chunks[1]
        case.engine.precompute([chunk.whole], method=made("direct", chunk_context="passages"))
        before, passages = (
            case.engine.chunk_caches(CONTEXTS[name], with_auxiliary=False)[0] for name in ("prefix", "passages")
        )
        context = case.runtime.tokenize(CONTEXTS["passages"].text).ids
        ids = torch.tensor([*before.prefix_ids, *context, *chunk.tokens.ids])
        full, _ = case.runtime.prefill(ids, len(ids))
        stored = passages.read(chunk.whole)
        assert stored is not None
        assert gap(stored.tensor(), case.runtime.extract(full, len(ids) - len(chunk.tokens), len(ids))) < EXACT
        behind_prefix = before.read(chunk.whole)
        assert behind_prefix is not None and gap(stored.tensor(), behind_prefix.tensor()) > 1e-3

    @pytest.mark.parametrize("context", ["nothing", "", 3])
    def test_an_unknown_context(self, context: Any, tiny_models: dict[str, str]) -> None:
        with pytest.raises(ConfigurationError, match=(message := "chunk_context must be one of prefix, passages")):
            made("direct", chunk_context=context)
        with pytest.raises(ConfigurationError, match=message):
            make_engine(tiny_models["llama"], tiny_models["auxiliary"], chunk_context=context)

    def test_the_engines_setting_is_the_default_of_all_methods(self, tiny_models: dict[str, str]) -> None:
        engine = make_engine(tiny_models["llama"], tiny_models["auxiliary"], chunk_context="passages")
        engine.precompute(CHUNKS[:3])
        prompt = "\n\n".join(CHUNKS[:3]) + "\n\nQuestion: What is the magic number?"
        for name in ("cacheclip", "direct", "epic"):
            stats = engine.generate(prompt, SamplingParams(max_tokens=2), method=name).stats
            assert (stats.method, stats.hits, stats.exact_tokens) == (name, 3, 0)
        own = made("direct", chunk_context="prefix")
        engine.prefixes.clear()
        assert engine.generate(prompt, SamplingParams(max_tokens=2), method=own).stats.fallback
