"""Query attention, against weights of an eager model."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheclip_rag import Chunk, ConfigurationError, Fresh
from cacheclip_rag.measuring import cache_argument
from cacheclip_rag.methods import preset
from cacheclip_rag.prompt.layout import question_slots
from cacheclip_rag.selection.scorers.base import pick_layers
from tests.conftest import CHUNKS
from tests.fusion.cases import Case, gap, reference_model, scatter_cache
from tests.methods.spying import made, plain, spied


class TestQueryAttention:
    def brute_force(self, case: Case, spy: Any) -> torch.Tensor:
        """``(num_layers, num_tokens)`` from an eager model that returns its attention weights."""
        view = spy.view
        rows = view.fresh
        num_tokens = case.layout.num_tokens
        past = scatter_cache(case.assembled(), num_tokens, rows)
        hidden = rows[:, None] < torch.arange(num_tokens)[None]
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
        model = reference_model(case.folder)
        output = model(
            input_ids=case.layout.ids[rows][None],
            position_ids=rows[None],
            attention_mask=mask,
            **cache_argument(model, past),
            output_attentions=True,
        )
        asking = torch.isin(rows, view.question)
        return torch.stack([weights[0].mean(0)[asking].mean(0) for weights in output.attentions])

    @pytest.mark.some(3)
    @plain
    @pytest.mark.parametrize("layers", ["all", "last", "0+1"])
    def test_scores_are_those_of_an_eager_model(self, case: Case, layers: str) -> None:
        _, spy = spied(case, "query_attention", scorer={"layers": layers})
        with torch.inference_mode():
            expected = self.brute_force(case, spy)[pick_layers(layers, case.runtime.num_layers)].mean(0)
            view = spy.view
            cache = case.assembled()
            ours = spy.method.scorer.score(replace(view, cache=cache))
        for span, score in zip(view.spans, ours, strict=True):
            assert gap(score, expected[span.start : span.stop]) < 1e-5
            assert float(score.sum()) <= 1.0

    def test_the_question_is_what_the_user_asks(self, case_of: Any) -> None:
        _, spy = spied(case_of("llama"), "query_attention")
        layout = spy.view.layout
        words = [
            s.segment.text[a:b]
            for s in layout.spans
            for n, (a, b) in enumerate(s.tokens.offsets)
            if s.start + n in set(spy.view.question.tolist())
        ]
        assert "".join(words).replace(" ", "") == "Question:Whatisthemagicnumber?"

    def test_a_given_question_is_found_in_the_prompt(self, case_of: Any) -> None:
        layout = case_of("llama").layout
        some = question_slots(layout, "What is the magic number?")
        assert 0 < len(some) < len(question_slots(layout)) == len(question_slots(layout, "Not in there."))

    @pytest.mark.parametrize("name", ["llama", "llama-rope-dynamic", "phi3-longrope"])
    def test_a_prompt_that_opens_otherwise(self, case_of: Any, name: str) -> None:
        """No shared prefix stands before what the question reads."""
        case = case_of(name)
        segments = [Fresh("Otherwise. "), *(Chunk(text) for text in CHUNKS[:3]), Fresh(" What is the magic number?")]
        result = case.engine.prefill(segments, method=preset("query_attention").at(0.3))
        assert result.layout.num_prefix < case.engine.parts.models.caches_after_prefix.num_prefix
        assert result.stats.hits == 3
        assert result.stats.recomputed_tokens == round(0.3 * result.stats.chunk_tokens)

    def test_layers_by_name(self) -> None:
        assert pick_layers("all", 4) == [0, 1, 2, 3] and pick_layers("last", 4) == [3]
        assert pick_layers("upper", 24) == list(range(12, 24)) and pick_layers("upper", 1) == [0]
        assert pick_layers("middle", 24) == list(range(8, 16)) and pick_layers("middle", 1) == [0]
        assert pick_layers("14+13+17", 32) == [13, 14, 17] and pick_layers("0+3", 4) == [0, 3]
        for wrong in ("9", "some", 3, None, [1], "-1", "0.5+3", "1-2", "", "+"):
            with pytest.raises(ConfigurationError, match="numbers below 4 joined by"):
                pick_layers(wrong, 4)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"layers": "some"}, "layers must be all, last"),
            ({"visible_share": 0.1}, "has no field 'visible_share'"),
        ],
    )
    def test_wrong_settings(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            made("query_attention", scorer=settings)
