"""Scorers: the auxiliary model, first tokens whatever is asked, and chance."""

from typing import Any

import pytest
import torch
from cacheclip_testing.methods import Observed

from cacheclip_rag import Chunk, ConfigurationError, Fresh
from cacheclip_rag.selection.scorers import pick_layers
from tests.fusion.cases import EXACT, Case, gap, reference_logits
from tests.methods.spying import few, made, plain, same, spied


class TestCacheClip:
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


def test_layers_by_name() -> None:
    assert pick_layers("all", 4) == [0, 1, 2, 3] and pick_layers("last", 4) == [3]
    assert pick_layers("upper", 24) == list(range(12, 24)) and pick_layers("upper", 1) == [0]
    assert pick_layers("middle", 24) == list(range(8, 16)) and pick_layers("middle", 1) == [0]
    assert pick_layers("14+13+17", 32) == [13, 14, 17] and pick_layers("0+3", 4) == [0, 3]
    for wrong in ("9", "some", 3, None, [1], "-1", "0.5+3", "1-2", "", "+"):
        with pytest.raises(ConfigurationError, match="numbers below 4 joined by"):
            pick_layers(wrong, 4)  # type: ignore[arg-type]


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
        first, second = (chosen(case, made("uncorrected", 0.3), question) for question in questions)
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
