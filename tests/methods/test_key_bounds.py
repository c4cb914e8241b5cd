"""Bounds of the primary's keys, page by page, against loops over an eager model's queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheclip_rag.methods import create
from cacheclip_rag.selection.bounds import bounds_to_tokens
from cacheclip_rag.selection.question import pick_layers
from tests.conftest import CHUNKS
from tests.fusion.cases import Case, gap, make_case
from tests.methods.spying import plain, spied
from tests.methods.test_matrix import few, run
from tests.methods.test_query_attention import eager_queries


@torch.inference_mode()
def rated(case: Case, request: Any, spec: str) -> list[torch.Tensor]:
    method: Any = create(spec, {})
    return list(method.rate(replace(request, cache=case.assembled()), []))


def bounds_by_hand(case: Case, request: Any, page: int) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """The slots of each page; per layer, head and question token the bound of each page, and the largest product that a
    key of it has: ``(num_layers, num_heads, num_question_tokens, num_pages)``, scaled."""
    slots = torch.arange(case.layout.num_tokens)
    own = (slots[None] >= request.question[0]) & (slots[None] <= request.fresh[:, None])
    hidden = ~(own | (slots[None] == request.fresh[:, None]))
    pages = [
        list(range(start, min(start + page, span.stop)))
        for span in case.layout.chunks
        for start in range(span.start, span.stop, page)
    ]
    asking = torch.isin(request.fresh, request.question)
    bounds, products = [], []
    for queries, keys in eager_queries(case, request.fresh, hidden):
        group, scaling = queries.shape[0] // keys.shape[0], queries.shape[-1] ** -0.5
        for head, of_head in enumerate(queries[:, asking]):
            for query in of_head:
                of_pages = [keys[head // group, of_page] for of_page in pages]
                bounds.append(
                    [
                        sum(max(q * low, q * high) for q, low, high in zip(query, p.amin(0), p.amax(0), strict=True))
                        * scaling
                        for p in of_pages
                    ]
                )
                products.append([float((p @ query).max()) * scaling for p in of_pages])
    shape = (case.runtime.num_layers, -1, int(asking.sum()), len(pages))
    return pages, torch.tensor(bounds).view(shape), torch.tensor(products).view(shape)


@plain
@pytest.mark.parametrize(("layers", "page"), [("upper", 16), ("0", 7)])
def test_scores_are_those_of_loops(case: Case, layers: str, page: int) -> None:
    _, spy = spied(case, "key_bounds")
    pages, bounds, products = bounds_by_hand(case, spy.request, page)
    assert bool((bounds >= products - 1e-4).all()), "no key of a page exceeds its bound"
    of_pages = bounds[pick_layers(layers, case.runtime.num_layers)].softmax(-1).mean((0, 1, 2))
    expected = torch.zeros(case.layout.num_tokens)
    for slots, score in zip(pages, of_pages, strict=True):
        expected[slots] = score
    ours = rated(case, spy.request, f"key_bounds:layers={layers}:page={page}")
    for span, scores in zip(spy.request.spans, ours, strict=True):
        assert gap(scores, expected[span.start : span.stop]) < 1e-5
    others = rated(case, spy.request, f"key_bounds:layers={layers}:page={page + 1}")
    assert max(gap(a, b) for a, b in zip(ours, others, strict=True)) > 1e-4, "other pages must show"


@pytest.mark.parametrize("layers", ["all", "last", "0+1"])
@few
def test_pages_of_one_token_are_the_attention_of_a_question_by_itself(case: Case, layers: str) -> None:
    """With windows, soft caps and the scaling of each model."""
    _, spy = spied(case, "key_bounds")
    attention = rated(case, spy.request, f"query_attention:alone=true:softmax=chunks:layers={layers}")
    ours = rated(case, spy.request, f"key_bounds:page=1:layers={layers}")
    assert all(gap(a, b) < 1e-5 for a, b in zip(ours, attention, strict=True))
    in_context = rated(case, spy.request, f"query_attention:softmax=chunks:layers={layers}")
    assert layers == "0+1" or max(gap(a, b) for a, b in zip(ours, in_context, strict=True)) > 1e-4


@plain
def test_pages_end_with_their_chunk(case: Case) -> None:
    _, spy = spied(case, "key_bounds")
    for scores in rated(case, spy.request, "key_bounds:page=8"):
        assert all(len(of_page.unique()) == 1 for of_page in scores.split(8))
    whole = rated(case, spy.request, "key_bounds:page=100000")
    assert all(len(scores.unique()) == 1 for scores in whole)
    assert sum(float(scores[0]) for scores in whole) == pytest.approx(1.0, abs=1e-5), "all chunks are stale here"
    assert len({float(scores[0]) for scores in whole}) == len(whole)


def test_a_page_out_of_the_window_is_not_seen(case_of: Any) -> None:
    """One whose last token is within it is."""
    case = case_of("gemma3")
    _, spy = spied(case, "key_bounds")
    window = case.runtime.model.config.sliding_window
    sliding = case.runtime.model.config.layer_types.index("sliding_attention")
    [last] = spy.request.question[-1:].tolist()
    near, far = slice(last - window - 3, last - window + 2), slice(last - window - 9, last - window - 3)
    assert case.layout.chunks[-1].start <= far.start and near.stop <= case.layout.chunks[-1].stop
    with torch.inference_mode():
        found = bounds_to_tokens(
            case.runtime,
            case.assembled(),
            case.layout.ids,
            spy.request.question[-1:],
            [far, near],
            [sliding],
            page=16,
        )
    assert float(found[near][0]) == pytest.approx(1.0) and float(found[far].sum()) == 0.0


def test_chunks_that_are_exact_share_the_softmax(tiny_models: dict[str, str]) -> None:
    """Nothing is spent on them; and a chunk that is not stored has no keys to bound."""
    case = make_case(tiny_models["llama"], tiny_models["auxiliary"], CHUNKS[:3], opening="")
    _, spy = spied(case, "key_bounds:page=100000")
    assert case.layout.is_exact(case.layout.chunks[0]) and len(spy.request.spans) == 2
    ours = rated(case, spy.request, "key_bounds:page=100000")
    assert 0.0 < sum(float(scores[0]) for scores in ours) < 1.0 - 1e-3
    case.engine.release([case.layout.chunks[1].segment.text])
    result, spy = spied(case, "key_bounds:page=100000")
    assert (result.stats.hits, result.stats.misses) == (2, 1) and len(spy.request.spans) == 1


@plain
def test_it_mixes_with_a_place_in_the_chunk(case: Case) -> None:
    mixed = run(case, "mixed:first=key_bounds/page=8:second=epic/reach=64", 0.3)
    assert mixed.stats.recomputed_tokens == round(0.3 * mixed.stats.chunk_tokens)
    assert not create("mixed:first=key_bounds:second=epic", {}).needs_auxiliary
    alone = run(case, "key_bounds:page=8", 0.3)
    assert gap(mixed.logits, alone.logits) > 0


@plain
def test_rounds_look_at_the_keys_that_were_recomputed(case: Case) -> None:
    once, twice = (run(case, f"key_bounds:rounds={rounds}", 0.4) for rounds in (1, 2))
    assert once.stats.recomputed_tokens == twice.stats.recomputed_tokens == round(0.4 * once.stats.chunk_tokens)
    assert gap(once.logits, twice.logits) > 0


@plain
def test_a_question_of_many_rows(case: Case) -> None:
    """More than a block of attention holds."""
    segments = [span.segment for span in case.layout.spans]
    words = "What is the magic number, and who said so to whom? " * 12
    longer = [replace(s, text=s.text.replace("Question: ", f"Question: {words}")) for s in segments]
    assert longer != segments
    with torch.inference_mode():
        result = case.engine.prefill(longer, method=create("key_bounds", {"recompute_ratio": 0.3}))
    assert result.stats.fresh_tokens > 140 and bool(result.logits.isfinite().all())
