"""A fused prefill in slices, between which others go first, computes what one in a single pass does."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import pytest
import torch

from cacheclip_rag.base.clock import PhaseClock
from cacheclip_rag.fusion import fuse as module
from cacheclip_rag.runtime import Slices
from cacheclip_rag.runtime.base import KVMatch
from cacheclip_rag.store.codecs import Frame
from tests.conftest import CHUNKS, rag_prompt
from tests.fusion.cases import BROKEN, EXACT, gap, make_engine


def held() -> int:
    """Number of payloads in memory, and of matches that keep KV of the prefix cache."""
    gc.collect()
    return sum(type(each) is Frame or (type(each) is KVMatch and each.parts is not None) for each in gc.get_objects())


class InSlices:
    """One plan in a single pass and in slices of so many tokens."""

    def __init__(self, tiny_models: dict[str, str], kind: str, method: str, most: int) -> None:
        engine = make_engine(tiny_models[kind], tiny_models["auxiliary"], method=method, prefix_cache_bytes=0)
        engine.precompute(CHUNKS)
        self.plan = engine.plan(rag_prompt(CHUNKS), recompute_ratio=0.4)
        self.kv_sources = engine.parts.kv_sources(self.plan.method)
        self.pauses: list[tuple[int, int]] = []
        self.whole = self._fused()
        self._held = held()
        self.cut = self._fused(Slices(most, self._pause))

    def _pause(self, done: int, work: int) -> None:
        if done and len(self.pauses) <= 1:  # once: to look at all objects of a long run takes a second
            assert held() <= self._held, "a prompt that waits holds its cache alone"  # others may have gone
        self.pauses.append((done, work))

    @torch.inference_mode()
    def _fused(self, slices: Slices | None = None) -> Any:
        runtime, capacity = self.kv_sources.primary.runtime, self.plan.layout.num_tokens + 8
        return runtime.fuse(self.plan, self.kv_sources, capacity=capacity, clock=PhaseClock(), slices=slices)

    def gap(self) -> float:
        """Of logits and KV."""
        length = self.plan.layout.num_tokens
        layers = zip(self.whole.state.layers, self.cut.state.layers, strict=True)
        pairs = [pair for one, other in layers for pair in ((one.keys, other.keys), (one.values, other.values))]
        assert self.cut.state.get_seq_length() == self.whole.state.get_seq_length() == length
        of_kv = [gap(one[:, :, :length], other[:, :, :length]) for one, other in pairs]
        return max(gap(self.whole.logits, self.cut.logits), *of_kv)


@pytest.mark.parametrize("method", ["cacheclip", "epic"])
@pytest.mark.parametrize("kind", ["llama", "qwen2-sliding"])
def test_slices_compute_what_one_pass_does(tiny_models: dict[str, str], kind: str, method: str) -> None:
    each = InSlices(tiny_models, kind, method, 24)
    assert each.gap() < EXACT and each.cut.recomputed == each.whole.recomputed
    first, *later = each.pauses if method == "cacheclip" else [(0, each.pauses[0][1]), *each.pauses]
    assert first[0] == 0, "others go first once tokens are scored, too"
    done = [number for number, _ in later]
    assert len(done) >= 3 and done == sorted({*done}) and {work for _, work in each.pauses} == {later[0][1]}
    whole = max(sum(span.start <= row < span.stop for row in each.cut.recomputed) for span in each.plan.reused)
    most = max(b - a for a, b in pairwise([0, *done, later[0][1]]))
    assert most <= 36 + (whole if method == "cacheclip" else 0)


def test_a_corrected_chunk_is_not_cut(tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: its computed tokens are in two passes, each of which corrects the others by its own."""
    monkeypatch.setattr(
        module._FusedPass,
        "_stops",
        lambda self, slices, plan, rows: slices.stops(len(rows)),
    )
    assert InSlices(tiny_models, "llama", "cacheclip", 24).gap() > BROKEN
