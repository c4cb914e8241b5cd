"""Texts, their entries and their sources, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cacheclip_rag.chunks.texts import ChunkTexts
from cacheclip_rag.store import ChunkStore, TenantStore, chunk_key

ONE, TWO, THREE = (f"The lamp of lighthouse number {n} burned oil." for n in range(3))


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ChunkStore:
    return ChunkStore.open(tmp_path if request.param == "disk" else None)


@pytest.fixture
def library(store: ChunkStore) -> ChunkTexts:
    return ChunkTexts(TenantStore(store, "ours"))


def write(store: ChunkStore, text: str, *models: str, namespace: str = "ours") -> None:
    tenant = TenantStore(store, namespace)
    for model in models:
        name = chunk_key(
            model_fingerprint=model, prefix_ids=[], chunk_ids=[*map(ord, text)], rope_pin="", namespace=namespace
        )
        tenant.put(name, torch.ones(1, 2, 1, 3, 4), "float32", text=text)


def found(library: ChunkTexts, prompt: str) -> list[str]:
    return [prompt[match.start : match.stop] for match in library.index.find(prompt)]


def test_added_texts_are_known_and_found(library: ChunkTexts) -> None:
    library.add(ONE)
    library.add(TWO, "node", "report")
    assert library.index.known(ONE) and not library.index.known(THREE)
    assert found(library, f"{TWO} {THREE} {ONE}") == [TWO, ONE]
    prompt = f"{THREE} {ONE}"
    assert [prompt[m.start : m.stop] for m in library.index.find(prompt, [THREE])] == [THREE, ONE]


def test_release_deletes_every_entry_of_a_text(store: ChunkStore, library: ChunkTexts) -> None:
    for text in (ONE, TWO):
        write(store, text, "primary", "primary in another context", "auxiliary")
        library.add(text)
    assert library.release([ONE, THREE]) == 1
    assert store.stats().entries == 3
    assert not library.index.known(ONE) and found(library, f"{ONE} {TWO}") == [TWO]
    assert library.release([ONE]) == 0


def release_sources(library: ChunkTexts, gone: list[str], keep: Sequence[str] = ()) -> int:
    """What an engine does with sources: texts that come from nowhere else go, then the sources."""
    released = library.release(library.orphans(gone, keep))
    library.remove_sources(gone)
    return released


def test_namespaces_share_nothing(store: ChunkStore, library: ChunkTexts) -> None:
    theirs = ChunkTexts(TenantStore(store, "theirs"))
    for each, namespace in ((library, "ours"), (theirs, "theirs")):
        write(store, ONE, "model", namespace=namespace)
        each.add(ONE, "node")
    assert release_sources(library, ["node"]) == 1
    assert not library.index.known(ONE) and theirs.index.known(ONE) and store.stats().entries == 1
    assert theirs.texts() == [ONE] and library.texts() == []


class TestSources:
    def test_a_text_goes_with_its_last_source(self, store: ChunkStore, library: ChunkTexts) -> None:
        write(store, ONE, "model")
        library.add(ONE, "node 1")
        library.add_source(ONE, "node 2")
        assert library.orphans(["node 1"]) == [] and library.orphans(["node 1", "node 2"]) == [ONE]
        assert release_sources(library, ["node 1", "no such node"]) == 0 and library.index.known(ONE)
        assert release_sources(library, ["node 2"]) == 1 and not library.index.known(ONE)

    def test_a_document_takes_its_sources_along(self, store: ChunkStore, library: ChunkTexts) -> None:
        for number, text in enumerate((ONE, TWO)):
            write(store, text, "model")
            library.add(text, f"node {number}", "report")
        library.add_source(TWO, "elsewhere", "letter")
        assert release_sources(library, ["report"]) == 1
        assert library.index.known(TWO) and library.texts() == [TWO] and library.texts("node 1") == []

    def test_texts_to_keep_stay_though_their_source_goes(self, store: ChunkStore, library: ChunkTexts) -> None:
        write(store, ONE, "model")
        library.add(ONE, "node")
        assert release_sources(library, ["node"], keep=[ONE]) == 0
        assert library.index.known(ONE) and store.stats().entries == 1 and library.texts() == []

    def test_sources_of_some_texts_alone_are_removed(self, library: ChunkTexts) -> None:
        for text in (ONE, TWO):
            library.add(text, "node")
        library.remove_sources(["node"], texts=[ONE])
        assert library.texts("node") == [TWO] and library.index.known(ONE)

    def test_a_source_does_not_make_a_text_known(self, library: ChunkTexts) -> None:
        library.add_source(ONE, "deleted just now")
        assert not library.index.known(ONE) and found(library, ONE) == [] and library.texts() == [ONE]
