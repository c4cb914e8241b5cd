"""Chunks that are missing, damaged, shared or evicted."""

import copy
import json
import pickle
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
import torch

from cacheclip_rag import CacheClipEngine, Chunk, ConfigurationError, Fresh, PromptTooLongError, get_engine
from cacheclip_rag.answering import pipeline
from cacheclip_rag.methods import preset, vary
from cacheclip_rag.methods.direct import Direct
from cacheclip_rag.methods.full import Full
from tests.conftest import Make, Models, Patch, some_of
from tests.engine.asking import SHORT, check_sums, logits, rag

BEHIND_PASSAGES = vary(preset("epic"), {"chunk_context": "passages"})
MARKED = (
    "The **boiler** of the *northern* hall has **four** valves, of which **two** are `closed` in **winter**. The "
    "*keeper* reads the **pressure** at `six` in the **morning** and writes it into the **red** book. If the "
    "**needle** stands **above** the *third* mark, the **outer** valve is **opened** by a **quarter** turn. The "
    "**pump** of the *eastern* wing was **replaced** in `1987`, and its **bearing** needs **grease** every **month**."
)
GERMAN = (
    "Die Öfen der größeren Häuser müssen jährlich überprüft werden. Für die Prüfung ist die zuständige Behörde mit "
    "geeigneten Geräten ausgerüstet. Übermäßige Rückstände führen zu Störungen, die für die Bewohner gefährlich "
    "wären. Künftig würden höhere Gebühren fällig. Für ältere Gebäude gelten möglicherweise größere Beträge."
)
GREEK = (
    "Οι λέβητες των μεγάλων κτιρίων πρέπει να ελέγχονται κάθε χρόνο. Η αρμόδια αρχή "
    "έχει τα κατάλληλα όργανα για την εξέταση, και η πίεση μετράται κάθε πρωί στις έξι. Αν η "
    "βελόνα περάσει το τρίτο σημάδι, ανοίγεται η εξωτερική βαλβίδα."
)


FRENCH = (
    "Le château fut bâti près de la rivière par un maître maçon très âgé, déjà célèbre à l'époque où la forêt brûla. "
    "L'évêque y reçut le général français, qui préféra être logé côté cour. Après l'été, la façade fut réparée."
)


def without_marks(text: str) -> str:
    return "".join(each for each in unicodedata.normalize("NFD", text) if not unicodedata.combining(each))


REWRITTEN: dict[str, tuple[str, str]] = {
    # name: a stored text, and how the prompt has it
    "marks removed": (MARKED, re.sub("[*`]", "", MARKED)),
    "marks added": (re.sub("[*`]", "", MARKED), MARKED),
    "other marks": (MARKED, MARKED.replace("**", "__").replace("*", "_")),
    "tags": (re.sub("[*`]", "", MARKED), re.sub(r"\*\*(.*?)\*\*", r"<b class='x'>\1</b>", MARKED)),
    "a tag for each space": (GREEK, GREEK.replace(" ", "<br/>")),
    "accents of LaTeX": (
        FRENCH,
        FRENCH.translate(
            str.maketrans({"é": r"\'e", "è": r"\`e", "ê": r"\^e", "û": r"\^u", "â": r"\^a", "ç": r"\c{c}"})
        ),
    ),
    "a form of a URL": (FRENCH, quote_plus(FRENCH)),
    "links": (re.sub("[*`]", "", MARKED), re.sub(r"\*\*(.*?)\*\*", r"[\1](https://x.org/a/\1)", MARKED)),
    "capitals": (GERMAN, GERMAN.upper()),
    "umlauts stripped": (GERMAN, without_marks(GERMAN)),
    "umlauts restored": (without_marks(GERMAN), GERMAN),
    "two letters for one": (GERMAN, GERMAN.translate(str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss"}))),
    "question marks": (GERMAN, GERMAN.encode("ascii", "replace").decode()),
    "lost in decoding": (GERMAN, GERMAN.encode("cp1252").decode("utf-8", "replace")),
    "decoded wrongly": (GERMAN, GERMAN.encode().decode("latin-1")),
    "accents of Greek": (GREEK, without_marks(GREEK)),
}


class TestMisses:
    @pytest.mark.some(3)
    @some_of(3, name=REWRITTEN)
    def test_a_rewritten_text_counts_as_missed(self, engine: CacheClipEngine, chunks: list[str], name: str) -> None:
        text, shown = REWRITTEN[name]
        others = [
            each for each in (MARKED, GERMAN, GREEK, FRENCH) if without_marks(each)[:3] != without_marks(text)[:3]
        ]
        engine.precompute([text, chunks[0], *others])
        stats = engine.generate(rag([chunks[0], shown]), SHORT).stats
        assert (stats.hits, stats.misses, stats.missed_tokens) == (1, 1, len(engine.primary.tokenize(text)))
        engine.release([text])
        stats = engine.generate(rag([chunks[0], shown]), SHORT).stats
        assert (stats.hits, stats.misses) == (1, 0), "nothing of the text is left"

    def test_no_stored_chunk_is_plain_prefill_and_says_so(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        answer = engine.generate(rag(chunks), SHORT, documents=chunks)
        check_sums(answer)
        assert answer.stats.method == "full"
        assert answer.stats.fallback is not None and "4 chunks" in answer.stats.fallback
        assert answer.stats.misses == 4 and answer.stats.nominal_ratio == 0.2
        assert answer.token_ids == engine.generate(rag(chunks), SHORT, method="full").token_ids

    @pytest.mark.parametrize(("length", "stores"), [(200, False), (400, True)])
    def test_a_part_of_a_deleted_text(
        self, engine: CacheClipEngine, chunks: list[str], length: int, stores: bool
    ) -> None:
        """Boilerplate of a long text does not make the engine compute all of it; the better half does."""
        text = " ".join(chunks)[:600]
        engine.precompute([text])
        engine.store.delete(engine.store.keys())
        answer = engine.generate(rag([text[:length]]), SHORT)
        assert (answer.stats.hits, answer.stats.misses) == (0, 1) and answer.stats.missed_tokens >= 32
        assert engine.is_stored(text) == stores

    @pytest.mark.some(3)
    @pytest.mark.parametrize("name", ["cacheclip", "epic-corrected", "epic", "direct"])
    def test_a_chunk_that_is_computed_in_full_is_as_a_missing_one(
        self, make: Make, chunks: list[str], monkeypatch: Patch, name: str
    ) -> None:
        """The controller says which, where reading takes longer; it counts as a hit, and is not stored again."""
        whole, others = make(prefix_cache_bytes=0), make(prefix_cache_bytes=0, on_miss="ignore")
        chunks = [chunks[0], MARKED, chunks[2], GREEK]  # which share no sentence
        method, in_full = preset(name), {chunks[0], chunks[2]}
        whole.precompute(chunks, method=name)
        others.precompute([chunks[1], chunks[3]], method=name)
        expected = logits(others, rag(chunks), method)
        full = logits(whole, rag(chunks), Full())
        monkeypatch.setattr(pipeline, "least_computed", lambda plan, *_: plan.computing(in_full))
        found = logits(whole, rag(chunks), method)
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-4)
        assert (found.logits - full.logits).abs().max() > 1e-3, "the others are approximate"
        assert (found.stats.hits, found.stats.misses, found.stats.missed_tokens, found.missing) == (4, 0, 0, ())
        assert found.stats.chunk_tokens == expected.stats.chunk_tokens
        if method.exact_at_one and method.has_ratio:
            torch.testing.assert_close(
                logits(whole, rag(chunks), method.at(1.0)).logits, full.logits, rtol=0, atol=1e-4
            )

    def test_what_is_stored(self, make: Make, engine: CacheClipEngine, chunks: list[str]) -> None:
        ignoring = make(on_miss="ignore")
        for _ in range(2):
            stats = ignoring.generate(rag(chunks), SHORT, documents=chunks).stats
            assert (stats.hits, stats.misses) == (0, 4)
        assert not ignoring.is_stored(chunks[0])
        engine.generate(rag(chunks), SHORT, method="full", documents=chunks)
        assert chunks[0] not in engine.chunk_caches()[0], "plain prefill stores nothing"
        segments = [Fresh("Read: "), Chunk(chunks[0]), Fresh("\nWhat?")]
        assert engine.generate(segments, SHORT).stats.misses == 1, "also segments that are made by hand"
        assert engine.generate(segments, SHORT).stats.hits == 1

    def test_stored_for_direct_only(self, make: Make, chunks: list[str], tmp_path: Path) -> None:
        """A store written without an auxiliary serves direct reuse at once, and cacheclip from the second call on."""
        make(auxiliary=None, store=str(tmp_path)).precompute(chunks)
        engine = make(store=str(tmp_path))
        assert engine.generate(rag(chunks), SHORT, method="direct").stats.hits == 4
        assert engine.generate(rag(chunks), SHORT).stats.hits == 0
        assert engine.generate(rag(chunks), SHORT).stats.hits == 4


@pytest.mark.parametrize("method", ["full", "prefix", BEHIND_PASSAGES], ids=str)
def test_chunks_are_computed_as_the_method_needs_them(engine: CacheClipEngine, chunks: list[str], method: Any) -> None:
    """For one that reads none as the settings have it."""
    engine.precompute(chunks, method=method)
    if not isinstance(method, str):
        assert engine.generate(rag(chunks), SHORT, method=method).stats.hits == 4
    assert engine.generate(rag(chunks), SHORT).stats.hits == 4 * isinstance(method, str)


class TestSources:
    """What came from a record or a document goes with it, unless another holds the same text."""

    def test_a_source_and_its_document(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks[:2], source="node 1", document="report")
        engine.precompute(chunks[1:3], source="node 2", document="report")
        engine.precompute(chunks[3:])
        with pytest.raises(ConfigurationError, match="put it in a list"):
            engine.release(sources="node 1")
        assert engine.release(sources=["node 1", "no such node"]) == 1
        assert [engine.is_stored(c) for c in chunks] == [False, True, True, True]
        assert engine.release(sources=["report"]) == 2
        assert [engine.is_stored(c) for c in chunks] == [False, False, False, True]

    def test_what_is_stored_after_an_answer_goes_with_its_sources(
        self, engine: CacheClipEngine, chunks: list[str]
    ) -> None:
        origins = {f"  {chunks[0]}\n": [("node 1", "report"), ("node 2", "")], chunks[1]: [("node 3", "report")]}
        engine.generate(rag(chunks), SHORT, documents=origins)
        assert [engine.is_stored(c) for c in chunks] == [True, True, False, False]
        assert engine.release(sources=["report"]) == 1
        assert engine.is_stored(chunks[0]) and not engine.is_stored(chunks[1])
        assert engine.release(sources=["node 2"]) == 1
        assert not engine.is_stored(chunks[0])

    def test_nothing_to_release_leaves_the_prefix_cache(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.generate(rag(chunks), SHORT, method="prefix")
        engine.release(sources=["no such node"])
        assert engine.generate(rag(chunks), SHORT, method="prefix").stats.reused_tokens > 0
        engine.precompute(chunks[:1])
        engine.release(chunks[:1])
        assert engine.generate(rag(chunks), SHORT, method="prefix").stats.reused_tokens == 0


class TestDamage:
    def change(self, engine: CacheClipEngine, key: str, change: Callable[[bytearray], Any]) -> None:
        """A stored payload on the disk."""
        path = Path(str(engine.config.store)) / "kv" / key[:2] / f"{key}.kv"
        change(content := bytearray(path.read_bytes()))
        path.write_bytes(content)

    def damage(self, engine: CacheClipEngine, *texts: str) -> None:
        def change(content: bytearray) -> None:
            content[-7] ^= 0xFF

        for text in texts:
            self.change(engine, engine.parts.models.caches_after_prefix.key(text), change)

    def test_damaged_chunk_is_a_miss_and_the_answer_is_right(
        self, engine: CacheClipEngine, make: Make, chunks: list[str]
    ) -> None:
        """As if that chunk had been fresh text all along."""
        engine.precompute(chunks)
        self.damage(engine, chunks[1])
        answer = engine.generate(rag(chunks), SHORT, method="direct")
        check_sums(answer)
        assert (answer.stats.hits, answer.stats.misses) == (3, 1)
        other = make(stored=[c for c in chunks if c != chunks[1]], on_miss="ignore")
        expected = other.generate(rag(chunks), SHORT, method="direct", documents=chunks)
        assert answer.token_ids == expected.token_ids
        assert answer.stats.fresh_tokens == expected.stats.fresh_tokens
        assert engine.generate(rag(chunks), SHORT, method="direct").stats.hits == 4  # mended after the answer

    def test_ratio_one_stays_exact(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        self.damage(engine, chunks[0], chunks[3])
        answer = engine.generate(rag(chunks), SHORT, recompute_ratio=1.0)
        assert answer.stats.misses == 2
        assert answer.token_ids == engine.generate(rag(chunks), SHORT, method="full").token_ids

    def test_damaged_prefix(self, engine: CacheClipEngine, make: Make, chunks: list[str]) -> None:
        engine.precompute(chunks)
        expected = engine.generate(rag(chunks), SHORT)

        def shorten(content: bytearray) -> None:
            del content[-9:]

        self.change(engine, engine.parts.models.caches_after_prefix.prefix.key, shorten)
        again = make(store=engine.config.store)
        assert again.generate(rag(chunks), SHORT).token_ids == expected.token_ids


class TestStore:
    def test_precompute_is_idempotent(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        counts = [engine.precompute(texts) for texts in (chunks, chunks, [f"\n {chunks[0]}  "], [*chunks, "One more."])]
        assert counts == [4, 0, 0, 1], "the same text once stripped"
        assert copy.deepcopy(engine) is engine
        assert pickle.loads(pickle.dumps(engine)) is get_engine(engine.config)

    def test_release_of_every_chunk_context_loads_no_model(self, make: Make, tmp_path: Path, chunks: list[str]) -> None:
        """An engine whose models are not there deletes what another one stored for its own models and settings."""
        engine = make(store=tmp_path)
        engine.precompute(chunks[:2], source="node")
        prefixes = engine.store.stats().entries - 2 * 2
        assert engine.precompute(chunks[:2], method=BEHIND_PASSAGES) == 2
        other = make(primary="no-such-model", auxiliary=None, store=tmp_path)
        assert other.release(chunks[:1]) == 1 and other.release(sources=["node"]) == 1
        assert prefixes <= engine.store.stats().entries <= prefixes + 1, "of no text"
        assert not any(engine.is_stored(text) for text in chunks[:2])
        assert engine.precompute(chunks[:2], method=BEHIND_PASSAGES) == 2, "nothing of it is left"

    def test_release(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        assert engine.release(chunks[:2]) == 2
        assert engine.release(chunks[:2]) == 0
        assert not engine.is_stored(chunks[0]) and engine.is_stored(chunks[2])
        assert Chunk(chunks[0]) not in engine.segment(rag(chunks))
        assert {span.whole for span in engine.plan(rag(chunks)).reused} == {*chunks[2:]}, "they share sentences"
        assert engine.generate(rag(chunks), SHORT).stats.misses == 0
        assert engine.precompute(chunks) == 2
        assert engine.generate(rag(chunks), SHORT).stats.hits == 4

    def test_other_system_prompt_does_not_share(self, make: Make, chunks: list[str], tmp_path: Path) -> None:
        make(store=str(tmp_path)).precompute(chunks)
        assert not make(store=str(tmp_path), system_prompt="Be brief.").is_stored(chunks[0])

    def test_one_chunk_that_cannot_be_stored_does_not_keep_out_the_others(
        self, make: Make, tiny_models: Models, chunks: list[str], tmp_path: Path
    ) -> None:
        """Too long for the auxiliary's short context: that chunk alone stays fresh text."""
        short = tmp_path / "short"
        shutil.copytree(tiny_models["auxiliary"], short)
        config = json.loads((short / "config.json").read_text())
        (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 200}))
        engine = make(auxiliary=str(short))
        texts = [" ".join(chunks), *chunks[1:3]]
        assert engine.generate(rag(texts), SHORT, documents=texts).stats.misses == 3
        assert [engine.is_stored(text) for text in texts] == [False, True, True]
        assert engine.generate(rag(texts), SHORT, documents=texts).stats.hits == 2
        keys = set(engine.store.keys())
        with pytest.raises(PromptTooLongError):
            engine.precompute([texts[0] + " More."])
        assert set(engine.store.keys()) == keys  # nothing of it was written for the other model either

    def test_evicted_chunks_are_misses(self, make: Make, chunks: list[str], tmp_path: Path) -> None:
        engine = make(stored=chunks, store=str(tmp_path), max_bytes=200_000)
        [disk] = engine.store.chunk_store.stats().tiers
        assert disk.evictions > 0 and engine.store.stats().bytes == disk.bytes <= 200_000
        expected = engine.generate(rag(chunks), SHORT, method="full")
        answer = engine.generate(rag(chunks), SHORT, recompute_ratio=1.0)
        check_sums(answer)
        assert answer.token_ids == expected.token_ids

    def test_coarser_entry_of_an_auxiliary_is_not_good_enough_for_a_primary(
        self, make: Make, tiny_models: Models, chunks: list[str], tmp_path: Path
    ) -> None:
        """One engine's auxiliary is another's primary, over one store: the primary reads no bfloat16 rounding."""
        first = make(stored=chunks, primary=tiny_models["qwen2"], auxiliary=tiny_models["llama"], store=str(tmp_path))
        engine, clean = make(auxiliary=None, store=str(tmp_path)), make(auxiliary=None)
        assert not engine.is_stored(chunks[0]) and first.is_stored(chunks[0])
        assert engine.precompute(chunks) == clean.precompute(chunks) == 4
        for method in (Direct(), preset("cacheclip").at(1.0)):
            ours, theirs = logits(engine, rag(chunks), method), logits(clean, rag(chunks), method)
            assert ours.stats.hits == theirs.stats.hits == 4
            assert torch.equal(ours.logits, theirs.logits)
        assert (ours.logits - logits(engine, rag(chunks), Full()).logits).abs().max() < 1e-4
        assert first.is_stored(chunks[0]) and first.precompute(chunks) == 0  # finer than it needs is good enough
