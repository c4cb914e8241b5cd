"""Methods that put tokens elsewhere than in their places, against plain transformers at these positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheclip_rag import Chunk, Fresh
from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.prompt.known_kv import choose_rows, known_kv
from cacheclip_rag.runtime.transformers.cache import Geometry, cache_argument
from tests.conftest import CHUNKS, lose
from tests.fusion.cases import BROKEN, EXACT, Case, gap, reference_model, scatter_cache
from tests.methods.spying import made, plain, run


@torch.inference_mode()
def placed_reference(case: Case, cache: Any, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows over assembled KV by an unmodified eager model: own positions, and all contexts visible to all rows."""
    num_tokens = case.layout.num_tokens
    past = scatter_cache(cache, num_tokens, rows)
    hidden = rows[:, None] < torch.arange(num_tokens)[None]
    geometry: Geometry = cache.geometry
    if geometry.contexts is not None:
        hidden = hidden & ~geometry.contexts[None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
    model = reference_model(case.folder)
    output = model(
        input_ids=case.layout.ids[rows][None],
        position_ids=positions[rows][None],
        attention_mask=mask,
        **cache_argument(model, past),
    )
    return output.logits[0, -1]


def assembled(case: Case, geometry: Geometry) -> Any:
    cache = case.runtime.new_cache(case.layout.num_tokens + 8)
    cache.geometry = geometry
    for start, kv in case.kv.items():
        cache.fill(kv, slot=start, position=cache.position_of(start))
    return cache


class TestOwnPositions:
    @plain
    def test_plain_transformers_at_these_positions(self, case: Case) -> None:
        method = made("ape", temperature=1.0, scale=1.0)
        geometry = method.positions(case.layout, case.layout.chunks)
        assert geometry is not None and not torch.equal(geometry.positions, torch.arange(case.layout.num_tokens))
        rows = choose_rows(known_kv(case.layout, case.layout.chunks), [])
        expected = placed_reference(case, assembled(case, geometry), rows, geometry.positions)
        assert gap(run(case, method).logits, expected) < EXACT
        assert gap(run(case, "direct").logits, expected) > BROKEN

    def test_what_is_generated_comes_after_everything(self, case_of: Any) -> None:
        """Where a prompt ends in a chunk that is not the longest, its last position is not the largest."""
        case, method = case_of("llama"), made("ape")
        opening, *_ = (span.segment for span in case.layout.spans)
        texts = sorted(CHUNKS[:3], key=len, reverse=True)
        case.engine.precompute(texts, method=method)
        segments = [opening, Fresh("What is the magic number?"), *map(Chunk, texts)]
        result = case.engine.prefill(segments, method=method, question="What?")
        positions, num_tokens = result.cache.geometry.positions, result.layout.num_tokens
        assert result.stats.hits == 3 and int(positions[-1]) < int(positions.max())
        largest = int(positions.max())
        asked: list[int] = []
        hook = case.runtime.model.base_model.register_forward_pre_hook(
            lambda module, args, kwargs: asked.extend(kwargs["position_ids"].flatten().tolist()), with_kwargs=True
        )
        try:
            for token in (5, 6, 7):
                case.runtime.decode_step(result.cache, token)
        finally:
            hook.remove()
        assert asked == [largest + 1, largest + 2, largest + 3]
        assert result.cache.position_of(num_tokens) == largest + 1 and result.cache.position_of(0) == 0

    def test_a_damaged_chunk_is_placed_as_text(self, case_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        case = case_of("llama")
        caches = case.engine.parts.models.caches_after_prefix
        lost = case.layout.chunks[1].whole
        lose(monkeypatch, caches, lost)
        result = run(case, "ape")
        assert (result.stats.hits, result.stats.misses) == (2, 1) and result.missing == (lost,)
        stored = [s for s in case.layout.chunks if s.whole != lost]
        assert torch.equal(result.cache.geometry.positions, made("ape").positions(case.layout, stored).positions)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"temperature": 0}, "temperature must be above 0 and at most 10"),
            ({"scale": True}, "scale must be above 0"),
        ],
    )
    def test_wrong_settings(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            made("ape", **changes)
