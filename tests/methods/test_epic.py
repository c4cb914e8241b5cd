"""EPIC: first tokens, whatever is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheclip_rag import Chunk, Fresh
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.methods import create
from tests.fusion.cases import EXACT, Case, gap, reference_logits
from tests.methods.spying import Spy, plain, spied
from tests.methods.test_matrix import few, run


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

    @plain
    def test_numbers_and_a_skipped_first_chunk(self, case: Case) -> None:
        _, spy = spied(case, "epic:k_init=5:k_final=2:skip_first_chunk=true")
        assert not case.layout.is_exact(case.layout.chunks[0])
        assert [int(mask.sum()) for mask in spy.masks] == [0, 7, 7]

    @plain
    def test_numbers_are_corrected_by(self, case: Case) -> None:
        corrected, bare = (run(case, f"epic:k_init=5{part}") for part in (":correction=1.0", ""))
        assert gap(corrected.logits, bare.logits) > 1e-3

    @pytest.mark.parametrize("part", ["probes=0.25", "anchor=0.5", "always_include_first=4", "rounds=2"])
    @pytest.mark.parametrize("number", ["k_init=16", "k_final=2"])
    def test_numbers_leave_no_budget_to_share_out(self, part: str, number: str) -> None:
        with pytest.raises(ConfigurationError, match=f"{part} shares out a budget"):
            create(f"epic:{number}:{part}", {})
        assert create(f"epic:{part}", {})
