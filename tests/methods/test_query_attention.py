"""Query attention and its presets, against weights of an eager model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheclip_rag import Chunk, Fresh
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.methods import preset
from cacheclip_rag.prompt.layout import question_slots
from cacheclip_rag.runtime.transformers.cache import cache_argument
from cacheclip_rag.selection.question import pick_layers
from tests.conftest import CHUNKS
from tests.fusion.cases import Case, gap, make_case, reference_model, scatter_cache
from tests.methods.spying import few, made, plain, same, spied


@torch.inference_mode()
def eager_queries(case: Case, rows: torch.Tensor, hidden: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer queries ``(num_heads, num_rows, head_dim)`` of an eager model that runs ``rows`` over the assembled
    cache where ``hidden`` lets them look, and the keys ``(num_kv_heads, num_tokens, head_dim)`` of that; after RoPE."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = reference_model(case.folder)
    past = scatter_cache(case.assembled(), case.layout.num_tokens, rows)
    seen: list[torch.Tensor] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        states = (args[0] if args else kwargs["hidden_states"])[0]
        queries = module.q_proj(states).unflatten(-1, (-1, module.head_dim))
        queries = module.q_norm(queries) if hasattr(module, "q_norm") else queries
        tables = [table[0] for table in kwargs["position_embeddings"]]
        seen.append(apply_rotary_pos_emb(queries.transpose(0, 1), queries.transpose(0, 1), *tables, unsqueeze_dim=0)[0])

    hooks = [layer.self_attn.register_forward_pre_hook(look, with_kwargs=True) for layer in model.base_model.layers]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
    given = cache_argument(model, past)
    model(input_ids=case.layout.ids[rows][None], position_ids=rows[None], attention_mask=mask, **given)
    for hook in hooks:
        hook.remove()
    return [(queries, layer.keys[0]) for queries, layer in zip(seen, past.layers, strict=True)]


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

    def by_hand(self, case: Case, view: Any, hidden: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
        """``(num_layers, num_tokens)``: weights of the question's rows over keys that these rows may not have seen.

        The queries of an eager model are multiplied with the keys of the assembled cache by hand, one query head and
        its group's key head at a time.
        """
        asking = torch.isin(view.fresh, view.question)
        causal = torch.arange(case.layout.num_tokens)[None] <= view.fresh[asking, None]
        scores = []
        for queries, keys in eager_queries(case, view.fresh, hidden):
            group = queries.shape[0] // keys.shape[0]
            weights = []
            for head, of_head in enumerate(queries):
                logits = of_head[asking] @ keys[head // group].T * of_head.shape[-1] ** -0.5
                weights.append(logits.masked_fill(~(causal & among[None]), float("-inf")).softmax(-1))
            scores.append(torch.stack(weights).mean(0).mean(0))
        return torch.stack(scores)

    @plain
    @pytest.mark.parametrize("layers", ["all", "0", "last"])
    def test_a_question_by_itself(self, case: Case, layers: str) -> None:
        """ProphetKV's other reading: an independent sequence at its place, a softmax over the chunks' stale keys."""
        _, spy = spied(case, "prophetkv", scorer={"question_only": True, "softmax": "chunks", "layers": layers})
        view, slots = spy.view, torch.arange(case.layout.num_tokens)
        among = torch.zeros(len(slots), dtype=torch.bool)
        for span in case.layout.chunks:
            among[span.start : span.stop] = True
        first = int(view.question[0])
        own = (slots[None] >= first) & (slots[None] <= view.fresh[:, None])
        hidden = ~(own | (slots[None] == view.fresh[:, None]))
        chosen = pick_layers(layers, case.runtime.num_layers)
        expected = self.by_hand(case, view, hidden, among)[chosen].mean(0)
        with torch.inference_mode():
            ours = spy.method.scorer.score(replace(view, cache=case.assembled()))
        for span, score in zip(view.spans, ours, strict=True):
            assert gap(score, expected[span.start : span.stop]) < 1e-5
        assert sum(float(score.sum()) for score in ours) == pytest.approx(1.0, abs=1e-4), "all chunks are stale here"
        in_context = made("prophetkv", scorer={"softmax": "chunks", "layers": layers})
        with torch.inference_mode():
            others = in_context.scorer.score(replace(view, cache=case.assembled()))
        apart = max(gap(a, b) for a, b in zip(ours, others, strict=True))
        assert apart > 1e-3 if layers != "0" else apart < 1e-5, "in the first layer nothing was seen yet"

    @plain
    def test_a_visible_part_is_read_at_its_true_positions(self, case: Case) -> None:
        _, spy = spied(case, "qcfuse", scorer={"visible_share": 0.3, "layers": "all"})
        view, slots = spy.view, torch.arange(case.layout.num_tokens)
        with torch.inference_mode():
            visible = spy.method.scorer._visible(replace(view, cache=case.assembled()))
            ours = spy.method.scorer.score(replace(view, cache=case.assembled()))
        causal = slots[None] <= view.fresh[:, None]
        everything = torch.ones(len(slots), dtype=torch.bool)
        expected = self.by_hand(case, view, ~(causal & visible[None]), everything).mean(0)
        for span, score in zip(view.spans, ours, strict=True):
            assert gap(score, expected[span.start : span.stop]) < 1e-5
        whole = self.by_hand(case, view, ~causal, everything).mean(0)
        assert gap(whole, expected) > 1e-3

    def test_chunks_that_are_exact_share_the_softmax(self, tiny_models: dict[str, str]) -> None:
        """Nothing is spent on them, but the question attends to them."""
        case = make_case(tiny_models["llama"], tiny_models["auxiliary"], CHUNKS[:3], opening="")
        _, spy = spied(case, "prophetkv", scorer={"softmax": "chunks"})
        first, *others = case.layout.chunks
        assert case.layout.is_exact(first) and len(spy.view.spans) == len(others)
        with torch.inference_mode():
            ours = spy.method.scorer.score(replace(spy.view, cache=case.assembled()))
            both = spy.method.scorer.score(replace(spy.view, cache=case.assembled(), spans=case.layout.chunks))
        assert sum(float(score.sum()) for score in both) == pytest.approx(1.0, abs=1e-4)
        assert all(gap(a, b) < 1e-6 for a, b in zip(ours, both[1:], strict=True)) and float(both[0].sum()) > 1e-3

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

    @few
    def test_all_of_it_visible_is_the_whole_context(self, case: Case) -> None:
        _, whole = spied(case, "query_attention", scorer={"layers": "all", "visible_share": 1.0})
        _, almost = spied(case, "query_attention", scorer={"layers": "all", "visible_share": 0.9999999})
        assert same(whole.masks, almost.masks)

    @few
    def test_qcfuse_is_prophetkv_with_other_settings(self, case: Case) -> None:
        left, qcfuse = spied(case, "qcfuse", scorer={"visible_share": 1.0, "layers": "all"})
        right, prophet = spied(case, "prophetkv")
        assert same(prophet.masks, qcfuse.masks)
        assert torch.equal(left.logits, right.logits)

    @plain
    def test_a_visible_part_has_its_sinks_and_size(self, case: Case) -> None:
        _, spy = spied(case, "qcfuse", scorer={"visible_share": 0.3})
        with torch.inference_mode():
            visible = spy.method.scorer._visible(replace(spy.view, cache=case.assembled()))
        for span in spy.view.spans:
            inside = visible[span.start : span.stop]
            assert (
                bool(inside[:4].all()) and round(0.3 * len(inside)) <= int(inside.sum()) <= round(0.3 * len(inside)) + 4
            )
        assert bool(visible[: spy.view.spans[0].start].all())

    @pytest.mark.parametrize("name", ["llama", "llama-rope-dynamic", "phi3-longrope"])
    def test_a_prompt_that_opens_otherwise(self, case_of: Any, name: str) -> None:
        """No shared prefix stands before what the question reads."""
        case = case_of(name)
        segments = [Fresh("Otherwise. "), *(Chunk(text) for text in CHUNKS[:3]), Fresh(" What is the magic number?")]
        result = case.engine.prefill(segments, method=preset("qcfuse").at(0.3))
        assert not result.layout.opens_with_prefix and result.stats.hits == 3
        assert result.stats.recomputed_tokens == round(0.3 * result.stats.chunk_tokens)

    def test_layers_by_name(self) -> None:
        assert pick_layers("all", 4) == [0, 1, 2, 3] and pick_layers("last", 4) == [3]
        assert pick_layers("upper", 24) == list(range(12, 24)) and pick_layers("middle", 24) == list(range(8, 16))
        assert pick_layers("14+13+17", 32) == [13, 14, 17] and pick_layers("0.5-0.62", 24) == [12, 13, 14]
        assert pick_layers("0.5+3", 32) == [16, 17, 18] and pick_layers("0.0+1", 4) == [0]
        assert pick_layers("0.9+4", 10) == [9], "no further than the model goes"
        assert pick_layers("0+3", 4) == [0, 3] and pick_layers("1+2+3", 4) == [1, 2, 3], "numbers, not a depth"
        wrong_depths = ("0.5+", "0.5+0", "0.5+1.5", "0.5+3+1", "1.0+2", "0.5", "-0.5+2", "3+0.5", "nan.+2", ".+1")
        for wrong in ("9", "some", 3, None, "0.9-0.2", "1-2-3", "", "+", *wrong_depths):
            with pytest.raises(ConfigurationError, match="numbers below 4 joined by"):
                pick_layers(wrong, 4)

    def test_published_layers_are_as_many_on_every_model(self) -> None:
        """InfoFlow names four, QCFuse three, whatever the depth; 24 layers get what a share of the depth gave."""
        infoflow, qcfuse = (made(name).scorer.layers for name in ("infoflow", "qcfuse"))
        assert pick_layers(infoflow, 24) == [14, 15, 16, 17] and pick_layers(qcfuse, 24) == [12, 13, 14]
        for num_layers in (24, 28, 32, 36, 40, 48, 64, 80):
            assert len(pick_layers(infoflow, num_layers)) == 4 and len(pick_layers(qcfuse, num_layers)) == 3
        assert pick_layers(infoflow, 40) == [24, 25, 26, 27], "the paper has 22 to 25"

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"layers": "some"}, "layers must be all, last"),
            ({"layers": "0.9-0.2"}, "range of depth"),
            ({"heads": "median"}, "heads must be one of mean, max"),
            ({"queries": 3}, "queries must be one of mean, max"),
            ({"softmax": "page"}, "softmax must be one of row, chunks"),
            ({"visible_share": 2}, "visible_share must be a share of each chunk, 0 to 1"),
            ({"question_only": 1}, "question_only must be True or False"),
            ({"question_only": True, "visible_share": 0.1}, "question_only=True .* visible_share=0.1"),
        ],
    )
    def test_wrong_settings(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            made("query_attention", scorer=settings)
