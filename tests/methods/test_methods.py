"""What each method promises of itself, against brute force."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheclip_rag import Chunk, Fresh, SamplingParams
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.fusion.recompute import choose_rows
from cacheclip_rag.methods import create
from cacheclip_rag.methods.base import Method
from cacheclip_rag.methods.cacheblend import CacheBlend, DeviationWalk
from cacheclip_rag.models.attention import Geometry
from cacheclip_rag.models.walk import RowWalk
from cacheclip_rag.selection.question import pick_layers
from tests.conftest import CHUNKS
from tests.fusion.cases import (
    BROKEN,
    EXACT,
    Case,
    gap,
    make_case,
    make_engine,
    reference_logits,
    reference_model,
    scatter_cache,
)
from tests.methods.test_matrix import few, run

plain = pytest.mark.parametrize("primary", ["llama", "qwen3"], indirect=True)


class Spy(Method):
    """Keeps the request that a method was asked with."""

    name = "spy"

    def __init__(self, inner: Method) -> None:
        object.__setattr__(self, "inner", inner)

    def __getattribute__(self, name: str) -> Any:
        if name in ("inner", "request", "masks", "select", "score", "walk", "made"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "inner"), name)

    def score(self, request: Any) -> Any:
        return self.inner.score(request)

    def select(self, request: Any, scores: Any) -> Any:
        object.__setattr__(self, "request", request)
        object.__setattr__(self, "masks", self.inner.select(request, scores))
        return self.masks

    def walk(self, request: Any, rows: Any) -> Any:
        object.__setattr__(self, "made", self.inner.walk(request, rows))
        return self.made


def spied(case: Case, spec: str, ratio: float = 0.3) -> tuple[Any, Any]:
    spy = Spy(create(spec, {"recompute_ratio": ratio}))
    return run(case, spy), spy


@torch.inference_mode()
def placed_reference(case: Case, cache: Any, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows over assembled KV by an unmodified eager model: own positions, and all contexts visible to all rows."""
    num_tokens = case.layout.num_tokens
    past = scatter_cache(cache, num_tokens, rows)
    hidden = rows[:, None] < torch.arange(num_tokens)[None]
    geometry: Geometry = cache.geometry
    if geometry.contexts is not None:
        hidden = hidden & ~geometry.contexts[None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
    output = reference_model(case.folder)(
        input_ids=case.layout.ids[rows][None],
        position_ids=positions[rows][None],
        attention_mask=mask,
        past_key_values=past,
    )
    return output.logits[0, -1]


def assembled(case: Case, geometry: Geometry) -> Any:
    cache = case.runtime.new_cache(case.layout.num_tokens + 8)
    cache.geometry = geometry
    for start, kv in case.kv.items():
        case.runtime.fill(cache, kv, slot=start, position=cache.position_of(start))
    return cache


class TestOwnPositions:
    @plain
    @pytest.mark.parametrize(
        "spec", ["direct_gapped", "direct_gapped:place_tokens=90", "ape:temperature=1.0:scale=1.0"]
    )
    def test_plain_transformers_at_these_positions(self, case: Case, spec: str) -> None:
        geometry = create(spec, {}).place(case.layout, case.layout.chunks)
        assert geometry is not None and not torch.equal(geometry.positions, torch.arange(case.layout.num_tokens))
        rows = choose_rows(case.layout, case.layout.chunks, [])
        expected = placed_reference(case, assembled(case, geometry), rows, geometry.positions)
        assert gap(run(case, spec).logits, expected) < EXACT
        assert gap(run(case, "direct").logits, expected) > BROKEN

    @plain
    def test_one_chunk_leaves_no_gap(self, case: Case) -> None:
        segments = [span.segment for span in case.layout.spans]
        only = [s for s in segments if not isinstance(s, Chunk)]
        only.insert(segments.index(case.layout.chunks[0].segment), case.layout.chunks[0].segment)
        gapped, direct = (
            case.engine.prefill(only, method=create(spec, {})) for spec in ("direct_gapped:place_tokens=200", "direct")
        )
        assert direct.stats.hits == 1 and direct.stats.exact_tokens == 0
        assert gap(gapped.logits, direct.logits) < EXACT

    def test_gaps(self, tiny_models: dict[str, str], case_of: Any) -> None:
        layout = case_of("llama").layout
        first, second, third = layout.chunks
        positions = create("direct_gapped:place_tokens=100", {}).place(layout, layout.chunks).positions
        assert positions[: first.stop].tolist() == list(range(first.stop))
        assert int(positions[first.stop]) == first.start + 100
        assert int(positions[second.start]) - int(positions[first.start]) == 100 + second.start - first.stop
        assert int(positions[-1]) - int(positions[third.start]) == layout.num_tokens - 1 - third.start

    def test_beyond_the_context_is_plain_prefill(self, case_of: Any) -> None:
        result = run(case_of("llama"), "direct_gapped:place_tokens=100000")
        assert result.stats.method == "full" and "positions up to" in result.stats.fallback

    def test_a_damaged_chunk_is_placed_as_text(self, case_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        case = case_of("llama")
        caches = case.engine._caches_of(case.folder)
        lost = case.layout.chunks[1].segment.text
        read = type(caches).read
        monkeypatch.setattr(type(caches), "read", lambda self, text: None if text == lost else read(self, text))
        result = run(case, "ape")
        assert (result.stats.hits, result.stats.misses) == (2, 1) and result.missing == (lost,)
        stored = [s for s in case.layout.chunks if s.segment.text != lost]
        assert torch.equal(result.cache.geometry.positions, create("ape", {}).place(case.layout, stored).positions)


@pytest.fixture
def case_of(tiny_models: dict[str, str]) -> Any:

    return lambda name: make_case(tiny_models[name], tiny_models["auxiliary"], CHUNKS[:3])


class TestApe:
    @few
    def test_the_order_of_contexts_does_not_matter(self, case: Case) -> None:
        opening, *_, closing = [
            span.segment for span in case.layout.spans if not span.is_chunk and span.segment.control
        ]
        chunks = [span.segment.text for span in case.layout.chunks]
        ask = Fresh("\n\nWhat is the magic number?")
        ids = []
        for order in ((0, 1, 2), (2, 0, 1)):
            segments = [opening, *(Chunk(chunks[n]) for n in order), ask, closing]
            ids.append(case.engine.prefill(segments, method=create("ape", {})))
        assert gap(ids[0].logits, ids[1].logits) < EXACT
        direct = [
            case.engine.prefill(
                [opening, *(Chunk(chunks[n]) for n in order), ask, closing], method=create("direct", {})
            )
            for order in ((0, 1, 2), (2, 0, 1))
        ]
        assert gap(direct[0].logits, direct[1].logits) > BROKEN

    def test_merged_attention_is_the_weighted_sum(self) -> None:
        from cacheclip_rag.models.attention import AttentionRule, block_attention, causal_plan

        generator = torch.Generator().manual_seed(0)
        query = torch.randn(1, 4, 3, 8, generator=generator)
        key, value = (torch.randn(1, 2, 12, 8, generator=generator) for _ in range(2))
        contexts = torch.zeros(12, dtype=torch.bool)
        contexts[2:6] = contexts[7:9] = True
        slots = torch.tensor([6, 10, 11])
        positions = torch.arange(12)
        geometry = Geometry(positions, contexts, temperature=0.8, scale=0.7)
        ours = block_attention(query, key, value, causal_plan(slots, geometry=geometry).blocks, AttentionRule(0.35))
        for head in range(4):
            for row, slot in enumerate(slots.tolist()):
                logits = (key[0, head // 2] @ query[0, head, row]) * 0.35
                other = ~contexts & (torch.arange(12) <= slot)
                inside, outside = logits[contexts] / 0.8, logits[other]
                z_inside = float(inside.exp().sum()) ** (0.7 * 0.8)
                z_outside = float(outside.exp().sum())
                expected = (
                    z_inside * (inside.softmax(0) @ value[0, head // 2][contexts])
                    + z_outside * (outside.softmax(0) @ value[0, head // 2][other])
                ) / (z_inside + z_outside)
                assert gap(ours[0, row, head], expected) < 1e-5

    def test_a_window_that_hides_every_context(self) -> None:
        from cacheclip_rag.models.attention import AttentionRule, block_attention, causal_plan

        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(1, 1, n, 4, generator=generator) for n in (1, 8, 8))
        contexts = torch.arange(8) < 4
        geometry = Geometry(torch.arange(8), contexts, 0.9, 0.9)
        plan = causal_plan(torch.tensor([7]), geometry=geometry)
        ours = block_attention(query, key, value, plan.blocks, AttentionRule(1.0, window=2))
        weights = (key[0, 0, 6:] @ query[0, 0, 0]).softmax(0)
        assert gap(ours[0, 0, 0], weights @ value[0, 0, 6:]) < 1e-6


class TestEpic:
    @few
    @pytest.mark.parametrize("k", [1, 8, 10_000])
    def test_first_tokens_of_every_chunk(self, case: Case, k: int) -> None:
        result, spy = spied(case, f"epic:k_init={k}")
        for span, mask in zip(spy.request.spans, spy.masks, strict=True):
            assert mask.tolist() == [n < k for n in range(len(span.tokens))]
        assert result.stats.recomputed_tokens == sum(min(k, len(span.tokens)) for span in spy.request.spans)
        if k == 10_000:
            assert gap(result.logits, reference_logits(case.folder, case.layout.ids)) < EXACT

    @plain
    def test_numbers_give_way_to_ratio_one(self, case: Case) -> None:
        method: Any = create("epic:k_init=3", {"recompute_ratio": 1.0})
        assert method.nominal_ratio == 1.0 and create("epic:k_init=3", {}).nominal_ratio == 0.0
        assert gap(run(case, method).logits, reference_logits(case.folder, case.layout.ids)) < EXACT

    @plain
    def test_budget_goes_round(self, case: Case) -> None:
        result, spy = spied(case, "epic", 0.3)
        counts = [int(mask.sum()) for mask in spy.masks]
        assert sum(counts) == round(0.3 * result.stats.chunk_tokens)
        assert max(counts) - min(counts) <= 1
        assert all(bool(mask[: int(mask.sum())].all()) for mask in spy.masks)

    @plain
    @pytest.mark.parametrize("spec", ["epic", "epic:k_init=5:k_final=2"])
    def test_the_question_decides_nothing(self, case: Case, spec: str) -> None:
        def chosen(spec: str, question: str) -> list[torch.Tensor]:
            spy: Any = Spy(create(spec, {"recompute_ratio": 0.3}))
            segments = [span.segment for span in case.layout.spans]
            number = 1 + max(n for n, segment in enumerate(segments) if isinstance(segment, Chunk))
            segments[number] = Fresh(f"\n\n{question}")
            case.engine.prefill(segments, method=spy)
            masks: list[torch.Tensor] = spy.masks
            return masks

        questions = ("When do seabirds nest?", "Who was the last keeper, and in which year did he go ashore?")
        first, second = (chosen(spec, question) for question in questions)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        first, second = (chosen("query_attention", question) for question in questions)
        assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "elsewhere it does"

    @plain
    def test_last_tokens(self, case: Case) -> None:
        _, spy = spied(case, "epic:k_final=3")
        assert all(mask.nonzero().flatten().tolist() == list(range(len(mask) - 3, len(mask))) for mask in spy.masks)


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
        result, spy = spied(case, f"cacheblend:deviation={deviation}", 0.25)
        change = self.changes(case, deviation)
        slots = torch.cat([torch.arange(s.start, s.stop) for s in spy.request.spans])
        ours = torch.zeros(case.layout.num_tokens)
        ours[spy.made.slots] = spy.made.deviations[1]
        scale = change.max() / ours[slots].max()  # YaRN lengthens keys as it turns them, all of them alike
        assert gap(ours[slots] * scale, change[slots]) < 1e-4 * float(change.max())
        if deviation == "kv":
            assert float(scale) == pytest.approx(1.0, abs=1e-4)
        budget = round(0.25 * result.stats.chunk_tokens)
        best = set(slots[change[slots].argsort(descending=True, stable=True)[:budget]].tolist())
        alive = set(spy.made.slots[spy.made.alive].tolist())
        assert alive & set(slots.tolist()) == best

    def deviations(self, case: Case, deviation: str, shift: int = 0) -> tuple[DeviationWalk, torch.Tensor]:
        """A walk over all rows of the prompt, those that are exact included, and ``(num_tokens,)`` of layer 1."""
        _, spy = spied(case, f"cacheblend:deviation={deviation}", 0.1)
        rows = torch.arange(case.layout.num_tokens)
        cache = case.runtime.new_cache(case.layout.num_tokens)
        cache.geometry = Geometry(rows + shift)
        for start, kv in case.kv.items():
            case.runtime.fill(cache, kv, slot=start, position=cache.position_of(start))
        request = replace(spy.request, cache=cache, spans=case.layout.chunks)
        walk = DeviationWalk(spy.inner, request, rows)
        case.runtime.run_slots(cache, case.layout.ids, rows, walk=walk)
        return walk, walk.deviations[1]

    @pytest.mark.parametrize("deviation", ["v", "k", "kv"])
    @pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
    def test_what_is_exact_does_not_deviate(self, tiny_models: dict[str, str], name: str, deviation: str) -> None:
        """Prefix and first chunk right behind it were computed as in this prompt: even run, they would lose."""
        case = make_case(tiny_models[name], tiny_models["auxiliary"], CHUNKS[:3], opening="")
        first, second, third = case.layout.chunks
        assert case.layout.is_exact(first)
        walk, found = self.deviations(case, deviation)
        assert float(found[: first.stop].max()) < 1e-8 + 1e-4 * float(found[second.start : third.stop].max())
        assert float(found[second.start : second.start + 8].min()) > 100 * float(found[: first.stop].max())
        alive = walk.slots[walk.alive]
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
    def test_charged_is_what_was_computed(self, case: Case) -> None:
        stats = run(case, "cacheblend", 0.2).stats
        layers = case.runtime.num_layers
        stale = stats.chunk_tokens - stats.exact_tokens
        expected = (2 * stale + (layers - 2) * stats.recomputed_tokens) / (layers * stats.chunk_tokens)
        assert stats.charged_ratio == pytest.approx(expected)
        assert stats.recomputed_tokens == round(0.2 * stats.chunk_tokens)

    @few
    def test_rows_that_stay_are_computed_exactly(self, case: Case) -> None:
        """The tokens that went through all layers have the KV that a recompute of just their layers' rows gives."""
        result, spy = spied(case, "cacheblend:check_layer=0", 0.4)
        cache = case.assembled()
        rows = spy.made.slots
        alive = spy.made.slots[spy.made.alive]

        class Replay(RowWalk):
            def before_layer(self, layer: int) -> Any:
                return None if layer == 0 else torch.isin(rows, alive).nonzero().flatten()

        replay = Replay(cache, rows)
        with torch.inference_mode():
            logits = case.runtime.run_slots(cache, case.layout.ids[rows], rows, walk=replay)
        assert gap(result.logits, logits) == 0.0

    def test_gradual_sets_are_nested_and_average_to_the_ratio(self) -> None:
        method = CacheBlend(recompute_ratio=0.2, schedule="gradual")
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
        budgets = CacheBlend(recompute_ratio=ratio, schedule=schedule).budgets(24, 10_000, num_stale)
        assert budgets == sorted(budgets, reverse=True) and budgets[0] == num_stale
        assert sum(budgets[2:]) / 22 == pytest.approx(min(ratio * 10_000, num_stale), abs=1)

    @plain
    def test_gradual_filters_behind_every_layer(self, case: Case) -> None:
        seen: list[set[int]] = []
        walk_of = DeviationWalk.before_layer

        def spy(self: DeviationWalk, layer: int) -> Any:
            kept = walk_of(self, layer)
            seen.append(set((self.alive if kept is None else kept).tolist()))
            return kept

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviationWalk, "before_layer", spy)
            run(case, "cacheblend:schedule=gradual:check_layer=0", 0.3)
        assert all(later <= earlier for earlier, later in zip(seen, seen[1:], strict=False))
        assert len(seen[-1]) < len(seen[1]) < len(seen[0])

    @few
    @pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
    def test_a_prompt_that_ends_in_a_chunk(self, case: Case, ratio: float) -> None:
        """Its last token gives the logits, whatever it scores."""
        segments = [span.segment for span in case.layout.spans][: case.layout.spans.index(case.layout.chunks[-1]) + 1]
        seen = []
        recompute = case.runtime.run_slots

        def watch(cache: Any, ids: Any, slots: Any, **options: Any) -> Any:
            logits = recompute(cache, ids, slots, **options)
            if options.get("walk") is not None:
                seen.append(int(slots[options["walk"].alive][-1]))
            return logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(case.runtime, "run_slots", watch)
            method = create("cacheblend", {"recompute_ratio": ratio})
            result = case.engine.prefill(segments, method=method, question="What?")
        assert seen == ([] if ratio == 1.0 else [result.layout.num_tokens - 1])
        if ratio == 1.0:
            assert gap(result.logits, reference_logits(case.folder, result.layout.ids)) < EXACT

    @plain
    @pytest.mark.parametrize("beyond", [2, 3, 40])
    def test_a_check_layer_with_nothing_behind_it(self, case: Case, beyond: int) -> None:
        assert case.runtime.num_layers == 3
        for ratio in (0.0, 0.2, 1.0):
            with pytest.raises(ConfigurationError, match=f"check_layer={beyond} .* has 3, .* from 0 to 1"):
                run(case, f"cacheblend:check_layer={beyond}", ratio)
        assert run(case, "cacheblend:check_layer=1").stats.effective_ratio < 0.3

    @pytest.mark.parametrize("schedule", ["single", "gradual"])
    @pytest.mark.parametrize("ratio", [0.1, 0.2, 0.5, 0.9, 1.0])
    def test_equal_charge(self, schedule: str, ratio: float) -> None:
        method = CacheBlend(recompute_ratio=ratio, equal_charge=True, schedule=schedule)
        for num_stale in (10_000, 7_000):
            budgets = method.budgets(24, 10_000, num_stale)
            assert sum(budgets) / 24 == pytest.approx(min(ratio * 10_000, num_stale), abs=1)
        assert CacheBlend(recompute_ratio=0.08, equal_charge=True).budgets(24, 10_000, 10_000) == [0] * 24
        assert CacheBlend(recompute_ratio=0.08, equal_charge=True).budgets(24, 10_000, 9_000)[-1] > 0

    @pytest.mark.parametrize("opening", ["", "Read this first.\n\n"])
    @pytest.mark.parametrize(("spec", "ratio"), [("", 0.7), (":check_layer=0", 0.5), (":schedule=gradual", 0.75)])
    def test_equal_charge_is_charged_so(
        self, tiny_models: dict[str, str], opening: str, spec: str, ratio: float
    ) -> None:
        """Chunks that are exact and are not run leave their share to others."""
        case = make_case(tiny_models["qwen2"], tiny_models["auxiliary"], CHUNKS[:3], opening=opening)
        stats = run(case, f"cacheblend:equal_charge=true{spec}", ratio).stats
        expected = min(ratio, 1 - stats.exact_tokens / stats.chunk_tokens)
        assert stats.charged_ratio == pytest.approx(expected, abs=1 / stats.chunk_tokens)
        assert bool(stats.exact_tokens) == (not opening)

    @plain
    def test_a_charge_below_that_of_the_check_layers(self, case: Case, caplog: pytest.LogCaptureFixture) -> None:
        from cacheclip_rag.methods.cacheblend import _warn_unaffordable

        _warn_unaffordable.cache_clear()
        for _ in range(2):
            result = run(case, "cacheblend:equal_charge=true", 0.6)
        assert (result.stats.recomputed_tokens, result.stats.charged_ratio) == (0, 0.0)
        assert result.stats.fallback is None and result.stats.nominal_ratio == 0.6
        assert gap(result.logits, run(case, "direct").logits) == 0.0
        assert caplog.text.count("nothing is recomputed. Raise the ratio or lower check_layer") == 1

    @few
    @pytest.mark.parametrize("schedule", ["single", "gradual"])
    def test_a_first_chunk_that_is_skipped(self, case: Case, schedule: str) -> None:
        """No layer computes it, the check layers included."""
        result = run(case, f"cacheblend:skip_first_chunk=true:check_layer=0:schedule={schedule}", 0.3)
        first, *others = case.layout.chunks
        stored = case.assembled()
        for fresh, old in zip(result.cache.layers, stored.layers, strict=True):
            assert gap(fresh.values[0, :, first.start : first.stop], old.values[0, :, first.start : first.stop]) == 0
        layers, stats = case.runtime.num_layers, result.stats
        behind = round(0.3 * stats.chunk_tokens) * (layers - 1)
        charged = (sum(len(span.tokens) for span in others) + behind) / (layers * stats.chunk_tokens)
        assert stats.charged_ratio == pytest.approx(charged, abs=0.01)
        everything = run(case, "cacheblend:skip_first_chunk=true", 1.0)
        assert gap(everything.logits, reference_logits(case.folder, case.layout.ids)) < EXACT

    @few
    @pytest.mark.parametrize("schedule", ["single", "gradual"])
    def test_first_tokens_stay_in_every_layer(self, case: Case, schedule: str) -> None:
        result, spy = spied(case, f"cacheblend:always_include_first=3:check_layer=0:schedule={schedule}", 0.3)
        alive = set(spy.made.slots[spy.made.alive].tolist())
        for span in spy.request.spans:
            assert alive.issuperset(range(span.start, span.start + 3))
        bare = run(case, f"cacheblend:check_layer=0:schedule={schedule}", 0.3).stats
        assert result.stats.recomputed_tokens == bare.recomputed_tokens, "within the budget"
        assert result.stats.charged_ratio == bare.charged_ratio
        _, tight = spied(case, f"cacheblend:always_include_first=10000:schedule={schedule}", 0.3)
        _, free = spied(case, f"cacheblend:schedule={schedule}", 0.3)
        assert torch.equal(tight.made.alive, free.made.alive), "all come first: the largest change decides"

    @few
    def test_spans_instead_of_single_tokens(self, case: Case) -> None:
        from cacheclip_rag.selection.grouping import group

        result, spy = spied(case, "cacheblend:window=8:threshold=5", 0.3)
        change = self.changes(case, "v")
        scores = [change[span.start : span.stop] for span in spy.request.spans]
        expected = group(scores, round(0.3 * result.stats.chunk_tokens))
        alive = torch.zeros(case.layout.num_tokens, dtype=torch.bool)
        alive[spy.made.slots[spy.made.alive]] = True
        for span, mask in zip(spy.request.spans, expected, strict=True):
            assert torch.equal(alive[span.start : span.stop], mask)

    @plain
    @pytest.mark.parametrize("schedule", ["single", "gradual"])
    def test_correction_of_what_left(self, case: Case, schedule: str) -> None:
        """In each layer, what no longer runs follows what does; layers that ran in full are left alone."""
        seen: list[torch.Tensor] = []
        walk_of = DeviationWalk.before_layer

        def spy(self: DeviationWalk, layer: int) -> Any:
            kept = walk_of(self, layer)
            seen.append(self.slots[self.alive if kept is None else kept])
            return kept

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviationWalk, "before_layer", spy)
            result = run(case, f"cacheblend:correction=1.0:check_layer=0:schedule={schedule}", 0.4)
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
        assert gap(result.logits, run(case, f"cacheblend:check_layer=0:schedule={schedule}", 0.4).logits) > 1e-3
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

            class Thin(RowWalk):
                def before_layer(self, layer: int) -> Any:
                    return keep if layer == 1 else None

            case.runtime.run_slots(cache, ids[rows], rows, walk=Thin(cache, rows))
            caches.append(cache)
        for left, right in zip(caches[0].layers, caches[1].layers, strict=True):
            assert gap(left.values[:, :, : border + 2], right.values[:, :, : border + 2]) == 0.0
            assert gap(left.values[:, :, border + 2 :], right.values[:, :, border + 2 :]) > 0.0


class TestQueryAttention:
    def brute_force(self, case: Case, spy: Any) -> torch.Tensor:
        """``(num_layers, num_tokens)`` from an eager model that returns its attention weights."""
        request = spy.request
        rows = request.fresh
        num_tokens = case.layout.num_tokens
        past = scatter_cache(case.assembled(), num_tokens, rows)
        hidden = rows[:, None] < torch.arange(num_tokens)[None]
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
        output = reference_model(case.folder)(
            input_ids=case.layout.ids[rows][None],
            position_ids=rows[None],
            attention_mask=mask,
            past_key_values=past,
            output_attentions=True,
        )
        asking = torch.isin(rows, request.question)
        return torch.stack([weights[0].mean(0)[asking].mean(0) for weights in output.attentions])

    @plain
    @pytest.mark.parametrize("layers", ["all", "last", "0+1"])
    def test_scores_are_those_of_an_eager_model(self, case: Case, layers: str) -> None:
        _, spy = spied(case, f"query_attention:layers={layers}")
        with torch.inference_mode():
            expected = self.brute_force(case, spy)[pick_layers(layers, case.runtime.num_layers)].mean(0)
            request = spy.request
            cache = case.assembled()
            ours = spy.inner.rate(replace(request, cache=cache), [])
        for span, score in zip(request.spans, ours, strict=True):
            assert gap(score, expected[span.start : span.stop]) < 1e-5
            assert float(score.sum()) <= 1.0

    @torch.inference_mode()
    def by_hand(self, case: Case, request: Any, hidden: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
        """``(num_layers, num_tokens)``: weights of the question's rows over keys that these rows may not have seen.

        An eager model runs the fresh rows where ``hidden`` lets them look; its queries are then turned and multiplied
        with the keys of the assembled cache by hand, one query head and its group's key head at a time.
        """
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        rows, model = request.fresh, reference_model(case.folder)
        past = scatter_cache(case.assembled(), case.layout.num_tokens, rows)
        seen: list[torch.Tensor] = []

        def look(module: Any, args: Any, kwargs: Any) -> None:
            states = (args[0] if args else kwargs["hidden_states"])[0]
            queries = module.q_proj(states).unflatten(-1, (-1, module.head_dim))
            queries = module.q_norm(queries) if hasattr(module, "q_norm") else queries
            tables = [table[0] for table in kwargs["position_embeddings"]]
            seen.append(
                apply_rotary_pos_emb(queries.transpose(0, 1), queries.transpose(0, 1), *tables, unsqueeze_dim=0)[0]
            )

        hooks = [layer.self_attn.register_forward_pre_hook(look, with_kwargs=True) for layer in model.base_model.layers]
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
        model(input_ids=case.layout.ids[rows][None], position_ids=rows[None], attention_mask=mask, past_key_values=past)
        for hook in hooks:
            hook.remove()
        asking = torch.isin(rows, request.question)
        causal = torch.arange(case.layout.num_tokens)[None] <= rows[asking, None]
        scores = []
        for queries, layer in zip(seen, past.layers, strict=True):
            group = queries.shape[0] // layer.keys.shape[1]
            weights = []
            for head, of_head in enumerate(queries):
                logits = of_head[asking] @ layer.keys[0, head // group].T * of_head.shape[-1] ** -0.5
                weights.append(logits.masked_fill(~(causal & among[None]), float("-inf")).softmax(-1))
            scores.append(torch.stack(weights).mean(0).mean(0))
        return torch.stack(scores)

    @plain
    @pytest.mark.parametrize("layers", ["all", "0", "last"])
    def test_a_question_by_itself(self, case: Case, layers: str) -> None:
        """ProphetKV's other reading: an independent sequence at its place, a softmax over the chunks' stale keys."""
        _, spy = spied(case, f"prophetkv:alone=true:softmax=chunks:layers={layers}")
        request, slots = spy.request, torch.arange(case.layout.num_tokens)
        among = torch.zeros(len(slots), dtype=torch.bool)
        for span in case.layout.chunks:
            among[span.start : span.stop] = True
        first = int(request.question[0])
        own = (slots[None] >= first) & (slots[None] <= request.fresh[:, None])
        hidden = ~(own | (slots[None] == request.fresh[:, None]))
        chosen = pick_layers(layers, case.runtime.num_layers)
        expected = self.by_hand(case, request, hidden, among)[chosen].mean(0)
        with torch.inference_mode():
            ours = spy.inner.rate(replace(request, cache=case.assembled()), [])
        for span, score in zip(request.spans, ours, strict=True):
            assert gap(score, expected[span.start : span.stop]) < 1e-5
        assert sum(float(score.sum()) for score in ours) == pytest.approx(1.0, abs=1e-4), "all chunks are stale here"
        in_context = create(f"prophetkv:softmax=chunks:layers={layers}", {})
        with torch.inference_mode():
            others = in_context.rate(replace(request, cache=case.assembled()), [])  # type: ignore[attr-defined]
        apart = max(gap(a, b) for a, b in zip(ours, others, strict=True))
        assert apart > 1e-3 if layers != "0" else apart < 1e-5, "in the first layer nothing was seen yet"

    @plain
    def test_a_digest_is_read_at_its_true_positions(self, case: Case) -> None:
        _, spy = spied(case, "qcfuse:digest=0.3:layers=all")
        request, slots = spy.request, torch.arange(case.layout.num_tokens)
        with torch.inference_mode():
            visible = spy.inner._digest(replace(request, cache=case.assembled()))
            ours = spy.inner.rate(replace(request, cache=case.assembled()), [])
        causal = slots[None] <= request.fresh[:, None]
        everything = torch.ones(len(slots), dtype=torch.bool)
        expected = self.by_hand(case, request, ~(causal & visible[None]), everything).mean(0)
        for span, score in zip(request.spans, ours, strict=True):
            assert gap(score, expected[span.start : span.stop]) < 1e-5
        whole = self.by_hand(case, request, ~causal, everything).mean(0)
        assert gap(whole, expected) > 1e-3

    def test_chunks_that_are_exact_share_the_softmax(self, tiny_models: dict[str, str]) -> None:
        """Nothing is spent on them, but the question attends to them."""

        case = make_case(tiny_models["llama"], tiny_models["auxiliary"], CHUNKS[:3], opening="")
        _, spy = spied(case, "prophetkv:softmax=chunks")
        first, *others = case.layout.chunks
        assert case.layout.is_exact(first) and len(spy.request.spans) == len(others)
        with torch.inference_mode():
            ours = spy.inner.rate(replace(spy.request, cache=case.assembled()), [])
            both = spy.inner.rate(replace(spy.request, cache=case.assembled(), spans=case.layout.chunks), [])
        assert sum(float(score.sum()) for score in both) == pytest.approx(1.0, abs=1e-4)
        assert all(gap(a, b) < 1e-6 for a, b in zip(ours, both[1:], strict=True)) and float(both[0].sum()) > 1e-3

    def test_the_question_is_what_the_user_asks(self, case_of: Any) -> None:
        _, spy = spied(case_of("llama"), "query_attention")
        layout = spy.request.layout
        words = [
            s.segment.text[a:b]
            for s in layout.spans
            for n, (a, b) in enumerate(s.tokens.offsets)
            if s.start + n in set(spy.request.question.tolist())
        ]
        assert "".join(words).replace(" ", "") == "Question:Whatisthemagicnumber?"

    def test_a_given_question_is_found_in_the_prompt(self, case_of: Any) -> None:
        from cacheclip_rag.fusion.layout import question_slots

        layout = case_of("llama").layout
        some = question_slots(layout, "What is the magic number?")
        assert 0 < len(some) < len(question_slots(layout)) == len(question_slots(layout, "Not in there."))

    @few
    def test_a_whole_digest_is_the_whole_context(self, case: Case) -> None:
        _, whole = spied(case, "query_attention:layers=all:digest=1.0")
        _, almost = spied(case, "query_attention:layers=all:digest=0.9999999")
        assert all(torch.equal(a, b) for a, b in zip(whole.masks, almost.masks, strict=True))

    @few
    def test_qcfuse_is_prophetkv_with_other_settings(self, case: Case) -> None:
        left, prophet = spied(case, "qcfuse:digest=1.0:layers=all")
        right, qcfuse = spied(case, "prophetkv")
        assert all(torch.equal(a, b) for a, b in zip(prophet.masks, qcfuse.masks, strict=True))
        assert torch.equal(left.logits, right.logits)

    @plain
    def test_a_digest_keeps_its_sinks_and_size(self, case: Case) -> None:
        _, spy = spied(case, "qcfuse:digest=0.3")
        with torch.inference_mode():
            visible = spy.inner._digest(replace(spy.request, cache=case.assembled()))
        for span in spy.request.spans:
            inside = visible[span.start : span.stop]
            assert (
                bool(inside[:4].all()) and round(0.3 * len(inside)) <= int(inside.sum()) <= round(0.3 * len(inside)) + 4
            )
        assert bool(visible[: spy.request.spans[0].start].all())

    @few
    def test_rounds_spend_the_same_budget(self, case: Case) -> None:
        stats = run(case, "query_attention:rounds=3", 0.3).stats
        assert stats.recomputed_tokens == round(0.3 * stats.chunk_tokens)
        assert stats.charged_ratio == pytest.approx(stats.effective_ratio)
        assert (
            gap(run(case, "query_attention:rounds=3", 1.0).logits, reference_logits(case.folder, case.layout.ids))
            < EXACT
        )

    @few
    def test_rounds_keep_spans_together_and_leave_each_other_alone(self, case: Case) -> None:
        from cacheclip_rag.methods.selective import Selective

        picked: list[list[torch.Tensor]] = []
        choose = Selective.choose

        def watch(self: Any, *arguments: Any, **options: Any) -> Any:
            picked.append(choose(self, *arguments, **options))
            return picked[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Selective, "choose", watch)
            corrected = run(case, "query_attention:rounds=2:correction=1.0", 0.4)
        first, second = (torch.cat(masks) for masks in picked)
        assert not bool((first & second).any())
        assert int(first.sum()) + int(second.sum()) == corrected.stats.recomputed_tokens
        runs = int((second.int().diff() > 0).sum()) + 1
        assert runs <= int(second.sum()) / 4, "spans, not single tokens"
        bare = run(case, "query_attention:rounds=2", 0.4)
        stale = [span for span in case.layout.chunks if not case.layout.is_exact(span)]
        slots = torch.cat([torch.arange(span.start, span.stop) for span in stale])[first]
        left, right = (result.cache.layers[0].values[0, :, slots] for result in (corrected, bare))
        assert gap(left, right) < 1e-5, "what an earlier round recomputed is not moved"

    def test_layers_by_name(self) -> None:
        assert pick_layers("all", 4) == [0, 1, 2, 3] and pick_layers("last", 4) == [3]
        assert pick_layers("upper", 24) == list(range(12, 24)) and pick_layers("middle", 24) == list(range(8, 16))
        assert pick_layers("14+13+17", 32) == [13, 14, 17] and pick_layers("0.5-0.62", 24) == [12, 13, 14]
        assert pick_layers("0.5+3", 32) == [16, 17, 18] and pick_layers("0.0+1", 4) == [0]
        assert pick_layers("0.9+4", 10) == [9], "no further than the model goes"
        assert pick_layers("0+3", 4) == [0, 3] and pick_layers("1+2+3", 4) == [1, 2, 3], "numbers, not a depth"
        wrong_depths = ("0.5+", "0.5+0", "0.5+1.5", "0.5+3+1", "1.0+2", "0.5", "-0.5+2", "3+0.5", "nan.+2", ".+1")
        for wrong in ("9", "some", "0.9-0.2", "1-2-3", "", "+", *wrong_depths):
            with pytest.raises(ConfigurationError, match="numbers below 4 joined by"):
                pick_layers(wrong, 4)

    def test_published_layers_are_as_many_on_every_model(self) -> None:
        """InfoFlow names four, QCFuse three, whatever the depth; 24 layers get what a share of the depth gave."""
        infoflow, qcfuse = (create(name, {}).layers for name in ("infoflow", "qcfuse"))  # type: ignore[attr-defined]
        assert pick_layers(infoflow, 24) == [14, 15, 16, 17] and pick_layers(qcfuse, 24) == [12, 13, 14]
        for num_layers in (24, 28, 32, 36, 40, 48, 64, 80):
            assert len(pick_layers(infoflow, num_layers)) == 4 and len(pick_layers(qcfuse, num_layers)) == 3
        assert pick_layers(infoflow, 40) == [24, 25, 26, 27], "the paper has 22 to 25"


class TestCacheClip:
    @few
    def test_by_the_primary_itself_it_is_query_attention(self, primary: str) -> None:
        """With one chunk between prefix and question both read the same text, so every layer scores alike."""
        from cacheclip_rag.selection.auxiliary import score_chunks
        from cacheclip_rag.selection.grouping import group
        from cacheclip_rag.selection.mapping import map_scores

        question = "What is the magic number?"
        engine = make_engine(primary, primary, auxiliary_codec="float32")
        engine.precompute(CHUNKS[:1])
        opening, *_, closing = engine.segment(question)
        spy: Any = Spy(create("query_attention", {}))
        layout = engine.prefill([opening, Chunk(CHUNKS[0]), Fresh(question), closing], method=spy).layout
        caches = engine._caches_of(primary)
        runtime, [span] = caches.kv_runtime, layout.chunks
        stored = caches.read(CHUNKS[0])
        assert stored is not None
        for layer in range(runtime.num_layers):
            cache = runtime.new_cache(layout.num_tokens)
            runtime.fill(cache, caches.prefix, slot=0, position=0)
            runtime.fill(cache, stored, slot=span.start, position=span.start)
            method: Any = create(f"query_attention:layers={layer}", {})
            with torch.inference_mode():
                [theirs] = method.rate(replace(spy.request, spans=layout.chunks, cache=cache), [])
            [raw] = score_chunks(
                runtime, caches.prefix, [stored], runtime.tokenize(question).ids, layers=pick_layers(f"{layer}", 8)
            )
            ours = map_scores(raw, span.tokens.offsets, span.tokens.offsets)
            assert gap(ours, theirs) < 1e-5, layer
            budget = round(0.2 * len(span.tokens))
            assert torch.equal(*(group([scores], budget)[0] for scores in (ours, theirs)))

    @pytest.mark.parametrize("heads", ["mean", "max"])
    def test_the_masses_of_a_chunk_are_bounded(self, case_of: Any, heads: str) -> None:
        """A question token hands out one, whoever else it looks at; of several, the largest add up to no more."""
        from cacheclip_rag.selection.auxiliary import score_chunks

        case = case_of("llama")
        auxiliary = case.engine._caches_of(case.engine.config.auxiliary)
        runtime = auxiliary.kv_runtime
        kv = [auxiliary.read(span.segment.text) for span in case.layout.chunks]
        question = runtime.tokenize("What is the magic number?").ids
        most = len(question) * (1 if heads == "mean" else runtime.model.config.num_attention_heads)
        for pooled in (False, True):
            options = {"heads": heads, "pooled": pooled, "layers": range(runtime.num_layers)}
            largest = score_chunks(runtime, auxiliary.prefix, kv, question, queries="max", **options)
            mean = score_chunks(runtime, auxiliary.prefix, kv, question, **options)
            for scores, others in zip(largest, mean, strict=True):
                assert bool((scores >= others - 1e-6).all()) and float(scores.sum()) <= most + 1e-5
                assert float(others.sum()) <= most / len(question) + 1e-5


class TestParts:
    @plain
    @pytest.mark.parametrize("spec", ["cacheclip", "prophetkv", "mixed", "query_attention:always_include_first=2"])
    def test_saved_scores_choose_the_same(self, case: Case, spec: str) -> None:
        from cacheclip_rag.methods.selective import Selective

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

        settings = ("recompute_ratio", "window", "threshold", "always_include_first")
        again: Any = Spy(Replay(**{name: getattr(spy.inner, name) for name in settings}))
        second = run(case, again)
        assert all(torch.equal(a, b) for a, b in zip(spy.masks, again.masks, strict=True))
        assert torch.equal(first.logits, second.logits)

    @plain
    def test_first_tokens_come_before_all_others(self, case: Case) -> None:
        _, spy = spied(case, "random:always_include_first=4", 0.4)
        assert all(bool(mask[:4].all()) for mask in spy.masks)
        assert sum(int(m.sum()) for m in spy.masks) == round(0.4 * spy.request.num_chunk_tokens)

    @plain
    def test_a_skipped_first_chunk(self, case: Case) -> None:
        _, spy = spied(case, "random:skip_first_chunk=true", 0.3)
        first = int(case.layout.is_exact(case.layout.chunks[0]))
        assert first or not bool(spy.masks[0].any())
        assert sum(int(m.sum()) for m in spy.masks) == round(0.3 * spy.request.num_chunk_tokens)

    def test_random_follows_its_seed(self, case_of: Any) -> None:
        case = case_of("llama")
        masks = [spied(case, f"random:seed={seed}")[1].masks for seed in (0, 0, 1)]
        assert all(torch.equal(a, b) for a, b in zip(masks[0], masks[1], strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(masks[0], masks[2], strict=True))

    @plain
    def test_mixed_with_all_the_weight_on_one(self, case: Case) -> None:
        for weight, part in ((1.0, "cacheclip"), (0.0, "query_attention")):
            _, mixed = spied(case, f"mixed:weight={weight}:window=1:threshold=0")
            _, alone = spied(case, f"{part}:window=1:threshold=0")
            assert all(torch.equal(a, b) for a, b in zip(mixed.masks, alone.masks, strict=True))

    def test_mixed_needs_what_its_parts_need(self, tiny_models: dict[str, str]) -> None:
        from cacheclip_rag import CacheClipEngine
        from tests.conftest import CHUNKS, rag_prompt

        engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=None)
        engine.precompute(CHUNKS[:3])
        answer = engine.generate(
            rag_prompt(CHUNKS[:3]), SamplingParams(max_tokens=1), method="mixed:first=qcfuse:second=epic"
        )
        assert answer.stats.method == "mixed" and answer.stats.effective_ratio == pytest.approx(0.2, abs=0.01)
        with pytest.raises(ConfigurationError, match="'mixed' needs an auxiliary model .* full, prefix"):
            engine.generate(rag_prompt(CHUNKS[:3]), method="mixed")

    @plain
    def test_mixed_is_charged_what_its_parts_cost(self, case: Case) -> None:
        for spec, references in (
            ("mixed:first=oracle", 1),
            ("mixed:first=oracle:second=oracle", 2),
            ("mixed:first=epic", 0),
        ):
            stats = run(case, spec, 0.3).stats
            assert stats.charged_ratio == pytest.approx(references + stats.effective_ratio), spec
        assert run(case, "oracle", 0.0).stats.charged_ratio == 0.0, "where nothing is chosen, no prefill is run for it"

    @plain
    def test_parts_of_mixed_score_by_their_own_settings(self, case: Case) -> None:
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

    def test_equal_scores_have_equal_ranks(self) -> None:
        from cacheclip_rag.methods.mixed import _ranks

        assert _ranks(torch.tensor([3.0, 1.0, 3.0, 2.0, 0.0])).tolist() == [0.875, 0.25, 0.875, 0.5, 0.0]
        assert _ranks(torch.tensor([7.0])).tolist() == [0.0]

    @plain
    def test_correction_moves_what_is_not_recomputed(self, case: Case) -> None:
        """By the mean change of what is, keys compared before RoPE."""
        result, spy = spied(case, "random:correction=1.0:grouping=window_score", 0.3)
        bare, _ = spied(case, "random", 0.3)
        runtime, before = case.runtime, case.assembled()
        first = before.layers[0]
        corrected, fresh = result.cache.layers[0], bare.cache.layers[0]
        for span, mask in zip(spy.request.spans, spy.masks, strict=True):
            slots = torch.arange(span.start, span.stop)
            change = fresh.values[0, :, slots[mask]] - first.values[0, :, slots[mask]]
            moved = corrected.values[0, :, slots[~mask]] - first.values[0, :, slots[~mask]]
            assert gap(moved, change.mean(1, keepdim=True).expand_as(moved)) < 1e-5
            free = [runtime.extract(c, span.start, span.stop)[0, 0] for c in (result.cache, bare.cache, before)]
            assert (
                gap((free[0] - free[2])[:, ~mask], (free[1] - free[2])[:, mask].mean(1, keepdim=True).expand_as(moved))
                < 1e-4
            )
        assert gap(result.logits, bare.logits) > 0
        assert all(layer.before_scatter is None for layer in result.cache.layers)

    @plain
    def test_the_oracle_knows_what_is_attended_and_stale(self, case: Case) -> None:
        _, spy = spied(case, "oracle")
        request = spy.request
        with torch.inference_mode():
            ours = spy.inner.rate(replace(request, cache=case.assembled()), [])
            output = reference_model(case.folder)(
                input_ids=case.layout.ids[None], use_cache=True, output_attentions=True
            )
        stale = case.assembled()
        expected = torch.zeros(case.layout.num_tokens)
        for weights, layer, old in zip(output.attentions, output.past_key_values.layers, stale.layers, strict=True):
            attended = weights[0].mean(0)[request.question].mean(0)
            change = (layer.values[0, :, : old.length] - old.values[0]).norm(dim=-1)
            relative = (change / layer.values[0].norm(dim=-1).mean(-1, keepdim=True)).mean(0)
            expected[: old.length] += attended[: old.length] * relative / len(stale.layers)
        for span, score in zip(request.spans, ours, strict=True):
            assert gap(score, expected[span.start : span.stop]) < 1e-5

    @plain
    def test_layers_and_pooling_of_the_auxiliary_change_the_choice(self, case: Case) -> None:
        chosen = [
            spied(case, f"cacheclip:layers={layers}:pooled={pooled}")[1].masks
            for layers, pooled in (("last", "false"), ("last", "true"), ("0", "false"))
        ]
        counts = {sum(int(mask.sum()) for mask in masks) for masks in chosen}
        assert len(counts) == 1
        for n, masks in enumerate(chosen):
            for other in chosen[:n]:
                assert not all(torch.equal(a, b) for a, b in zip(masks, other, strict=True))

    def test_pooled_auxiliary_scores_share_one_softmax(self, case_of: Any) -> None:
        from cacheclip_rag.selection.auxiliary import score_chunks

        case = case_of("llama")
        auxiliary = case.engine._caches_of(case.engine.config.auxiliary)
        runtime = auxiliary.kv_runtime
        kv = [auxiliary.read(span.segment.text) for span in case.layout.chunks]
        question = runtime.tokenize("What is the magic number?").ids
        pooled = score_chunks(runtime, auxiliary.prefix, kv, question, pooled=True)
        assert sum(float(s.sum()) for s in pooled) == pytest.approx(1.0, abs=1e-5)
        apart = score_chunks(runtime, auxiliary.prefix, kv, question)
        assert all(float(s.sum()) < 1.0 for s in apart)
        swapped = score_chunks(runtime, auxiliary.prefix, kv[::-1], question, pooled=True)[::-1]
        assert all(gap(a, b) < 1e-6 for a, b in zip(pooled, swapped, strict=True))


def test_a_store_of_half_a_prompt(case_of: Any) -> None:
    """Chunks that are not stored are fresh text for every method."""
    from tests.methods.test_matrix import REUSING

    case = case_of("llama")
    texts = [span.segment.text for span in case.layout.chunks]
    case.engine.release([texts[1]])
    for name in REUSING:
        segments = [span.segment for span in case.layout.spans]
        result = case.engine.prefill(segments, SamplingParams(max_tokens=4), method=create(name, {}))
        assert (result.stats.hits, result.stats.misses) == (2, 1), name
