"""The oracle: what is attended to and stale."""

from dataclasses import replace

import torch
from transformers.cache_utils import DynamicCache

from cacheclip_rag.runtime.transformers.cache import cache_argument
from tests.fusion.cases import Case, gap, reference_model
from tests.methods.spying import plain, spied


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
