"""Engines in one process and across several, and what those of two tenants see of each other."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_ingest.library import Library, LibrarySettings

import cacheclip_rag
from cacheclip_rag import CacheClipEngine, ConfigurationError, EngineConfig, SamplingParams, get_engine
from cacheclip_rag.models.load import load_model
from cacheclip_rag.plugins import cache_home
from cacheclip_rag.store import Catalog, ChunkStore, DiskBackend, StoreReader, TenantStore
from cacheclip_rag.store.process import Writer
from tests.conftest import CHUNKS, Make, Models, Patch, rag_prompt, raising
from tests.engine.asking import SHORT, rag
from tests.store import samples

OPEN_FILES = Path("/proc/self/fd")


PUBLIC = """
Answer CacheClipEngine CacheClipError CallOptions CertificateError Chunk ConfigurationError DigestMismatchError
DocumentError DownloadError EncodingError EngineConfig Event Fresh FusionStats MissingExtraError ModelError Plan
PromptTooLongError SamplingParams Segment ServerError StoreError TokenLogprob ToolCall Trace
UnknownModelError UnsupportedModelError WarmUp __version__ call_schema get_engine
"""


class TestProcess:
    def test_constructor_costs_nothing(self, tmp_path: Path, monkeypatch: Patch) -> None:
        never = raising(AssertionError("no model is looked for before it is used"))
        monkeypatch.setattr("cacheclip_rag.models.load.guest_loader", never)
        seconds = []
        for n in range(3):
            begin = time.perf_counter()
            CacheClipEngine(primary="qwen2.5-coder-1.5b", store=str(tmp_path / f"store{n}"))
            seconds.append(time.perf_counter() - begin)
        assert min(seconds) < 0.010 and not list(tmp_path.iterdir()), "nothing is written either"

    def test_get_engine_is_one_per_settings(self, tiny_models: Models, tmp_path: Path) -> None:
        options = {"primary": tiny_models["llama"], "auxiliary": None, "store": str(tmp_path)}
        with ThreadPoolExecutor(8) as pool:
            first, *others = pool.map(lambda _: get_engine(**options), range(8))
        same = (get_engine(EngineConfig(**options)), get_engine(EngineConfig(**options), method="auto"))
        assert all(each is first for each in (*others, *same))
        assert all(
            get_engine(**options, **more) is not first for more in ({"recompute_ratio": 0.3}, {"namespace": "other"})
        )

    @pytest.mark.skipif(not OPEN_FILES.is_dir(), reason="this system does not list a process's open files")
    def test_no_file_is_left_open(self, make: Callable[..., CacheClipEngine], tmp_path: Path) -> None:
        make().generate(rag(CHUNKS), SHORT)  # what the process opens once

        def opened() -> list[str]:
            links = [os.readlink(each) for each in OPEN_FILES.iterdir() if each.exists()]
            # the lock by which others know that this process lives stays until it ends
            return sorted(link for link in links if str(tmp_path) in link and "/writers/" not in link)

        engine = make(stored=CHUNKS, store=str(tmp_path))
        assert engine.generate(rag(CHUNKS), SHORT).stats.hits
        in_use = opened()
        assert in_use  # the catalog
        for number in range(3):
            engine.generate(rag(CHUNKS), SHORT)
            engine.precompute([f"Text number {number} of the harbour master."])
            events = engine.stream(rag(CHUNKS), SHORT)
            next(events)
            events.close()
            with pytest.raises(ConfigurationError):
                engine.generate(rag(CHUNKS), SHORT, method="nothing")
        assert opened() == in_use
        engine.close()
        assert opened() == []

    def test_engines_share_weights(self, make: Callable[..., CacheClipEngine]) -> None:
        assert make().primary is make(namespace="other").primary

    def test_what_loads_no_torch(self) -> None:
        """The package, settings, options of a call, and what adapters import."""
        program = """
import sys
import cacheclip_rag

heavy = {"torch", "transformers", "numpy", "langchain_core", "llama_index"}
assert not heavy & set(sys.modules)
from cacheclip_rag import CallOptions, EngineConfig
import cacheclip_rag.answering.options, cacheclip_rag.adapters.aio
EngineConfig(), EngineConfig(method="epic", recompute_ratio=0.1), CallOptions()
assert "torch" not in sys.modules
"""
        subprocess.run([sys.executable, "-c", program], check=True)

    def test_public_names(self) -> None:
        """A name that is added here is a promise to keep."""
        assert sorted(cacheclip_rag.__all__) == PUBLIC.split()
        assert all(getattr(cacheclip_rag, name) is not None for name in cacheclip_rag.__all__)
        assert dir(cacheclip_rag) == sorted(cacheclip_rag.__all__)
        with pytest.raises(AttributeError, match="nonsense"):
            cacheclip_rag.nonsense  # noqa: B018


@pytest.mark.parametrize("url", ["ftp://host/store", "s3://"])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="s3://bucket/prefix"):
        CacheClipEngine(store=url)


class TestAnotherWorkingDirectory:
    """A path is read once, when what has it is made: a server or a notebook may go elsewhere before its first use."""

    @pytest.fixture
    def here(self, tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        for name in ("llama", "auxiliary"):
            shutil.copytree(tiny_models[name], tmp_path / "here" / name)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        yield tmp_path / "here"
        assert not [*(tmp_path / "elsewhere").iterdir()], "nothing is written there"

    @pytest.mark.long
    def test_of_an_engine(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CACHECLIP_HOME", f"home-of-{here.parent.name}")
        cache_home()
        given: dict[str, Any] = {"primary": "llama", "auxiliary": "auxiliary", "store": "store", "device": "auto"}
        engine = CacheClipEngine(**given, method="cacheclip")
        monkeypatch.chdir(here.parent / "elsewhere")
        assert engine.precompute(CHUNKS[:2]) == 2
        assert engine.generate(rag(CHUNKS[:2]), SHORT).stats.hits == 2
        assert (engine.primary.fingerprint, engine.unload()) == (load_model(here / "llama").fingerprint, None)
        assert engine.generate(rag(CHUNKS[:2]), SHORT).stats.hits == 2, "loaded again"
        assert cache_home() == here / f"home-of-{here.parent.name}"
        engine.close()
        with closing(
            CacheClipEngine(**{**given, "primary": here / "llama", "auxiliary": None, "store": here / "store"})
        ) as other:
            assert other.is_stored(CHUNKS[0])

    @pytest.mark.parametrize("folder", ["store", "./store", "../here/store"])
    def test_of_a_store(self, here: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
        store, library, catalog = ChunkStore.open(folder), Library(folder), Catalog(Path(folder))
        backend, reader = DiskBackend(folder), StoreReader(folder, "t")
        writer = Writer(Path(folder))
        monkeypatch.chdir(here.parent / "elsewhere")
        samples.put(TenantStore(store, "t"), 1)
        key = samples.key(1)
        assert torch.equal(reader.get(key, codec="float32").tensor(), samples.kv(1))
        assert len(writer.name) == 32 and [*backend.list()] == [key] == [*catalog.keys("t")]
        library.fix_settings(LibrarySettings())
        assert {*os.listdir(here / "store")} >= {"catalog.sqlite3", "library.sqlite3", "kv", "writers"}


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
