"""Commands on documents as scripts use them: JSON alone on stdout, exit codes, one-line errors."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cacheclip_ingest.commands.settings import given_settings
from cacheclip_ingest.commands.tables import AskTable
from ingest_cases import embedding_models  # noqa: F401
from pdf_cases import pdf

from cacheclip_rag import CacheClipEngine, ConfigurationError, Event
from cacheclip_rag.testing import run_without_torch


@pytest.fixture
def models(tiny_models: dict[str, str], minilm: str) -> list[str]:
    return ["--primary", tiny_models["llama"], "--auxiliary", tiny_models["auxiliary"], "--embedding", minilm]


def settings(folder: Path, text: str) -> list[str]:
    """``--settings`` with a file of this text."""
    file = folder / f"{len(list(folder.glob('*.toml')))}.toml"
    file.write_text(text)
    return ["--settings", str(file)]


@pytest.fixture
def stored(cacheclip: Any, models: list[str], tmp_path: Path, chunks: list[str]) -> Path:
    """A store made by the command itself."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "island.txt").write_text("\n\n".join(chunks[:3]))
    result = cacheclip("ingest", corpus, "--store", tmp_path / "store", *models, "--chunk-tokens", "64", "--json")
    assert result.code == 0, result.err
    assert result.json["computed"] == result.json["chunks"] >= 3
    return tmp_path / "store"


def test_ingest_again_does_nothing(cacheclip: Any, stored: Path) -> None:
    result = cacheclip("ingest", stored.parent / "corpus", "--store", stored, "--json")
    assert (result.json["unchanged"], result.json["computed"]) == (1, 0)


def test_a_store_remembers_what_its_chunks_are_behind(
    cacheclip: Any, models: list[str], stored: Path, tmp_path: Path
) -> None:
    ingest = ("ingest", stored.parent / "corpus", "--store", tmp_path / "context", *models)
    passages = settings(tmp_path, 'chunk_context = "passages"')
    assert cacheclip(*ingest, *passages, "--json").json["computed"] > 0
    ask = ("ask", "Who was the last keeper?", "--store", tmp_path / "context", "--max-tokens", "2", "--json")
    stats = cacheclip(*ask).json["stats"]
    assert stats["fallback"] is None and stats["exact_tokens"] == 0 < stats["hits"]
    other = cacheclip(*ingest, *settings(tmp_path, 'chunk_context = "prefix"'))
    assert other.code == 2 and "chunk_context 'passages', not 'prefix'" in other.err


def test_ask_streams_the_answer_with_sources_and_phases(cacheclip: Any, stored: Path) -> None:
    arguments = ("ask", "When was the lighthouse built?", "--store", stored, "--max-tokens", "12")
    plain, machine = cacheclip(*arguments), cacheclip(*arguments, "--json")
    assert machine.code == plain.code == 0
    result = machine.json
    assert plain.out.startswith(result["answer"])
    assert "island.txt" in plain.out and "first token after" in plain.out
    assert "(ratio: nominal 0.200, effective 0.2" in plain.out and ", charged 0.2" in plain.out
    assert result["stats"]["hits"] == len(result["sources"]) >= 3
    assert result["stats"]["method"] == "anchored"
    assert result["stats"]["effective_ratio"] == pytest.approx(0.2, abs=0.01)


def test_ask_gives_the_chat_template_its_variables(
    cacheclip: Any, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, given = CacheClipEngine.stream, list[Any]()

    def watched(engine: CacheClipEngine, *arguments: Any, **options: Any) -> Iterator[Event]:
        given.append(options["chat_template_kwargs"])
        for event in stream(engine, *arguments, **options):
            yield replace(event, answer=event.answer and replace(event.answer, text="", reasoning="So."))

    monkeypatch.setattr(CacheClipEngine, "stream", watched)
    file = tmp_path / "ask.toml"
    file.write_text("[ask.chat_template_kwargs]\nenable_thinking = false")
    ask = ("ask", "Why?", "--store", stored, "--max-tokens", "2")
    said = cacheclip(*ask, "--settings", file).out
    assert given == [{"enable_thinking": False}] and "the model reasoned, and came to no answer" in said
    assert cacheclip(*ask, "--json").json["reasoning"] == "So." and given[1:] == [{}]


def test_ask_methods_and_ratio_one_agree_with_full(cacheclip: Any, stored: Path) -> None:
    ask = ("ask", "Who was the last keeper?", "--store", stored, "--max-tokens", "16", "--json")
    full = cacheclip(*ask, "--method", "full").json
    exact = cacheclip(*ask, "--ratio", "1.0").json
    assert exact["answer"] == full["answer"]
    assert full["stats"]["method"] == "full" and exact["stats"]["method"] == "anchored"


def test_ask_verifies_and_revises(cacheclip: Any, stored: Path) -> None:
    ask = ("ask", "Who was the last keeper?", "--store", stored, "--max-tokens", "16", "--method", "direct")
    full = cacheclip(*ask[:-1], "full", "--json").json["answer"]
    given = cacheclip(*ask, "--json").json
    assert given["answer"] != full and given["stats"]["verified_tokens"] is None
    verified = cacheclip(*ask, "--finish", "verify", "--json").json
    at = verified["stats"]["diverged_at"]
    assert verified["answer"] == given["answer"] and verified["stats"]["verified_tokens"] == at < 16
    corrected = cacheclip(*ask, "--finish", "revise", "--json").json
    tokens = corrected["stats"]["generated_tokens"]
    assert corrected["answer"] == full and corrected["stats"]["verified_tokens"] == tokens
    plain = cacheclip(*ask, "--finish", "verify").out
    assert plain.startswith(given["answer"]) and f"{at} of 16 tokens are full prefill's own" in plain
    revised = cacheclip(*ask, "--finish", "revise").out
    assert revised.startswith(f"{given['answer']}\n\nrevised answer:\n{full}\n")
    assert f"{tokens} of {tokens} tokens are full prefill's own; token {at} of the first answer differs" in revised
    assert "full prefill's own" not in cacheclip(*ask).out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--ratio", "1.5"], 2, "between 0"),
        (["--top-k", "0"], 2, "1 or more"),
        (["--max-tokens", "0"], 2, "1 or more"),
        (["--primary", "nobody/other"], 2, "was made with"),
        (["--device", "abacus"], 2, "abacus"),
    ],
)
def test_ask_refuses_bad_options_in_one_line(
    cacheclip: Any, stored: Path, arguments: list[str], code: int, message: str
) -> None:
    result = cacheclip("ask", "Why?", "--store", stored, *arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err and len(result.err.splitlines()) == 1


def test_ask_without_a_store_says_what_to_do(cacheclip: Any, tmp_path: Path) -> None:
    result = cacheclip("ask", "Why?", "--store", tmp_path / "nothing")
    assert result.code == 1 and "cacheclip ingest" in result.err


def test_ask_without_auxiliary_refuses_cacheclip_and_offers_the_others(
    cacheclip: Any, tmp_path: Path, tiny_models: dict[str, str], minilm: str, chunks: list[str]
) -> None:
    (tmp_path / "a.txt").write_text(chunks[0])
    store = tmp_path / "store"
    made = cacheclip(
        *("ingest", tmp_path / "a.txt", "--store", store, "--primary", tiny_models["llama"]),
        *("--auxiliary", "none", "--embedding", minilm),
    )
    assert made.code == 0, made.err
    refused = cacheclip("ask", "When?", "--store", store, "--method", "cacheclip")
    assert refused.code == 2 and "full, prefix, direct" in refused.err
    direct = cacheclip("ask", "When?", "--store", store, "--method", "direct", "--max-tokens", "4", "--json")
    assert direct.json["stats"]["hits"] == 1


def test_ask_may_leave_the_auxiliary_out(cacheclip: Any, stored: Path) -> None:
    ask = ("ask", "Who was the last keeper?", "--store", stored, "--max-tokens", "4", "--json")
    assert cacheclip(*ask, "--auxiliary", "none", "--method", "direct").json["stats"]["hits"] >= 3
    again = cacheclip(*ask, "--method", "cacheclip").json
    assert (
        again["stats"]["method"] == "cacheclip" and again["stats"]["fallback"] is None
    )  # the store is what it was made with


def test_models_in_the_present_folder_are_kept_by_their_absolute_paths(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next command may run in another folder."""
    monkeypatch.chdir(tmp_path)
    folder = models[models.index("--primary") + 1]
    Path("model").symlink_to(folder)
    given = given_settings({"primary": "model", "auxiliary": None, "namespace": "model"})
    assert given == {"primary": str(Path(folder).resolve()), "auxiliary": None, "namespace": "model"}
    assert given_settings({"primary": "gone/model"}) == {"primary": "gone/model"}


def test_ask_where_ingestion_never_succeeded(cacheclip: Any, models: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    assert cacheclip("ingest", tmp_path / "empty.txt", "--store", tmp_path / "store", *models).code == 1
    result = cacheclip("ask", "Why?", "--store", tmp_path / "store")
    assert result.code == 1 and "cacheclip ingest" in result.err


@pytest.mark.parametrize("strict", [False, True])
def test_notes_on_documents_are_said_and_count_if_strict(
    cacheclip: Any, models: list[str], tmp_path: Path, chunks: list[str], strict: bool
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "lease.pdf").write_bytes(pdf(chunks[0], "", "Signed on 3 March."))
    (corpus / "plain.txt").write_text(chunks[1])
    given = ("ingest", corpus, "--store", tmp_path / "store", *models, *(["--strict"] if strict else []))
    for option, key in ((["--dry-run"], "chunks"), ([], "added")):
        result = cacheclip(*given, *option, "--json")
        assert result.code == (1 if strict else 0) and result.json[key] == 2
        [note] = result.json["notes"]
        assert note["path"].endswith("lease.pdf") and "page 2 of 3 without text" in note["note"]
        assert result.json["failed"] == result.json["skipped"] == []
    (corpus / "lease.pdf").write_bytes(pdf(chunks[0], "", "Signed on 4 March."))
    said = cacheclip(*given)
    assert "lease.pdf: page 2 of 3 without text" in said.err and said.code == (1 if strict else 0)
    (corpus / "lease.pdf").write_bytes(pdf(chunks[0]))
    assert cacheclip(*given).code == 0


def test_an_empty_file_is_skipped(cacheclip: Any, models: list[str], tmp_path: Path, chunks: list[str]) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text(chunks[0])
    for name in ("b.txt", "c.md"):
        (corpus / name).write_text(" \n" * (name == "c.md"))
    result = cacheclip("ingest", corpus, "--store", tmp_path / "store", *models, "--json")
    assert result.code == 0 and result.json["failed"] == [] and result.json["documents"] == 1
    assert [Path(each["path"]).name for each in result.json["skipped"]] == ["b.txt", "c.md"]
    (corpus / "a.txt").write_text("")
    assert cacheclip("ingest", corpus, "--store", tmp_path / "store", "--dry-run", "--json").json["removed"] == 1
    assert cacheclip("ingest", corpus, "--store", tmp_path / "store", "--json").json["removed"] == 1, "now it is empty"


def test_a_run_asks_before_it_removes_most(cacheclip: Any, stored: Path) -> None:
    """It says which documents and what to do, a dry run too; nothing is removed, and the exit code is 1."""
    corpus = stored.parent / "corpus"
    (corpus / "island.txt").unlink()
    for option in (["--dry-run"], []):
        found = cacheclip("ingest", corpus, "--store", stored, *option)
        assert found.code == 1 and f"gone, and kept: {corpus / 'island.txt'}" in found.err and "add --yes" in found.err
        told = cacheclip("ingest", corpus, "--store", stored, *option, "--json")
        assert told.code == 1 and told.json["unconfirmed"] == [str(corpus / "island.txt")] and told.json["removed"] == 0
    assert cacheclip("ingest", corpus, "--store", stored, "--dry-run", "--yes", "--json").json["removed"] == 1
    confirmed = cacheclip("ingest", corpus, "--store", stored, "--yes", "--json")
    assert confirmed.code == 0 and (confirmed.json["removed"], confirmed.json["documents"]) == (1, 0)


def test_a_run_that_finds_nothing_ends_with_one(cacheclip: Any, stored: Path, tmp_path: Path) -> None:
    """Also if the store has documents of other folders."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "empty.txt").touch()
    found = cacheclip("ingest", tmp_path / "other", "--store", stored, "--json")
    assert found.code == 1 and found.json["documents"] == 1 and len(found.json["skipped"]) == 1
    assert cacheclip("ingest", tmp_path / "other", stored.parent / "corpus", "--store", stored).code == 0


def test_the_limit_given_once_holds_for_every_command(
    cacheclip: Any, stored: Path, models: list[str], tmp_path: Path, chunks: list[str]
) -> None:
    entry_bytes = cacheclip("store", "stats", "--store", stored, "--json").json["bytes"]
    limit = str(entry_bytes // 2)
    corpus, limited = stored.parent / "corpus", settings(tmp_path, f"max_bytes = {limit}")
    (corpus / "more.txt").write_text(chunks[3])
    assert cacheclip("ingest", corpus, "--store", stored, *limited, "--json").code == 0
    for question in ("When was the lighthouse built?", "Who was the last keeper?"):
        assert cacheclip("ask", question, "--store", stored, "--max-tokens", "2", "--json").code == 0
        stats = cacheclip("store", "stats", "--store", stored, "--json").json
        assert stats["bytes"] <= int(limit) == stats["max_bytes"]
    cacheclip("ingest", corpus, "--store", stored, *settings(tmp_path, "max_bytes = 0"), "--json")
    assert cacheclip("store", "stats", "--store", stored, "--json").json["max_bytes"] is None


def test_a_limit_too_small_for_a_run_is_said_before_and_after(
    cacheclip: Any, stored: Path, models: list[str], tmp_path: Path
) -> None:
    """Documents whose chunk caches do not fit: the dry run warns, the run warns and exits with 1."""
    corpus, store = stored.parent / "corpus", tmp_path / "small"
    limit = cacheclip("store", "stats", "--store", stored, "--json").json["bytes"] // 2
    limited, unlimited = settings(tmp_path, f"max_bytes = {limit}"), settings(tmp_path, "max_bytes = 0")
    ingest = ("ingest", corpus, "--store", store, *models, "--chunk-tokens", "64", *limited)
    planned = cacheclip(*ingest, "--dry-run")
    assert planned.code == 0 and "chunk caches would be evicted" in planned.err
    cost = cacheclip(*ingest, "--dry-run", "--json").json
    assert cost["excess_bytes"] == cost["bytes"] - limit > 0 and cost["max_bytes"] == limit
    assert not store.exists()
    result = cacheclip(*ingest)
    assert result.code == 1 and "not stored any more" in result.err and "1 added" in result.out
    again = cacheclip("ingest", corpus, "--store", store, *unlimited)
    assert again.code == 0 and again.err == ""
    (corpus / "island.txt").write_text((corpus / "island.txt").read_text() + " It is still there.")
    cacheclip("ingest", corpus, "--store", store, *unlimited)
    (corpus / "island.txt").write_text((corpus / "island.txt").read_text() + " It is still there today.")
    evicted = cacheclip("ingest", corpus, "--store", store, *limited, "--json")
    assert evicted.code == 1 and evicted.json["evicted"] > 0


def test_names_that_are_not_utf8(cacheclip: Any, stored: Path) -> None:
    corpus = stored.parent / "corpus"
    odd = os.fsdecode(os.fsencode(corpus) + b"/odd\xff")
    os.mkdir(odd)
    Path(odd, "a.txt").write_text("Some text of some length.")
    Path(corpus, "link\udcfe.txt").symlink_to("/etc/hostname")
    result = cacheclip("ingest", corpus, "--store", stored, "--json")
    assert result.code == 1 and "not UTF-8" in result.json["failed"][0]["error"]
    assert "leads out of" in result.json["skipped"][0]["error"] and result.json["unchanged"] == 1
    for given in (odd, os.path.join(odd, "none.txt")):
        result = cacheclip("ingest", given, "--store", stored)
        assert result.code in (1, 2) and "Traceback" not in result.err
        result.err.encode()


def test_a_damaged_passage_is_not_used_and_is_mended_by_ingest(
    cacheclip: Any, stored: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connection = sqlite3.connect(stored / "library.sqlite3")
    with connection:
        connection.execute("UPDATE passages SET text = 'The keeper was a smuggler.' WHERE ordinal = 0")
    connection.close()
    ask = ("ask", "Who was the last keeper?", "--store", stored, "--max-tokens", "2", "--json")
    asked = cacheclip(*ask)
    assert asked.code == 0 and 0 not in [source["ordinal"] for source in asked.json["sources"]]
    assert ["island.txt is damaged" in record.getMessage() for record in caplog.records].count(True) == 1
    again = cacheclip("ingest", stored.parent / "corpus", "--store", stored, "--json").json
    assert (again["changed"], again["computed"]) == (1, 0)
    assert 0 in [source["ordinal"] for source in cacheclip(*ask).json["sources"]]


def test_a_damaged_library_is_refused_and_repaired(cacheclip: Any, stored: Path, models: list[str]) -> None:
    for file in stored.glob("library.sqlite3*"):
        file.unlink()  # a write-ahead log may hold the whole library
    (stored / "library.sqlite3").write_bytes(b"this is no database, " * 1000)
    ingest = ("ingest", stored.parent / "corpus", "--store", stored, *models, "--chunk-tokens", "64", "--json")
    for command in (("ask", "Why?", "--store", stored), ingest):
        result = cacheclip(*command)
        assert result.code == 1 and "library.sqlite3" in result.err and "cacheclip store repair" in result.err
    assert cacheclip("store", "verify", "--store", stored).code == 1
    assert "library.sqlite3.damaged" in cacheclip("store", "repair", "--store", stored).out
    assert cacheclip("store", "verify", "--store", stored).code == 0
    mended = cacheclip(*ingest)
    assert mended.code == 0 and (mended.json["added"], mended.json["computed"]) == (1, 0)


def test_model_folders_are_found_from_anywhere(
    cacheclip: Any, tiny_models: dict[str, str], minilm: str, chunks: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    root, name = os.path.split(tiny_models["llama"])
    monkeypatch.chdir(root)
    (tmp_path / "a.txt").write_text(chunks[0])
    made = cacheclip(
        *("ingest", tmp_path / "a.txt", "--store", tmp_path / "store", "--primary", f"./{name}"),
        *("--auxiliary", "none", "--embedding", minilm, "--json"),
    )
    assert made.code == 0, made.err
    monkeypatch.chdir(tmp_path)
    ask = ("ask", "When?", "--store", "store", "--method", "direct", "--max-tokens", "2", "--json")
    assert cacheclip(*ask).json["stats"]["hits"] == 1


def test_unreadable_documents_are_named_and_the_exit_code_says_so(
    cacheclip: Any, stored: Path, models: list[str]
) -> None:
    (stored.parent / "corpus" / "picture.txt").write_bytes(b"\x89PNG\x00\x00")
    result = cacheclip("ingest", stored.parent / "corpus", "--store", stored)
    assert result.code == 1
    assert "picture.txt" in result.err and "1 unchanged" in result.out


class TestFirstIngest:
    def test_a_failed_one_fixes_no_settings(
        self, cacheclip: Any, models: list[str], tmp_path: Path, chunks: list[str]
    ) -> None:
        corpus, store, wrong = tmp_path / "corpus", tmp_path / "store", tmp_path / "wrong"
        corpus.mkdir()
        wrong.mkdir()
        (wrong / "config.json").write_text("{}")
        (corpus / "a.txt").write_text(chunks[0])
        arguments = ("ingest", corpus, "--store", store, *models[:4], *settings(tmp_path, "max_bytes = 1000000000"))
        failed = cacheclip(*arguments, "--embedding", wrong)
        assert failed.code == 1 and "sentence-transformers" in failed.err
        asked = cacheclip("ask", "Why?", "--store", store)
        assert asked.code == 1 and "no documents are stored" in asked.err
        found = cacheclip(*arguments, *models[4:], "--json").json
        # models are loaded before anything is computed, and another embedding model may be named
        assert (found["documents"], found["chunks"], found["computed"]) == (1, 1, 1)

    def test_one_without_a_readable_document_leaves_nothing(
        self, cacheclip: Any, models: list[str], tmp_path: Path
    ) -> None:
        (tmp_path / "corpus").mkdir()
        (tmp_path / "corpus" / "bad.txt").write_bytes(b"\xff\xfe\x00")
        failed = cacheclip("ingest", tmp_path / "corpus", "--store", tmp_path / "store", *models, "--json")
        assert failed.code == 1 and len(failed.json["failed"]) == 1 and not (tmp_path / "store").exists()


def test_skipped_files_are_listed_with_reasons(
    cacheclip: Any, models: list[str], tmp_path: Path, chunks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text(chunks[0])
    (corpus / "b.docx").write_text("x")
    (corpus / "c.pdf").write_bytes(pdf("The harbour master keeps a parrot."))
    find_spec = importlib.util.find_spec

    def without_pypdf(name: str, *rest: Any) -> Any:
        return None if name in ("pypdf", "mammoth") else find_spec(name, *rest)

    def without_mammoth(name: str, *rest: Any) -> Any:
        return None if name == "mammoth" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_mammoth)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", without_pypdf)
        result = cacheclip("ingest", corpus, "--store", tmp_path / "store", *models)
        planned = cacheclip("ingest", corpus, "--store", tmp_path / "other", *models, "--dry-run", "--json").json
    assert result.code == 0 and "b.docx is a file of type .docx, which is not read from a folder" in result.err
    assert "c.pdf is not read: pypdf" in result.err and "pip install 'cacheclip-rag[pdf]'" in result.err
    assert [Path(each["path"]).name for each in planned["skipped"]] == ["b.docx", "c.pdf"]
    again = cacheclip("ingest", corpus, "--store", tmp_path / "store", *models, "--json").json
    assert (again["added"], again["computed"], [Path(each["path"]).name for each in again["skipped"]]) == (
        1,
        1,
        ["b.docx"],
    )
    asked = cacheclip("ask", "Who keeps a parrot?", "--store", tmp_path / "store", "--max-tokens", "2", "--json").json
    assert Path(asked["sources"][0]["path"]).name == "c.pdf"


class TestDocumentsInAStore:
    def test_stats(self, cacheclip: Any, stored: Path) -> None:
        stats = cacheclip("store", "stats", "--store", stored, "--json").json
        assert stats["documents"] == 1
        assert stats["entries"] == 2 * stats["passages"] + 2  # both models, and a shared prefix for each
        assert "documents     1\npassages      " in cacheclip("store", "stats", "--store", stored).out

    def test_verify_and_repair(self, cacheclip: Any, stored: Path) -> None:
        assert cacheclip("store", "verify", "--store", stored, "--json").json["problems"] == []
        with sqlite3.connect(stored / "library.sqlite3") as library:
            library.execute("UPDATE passages SET text = 'altered' WHERE id = 1")
        library.close()
        found = cacheclip("store", "verify", "--store", stored, "--json")
        assert found.code == 1 and found.json["damaged"] == [] and len(found.json["problems"]) == 1
        repaired = cacheclip("store", "repair", "--store", stored, "--json")
        assert repaired.code == 0 and repaired.json["deleted"] == 0 and repaired.json["library"]
        assert cacheclip("store", "verify", "--store", stored).code == 0
        again = cacheclip("ingest", stored.parent / "corpus", "--store", stored, "--json").json
        assert (again["computed"], again["changed"] + again["added"]) == (0, 1)

    def test_clear_leaves_documents(self, cacheclip: Any, stored: Path) -> None:
        assert cacheclip("store", "clear", "--store", stored, "--yes", "--json").json["removed"] > 0
        asked = cacheclip("ask", "When was it built?", "--store", stored, "--max-tokens", "2", "--json")
        assert asked.code == 0 and asked.json["stats"]["hits"] == 0

    def test_explain_miss_knows_passages(self, cacheclip: Any, stored: Path, tmp_path: Path) -> None:
        """Also those whose chunk caches are gone."""
        (tmp_path / "prompt.txt").write_text("The lighthouse of Brindle Point was built in 1847, they say.")
        cacheclip("store", "clear", "--store", stored, "--yes", "--json")
        found = cacheclip("explain-miss", tmp_path / "prompt.txt", "--store", stored, "--json")
        assert found.code == 1 and "1847" in found.json["texts"][0]["text"]

    def test_a_link_in_place_of_the_library(self, cacheclip: Any, stored: Path, tmp_path: Path) -> None:
        """It is named, moved aside, and leads nowhere."""
        (stored / "library.sqlite3").rename(tmp_path / "library.sqlite3")
        (stored / "library.sqlite3").symlink_to(tmp_path / "library.sqlite3")
        assert cacheclip("store", "verify", "--store", stored).code == 1
        repaired = cacheclip("store", "repair", "--store", stored, "--json")
        assert repaired.code == 0 and "library.sqlite3.damaged" in repaired.json["library"][0]
        assert cacheclip("store", "verify", "--store", stored).code == 0

    def test_remove(self, cacheclip: Any, stored: Path) -> None:
        """A folder that was renamed leaves its documents behind, until they are taken out."""
        corpus, before = stored.parent / "corpus", cacheclip("store", "stats", "--store", stored, "--json").json
        corpus.rename(stored.parent / "renamed")
        assert cacheclip("ingest", corpus, "--store", stored).code == 2
        assert cacheclip("ingest", stored.parent / "renamed", "--store", stored, "--json").json["added"] == 1
        wrong = cacheclip("store", "remove", corpus / "islnd.txt", "--store", stored, "--json")
        assert wrong.code == 2 and wrong.out == "" and "Did you mean" in wrong.err and "island.txt" in wrong.err
        assert cacheclip("store", "remove", "--store", stored).code == 2
        found = cacheclip("store", "remove", "--under", corpus, "--store", stored, "--json")
        assert found.code == 0 and found.json == {"store": str(stored), "removed": [str(corpus / "island.txt")]}
        assert cacheclip("store", "stats", "--store", stored, "--json").json == before
        renamed = stored.parent / "renamed" / "island.txt"
        assert str(renamed) in cacheclip("store", "remove", renamed, "--store", stored).out
        after = cacheclip("store", "stats", "--store", stored, "--json").json
        assert (after["documents"], after["passages"]) == (0, 0) and after["entries"] == 2, "what is before each chunk"

    def test_a_codec_holds_for_the_whole_store(
        self, cacheclip: Any, models: list[str], stored: Path, tmp_path: Path
    ) -> None:
        ingest = ("ingest", stored.parent / "corpus", *models, "--chunk-tokens", "64", "--json")
        coarse, lossless = (settings(tmp_path, f'codec = "{codec}"') for codec in ("int8", "float32"))
        assert cacheclip(*ingest, "--store", tmp_path / "small", *coarse).code == 0
        large, small = (
            sum(path.stat().st_size for path in folder.glob("kv/*/*")) for folder in (stored, tmp_path / "small")
        )
        assert small < 0.7 * large  # tiny caches: much of it is headers
        ask = ("ask", "When was the lighthouse built?", "--store", tmp_path / "small", "--max-tokens", "2", "--json")
        assert cacheclip(*ask).json["stats"]["hits"] > 0, "later commands use the same codec"
        assert cacheclip(*ingest, "--store", tmp_path / "small", *lossless).code == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("ask", "Who?", "--store", "{none}"), 1, "there is no store at"),
        (("ingest", "{here}", "--store", "~gone/s", "--primary", "~gone/m"), 2, "no model is called"),
        (("ingest", "{here}", "--store", "{none}", "--settings", "~gone/a.toml"), 2, "~gone/a.toml"),
        (("ask", "Who?", "--store", "{here}", "--method", "caheclip"), 2, "Did you mean 'cacheclip'?"),
        (("ask", "Who?", "--store", "{here}", "--finish", "verfy"), 2, "Did you mean 'verify'?"),
        (("ingest", "{here}", "--store", "{none}", "--dtype", "float23"), 2, "Did you mean 'float32'?"),
        (("ask", "Who?", "--store", "{here}", "--settings", "{ask}"), 2, "ask.toml: [ask]: chat_template_kwargs must"),
        (("ingest", "{here}", "--store", "{none}", "--overlap-tokens", "1"), 2, "overlap_tokens = ... under [ingest]"),
        (("ingest", "{here}", "--store", "{none}", "--codec", "int8"), 2, "write codec = ... in the file of"),
        (("ingest", "{here}", "--store", "{none}", "--vllm=seed=1"), 2, "write NAME = VALUE under [vllm]"),
        (("ingest", "{here}", "--store", "{none}", "--backend", "vlm"), 2, "Did you mean 'vllm'?"),
        (("ingest", "{here}", "--store", "{none}", "--embedding", "all-MiniLM"), 2, "packaged:all-MiniLM-L6-v2"),
        (("ask",), 2, "Missing argument"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_heavy_is_imported(
    arguments: tuple[str, ...], code: int, message: str, tmp_path: Path
) -> None:
    here, ask = tmp_path / "here", tmp_path / "ask.toml"
    here.mkdir()
    ask.write_text("[ask]\nchat_template_kwargs = 'no'")
    done = run_without_torch(*(each.format(none=tmp_path / "none", here=here, ask=ask) for each in arguments))
    assert (done.code, done.out) == (code, ""), done.err
    assert message in done.err and (len(done.err.splitlines()) == 1 or arguments == ("ask",))
    assert not (tmp_path / "none").exists()


def test_a_variable_that_no_template_may_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="chat_template_kwargs cannot set 'messages'"):
        AskTable({"messages": 1})
