"""A library that is encoded again: nothing is lost, nothing old stays, and it goes on after an interruption."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.chunks.behind import WriteBehind
from cacheclip_rag.chunks.caches import ChunkCaches
from cacheclip_rag.chunks.context import CONTEXTS, ChunkContext
from cacheclip_rag.chunks.trained import TrainedContext, trained_context_path
from cacheclip_rag.cli import main
from cacheclip_rag.errors import ModelError
from cacheclip_rag.ingest.library import Library
from cacheclip_rag.ingest.upgrade import UpgradeReport, plan_upgrade, upgrade
from cacheclip_rag.runtime.base import weights_digest
from tests.conftest import rag_prompt
from tests.ingest.test_job import Workshop

PASSAGES = CONTEXTS["passages"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))


class Upgraded(Workshop):
    """A workshop whose engines are opened anew, as commands do."""

    def __init__(self, root: Path, models: dict[str, str]) -> None:
        super().__init__(root, models)
        self._models = models
        self.settings = dataclasses.replace(self.settings, chunk_context="auto")

    def open(self, **options: Any) -> CacheClipEngine:
        models = {"primary": self._models["llama"], "auxiliary": self._models["auxiliary"]}
        return CacheClipEngine(**{**models, "store": str(self.store), **options})

    def train(self, seed: int = 0) -> ChunkContext:
        runtime: Any = self.engine.primary
        shape = (runtime.num_layers, 2, runtime.num_kv_heads, 4, runtime.head_dim)
        kv = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        made = TrainedContext(weights_digest(runtime.fingerprint), kv)
        made.save(trained_context_path(made.primary_sha256))
        return ChunkContext(trained=made.sha256)

    @property
    def texts(self) -> list[str]:
        return list(dict.fromkeys(text for _, _, text in self.library.passages()))

    def answered(self) -> int:
        """Hits of an answer over all texts, which stores nothing."""
        prompt = rag_prompt(self.texts)
        return self.open(method="direct", on_miss="ignore").generate(prompt, SamplingParams(max_tokens=1)).stats.hits

    def stored(self, context: ChunkContext) -> list[bool]:
        """Whether each text is stored behind this context."""
        caches = self.open().parts.primary(context)
        return [text in caches for text in self.texts]


@pytest.fixture
def shop(tmp_path: Path, tiny_models: dict[str, str], chunks: list[str]) -> Upgraded:
    made = Upgraded(tmp_path, tiny_models)
    made.write("a.txt", "\n\n".join(chunks[:2]))
    made.write("b.md", "# Birds\n\n" + chunks[2])
    made.write("copy.txt", chunks[0])
    made.run()
    return made


def test_an_auxiliary_of_the_same_weights_keeps_its_kv(
    tmp_path: Path, tiny_models: dict[str, str], chunks: list[str]
) -> None:
    """The auxiliary's chunks stand behind the shared prefix, which was the primary's context before."""
    models = {"llama": tiny_models["llama"], "auxiliary": tiny_models["llama"]}
    shop = Upgraded(tmp_path, models)
    shop.engine.close()
    shop.engine = shop.open(chunk_context="prefix")
    shop.settings = dataclasses.replace(shop.settings, chunk_context="prefix", auxiliary=models["auxiliary"])
    shop.write("a.txt", "\n\n".join(chunks))
    shop.run()
    count = len(shop.texts)
    assert upgrade(shop.library, shop.open()) == UpgradeReport(1, count, count, 0, 0)
    assert all(shop.stored(PASSAGES)) and all(shop.stored(CONTEXTS["prefix"]))
    assert upgrade(shop.library, shop.open()) == UpgradeReport(1, count, 0, 0, 0)


def test_after_a_training_everything_is_encoded_again_and_the_old_goes(shop: Upgraded) -> None:
    entries, before = shop.engine.store.stats().entries, shop.answered()
    auxiliary = shop.engine.parts.auxiliary_caches
    assert all(shop.stored(PASSAGES)) and shop.library.contexts() == [PASSAGES]
    trained, engine = shop.train(), shop.open()
    count = len(shop.texts)
    assert upgrade(shop.library, engine) == UpgradeReport(3, count, count, count, 0)
    assert all(shop.stored(trained)) and not any(shop.stored(PASSAGES))
    assert shop.library.contexts() == [trained] and all(text in auxiliary for text in shop.texts)
    # the KV of the passages themselves went; the shared prefix was stored for both contexts
    assert shop.open().store.stats().entries == entries
    assert upgrade(shop.library, shop.open()) == UpgradeReport(3, count, 0, 0, 0)
    assert shop.answered() == before


def test_once_more_after_another_training(shop: Upgraded) -> None:
    first = shop.train()
    upgrade(shop.library, shop.open())
    second = shop.train(seed=1)
    report = upgrade(shop.library, shop.open())
    assert report.removed == report.computed == len(shop.texts)
    assert all(shop.stored(second)) and not any(shop.stored(first))


@pytest.mark.parametrize("at", [1, 2, 4])
def test_interrupted_nothing_is_lost_and_it_goes_on(shop: Upgraded, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    trained, count, calls = shop.train(), len(shop.texts), 0
    write = ChunkCaches.write_many

    def stopping(self: ChunkCaches, texts: list[str], behind: WriteBehind) -> list[bool]:
        nonlocal calls
        if self.context == trained:
            calls += 1
            if calls == at:
                raise KeyboardInterrupt
        return write(self, texts, behind)

    monkeypatch.setattr(ChunkCaches, "write_many", stopping)
    with pytest.raises(KeyboardInterrupt):
        upgrade(shop.library, shop.open())
    new, old = shop.stored(trained), shop.stored(PASSAGES)
    assert sum(new) == at - 1 and all(one != other for one, other in zip(new, old, strict=True))
    assert set(shop.library.contexts()) == {PASSAGES, trained}
    assert (shop.answered() > 0) == (at > 1), "answers take what is there"
    report = upgrade(shop.library, shop.open())
    assert (report.computed, report.removed, report.evicted) == (count - at + 1, count - at + 1, 0)
    assert all(shop.stored(trained)) and not any(shop.stored(PASSAGES))


def test_the_old_goes_only_when_the_new_is_there(shop: Upgraded, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = shop.train()
    # as if the store took nothing
    monkeypatch.setattr(ChunkCaches, "write_many", lambda self, texts, behind: [False] * len(texts))
    report = upgrade(shop.library, shop.open())
    assert (report.removed, report.evicted) == (0, len(shop.texts)) and all(shop.stored(PASSAGES))
    assert set(shop.library.contexts()) == {PASSAGES, trained}, "not done"


def test_a_full_store_stays_within_its_limit(shop: Upgraded) -> None:
    trained, engine = shop.train(), shop.open()
    limit = engine.store.store.stats().bytes + engine.chunk_caches()[0].stored_bytes(64)
    engine.store.store.set_limit(limit)
    report = upgrade(shop.library, engine)
    assert report.evicted == 0 and all(shop.stored(trained))
    assert engine.store.store.stats().bytes <= limit


def test_other_entries_of_a_text_stay(shop: Upgraded) -> None:
    """Of other methods, and of other tenants."""
    engine = shop.open()
    engine.precompute(shop.texts, method="cacheclip-paper")
    other = shop.open(namespace="other")
    other.precompute(shop.texts)
    shop.train()
    upgrade(shop.library, shop.open())
    assert all(shop.stored(CONTEXTS["prefix"])) and not any(shop.stored(PASSAGES))
    behind = shop.open(namespace="other").parts.primary(PASSAGES)
    assert all(text in behind for text in shop.texts)


def test_to_another_context_by_name(shop: Upgraded) -> None:
    shop.train()
    report = upgrade(shop.library, shop.open(chunk_context="prefix"))
    assert report.computed == report.removed == len(shop.texts)
    settings = shop.library.settings
    assert settings == dataclasses.replace(shop.settings, chunk_context="prefix")
    assert all(shop.stored(CONTEXTS["prefix"])) and shop.library.contexts() == [CONTEXTS["prefix"]]


def test_a_context_that_is_missing_changes_nothing(shop: Upgraded) -> None:
    with pytest.raises(ModelError, match="no trained context"):
        upgrade(shop.library, shop.open(chunk_context="trained"))
    assert shop.library.settings == shop.settings and all(shop.stored(PASSAGES))


def test_a_library_that_did_not_record_its_contexts(shop: Upgraded) -> None:
    settings = dataclasses.replace(shop.settings, chunk_context="passages")
    shop.library.change_chunk_context("passages")
    shop.library._database.execute("DELETE FROM meta WHERE name = 'contexts'")
    assert shop.library.settings == settings and shop.library.contexts() == [PASSAGES]
    trained = shop.train()
    assert upgrade(shop.library, shop.open(chunk_context="auto")).removed == len(shop.texts)
    assert shop.library.contexts() == [trained]
    shop.library._database.execute("UPDATE meta SET value = 'damaged' WHERE name = 'contexts'")
    assert shop.library.contexts() == []


def test_new_documents_are_encoded_behind_the_new_context(shop: Upgraded) -> None:
    trained = shop.train()
    shop.engine = shop.open()
    shop.write("new.txt", "A frigate anchored off the eastern cliffs for three days in October.")
    shop.run()
    assert shop.library.contexts() == [PASSAGES, trained]
    report = upgrade(shop.library, shop.open())
    assert report.removed == report.computed < report.chunks == len(shop.texts)


def test_a_plan_says_what_is_then_done(shop: Upgraded) -> None:
    assert plan_upgrade(shop.library, shop.open()).computed == 0
    shop.train()
    before = plan_upgrade(shop.library, shop.open())
    assert (before.chunks, before.computed) == (len(shop.texts), len(shop.texts)) and before.seconds > 0
    assert all(shop.stored(PASSAGES)) and shop.library.contexts() == [PASSAGES]


class TestCommand:
    @pytest.fixture
    def cacheclip(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
        def run(*arguments: Any) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "argv", ["cacheclip", *map(str, arguments)])
            try:
                main()
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 0
            return (code, *capsys.readouterr())

        return run

    def test_json(self, cacheclip: Any, shop: Upgraded) -> None:
        trained, count = shop.train(), len(shop.texts)
        upgrade_store = ("ingest", "--upgrade", "--store", shop.store, "--json")
        code, out, _ = cacheclip(*upgrade_store, "--dry-run")
        assert code == 0 and json.loads(out)["computed"] == count
        code, out, _ = cacheclip(*upgrade_store)
        assert code == 0
        expected = {"documents": 3, "chunks": count, "computed": count, "removed": count, "evicted": 0}
        assert json.loads(out) == {"store": str(shop.store), **expected}
        assert all(shop.stored(trained))
        code, out, _ = cacheclip(*upgrade_store[:-1], "--chunk-context", "passages")
        assert code == 0 and f"{count} computed; {count} entries of earlier chunk contexts removed" in out
        assert Library.open(shop.store).settings.chunk_context == "passages"  # type: ignore[union-attr]

    def test_stopped_by_hand(self, cacheclip: Any, shop: Upgraded, monkeypatch: pytest.MonkeyPatch) -> None:
        shop.train()

        def stop(self: CacheClipEngine, texts: list[str]) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(CacheClipEngine, "precompute", stop)
        code, out, err = cacheclip("ingest", "--upgrade", "--store", shop.store)
        assert (code, out) == (130, "") and err.endswith("the same command continues from there.\n")

    def test_bad_usage(self, cacheclip: Any, shop: Upgraded, tmp_path: Path) -> None:
        code, _, err = cacheclip("ingest", shop.corpus, "--upgrade", "--store", shop.store)
        assert code == 2 and "--upgrade encodes what is stored and reads no documents" in err
        code, _, err = cacheclip("ingest", "--store", shop.store)
        assert code == 2 and "expected documents or folders, got none" in err
        code, _, err = cacheclip("ingest", "--upgrade", "--store", tmp_path / "none")
        assert code == 1 and "there is no store at" in err and not (tmp_path / "none").exists()
