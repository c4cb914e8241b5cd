"""CacheClip: the auxiliary model's scores, as the method uses them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cacheclip_testing.methods import Observed

from cacheclip_rag import Chunk, ConfigurationError, Fresh
from cacheclip_rag.selection.auxiliary_pass import map_scores, score_chunks
from cacheclip_rag.selection.budget import Windows
from cacheclip_rag.selection.scorers import QueryAttention
from cacheclip_rag.selection.scorers.base import pick_layers
from tests.conftest import CHUNKS
from tests.fusion.cases import Case, gap, make_engine
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
