"""What engines of two tenants see of each other, what callers see of hits, and what operators see of tiers."""

from pathlib import Path

import pytest

from cacheclip_rag import ConfigurationError, SamplingParams
from cacheclip_rag.store import ChunkStore
from tests.conftest import Make, rag_prompt

FEW = SamplingParams(max_tokens=3)


def test_the_store_of_an_engine_is_its_tenants(make: Make, tmp_path: Path, chunks: list[str]) -> None:
    north, south = (make(store=tmp_path, namespace=name) for name in ("north", "south"))
    north.precompute(chunks[:2])
    assert north.store.stats().entries > 0 and south.store.stats().entries == 0 == len(south.store.keys())
    for key in north.store.keys():  # noqa: SIM118 - not a dict
        assert key not in south.store and south.store.get(key) is None and south.store.delete([key]) == 0
        assert key in north.store and north.store.get(key) is not None
    assert south.release(chunks[:2]) == 0 and north.is_stored(chunks[0])
    assert south.generate(rag_prompt(chunks[:2], "Why?"), FEW).stats.hits == 0
    assert north.generate(rag_prompt(chunks[:2], "Why?"), FEW).stats.hits == 2


def test_a_namespace_that_cannot_be_written_is_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="half a character"):
        make(namespace="\ud800").precompute(["A text of a tenant without a name that can be written."])


class TestTiers:
    def test_metrics_have_every_tier(self, make: Make, tmp_path: Path, chunks: list[str]) -> None:
        engine = make(store=tmp_path, memory_bytes=1 << 26)
        assert "store_hits" not in engine.metrics.to_prometheus(), "the store is not open yet"
        engine.precompute(chunks[:2])
        engine.close()
        again = make(store=tmp_path, memory_bytes=1 << 26)
        for _ in range(2):
            again.generate(rag_prompt(chunks[:2], "When?"), FEW)
        found = again.metrics.snapshot()
        assert found['store_hits_total{tier="disk"}'] >= 4 and found['store_hits_total{tier="memory"}'] >= 2
        assert found['store_misses_total{tier="memory"}'] >= 4 and found['store_damaged_total{tier="disk"}'] == 0
        assert found['store_bytes{tier="disk"}'] == ChunkStore.open(tmp_path).stats().bytes
        assert 0 < found['store_bytes{tier="memory"}'] <= found['store_bytes{tier="disk"}']
        assert found['store_read_seconds_total{tier="disk"}'] > 0
        text = again.metrics.to_prometheus()
        assert "# TYPE cacheclip_store_bytes gauge" in text and "# TYPE cacheclip_store_hits_total counter" in text
        assert '\ncacheclip_store_evictions_total{tier="disk"} 0\n' in text
