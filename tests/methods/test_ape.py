"""APE: contexts in parallel, weighed against the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cacheclip_rag import Chunk, Fresh
from cacheclip_rag.guards.fidelity import greedy
from cacheclip_rag.methods import preset
from cacheclip_rag.prompt.known_kv import choose_rows, known_kv
from cacheclip_rag.runtime.transformers.attention import block_attention
from cacheclip_rag.runtime.transformers.attention_pattern import AttentionRule, causal_pattern
from cacheclip_rag.runtime.transformers.cache import Geometry
from tests.fusion.cases import BROKEN, EXACT, Case, gap
from tests.methods.spying import few, plain, run
from tests.methods.test_own_positions import assembled


class TestApe:
    @few
    def test_the_order_of_contexts_does_not_matter(self, case: Case) -> None:
        opening, *_, closing = [
            span.segment for span in case.layout.spans if not span.is_chunk and span.segment.control
        ]
        chunks = [span.whole for span in case.layout.chunks]
        ask = Fresh("\n\nWhat is the magic number?")
        ids = []
        for order in ((0, 1, 2), (2, 0, 1)):
            segments = [opening, *(Chunk(chunks[n]) for n in order), ask, closing]
            ids.append(case.engine.prefill(segments, method=preset("ape")))
        first, second = ids
        assert gap(first.logits, second.logits) < 1e-5 * float(first.logits.abs().max())
        direct = [
            case.engine.prefill([opening, *(Chunk(chunks[n]) for n in order), ask, closing], method=preset("direct"))
            for order in ((0, 1, 2), (2, 0, 1))
        ]
        assert gap(direct[0].logits, direct[1].logits) > BROKEN

    @plain
    def test_decoding_equals_rows_run_again(self, case: Case) -> None:
        """Step by step, or question and generated tokens in one pass over the contexts alone."""
        method = preset("ape")
        geometry = method.positions(case.layout, case.layout.chunks)
        assert geometry is not None
        fused = run(case, method)
        with torch.inference_mode():
            generated, stepped = greedy(case.runtime, fused.cache, fused.logits, 6, stop=False)
        ids = torch.cat((case.layout.ids, torch.tensor(generated)))
        rows = choose_rows(known_kv(case.layout, case.layout.chunks), [])
        twin = replace(geometry, temperature=1.0)
        for step in range(1, len(generated)):
            slots = torch.cat((rows, torch.arange(case.layout.num_tokens, case.layout.num_tokens + step)))
            again, other = (self.logits(case, ids, slots, each) for each in (geometry, twin))
            assert gap(again, stepped[step]) < EXACT
            assert gap(other, stepped[step]) > BROKEN, "the temperature must show at every step"

    @torch.inference_mode()
    def logits(self, case: Case, ids: torch.Tensor, slots: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        cache = assembled(case, geometry)
        plan = causal_pattern(slots, geometry=geometry)
        found = case.runtime.run_rows(cache, ids[slots], geometry.positions_of(slots), plan, slots=slots)
        assert found is not None
        return found

    def test_merged_attention_is_the_weighted_sum(self) -> None:
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(1, 4, 3, 8, generator=generator)
        key, value = (torch.randn(1, 2, 12, 8, generator=generator) for _ in range(2))
        contexts = torch.zeros(12, dtype=torch.bool)
        contexts[2:6] = contexts[7:9] = True
        slots = torch.tensor([6, 10, 11])
        positions = torch.arange(12)
        geometry = Geometry(positions, contexts, temperature=0.8, scale=0.7)
        ours = block_attention(query, key, value, causal_pattern(slots, geometry=geometry).blocks, AttentionRule(0.35))
        for head in range(4):
            for row, slot in enumerate(slots.tolist()):
                logits = (key[0, head // 2] @ query[0, head, row]) * 0.35
                other = ~contexts & (torch.arange(12) <= slot)
                inside, outside = logits[contexts] / 0.8, logits[other]
                z_inside = float(inside.exp().sum()) ** (0.7 * 0.8)
                z_outside = float(outside.exp().sum())
                expected = (
                    z_inside * (inside.softmax(0) @ value[0, head // 2][contexts])
                    + z_outside * (outside.softmax(0) @ value[0, head // 2][other])
                ) / (z_inside + z_outside)
                assert gap(ours[0, row, head], expected) < 1e-5

    @pytest.mark.parametrize("window", [1, 2])
    def test_a_window_that_hides_every_context(self, window: int) -> None:
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(1, 1, n, 4, generator=generator) for n in (1, 8, 8))
        contexts = torch.arange(8) < 4
        geometry = Geometry(torch.arange(8), contexts, 0.9, 0.9)
        plan = causal_pattern(torch.tensor([7]), geometry=geometry)
        ours = block_attention(query, key, value, plan.blocks, AttentionRule(1.0, window=window))
        weights = (key[0, 0, -window:] @ query[0, 0, 0]).softmax(0)
        assert gap(ours[0, 0, 0], weights @ value[0, 0, -window:]) < 1e-6
