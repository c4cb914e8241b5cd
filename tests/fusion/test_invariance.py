"""What a fused result may not depend on, mistakes that only some architectures can show, and random prompts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers import attention
from cacheclip_rag.runtime.transformers.attention_pattern import causal_pattern
from cacheclip_rag.runtime.transformers.cache import FusedLayer
from tests.conftest import CHUNKS, LLAMA, Models, Patch, build_model, examples, rag_prompt
from tests.fusion.cases import BROKEN, EXACT, KINDS, Case, gap, make_engine, prefilled, reference_logits, scatter

K_NORM = ("qwen3", "qwen3-moe", "gemma3", "olmo2")
SLIDING = ("qwen2-sliding", "mistral-sliding", "phi3-sliding", "gemma2", "gemma3", "gpt-oss")
DENSE = "llama qwen2-rope-yarn qwen3 smollm3 mistral-sliding phi3-longrope gemma2 gemma3 olmo2".split()
"""Without experts: a router that hesitates between two turns a rounding error into another expert."""


class TestTwins:
    @pytest.mark.parametrize("primary", K_NORM, indirect=True)
    def test_keys_stored_before_their_norm(self, case: Case) -> None:
        """At ratio 1 only the prefix is left of what was stored: even that must show."""
        expected = reference_logits(case.folder, case.layout.ids)
        rows = case.rows(1.0)
        assert gap(case.run(case.assembled(), rows, causal_pattern(rows)), expected) < EXACT
        prefix_ids = case.layout.ids[: case.layout.num_prefix].tolist()
        with pytest.MonkeyPatch.context() as patch:
            for layer in case.runtime.model.base_model.layers:
                patch.setattr(layer.self_attn.k_norm, "forward", lambda keys: keys)
            unnormed = case.runtime.encode(prefix_ids)
        wrong = case.assembled(kv={**case.kv, 0: unnormed})
        assert gap(case.run(wrong, rows, causal_pattern(rows)), expected) > BROKEN

    @pytest.mark.parametrize("primary", SLIDING, indirect=True)
    def test_sliding_cache_cut_to_its_window(self, case: Case, monkeypatch: Patch) -> None:
        """What stock caches do: sliding layers keep the last ``window - 1`` tokens. Earlier rows then miss theirs."""
        expected = reference_logits(case.folder, case.layout.ids)
        config = case.runtime.model.config
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        rows = case.rows(1.0)
        cache = case.assembled()
        sliding = {id(layer) for layer, kind in zip(cache.layers, kinds, strict=True) if kind == "sliding_attention"}
        original = FusedLayer.update

        def update(layer: FusedLayer, *args: Any, **kwargs: Any) -> Any:
            keys, values = original(layer, *args, **kwargs)
            if id(layer) in sliding:
                keys, values = keys.clone(), values.clone()
                keys[:, :, : 1 - config.sliding_window] = values[:, :, : 1 - config.sliding_window] = 0
            return keys, values

        monkeypatch.setattr(FusedLayer, "update", update)
        assert gap(case.run(cache, rows, causal_pattern(rows)), expected) > BROKEN

    @pytest.mark.parametrize(
        ("primary", "forgotten"),
        [*((name, ("window",)) for name in SLIDING), *((name, ("softcap", "sinks")) for name in ("gemma2", "gpt-oss"))],
        indirect=["primary"],
    )
    def test_window_soft_cap_or_sinks_forgotten(self, case: Case, forgotten: tuple[str, ...]) -> None:
        """A mask without the window: what one 4-D mask for all layers does in transformers."""
        rows, rule = case.rows(1.0), attention.AttentionRule
        expected = reference_logits(case.folder, case.layout.ids)
        with pytest.MonkeyPatch.context() as patch:
            without = dict.fromkeys(forgotten)
            patch.setattr(attention, "AttentionRule", lambda **settings: rule(**{**settings, **without}))
            assert gap(case.run(case.assembled(), rows, causal_pattern(rows)), expected) > BROKEN
        assert gap(case.run(case.assembled(), rows, causal_pattern(rows)), expected) < EXACT


class TestIndependence:
    """The same bits, whatever happened around them."""

    @pytest.mark.parametrize("primary", KINDS, indirect=True)
    def test_of_being_precomputed_together(self, primary: str, tiny_models: Models) -> None:
        together, apart = (make_engine(primary, tiny_models["auxiliary"]) for _ in range(2))
        together.precompute(CHUNKS)
        for text in CHUNKS:
            apart.precompute([text])
        for text in CHUNKS:
            left, right = (engine.parts.models.caches_after_prefix.read(text) for engine in (together, apart))
            assert left is not None and right is not None and torch.equal(left.tensor(), right.tensor())

    @pytest.mark.some(3)
    @pytest.mark.parametrize("primary", KINDS, indirect=True)
    def test_of_the_tier_that_served(self, primary: str, tiny_models: Models, tmp_path: Path) -> None:
        memory = make_engine(primary, tiny_models["auxiliary"])
        disk = make_engine(primary, tiny_models["auxiliary"], str(tmp_path / "disk"))
        tiered = make_engine(primary, tiny_models["auxiliary"], str(tmp_path / "tiered"), memory_bytes=10**8)
        for engine in (memory, disk, tiered):
            engine.precompute(CHUNKS)
        again = make_engine(primary, tiny_models["auxiliary"], str(tmp_path / "tiered"), memory_bytes=10**8)
        prompt = rag_prompt(CHUNKS)
        logits = [prefilled(e, prompt, "cacheclip", 0.3).logits for e in (memory, disk, tiered, tiered, again, again)]
        assert all(torch.equal(logits[0], other) for other in logits[1:])


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[bool]]:
    """Chunks of token ids, ids of a question, and which chunk tokens are recomputed."""
    token = st.integers(3, 390)
    chunks = draw(st.lists(st.lists(token, min_size=1, max_size=40), min_size=1, max_size=5))
    question = draw(st.lists(token, min_size=1, max_size=12))
    total = sum(map(len, chunks))
    ratio = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    chosen = draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=total, max_size=total))
    return chunks, question, [value < ratio for value in chosen]


class TestRandomPrompts:
    """Any number of chunks of any length, any selection: what unmodified transformers gives with the exact mask."""

    @examples(60)
    @given(prompt=prompts(), name=st.sampled_from(DENSE), data=st.data())
    def test_equals_the_reference(self, tiny_models: Models, prompt: Any, name: str, data: st.DataObject) -> None:
        folder = tiny_models[name]
        runtime = load_model(folder)
        chunks, question, chosen = prompt
        prefix_ids = runtime.tokenize("You answer.").ids
        prefix = runtime.encode(prefix_ids)
        ids = torch.tensor([*prefix_ids, *(token for chunk in chunks for token in chunk), *question])
        active = torch.tensor([False] * len(prefix_ids) + chosen + [True] * len(question))

        def assembled() -> Any:
            cache = runtime.new_cache(len(ids))
            cache.fill(prefix, slot=0, position=0)
            position = len(prefix_ids)
            for chunk in chunks:
                cache.fill(runtime.encode(chunk, prefix), slot=position, position=position)
                position += len(chunk)
            return cache

        rows = active.nonzero().flatten()
        ours = assembled()
        logits = runtime.run_rows(ours, ids[rows], rows, causal_pattern(rows))
        assert logits is not None
        assert gap(logits, scatter(folder, assembled(), ids, rows)[1]) < EXACT
        if all(chosen):
            assert gap(logits, reference_logits(folder, ids)) < EXACT
        # and no token's change reaches what stands before it
        at = data.draw(st.sampled_from(rows.tolist()), "changed token")
        changed = ids.clone()
        changed[at] = 3 + (changed[at] - 2) % 388
        after = assembled()
        runtime.run_rows(after, changed[rows], rows, causal_pattern(rows))
        for left, right in zip(ours.layers, after.layers, strict=True):
            assert gap_or_0(left.keys[:, :, :at], right.keys[:, :, :at]) <= 1e-5
            assert gap_or_0(left.values[:, :, :at], right.values[:, :, :at]) <= 1e-5


def gap_or_0(left: torch.Tensor, right: torch.Tensor) -> float:
    return gap(left, right) if left.numel() else 0.0


@pytest.mark.long
def test_eighty_chunks(tiny_models: Models) -> None:
    texts = [f"Ledger {number}: {number * 7919 % 1000} crowns." for number in range(80)]
    folder = Path(tiny_models["llama"]).parent / "llama-long"
    if not folder.exists():
        build_model(folder, LLAMA, context=8192)
    engine = CacheClipEngine(primary=str(folder), auxiliary=None, method="epic", chunk_context="prefix")
    engine.precompute(texts)
    fused = prefilled(engine, rag_prompt(texts), "epic", 1.0)
    assert fused.stats.hits == 80 and fused.stats.fallback is None
    assert gap(fused.logits, reference_logits(str(folder), fused.layout.ids)) < EXACT
    partial = prefilled(engine, rag_prompt(texts), "epic", 0.2).stats
    assert partial.recomputed_tokens == round(0.2 * partial.chunk_tokens)
