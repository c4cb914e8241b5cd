"""CacheBlend: the largest changes of KV, found and recomputed while the pass runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.methods import preset
from cacheclip_rag.methods.cacheblend import CacheBlend, DeviationFilter, _warn_unaffordable
from cacheclip_rag.runtime.transformers.attention_pattern import Geometry
from cacheclip_rag.runtime.transformers.row_filter import RowFilter
from cacheclip_rag.selection.budget import Budget
from cacheclip_rag.selection.grouping import Tokens, Windows
from tests.conftest import CHUNKS
from tests.fusion.cases import EXACT, Case, gap, make_case, reference_logits
from tests.methods.spying import few, made, plain, run, spied


class TestCacheBlend:
    def changes(self, case: Case, deviation: str, layer: int = 1) -> torch.Tensor:
        """``(num_tokens,)`` against a full prefill, keys before RoPE, zero outside the chunks: by brute force."""
        full, _ = case.runtime.prefill(case.layout.ids, case.layout.num_tokens)
        stale = case.assembled()
        fresh = case.runtime.extract(full, case.layout.num_prefix, case.layout.num_tokens)[layer]
        found = torch.zeros(case.layout.num_tokens)
        for span in case.layout.chunks:
            new, old = (case.runtime.extract(c, span.start, span.stop)[layer] for c in (full, stale))
            keys, values = (new - old).transpose(1, 2).flatten(2).norm(dim=-1)
            of_keys, of_values = fresh.transpose(1, 2).flatten(2).norm(dim=-1).mean(-1)
            both = keys / of_keys + values / of_values
            found[span.start : span.stop] = {"k": keys.square(), "v": values.square(), "kv": both}[deviation]
        return found

    @few
    @pytest.mark.parametrize("deviation", ["v", "k", "kv"])
    def test_single_is_the_largest_change_at_the_check_layer(self, case: Case, deviation: str) -> None:
        result, spy = spied(case, "cacheblend", deviation=deviation, ratio=0.25)
        change = self.changes(case, deviation)
        slots = torch.cat([torch.arange(s.start, s.stop) for s in spy.view.spans])
        ours = torch.zeros(case.layout.num_tokens)
        ours[spy.filter.slots] = spy.filter.deviations[1]
        scale = change.max() / ours[slots].max()  # YaRN lengthens keys as it turns them, all of them alike
        assert gap(ours[slots] * scale, change[slots]) < 1e-4 * float(change.max())
        if deviation == "kv":
            assert float(scale) == pytest.approx(1.0, abs=1e-4)
        budget = round(0.25 * result.stats.chunk_tokens)
        best = set(slots[change[slots].argsort(descending=True, stable=True)[:budget]].tolist())
        alive = set(spy.filter.slots[spy.filter.alive].tolist())
        assert alive & set(slots.tolist()) == best

    def deviations(self, case: Case, deviation: str, shift: int = 0) -> tuple[DeviationFilter, torch.Tensor]:
        """A row filter over all rows of the prompt, those that are exact included, and ``(num_tokens,)`` of layer 1."""
        _, spy = spied(case, "cacheblend", deviation=deviation, ratio=0.1)
        rows = torch.arange(case.layout.num_tokens)
        cache = case.runtime.new_cache(case.layout.num_tokens)
        cache.geometry = Geometry(rows + shift)
        for start, kv in case.kv.items():
            case.runtime.fill(cache, kv, slot=start, position=cache.position_of(start))
        view = replace(spy.view, cache=cache, spans=case.layout.chunks)
        row_filter = DeviationFilter(spy.method, view, rows)
        case.runtime.run_slots(cache, case.layout.ids, rows, row_filter=row_filter)
        return row_filter, row_filter.deviations[1]

    @pytest.mark.parametrize("deviation", ["v", "k", "kv"])
    @pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
    def test_what_is_exact_does_not_deviate(self, tiny_models: dict[str, str], name: str, deviation: str) -> None:
        """Prefix and first chunk right behind it were computed as in this prompt: even run, they would lose."""
        case = make_case(tiny_models[name], tiny_models["auxiliary"], CHUNKS[:3], opening="")
        first, second, third = case.layout.chunks
        assert case.layout.is_exact(first)
        row_filter, found = self.deviations(case, deviation)
        assert float(found[: first.stop].max()) < 1e-8 + 1e-4 * float(found[second.start : third.stop].max())
        assert float(found[second.start : second.start + 8].min()) > 100 * float(found[: first.stop].max())
        alive = row_filter.slots[row_filter.alive]
        assert not bool(((alive >= first.start) & (alive < first.stop)).any())

    @pytest.mark.parametrize("name", ["llama", "qwen3", "llama-rope-linear", "phi3-partial"])
    def test_the_change_of_keys_does_not_depend_on_their_place(self, tiny_models: dict[str, str], name: str) -> None:
        """Both keys are turned alike: it is the change before RoPE, wherever the prompt stands."""
        case = make_case(tiny_models[name], tiny_models["auxiliary"], CHUNKS[:3])
        (_, here), (_, there) = (self.deviations(case, "k", shift) for shift in (0, 211))
        chunks = torch.cat([torch.arange(span.start, span.stop) for span in case.layout.chunks])
        tolerance = 1e-4 * float(here[chunks].max())
        assert gap(here[chunks], there[chunks]) < tolerance
        assert gap(here[chunks], self.changes(case, "k")[chunks]) < tolerance
        elsewhere = dict(case.kv)
        for span in case.layout.chunks:  # stored from another place in a prompt: keys before RoPE are the same
            kv = elsewhere[span.start]
            cache = case.runtime.new_cache(700 + len(span.tokens))
            case.runtime.fill(cache, kv, slot=500, position=500)
            elsewhere[span.start] = case.runtime.extract(cache, 500, 500 + len(span.tokens))
        case.kv = elsewhere
        _, moved = self.deviations(case, "k")
        assert gap(here[chunks], moved[chunks]) < tolerance

    @few
    def test_rows_that_stay_are_computed_exactly(self, case: Case) -> None:
        """The tokens that went through all layers have the KV that a recompute of just their layers' rows gives."""
        result, spy = spied(case, "cacheblend", 0.4, check_layer=0)
        cache = case.assembled()
        rows = spy.filter.slots
        alive = spy.filter.slots[spy.filter.alive]

        class Replay(RowFilter):
            def before_layer(self, layer: int) -> Any:
                return None if layer == 0 else torch.isin(rows, alive).nonzero().flatten()

        replay = Replay(cache, rows)
        with torch.inference_mode():
            logits = case.runtime.run_slots(cache, case.layout.ids[rows], rows, row_filter=replay)
        assert gap(result.logits, logits) == 0.0

    def test_gradual_sets_are_nested_and_average_to_the_ratio(self) -> None:
        method = CacheBlend(Budget(0.2, Tokens()), schedule="gradual")
        budgets = method.budgets(24, 10_000, 10_000)
        assert budgets[:2] == [10_000, 10_000] and budgets[2:] == sorted(budgets[2:], reverse=True)
        assert sum(budgets[2:]) / 22 == pytest.approx(2000, abs=1)
        assert budgets[2] > 2000 > budgets[-1] and len(set(budgets[10:])) == 1
        assert budgets[2] / budgets[-1] == pytest.approx(1.5, abs=0.01)

    @pytest.mark.parametrize("schedule", ["single", "gradual"])
    @pytest.mark.parametrize("ratio", [0.05, 0.5, 0.7, 0.85, 0.95])
    @pytest.mark.parametrize("num_stale", [10_000, 9_000, 6_000])
    def test_what_a_full_layer_cannot_run_later_ones_do(self, schedule: str, ratio: float, num_stale: int) -> None:
        """A high ratio would begin above all tokens there are: no budget is lost on that."""
        budgets = CacheBlend(Budget(ratio, Tokens()), schedule=schedule).budgets(24, 10_000, num_stale)
        assert budgets == sorted(budgets, reverse=True) and budgets[0] == num_stale
        assert sum(budgets[2:]) / 22 == pytest.approx(min(ratio * 10_000, num_stale), abs=1)

    @few
    @pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
    def test_a_prompt_that_ends_in_a_chunk(self, case: Case, ratio: float) -> None:
        """Its last token gives the logits, whatever it scores."""
        segments = [span.segment for span in case.layout.spans][: case.layout.spans.index(case.layout.chunks[-1]) + 1]
        seen = []
        recompute = case.runtime.run_slots

        def watch(cache: Any, ids: Any, slots: Any, **options: Any) -> Any:
            logits = recompute(cache, ids, slots, **options)
            if options.get("row_filter") is not None:
                seen.append(int(slots[options["row_filter"].alive][-1]))
            return logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(case.runtime, "run_slots", watch)
            method = preset("cacheblend").at(ratio)
            result = case.engine.prefill(segments, method=method, question="What?")
        assert seen == ([] if ratio == 1.0 else [result.layout.num_tokens - 1])
        if ratio == 1.0:
            assert gap(result.logits, reference_logits(case.folder, result.layout.ids)) < EXACT

    @plain
    @pytest.mark.parametrize("beyond", [2, 3, 40])
    def test_a_check_layer_with_nothing_behind_it(self, case: Case, beyond: int) -> None:
        assert case.runtime.num_layers == 3
        for ratio in (0.0, 0.2, 1.0):
            with pytest.raises(ConfigurationError, match=f"check_layer={beyond}: .* has 3 layers, .* from 0 to 1"):
                run(case, "cacheblend", ratio, check_layer=beyond)
        assert run(case, "cacheblend", check_layer=1).stats.effective_ratio < 0.3

    @pytest.mark.parametrize("schedule", ["single", "gradual"])
    @pytest.mark.parametrize("ratio", [0.1, 0.2, 0.5, 0.9, 1.0])
    def test_equal_charge(self, schedule: str, ratio: float) -> None:
        method = CacheBlend(Budget(ratio, Tokens()), equal_charge=True, schedule=schedule)
        for num_stale in (10_000, 7_000):
            budgets = method.budgets(24, 10_000, num_stale)
            assert sum(budgets) / 24 == pytest.approx(min(ratio * 10_000, num_stale), abs=1)
        assert CacheBlend(Budget(0.08, Tokens()), equal_charge=True).budgets(24, 10_000, 10_000) == [0] * 24
        assert CacheBlend(Budget(0.08, Tokens()), equal_charge=True).budgets(24, 10_000, 9_000)[-1] > 0

    @pytest.mark.parametrize("opening", ["", "Read this first.\n\n"])
    @pytest.mark.parametrize(
        ("changes", "ratio"), [({}, 0.7), ({"check_layer": 0}, 0.5), ({"schedule": "gradual"}, 0.75)]
    )
    def test_equal_charge_is_charged_so(
        self, tiny_models: dict[str, str], opening: str, changes: dict[str, Any], ratio: float
    ) -> None:
        """Chunks that are exact and are not run leave their share to others."""
        case = make_case(tiny_models["qwen2"], tiny_models["auxiliary"], CHUNKS[:3], opening=opening)
        stats = run(case, "cacheblend-equal-charge", ratio, **changes).stats
        expected = min(ratio, 1 - stats.exact_tokens / stats.chunk_tokens)
        assert stats.charged_ratio == pytest.approx(expected, abs=1 / stats.chunk_tokens)
        assert bool(stats.exact_tokens) == (not opening)

    @plain
    def test_a_charge_below_that_of_the_check_layers(self, case: Case, caplog: pytest.LogCaptureFixture) -> None:
        _warn_unaffordable.cache_clear()
        for _ in range(2):
            result = run(case, "cacheblend-equal-charge", 0.6)
        assert (result.stats.recomputed_tokens, result.stats.charged_ratio) == (0, 0.0)
        assert result.stats.fallback is None and result.stats.nominal_ratio == 0.6
        assert gap(result.logits, run(case, "direct").logits) == 0.0
        assert caplog.text.count("nothing is recomputed. Raise the ratio or lower check_layer") == 1

    @few
    @pytest.mark.parametrize("schedule", ["single", "gradual"])
    def test_a_first_chunk_that_is_skipped(self, case: Case, schedule: str) -> None:
        """No layer computes it, the check layers included."""
        result = run(case, "cacheblend", 0.3, budget={"skip_first_chunk": True}, check_layer=0, schedule=schedule)
        first, *others = case.layout.chunks
        stored = case.assembled()
        for fresh, old in zip(result.cache.layers, stored.layers, strict=True):
            assert gap(fresh.values[0, :, first.start : first.stop], old.values[0, :, first.start : first.stop]) == 0
        layers, stats = case.runtime.num_layers, result.stats
        behind = round(0.3 * stats.chunk_tokens) * (layers - 1)
        charged = (sum(len(span.tokens) for span in others) + behind) / (layers * stats.chunk_tokens)
        assert stats.charged_ratio == pytest.approx(charged, abs=0.01)
        everything = run(case, "cacheblend", 1.0, budget={"skip_first_chunk": True})
        assert gap(everything.logits, reference_logits(case.folder, case.layout.ids)) < EXACT

    @few
    @pytest.mark.parametrize("schedule", ["single", "gradual"])
    def test_first_tokens_stay_in_every_layer(self, case: Case, schedule: str) -> None:
        result, spy = spied(case, "cacheblend", 0.3, budget={"first_tokens": 3}, check_layer=0, schedule=schedule)
        alive = set(spy.filter.slots[spy.filter.alive].tolist())
        for span in spy.view.spans:
            assert alive.issuperset(range(span.start, span.start + 3))
        bare = run(case, "cacheblend", 0.3, check_layer=0, schedule=schedule).stats
        assert result.stats.recomputed_tokens == bare.recomputed_tokens, "within the budget"
        assert result.stats.charged_ratio == bare.charged_ratio
        _, tight = spied(case, "cacheblend", 0.3, budget={"first_tokens": 10_000}, schedule=schedule)
        _, free = spied(case, "cacheblend", 0.3, schedule=schedule)
        assert torch.equal(tight.filter.alive, free.filter.alive), "all come first: the largest change decides"

    @few
    def test_spans_instead_of_single_tokens(self, case: Case) -> None:
        result, spy = spied(case, "cacheblend", 0.3, budget={"grouping": {"type": "Windows"}})
        change = self.changes(case, "v")
        scores = [change[span.start : span.stop] for span in spy.view.spans]
        expected = Windows(8).take(scores, round(0.3 * result.stats.chunk_tokens))
        alive = torch.zeros(case.layout.num_tokens, dtype=torch.bool)
        alive[spy.filter.slots[spy.filter.alive]] = True
        for span, mask in zip(spy.view.spans, expected, strict=True):
            assert torch.equal(alive[span.start : span.stop], mask)

    @plain
    @pytest.mark.parametrize("schedule", ["single", "gradual"])
    def test_correction_of_what_left(self, case: Case, schedule: str) -> None:
        """In each layer, what no longer runs follows what does; layers that ran in full are left alone."""
        seen: list[torch.Tensor] = []
        original = DeviationFilter.before_layer

        def spy(self: DeviationFilter, layer: int) -> Any:
            kept = original(self, layer)
            seen.append(self.slots[self.alive if kept is None else kept])
            return kept

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviationFilter, "before_layer", spy)
            result = run(case, "cacheblend", 0.4, correction=1.0, check_layer=0, schedule=schedule)
        full, _ = case.runtime.prefill(case.layout.ids, case.layout.num_tokens)
        corrected = 0
        for span in case.layout.chunks:
            slots = torch.arange(span.start, span.stop)
            now, old, exact = (
                case.runtime.extract(cache, span.start, span.stop) for cache in (result.cache, case.assembled(), full)
            )
            assert gap(now[0], exact[0]) < EXACT, "the check layer ran in full"
            for layer in range(1, case.runtime.num_layers):
                ran = torch.isin(slots, seen[layer])
                if bool(ran.all()):
                    continue
                moved = (now[layer] - old[layer])[:, :, ~ran]
                mean = (now[layer] - old[layer])[:, :, ran].mean(2, keepdim=True) if ran.any() else 0.0 * moved
                assert gap(moved, mean.expand_as(moved)) < 1e-4
                corrected += int((~ran).sum()) if ran.any() else 0
        assert corrected
        assert gap(result.logits, run(case, "cacheblend", 0.4, check_layer=0, schedule=schedule).logits) > 1e-3
        assert all(layer.before_scatter is None for layer in result.cache.layers)

    @few
    def test_a_later_token_changes_nothing_before(self, case: Case) -> None:
        caches = []
        rows = torch.arange(case.layout.num_prefix, case.layout.num_tokens)
        border = case.layout.chunks[2].start
        leaves = torch.zeros(len(rows), dtype=torch.bool)
        for span in case.layout.chunks[:2]:
            leaves |= (rows >= span.start) & (rows < span.stop) & (rows % 3 > 0)
        keep = (~leaves).nonzero().flatten()
        for shift in (0, 1):
            ids = case.layout.ids.clone()
            ids[border + 2 :] = (ids[border + 2 :] + shift) % 100
            cache = case.assembled()

            class Thin(RowFilter):
                def before_layer(self, layer: int) -> Any:
                    return keep if layer == 1 else None

            case.runtime.run_slots(cache, ids[rows], rows, row_filter=Thin(cache, rows))
            caches.append(cache)
        for left, right in zip(caches[0].layers, caches[1].layers, strict=True):
            assert gap(left.values[:, :, : border + 2], right.values[:, :, : border + 2]) == 0.0
            assert gap(left.values[:, :, border + 2 :], right.values[:, :, border + 2 :]) > 0.0

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"deviation": "q"}, "deviation must be one of v, k, kv"),
            ({"schedule": "twice"}, "schedule must be one of single, gradual"),
            ({"check_layer": -1}, "check_layer must be a whole number, 0 or more"),
            ({"check_layer": True}, "check_layer"),
            ({"equal_charge": 1}, "equal_charge must be True or False"),
            ({"budget": {"type": "FixedStarts"}}, "budget must be a Budget, got FixedStarts"),
        ],
    )
    def test_wrong_settings(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            made("cacheblend", **changes)
