"""CacheBlend: the largest changes of KV, found and recomputed while the pass runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.methods import preset
from cacheclip_rag.methods.cacheblend import CacheBlend, DeviationFilter, _warn_unaffordable
from cacheclip_rag.prompt.known_kv import known_kv
from cacheclip_rag.runtime.transformers.attention_pattern import RowFilter
from cacheclip_rag.selection.budget import Budget, Tokens, Windows
from tests.conftest import CHUNKS
from tests.fusion.cases import EXACT, Case, gap, make_case, reference_logits
from tests.methods.spying import few, made, plain, run, spied


class TestCacheBlend:
    def changes(self, case: Case, layer: int = 1) -> torch.Tensor:
        """``(num_tokens,)`` of values against a full prefill, zero outside the chunks: by brute force."""
        full, _ = case.runtime.prefill(case.layout.ids, case.layout.num_tokens)
        stale = case.assembled()
        found = torch.zeros(case.layout.num_tokens)
        for span in case.layout.chunks:
            new, old = (case.runtime.extract(c, span.start, span.stop)[layer][1] for c in (full, stale))
            found[span.start : span.stop] = (new - old).transpose(0, 1).flatten(1).norm(dim=-1).square()
        return found

    @few
    def test_the_largest_changes_at_the_check_layer(self, case: Case) -> None:
        result, spy = spied(case, "cacheblend", ratio=0.25)
        change = self.changes(case)
        slots = torch.cat([torch.arange(s.start, s.stop) for s in spy.view.spans])
        ours = torch.zeros(case.layout.num_tokens)
        ours[spy.filter.slots] = spy.filter.deviation
        assert gap(ours[slots], change[slots]) < 1e-4 * float(change.max())
        budget = round(0.25 * result.stats.chunk_tokens)
        best = set(slots[change[slots].argsort(descending=True, stable=True)[:budget]].tolist())
        alive = set(spy.filter.slots[spy.filter.alive].tolist())
        assert alive & set(slots.tolist()) == best

    @pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
    def test_what_is_exact_does_not_deviate(self, tiny_models: dict[str, str], name: str) -> None:
        """Prefix and first chunk right behind it were computed as in this prompt: even run, they would lose."""
        case = make_case(tiny_models[name], tiny_models["auxiliary"], CHUNKS[:3], opening="")
        first, second, third = case.layout.chunks
        assert known_kv(case.layout, case.layout.chunks).is_exact(first)
        _, spy = spied(case, "cacheblend", ratio=0.1)
        rows, cache = torch.arange(case.layout.num_tokens), case.assembled()
        row_filter = DeviationFilter(spy.method, replace(spy.view, cache=cache, spans=case.layout.chunks), rows)
        case.runtime.run_slots(cache, case.layout.ids, rows, row_filter=row_filter)
        found = row_filter.deviation
        assert float(found[: first.stop].max()) < 1e-8 + 1e-4 * float(found[second.start : third.stop].max())
        assert float(found[second.start : second.start + 8].min()) > 100 * float(found[: first.stop].max())
        alive = row_filter.slots[row_filter.alive]
        assert not bool(((alive >= first.start) & (alive < first.stop)).any())

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

    @pytest.mark.parametrize("num_stale", [10_000, 7_000])
    @pytest.mark.parametrize("ratio", [0.1, 0.2, 0.5, 0.9, 1.0])
    def test_what_each_layer_computes(self, num_stale: int, ratio: float) -> None:
        """After the check layer by the ratio; with equal charge, all layers together by the ratio."""
        at_first, then = CacheBlend(Budget(ratio, Tokens())).counts(24, 10_000, num_stale)
        assert at_first == num_stale and then == pytest.approx(min(ratio * 10_000, num_stale), abs=1)
        at_first, then = CacheBlend(Budget(ratio, Tokens()), equal_charge=True).counts(24, 10_000, num_stale)
        assert (2 * at_first + 22 * then) / 24 == pytest.approx(min(ratio * 10_000, num_stale), abs=1)

    def test_what_the_check_layers_alone_would_exceed(self) -> None:
        assert CacheBlend(Budget(0.08, Tokens()), equal_charge=True).counts(24, 10_000, 10_000) == (0, 0)
        assert CacheBlend(Budget(0.08, Tokens()), equal_charge=True).counts(24, 10_000, 9_000)[1] > 0

    @pytest.mark.parametrize("opening", ["", "Read this first.\n\n"])
    @pytest.mark.parametrize(("changes", "ratio"), [({}, 0.7), ({"check_layer": 0}, 0.5)])
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
    def test_spans_instead_of_single_tokens(self, case: Case) -> None:
        result, spy = spied(case, "cacheblend", 0.3, budget={"grouping": {"type": "Windows"}})
        change = self.changes(case)
        scores = [change[span.start : span.stop] for span in spy.view.spans]
        expected = Windows(8).take(scores, round(0.3 * result.stats.chunk_tokens))
        alive = torch.zeros(case.layout.num_tokens, dtype=torch.bool)
        alive[spy.filter.slots[spy.filter.alive]] = True
        for span, mask in zip(spy.view.spans, expected, strict=True):
            assert torch.equal(alive[span.start : span.stop], mask)

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
            ({"check_layer": -1}, "check_layer must be a whole number, 0 or more"),
            ({"check_layer": True}, "check_layer"),
            ({"equal_charge": 1}, "equal_charge must be True or False"),
            ({"budget": {"type": "FixedStarts"}}, "budget must be a Budget, got FixedStarts"),
        ],
    )
    def test_wrong_settings(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            made("cacheblend", **changes)
