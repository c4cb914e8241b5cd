"""Every method on every architecture: what holds whatever it selects."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from cacheclip_rag import SamplingParams
from cacheclip_rag.chunks.caches import DEFAULT_ENCODING
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.methods import METHODS, create, method_class, spec_of
from cacheclip_rag.methods.base import Method
from cacheclip_rag.methods.selective import Selective
from tests.fusion.cases import BROKEN, EXACT, Case, gap, prefilled, reference_logits, scatter


def reuses_stored_chunks(name: str) -> bool:
    """By one prefill, from what the store holds for every method."""
    cls = method_class(name)
    alike = create(name, {}).encoding == DEFAULT_ENCODING
    return cls.reuses_chunks and not cls.composes and not cls.captures and alike


REUSING = [name for name in METHODS if reuses_stored_chunks(name)]
WITH_RATIO = [name for name in REUSING if "recompute_ratio" in method_class(name).__dataclass_fields__]
SELECTIVE = [name for name in REUSING if issubclass(method_class(name), Selective)]
COSTLY = ("oracle", "cacheblend")
"""Choosing costs more than the choice."""
few = pytest.mark.parametrize("primary", ["llama", "gemma3", "qwen3", "gpt-oss"], indirect=True)


def run(case: Case, method: Method | str, ratio: float = 0.2) -> Any:
    method = create(method, {"recompute_ratio": ratio}) if isinstance(method, str) else method
    with torch.inference_mode():
        segments = [span.segment for span in case.layout.spans]
        return case.engine.prefill(segments, SamplingParams(max_tokens=16), method=method)


@pytest.mark.parametrize("name", [n for n in WITH_RATIO if method_class(n).exact_at_one])
def test_ratio_one_is_full_prefill(case: Case, name: str) -> None:
    fused = run(case, name, 1.0)
    assert fused.stats.fallback is None and fused.stats.method == name
    assert gap(fused.logits, reference_logits(case.folder, case.layout.ids)) < EXACT
    assert fused.stats.effective_ratio == 1.0


@pytest.mark.parametrize("name", [n if n != "cacheblend" else f"{n}:equal_charge=true" for n in WITH_RATIO])
def test_ratio_zero_is_direct_reuse(case: Case, name: str) -> None:
    direct = run(case, "direct")
    assert gap(run(case, name, 0.0).logits, direct.logits) < EXACT
    assert gap(direct.logits, reference_logits(case.folder, case.layout.ids)) > BROKEN, "direct reuse must differ"


@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_cacheblend_is_direct_reuse_behind_its_check_layer(case: Case, ratio: float) -> None:
    """Whatever goes on: plain transformers gives the same logits from a cache whose first layers are full prefill's."""
    result = run(case, "cacheblend", ratio)
    layers, stale = case.runtime.num_layers, result.stats.chunk_tokens - result.stats.exact_tokens
    assert result.stats.recomputed_tokens == round(ratio * result.stats.chunk_tokens)
    charged = 2 * stale + (layers - 2) * result.stats.recomputed_tokens
    assert result.stats.charged_ratio == pytest.approx(charged / (layers * result.stats.chunk_tokens))
    stored = run(case, "direct").cache  # as the store has it now: another test may have had it computed again
    full, _ = case.runtime.prefill(case.layout.ids, case.layout.num_tokens)
    mixed = case.assembled()
    for number in (0, 1):
        mixed.layers[number].write(0, full.layers[number].keys[0], full.layers[number].values[0])
    gone_on = torch.ones(case.layout.num_tokens, dtype=torch.bool)
    gone_on[: case.layout.num_prefix] = False
    for span in case.layout.chunks:
        of_span = slice(span.start, span.stop)
        fresh, old = result.cache.layers[2].values[0, :, of_span], stored.layers[2].values[0, :, of_span]
        gone_on[of_span] = (fresh != old).any(-1).any(0)
    assert int(gone_on.sum()) == result.stats.recomputed_tokens + result.stats.fresh_tokens
    _, logits = scatter(case.folder, mixed, case.layout.ids, gone_on.nonzero().flatten())
    assert gap(result.logits, logits) < EXACT
    assert gap(logits, run(case, "direct").logits) > BROKEN, "fresh first layers must show"


@pytest.mark.parametrize("name", [n for n in SELECTIVE if n not in COSTLY])
@few
def test_nominal_is_effective_is_charged(case: Case, name: str) -> None:
    stats = run(case, name, 0.3).stats
    assert stats.fallback is None
    assert stats.recomputed_tokens == round(0.3 * stats.chunk_tokens)
    assert stats.charged_ratio == pytest.approx(stats.effective_ratio)


def test_the_oracle_is_charged_its_full_prefill(case: Case) -> None:
    stats = run(case, "oracle", 0.3).stats
    assert stats.charged_ratio == pytest.approx(1.0 + stats.effective_ratio)


@pytest.mark.parametrize("name", REUSING)
@few
def test_deterministic(case: Case, name: str) -> None:
    first, second = run(case, name, 0.3), run(case, name, 0.3)
    assert torch.equal(first.logits, second.logits)
    assert first.stats.recomputed_tokens == second.stats.recomputed_tokens


@pytest.mark.parametrize("name", [n for n in REUSING if method_class(n).place is not Method.place])
def test_decoding_goes_on(case: Case, name: str) -> None:
    """One token at a time, or all read in one pass: the same logits, whatever the method's positions and attention."""
    from cacheclip_rag.guards.fidelity import greedy, read_along

    stepped, read = run(case, name, 0.3), run(case, name, 0.3)
    with torch.inference_mode():
        ids, logits = greedy(case.runtime, stepped.cache, stepped.logits, 6, stop=False)
        assert gap(read_along(case.runtime, read.cache, read.logits, ids), logits) < EXACT


@pytest.mark.parametrize(
    "spec",
    [
        "block:tuned=true",
        "block:tuned=true:positions=composite",
        "link:tuned=true:n_link=0:start_id=-1:end_id=-1",
        "cachecraft",
    ],
)
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss"])
def test_with_chunk_caches_of_its_own(case_of: Any, name: str, spec: str) -> None:
    """Windows, soft caps and sinks: the same again, and decoding step by step as read in one pass."""
    from cacheclip_rag.guards.fidelity import greedy, read_along

    case = case_of(name)
    method = create(spec, {})
    if method.captures:
        run(case, method)
    else:
        case.engine.precompute([span.segment.text for span in case.layout.chunks], method=method)
    first, second = run(case, method), run(case, method)
    assert (first.stats.method, first.stats.hits) == (method.name, 3)
    assert torch.equal(first.logits, second.logits)
    with torch.inference_mode():
        ids, logits = greedy(case.runtime, first.cache, first.logits, 6, stop=False)
        assert gap(read_along(case.runtime, second.cache, second.logits, ids), logits) < EXACT


def test_a_store_of_half_a_prompt(case_of: Any) -> None:
    """Chunks that are not stored are fresh text for every method."""
    case = case_of("llama")
    texts = [span.segment.text for span in case.layout.chunks]
    case.engine.release([texts[1]])
    for name in REUSING:
        segments = [span.segment for span in case.layout.spans]
        result = case.engine.prefill(segments, SamplingParams(max_tokens=4), method=create(name, {}))
        assert (result.stats.hits, result.stats.misses) == (2, 1), name


class TestOneChunkBehindThePrefix:
    @pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
    @pytest.mark.parametrize("name", REUSING)
    @few
    def test_is_exact(self, case: Case, name: str, ratio: float) -> None:
        chunk = case.layout.chunks[0].segment.text
        prompt = f"{chunk}\n\nQuestion: What is the magic number?"
        neutral = {"ape": "ape:temperature=1.0:scale=1.0"}.get(name, name)
        fused = prefilled(case.engine, prompt, neutral, ratio)
        assert fused.stats.fallback is None and fused.stats.exact_tokens == fused.stats.chunk_tokens > 0
        assert gap(fused.logits, reference_logits(case.folder, fused.layout.ids)) < EXACT


class TestNames:
    def test_settings_behind_the_name(self) -> None:
        method: Any = create("epic:k_init=16:k_final=2", {"recompute_ratio": 0.1, "codec": "float16"})
        assert (method.k_init, method.k_final, method.recompute_ratio) == (16, 2, 0.1)
        assert spec_of(method) == "epic:k_init=16:k_final=2"
        assert create(spec_of(method), {"recompute_ratio": 0.1}) == method
        engine = {"recompute_ratio": 0.1, "behind": "passages"}
        assert spec_of(method, engine) == "epic:behind=prefix:k_init=16:k_final=2"
        assert create(spec_of(method, engine), engine) == method
        assert create("cacheclip:skip_first_chunk=true", {}).skip_first_chunk is True  # type: ignore[attr-defined]

    def test_a_window_below_a_threshold_that_is_not_used(self) -> None:
        method: Any = create("random:window=1", {})
        assert (method.window, method.grouping) == (1, "window_score")
        with pytest.raises(ConfigurationError, match="threshold below the window .*'v1_literal', got threshold=5 and"):
            create("random:window=1:grouping=v1_literal", {})

    def test_settings_of_parts(self) -> None:
        spec = "mixed:first=cacheclip/layers=0.5+3/pooled=true:second=epic:weight=0.7"
        method: Any = create(spec, {"recompute_ratio": 0.1})
        assert spec_of(method) == spec and create(spec_of(method), {"recompute_ratio": 0.1}) == method
        first, second = method._parts()
        assert (first.layers, first.pooled, second.name) == ("0.5+3", True, "epic")
        with pytest.raises(ConfigurationError, match="behind slashes"):
            create("mixed", {"first": "cacheclip:layers=all"})

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("nonsense", "method must be auto .which takes no settings. or one of full"),
            ("epic:k=16", "names among .*recompute_ratio, .*k_init, k_final"),
            ("epic:k_init", "written name=value"),
            ("epic:k_init=many", "of type int"),
            ("epic:k_init=-1", "0 or more"),
            ("cacheclip:skip_first_chunk=perhaps", "true or false"),
            ("cacheclip:always_include_first=-1", "0 or more"),
            ("cacheclip:anchor=1.5", "0 to 1"),
            ("cacheclip:probes=0.6", "together 1 at most"),
            ("cacheclip:correction=2", "between 0"),
            ("query_attention:layers=some", "layers"),
            ("query_attention:layers=0.9-0.2", "range of depth"),
            ("cacheclip:layers=-3", "range of depth"),
            ("cacheclip:pooled=maybe", "true or false"),
            ("query_attention:heads=median", "heads must be one of mean, max"),
            ("query_attention:rounds=0", "from 1 to 8"),
            ("query_attention:digest=2", "between 0"),
            ("key_bounds:page=0", "page must be a whole number of tokens, 1 or more"),
            ("key_bounds:layers=some", "layers"),
            ("qcfuse:alone=true", "alone=True and digest=0.1"),
            ("ape:temperature=0", "above 0"),
            ("cacheblend:deviation=q", "one of v, k, kv"),
            ("cacheblend:check_layer=-1", "0 or more"),
            ("mixed:first=full", "first must be a method that scores tokens, one of .*epic.*got 'full'"),
            ("mixed:second=cacheblend", "second must be a method that scores"),
            ("mixed:second=mixed", "second must be a method that scores"),
            ("mixed:first=cacheclip/layers=some", "layers must be"),
            ("mixed:first=cacheclip/layer=all", "names among"),
            ("mixed:first=cacheclip/window=4", "window of 'cacheclip/window=4' says how .* set window of 'mixed'"),
            ("mixed:first=prophetkv/rounds=2", "rounds of .*leave it out, or set rounds of 'mixed'"),
            ("cacheblend:rounds=2", "not in rounds: got rounds=2"),
            ("mixed:second=epic/k_init=4", "k_init of .*leave it out.$"),
            ("mixed:weight=3", "between 0 and 1"),
            ("direct_gapped:place_tokens=-1", "0 or more"),
        ],
    )
    def test_wrong_settings(self, spec: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            create(spec, {})

    @pytest.mark.parametrize("name", list(METHODS))
    def test_a_truth_value_is_no_number(self, name: str) -> None:
        for field in fields(method_class(name)):
            if type(field.default) is int:
                for wrong in (True, False, 1.5, "1", None):
                    with pytest.raises(ConfigurationError, match=rf"{field.name}.*got .*{wrong}"):
                        method_class(name)(**{field.name: wrong})

    def test_a_truth_value_is_no_ratio(self) -> None:
        for wrong in (True, False, "0.2", -0.1, 1.1):
            with pytest.raises(ConfigurationError, match="recompute_ratio must be between"):
                create("epic", {"recompute_ratio": wrong})

    def test_every_method_names_its_source(self) -> None:
        import sys

        for name in METHODS:
            cls = method_class(name)
            assert cls.name == name and cls.__doc__
            assert len(sys.modules[cls.__module__].__doc__ or "") > 80
