"""Every preset on one architecture, one method on every architecture, against masks and logits by brute force."""

from typing import Any

import pytest
import torch
from cacheclip_testing.methods import MethodConformance

from cacheclip_rag import SamplingParams
from cacheclip_rag.measuring import greedy, read_along
from cacheclip_rag.methods import PRESET_NAMES, Method, Recompute, preset
from tests.fusion.cases import BROKEN, EXACT, Case, bottom_right_plan, gap, reference_logits, scatter
from tests.methods.spying import REUSING, made, run, same, spied

RECOMPUTING = [name for name in PRESET_NAMES if isinstance(preset(name), Recompute) and not preset(name).min_confidence]


class TestPresets(MethodConformance):
    """All of them on a tiny Llama, as third parties would test their own."""

    @pytest.fixture(params=["random", *(name for name in REUSING if name != "cacheclip-paper")])
    def method(self, request: pytest.FixtureRequest) -> Method:
        return made(request.param)


class TestWindowsThatAreDropped(MethodConformance):
    """The paper's grouping spends less than its budget."""

    fills_budget = False

    @pytest.fixture
    def method(self) -> Method:
        return made("cacheclip-paper", budget={"grouping": {"size": 4, "threshold": 1}})


@pytest.mark.long
class TestEveryArchitecture:
    """One method that chooses spans and recomputes them."""

    METHOD = "uncorrected"

    def test_ratio_one_is_full_prefill(self, case: Case) -> None:
        fused, direct = run(case, self.METHOD, 1.0), run(case, "direct")
        expected = reference_logits(case.folder, case.layout.ids)
        assert fused.stats.fallback is None and fused.stats.effective_ratio == 1.0
        assert gap(fused.logits, expected) < EXACT
        assert gap(run(case, self.METHOD, 0.0).logits, direct.logits) < EXACT
        assert gap(direct.logits, expected) > BROKEN, "direct reuse must differ"

    def test_in_between_it_is_unmodified_transformers_with_the_exact_mask(self, case: Case) -> None:
        result, spy = spied(case, self.METHOD, 0.3)
        assert result.stats.recomputed_tokens == round(0.3 * result.stats.chunk_tokens)
        _, expected = scatter(case.folder, case.assembled(), case.layout.ids, rows_of(case, spy))
        assert gap(result.logits, expected) < EXACT
        assert gap(expected, reference_logits(case.folder, case.layout.ids)) > 1e-3, "something is still stale"

    def test_twins_that_must_fail(self, case: Case) -> None:
        """Chunks rotated to wrong positions, and rows that see their future."""
        result, spy = spied(case, self.METHOD, 0.3)
        rows = rows_of(case, spy)
        _, elsewhere = scatter(case.folder, case.assembled(shift=5), case.layout.ids, rows)
        bottom_right = case.run(case.assembled(), rows, bottom_right_plan(rows, case.layout.num_tokens))
        if case.folder.split("/")[-1] != "smollm3":  # half of its layers know no positions
            assert gap(result.logits, elsewhere) > BROKEN
        assert gap(result.logits, bottom_right) > BROKEN


def rows_of(case: Case, spy: Any) -> torch.Tensor:
    """Slots that are computed, by hand: all but prefix and chunks, and what was chosen of these."""
    computed = torch.ones(case.layout.num_tokens, dtype=torch.bool)
    computed[: case.layout.num_prefix] = False
    for span in case.layout.chunks:
        computed[span.start : span.stop] = False
    for span, mask in zip(spy.view.spans, spy.masks, strict=True):
        computed[span.start : span.stop] = mask
    return computed.nonzero().flatten()


@pytest.mark.parametrize("primary", ["llama"], indirect=True)
class TestOneArchitecture:
    @pytest.mark.parametrize("name", RECOMPUTING)
    def test_a_selection_is_recomputed_exactly(self, case: Case, name: str) -> None:
        """By unmodified transformers over the assembled cache; what follows the selection is tested apart."""
        result, spy = spied(case, name, 0.3, correction=0.0)
        _, expected = scatter(case.folder, case.assembled(), case.layout.ids, rows_of(case, spy))
        assert gap(result.logits, expected) < EXACT

    def test_decoding_goes_on(self, case: Case) -> None:
        """One token at a time, or all read in one pass: the same logits."""
        stepped, read = run(case, "direct"), run(case, "direct")
        with torch.inference_mode():
            ids, logits = greedy(case.runtime, stepped.cache, stepped.logits, 6, stop=False)
            assert gap(read_along(case.runtime, read.cache, read.logits, ids), logits) < EXACT

    def test_scorers_choose_differently(self, case: Case) -> None:
        """Else one test of them all would be a test of one."""
        names = ("epic", "random", "cacheclip")
        chosen = {name: spied(case, name, correction=0.0)[1].masks for name in names}
        for number, name in enumerate(names):
            assert not any(same(chosen[name], chosen[other]) for other in names[:number]), name


def test_a_store_of_half_a_prompt(case_of: Any) -> None:
    """Chunks that are not stored are fresh text for every method."""
    case = case_of("llama")
    texts = [span.whole for span in case.layout.chunks]
    case.engine.release([texts[1]])
    segments = [span.segment for span in case.layout.spans]
    for name in REUSING:
        result = case.engine.prefill(segments, SamplingParams(max_tokens=4), method=made(name))
        assert (result.stats.hits, result.stats.misses) == (2, 1), name


@pytest.mark.some(3)
@pytest.mark.parametrize("name", REUSING)
def test_one_chunk_right_behind_the_prefix_is_exact(one_chunk: Case, name: str) -> None:
    fused = run(one_chunk, name, 0.3)
    assert fused.stats.fallback is None and fused.stats.exact_tokens == fused.stats.chunk_tokens > 0
    assert gap(fused.logits, reference_logits(one_chunk.folder, fused.layout.ids)) < EXACT
