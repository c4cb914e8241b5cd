"""Texts, their entries and their sources, without a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheclip_rag.chunks.texts import ChunkTexts
from cacheclip_rag.store import ChunkStore, TenantStore, chunk_key

ONE, TWO = (f"The lamp of lighthouse number {n} burned oil." for n in range(2))


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ChunkStore:
    return ChunkStore.open(tmp_path if request.param == "disk" else None)


@pytest.fixture
def texts(store: ChunkStore) -> ChunkTexts:
    return ChunkTexts(TenantStore(store, "ours"))


def write(store: ChunkStore, text: str, *, namespace: str = "ours") -> None:
    ids: Any = {"model_fingerprint": "model", "prefix_ids": [], "chunk_ids": [*map(ord, text)], "rope_pin": ""}
    kv, name = torch.ones(1, 2, 1, 3, 4), chunk_key(**ids, namespace=namespace)
    TenantStore(store, namespace).put(name, kv, "float32", text=text)


def release_sources(texts: ChunkTexts, gone: list[str], keep: Sequence[str] = ()) -> int:
    """What an engine does with sources: texts that come from nowhere else go, then the sources."""
    released = texts.release(texts.orphans(gone, keep))
    texts.remove_sources(gone)
    return released


def test_namespaces_share_nothing(store: ChunkStore, texts: ChunkTexts) -> None:
    theirs = ChunkTexts(TenantStore(store, "theirs"))
    for each, namespace in ((texts, "ours"), (theirs, "theirs")):
        write(store, ONE, namespace=namespace)
        each.add(ONE, "node")
    assert release_sources(texts, ["node"]) == 1
    assert not texts.index.known(ONE) and theirs.index.known(ONE) and store.stats().entries == 1
    assert theirs.texts() == [ONE] and texts.texts() == []


class TestSources:
    def test_a_text_goes_with_its_last_source(self, store: ChunkStore, texts: ChunkTexts) -> None:
        write(store, ONE)
        texts.add(ONE, "node 1")
        texts.add_source(ONE, "node 2")
        assert texts.orphans(["node 1"]) == [] and texts.orphans(["node 1", "node 2"]) == [ONE]
        assert release_sources(texts, ["node 1", "no such node"]) == 0 and texts.index.known(ONE)
        assert release_sources(texts, ["node 2"]) == 1 and not texts.index.known(ONE)

    def test_a_document_takes_its_sources_along(self, store: ChunkStore, texts: ChunkTexts) -> None:
        for number, text in enumerate((ONE, TWO)):
            write(store, text)
            texts.add(text, f"node {number}", "report")
        texts.add_source(TWO, "elsewhere", "letter")
        assert release_sources(texts, ["report"]) == 1
        assert texts.index.known(TWO) and texts.texts() == [TWO] and texts.texts("node 1") == []

    def test_texts_to_keep_stay_though_their_source_goes(self, store: ChunkStore, texts: ChunkTexts) -> None:
        write(store, ONE)
        texts.add(ONE, "node")
        assert release_sources(texts, ["node"], keep=[ONE]) == 0
        assert texts.index.known(ONE) and store.stats().entries == 1 and texts.texts() == []

    def test_sources_of_some_texts_alone_are_removed_and_make_no_text_known(self, texts: ChunkTexts) -> None:
        texts.add_source(ONE, "deleted just now")
        assert not texts.index.known(ONE) and not texts.index.find(ONE) and texts.texts() == [ONE]
        for text in (ONE, TWO):
            texts.add(text, "node")
        texts.remove_sources(["node"], texts=[ONE])
        assert texts.texts("node") == [TWO] and texts.index.known(ONE)
