"""Scorers: the auxiliary model, the primary itself, first tokens whatever is asked, and the oracle."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cacheclip_testing.methods import Observed
from transformers.cache_utils import DynamicCache

from cacheclip_rag import Chunk, ConfigurationError, Fresh
from cacheclip_rag.measuring import cache_argument
from cacheclip_rag.methods import preset
from cacheclip_rag.prompt.layout import question_slots
from cacheclip_rag.selection.auxiliary_pass import map_scores, score_chunks
from cacheclip_rag.selection.budget import Windows
from cacheclip_rag.selection.scorers import QueryAttention, pick_layers
from tests.conftest import CHUNKS
from tests.fusion.cases import EXACT, Case, gap, make_engine, reference_logits, reference_model, scatter_cache
from tests.methods.spying import few, made, plain, same, spied


class TestCacheClip:
    @few
    def test_by_the_primary_itself_it_is_query_attention(self, primary: str) -> None:
        """With one chunk between prefix and question both read the same text, so every layer scores alike."""
        question = "What is the magic number?"
        engine = make_engine(primary, primary, codec="float32")
        engine.precompute(CHUNKS[:1])
        opening, *_, closing = engine.segment(question)
        spy = Observed(made("query_attention"))
        layout = engine.prefill([opening, Chunk(CHUNKS[0]), Fresh(question), closing], method=spy).layout
        caches = engine.parts.models.caches_after_prefix
        runtime, [span] = caches.runtime, layout.chunks
        stored = caches.read(CHUNKS[0])
        assert stored is not None
        for layer in range(runtime.num_layers):
            cache = runtime.new_cache(layout.num_tokens)
            cache.fill(caches.prefix.kv, slot=0, position=0)
            cache.fill(stored.tensor(), slot=span.start, position=span.start)
            view = replace(spy.seen["view"], spans=layout.chunks, cache=cache)
            with torch.inference_mode():
                [theirs] = QueryAttention(layers=f"{layer}").score(view)
            [raw] = score_chunks(
                runtime, caches.prefix.kv, [stored], runtime.tokenize(question).ids, layers=pick_layers(f"{layer}", 8)
            )
            ours = torch.from_numpy(map_scores(raw.numpy(), span.tokens.columns[1], span.tokens.columns[1]))
            assert gap(ours, theirs) < 1e-5, layer
            budget = round(0.2 * len(span.tokens))
            assert torch.equal(*(Windows(8).take([scores], budget)[0] for scores in (ours, theirs)))

    @plain
    def test_layers_of_the_auxiliary_change_the_choice(self, case: Case) -> None:
        looks = ({"layers": "last"}, {"layers": "0"})
        chosen = [spied(case, "cacheclip", scorer=settings)[1].masks for settings in looks]
        counts = {sum(int(mask.sum()) for mask in masks) for masks in chosen}
        assert len(counts) == 1
        for n, masks in enumerate(chosen):
            assert not any(same(masks, other) for other in chosen[:n])

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"layers": "-3"}, "layers must be all, last, upper"),
            ({"heads": "../x y"}, None),
            ({"heads": ".x"}, "heads must be auto, none, a name"),
            ({"heads": "mine", "layers": "all"}, "heads=mine names a head set, which only layers=tuned uses"),
        ],
    )
    def test_wrong_settings(self, settings: dict[str, Any], message: str | None) -> None:
        if message is None:
            assert made("cacheclip", scorer=settings).head_sets == (settings["heads"],)
            return
        with pytest.raises(ConfigurationError, match=message):
            made("cacheclip", scorer=settings)


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
        [({"layers": "some"}, "layers must be all, last"), ({"visible_share": 0.1}, "has no field 'visible_share'")],
    )
    def test_wrong_settings(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            made("query_attention", scorer=settings)


class TestFixedNumbers:
    @pytest.mark.some(3)
    @few
    @pytest.mark.parametrize("first", [1, 8, 10_000])
    def test_first_tokens_of_every_chunk(self, case: Case, first: int) -> None:
        result, spy = spied(case, "epic-paper", budget={"first": first})
        for span, mask in zip(spy.view.spans, spy.masks, strict=True):
            assert mask.tolist() == [n < first for n in range(len(span.tokens))]
        assert result.stats.recomputed_tokens == sum(min(first, len(span.tokens)) for span in spy.view.spans)
        if first == 10_000:
            assert gap(result.logits, reference_logits(case.folder, case.layout.ids)) < EXACT

    def test_there_is_no_ratio(self) -> None:
        with pytest.raises(ConfigurationError, match="'epic-paper' has no recompute ratio, got 0.3"):
            made("epic-paper").at(0.3)
        for wrong in ({"first": -1}, {"first": True}):
            with pytest.raises(ConfigurationError, match=next(iter(wrong))):
                made("epic-paper", budget=wrong)


class TestEpic:
    @plain
    def test_the_budget_goes_round(self, case: Case) -> None:
        result, spy = spied(case, "epic", 0.3)
        counts = [int(mask.sum()) for mask in spy.masks]
        assert sum(counts) == round(0.3 * result.stats.chunk_tokens)
        assert max(counts) - min(counts) <= 1
        assert all(bool(mask[: int(mask.sum())].all()) for mask in spy.masks)

    @pytest.mark.some(3)
    @plain
    @pytest.mark.parametrize("name", ["epic", "epic-paper", "random"])
    def test_the_question_decides_nothing(self, case: Case, name: str) -> None:
        questions = ("When do seabirds nest?", "Who was the last keeper, and in which year did he go ashore?")
        first, second = (chosen(case, made(name, 0.3), question) for question in questions)
        assert same(first, second)
        first, second = (chosen(case, made("query_attention", 0.3), question) for question in questions)
        assert not same(first, second), "elsewhere it does"


def chosen(case: Case, method: Any, question: str) -> list[torch.Tensor]:
    observed = Observed(method)
    segments = [span.segment for span in case.layout.spans]
    number = 1 + max(n for n, segment in enumerate(segments) if isinstance(segment, Chunk))
    segments[number] = Fresh(f"\n\n{question}")
    case.engine.prefill(segments, method=observed)
    masks: list[torch.Tensor] = observed.seen["masks"]
    return masks


def test_random_follows_its_seed(case_of: Any) -> None:
    case = case_of("llama")
    masks = [spied(case, "random", scorer={"seed": seed})[1].masks for seed in (0, 0, 1)]
    assert same(masks[0], masks[1]) and not same(masks[0], masks[2])
    for wrong in (True, 1.5, 2**63):
        with pytest.raises(ConfigurationError, match="seed must be a whole number"):
            made("random", scorer={"seed": wrong})


@plain
def test_the_oracle_knows_what_is_attended_and_stale(case: Case) -> None:
    _, spy = spied(case, "oracle")
    with torch.inference_mode():
        ours = spy.method.scorer.score(replace(spy.view, cache=case.assembled()))
        model, computed = reference_model(case.folder), DynamicCache()
        given = cache_argument(model, computed)
        output = model(input_ids=case.layout.ids[None], use_cache=True, output_attentions=True, **given)
    stale = case.assembled()
    expected = torch.zeros(case.layout.num_tokens)
    for weights, layer, old in zip(output.attentions, computed.layers, stale.layers, strict=True):
        attended = weights[0].mean(0)[spy.view.question].mean(0)
        change = (layer.values[0, :, : old.length] - old.values[0]).norm(dim=-1)
        relative = (change / layer.values[0].norm(dim=-1).mean(-1, keepdim=True)).mean(0)
        expected[: old.length] += attended[: old.length] * relative / len(stale.layers)
    for span, score in zip(spy.view.spans, ours, strict=True):
        assert gap(score, expected[span.start : span.stop]) < 1e-5
