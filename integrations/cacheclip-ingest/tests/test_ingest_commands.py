"""Commands on documents as scripts use them: JSON alone on stdout, exit codes, one-line errors."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cacheclip_ingest.commands.settings import given_settings
from cacheclip_ingest.commands.tables import AskTable
from cacheclip_testing import run_without_torch
from ingest_cases import embedding_models  # noqa: F401
from pdf_cases import pdf

from cacheclip_rag import CacheClipEngine, ConfigurationError, Event


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


def test_a_store_remembers_its_codec_and_what_its_chunks_are_behind(
    cacheclip: Any, models: list[str], stored: Path, tmp_path: Path
) -> None:
    ingest = ("ingest", stored.parent / "corpus", "--store", tmp_path / "context", *models)
    passages = settings(tmp_path, 'chunk_context = "passages"\ncodec = "int8"')
    assert cacheclip(*ingest, *passages, "--json").json["computed"] > 0
    ask = ("ask", "Who was the last keeper?", "--store", tmp_path / "context", "--max-tokens", "2", "--json")
    stats = cacheclip(*ask).json["stats"]
    assert stats["fallback"] is None and stats["exact_tokens"] == 0 < stats["hits"]
    for name, own, given in (("chunk_context", "passages", "prefix"), ("codec", "int8", "float32")):
        other = cacheclip(*ingest, *settings(tmp_path, f"{name} = {given!r}"))
        assert other.code == 2 and f"{name} {own!r}, not {given!r}" in other.err


def test_ask_streams_the_answer_with_sources_and_phases(cacheclip: Any, stored: Path, tmp_path: Path) -> None:
    arguments = ("ask", "When was the lighthouse built?", "--store", stored, "--max-tokens", "12")
    page = tmp_path / "answer.html"
    plain, machine = cacheclip(*arguments, "--inspect", page), cacheclip(*arguments, "--json", "--trace")
    assert "island.txt" in page.read_text() and "<h1>When was the lighthouse built?</h1>" in page.read_text()
    nowhere = cacheclip(*arguments, "--inspect", page / "answer.html")
    assert nowhere.code == 2 and "must be a file in a folder" in nowhere.err and nowhere.out == ""
    assert machine.code == plain.code == 0
    result = machine.json
    texts = result["trace"]["texts"]
    assert len(texts) >= 3 and all(text["is_stored"] and "island.txt" in text["sources"][-1][1] for text in texts)
    assert plain.out.startswith(result["answer"])
    assert "island.txt" in plain.out and re.search(r"first token after .* s \(lookup \d\.\d{3} s  ", plain.out)
    assert "(ratio: nominal 0.200, effective 0.2" in plain.out and ", charged 0.2" in plain.out
    assert result["stats"]["hits"] == len(result["sources"]) >= 3
    assert result["stats"]["method"] == "epic-corrected"
    assert result["stats"]["effective_ratio"] == pytest.approx(0.2, abs=0.01)


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.some(3)
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


@pytest.mark.some(2)
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


@pytest.mark.long
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


def test_a_failed_one_fixes_no_settings(cacheclip: Any, models: list[str], tmp_path: Path, chunks: list[str]) -> None:
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


def test_skipped_files_are_listed_with_reasons(
    cacheclip: Any, models: list[str], tmp_path: Path, chunks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text(chunks[0])
    (corpus / "b.docx").write_text("x")
    (corpus / "c.pdf").write_bytes(pdf("The harbour master keeps a parrot."))
    find_spec = importlib.util.find_spec

    def lacking(*lacks: str) -> Any:
        return lambda name, *rest: None if name in lacks else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", lacking("mammoth"))
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lacking("pypdf", "mammoth"))
        result = cacheclip("ingest", corpus, "--store", tmp_path / "store", *models)
        planned = cacheclip("ingest", corpus, "--store", tmp_path / "other", *models, "--dry-run", "--json").json
    assert result.code == 0 and "b.docx is a file of type .docx, which is not read from a folder" in result.err
    assert "c.pdf is not read: pypdf" in result.err
    assert "pip install -e './integrations/cacheclip-ingest[pdf]'" in result.err
    assert [Path(each["path"]).name for each in planned["skipped"]] == ["b.docx", "c.pdf"]
    again = cacheclip("ingest", corpus, "--store", tmp_path / "store", *models, "--json").json
    assert (again["added"], again["computed"]) == (1, 1)
    assert [Path(each["path"]).name for each in again["skipped"]] == ["b.docx"]
    asked = cacheclip("ask", "Who keeps a parrot?", "--store", tmp_path / "store", "--max-tokens", "2", "--json").json
    assert Path(asked["sources"][0]["path"]).name == "c.pdf"


class TestDocumentsInAStore:
    def test_explain_miss_knows_passages(self, cacheclip: Any, stored: Path, tmp_path: Path) -> None:
        """Also those whose chunk caches are gone."""
        (tmp_path / "prompt.txt").write_text("The lighthouse of Brindle Point was built in 1847, they say.")
        cacheclip("store", "clear", "--store", stored, "--yes", "--json")
        found = cacheclip("explain-miss", tmp_path / "prompt.txt", "--store", stored, "--json")
        assert found.code == 1 and "1847" in found.json["texts"][0]["text"]

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


REFUSED = [
    (("ask", "Who?", "--store", "{none}"), 1, "there is no store at"),
    (("ingest", "{here}", "--store", "~gone/s", "--primary", "~gone/m"), 2, "no model is called"),
    (("ingest", "{here}", "--store", "{none}", "--settings", "~gone/a.toml"), 2, "~gone/a.toml"),
    (("ask", "Who?", "--store", "{here}", "--method", "caheclip"), 2, "Did you mean 'cacheclip'?"),
    (("ask", "Who?", "--store", "{here}", "--settings", "{ask}"), 2, "ask.toml: [ask]: chat_template_kwargs must"),
    (("ingest", "{here}", "--store", "{none}", "--overlap-tokens", "1"), 2, "overlap_tokens = ... under [ingest]"),
    (("ingest", "{here}", "--store", "{none}", "--backend", "vlm"), 2, "Did you mean 'vllm'?"),
    (("ingest", "{here}", "--store", "{none}", "--embedding", "all-MiniLM"), 2, "packaged:all-MiniLM-L6-v2"),
]


def test_what_cannot_work_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    places = {"none": tmp_path / "none", "here": tmp_path / "here", "ask": tmp_path / "ask.toml"}
    places["here"].mkdir()
    places["ask"].write_text("[ask]\nchat_template_kwargs = 'no'")
    commands = [[each.format(**places) for each in arguments] for arguments, *_ in REFUSED]
    for (_, code, message), done in zip(REFUSED, run_without_torch(*commands), strict=True):
        assert (done.code, done.out) == (code, ""), done.err
        assert message in done.err and len(done.err.splitlines()) == 1
    assert not (tmp_path / "none").exists()


def test_a_variable_that_no_template_may_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="chat_template_kwargs cannot set 'messages'"):
        AskTable({"messages": 1})
