"""What all selectors share: floors, a skipped chunk, correction, scores that can be saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheclip_rag.methods.selective import Selective
from tests.fusion.cases import Case, gap
from tests.methods.spying import Spy, plain, spied
from tests.methods.test_matrix import run


@plain
@pytest.mark.parametrize("spec", ["cacheclip", "prophetkv", "mixed", "query_attention:always_include_first=2"])
def test_saved_scores_choose_the_same(case: Case, spec: str) -> None:
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
def test_first_tokens_come_before_all_others(case: Case) -> None:
    _, spy = spied(case, "random:always_include_first=4", 0.4)
    assert all(bool(mask[:4].all()) for mask in spy.masks)
    assert sum(int(m.sum()) for m in spy.masks) == round(0.4 * spy.request.num_chunk_tokens)


@plain
def test_a_skipped_first_chunk(case: Case) -> None:
    _, spy = spied(case, "random:skip_first_chunk=true", 0.3)
    first = int(case.layout.is_exact(case.layout.chunks[0]))
    assert first or not bool(spy.masks[0].any())
    assert sum(int(m.sum()) for m in spy.masks) == round(0.3 * spy.request.num_chunk_tokens)


def test_random_follows_its_seed(case_of: Any) -> None:
    case = case_of("llama")
    masks = [spied(case, f"random:seed={seed}")[1].masks for seed in (0, 0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(masks[0], masks[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(masks[0], masks[2], strict=True))


@plain
def test_correction_moves_what_is_not_recomputed(case: Case) -> None:
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
