"""Why a text was not reused: each reason, met on purpose."""

import html
import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cacheclip_care import MissReport, explain_miss, plausible
from cacheclip_testing import SENTENCES

from cacheclip_rag import CacheClipEngine, EngineConfig, SamplingParams

TEXT = "The keeper of Brindle Point logged <three> ships & a storm on the night of the 4th of May, 1871, before dawn."


@pytest.fixture
def config(tiny_models: dict[str, str], tmp_path: Path) -> EngineConfig:
    return EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], store=str(tmp_path / "store"))


@pytest.fixture
def engine(config: EngineConfig) -> CacheClipEngine:
    engine = CacheClipEngine(config)
    engine.precompute([TEXT], source="node-1")
    return engine


def asked(text: str) -> str:
    return f"Use the context.\n\n{text}\n\nWhat was logged?"


def why(engine: CacheClipEngine, written: str, text: str = TEXT) -> MissReport:
    found = explain_miss(engine, asked(written), text)
    hits = [segment.text for segment in engine.segment(asked(written)) if type(segment).__name__ == "Chunk"]
    assert found.is_hit <= (text.strip() in hits), "a hit is what the engine sees too"
    return found


class TestReasons:
    def test_a_hit(self, engine: CacheClipEngine) -> None:
        assert why(engine, TEXT).reason == "hit" and why(engine, TEXT, f"  {TEXT}\n").is_hit
        question = {"role": "user", "content": "What was logged?"}
        assert explain_miss(engine, [{"role": "system", "content": TEXT}, question], TEXT).is_hit
        call = {"id": "abc123def", "function": {"name": "read", "arguments": {}}}
        calling = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "abc123def", "content": TEXT}
        assert explain_miss(engine, [question, calling, result], TEXT).reason == "hit"

    def test_html_escaped_on_the_way(self, engine: CacheClipEngine) -> None:
        text = "At <Brindle> & <Cove>, two <ships> & a <storm> were <logged> & <noted>."
        engine.precompute([text])
        found = why(engine, html.escape(text), text)
        assert found.reason == "not_in_prompt" and not found.is_hit and "escaped" in found.explanation

    @pytest.mark.some(2)
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda text: text.replace(" ", "-"), "written otherwise"),
            (lambda text: "  ".join(text.split()), "written otherwise"),
            (str.upper, "other letter case"),
            (lambda text: text[:40], "first 40 of 109 characters and is cut off there"),
            (lambda text: text[:40] + "and nothing else.", "continues differently: .*, got 'and nothing else."),
            (lambda text: "Something else altogether.", "neither the text nor its beginning"),
        ],
    )
    def test_changed_on_the_way(self, engine: CacheClipEngine, change: Any, said: str) -> None:
        found = why(engine, change(TEXT))
        assert found.reason == "not_in_prompt" and not found.is_hit and re.search(said, found.explanation)

    def test_what_is_not_stored_so(self, engine: CacheClipEngine, config: EngineConfig) -> None:
        other = "Another text that nobody has precomputed so far, of some length."
        found = why(engine, other, other)
        assert found.reason == "not_precomputed" and "namespace 'default'" in found.explanation
        assert why(CacheClipEngine(replace(config, namespace="tenant")), TEXT).reason == "not_precomputed"
        assert why(engine, TEXT, "The keeper").reason == "too_short"
        engine.precompute([whole := f"Log book. {TEXT} Signed."])
        assert why(engine, whole).reason == "inside_another"
        assert engine.store.delete(engine.store.keys()) > 0
        found = why(engine, TEXT)
        assert found.reason == "evicted" and "no KV of it is stored" in found.explanation and not found.is_hit

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"chunk_context": "prefix"}, "precomputed with chunk_context='passages'"),
            ({"system_prompt": "Another system prompt."}, "another model, system prompt, dtype"),
        ],
    )
    @pytest.mark.usefixtures("engine")
    def test_other_settings(self, config: EngineConfig, changed: dict[str, Any], said: str) -> None:
        found = why(CacheClipEngine(replace(config, **changed)), TEXT)
        assert found.reason == "other_settings" and said in found.explanation

    def test_without_the_auxiliary(self, config: EngineConfig) -> None:
        CacheClipEngine(replace(config, auxiliary=None)).precompute([TEXT], method="direct")
        engine = CacheClipEngine(config, method="cacheclip")
        found = why(engine, TEXT)
        assert found.reason == "no_auxiliary" and f"auxiliary model {engine.auxiliary.name!r}" in found.explanation  # type: ignore[union-attr]
        answer = engine.generate(asked(TEXT), SamplingParams(max_tokens=1))
        assert (answer.stats.hits, answer.stats.misses, answer.stats.unusable) == (0, 1, 1)
        assert "1 are stored for the primary model, but not for the auxiliary" in str(answer.stats.fallback)
        assert "another model" not in str(answer.stats.fallback)

    @pytest.mark.parametrize("method", ["full", "prefix"])
    def test_methods_that_reuse_nothing_of_it(self, config: EngineConfig, method: str) -> None:
        other = CacheClipEngine(replace(config, method=method))
        other.precompute([TEXT])
        found = why(other, TEXT)
        assert (found.reason, found.is_hit) == ("cannot_reuse", False)
        assert f"method '{method}' reuses no chunk" in found.explanation
        assert other.generate(asked(TEXT), SamplingParams(max_tokens=1)).stats.hits == 0


class TestParts:
    LONG = " ".join(SENTENCES[:6])
    HEADER = "file_name: log book.md\npage: 7"

    def test_which_part_is_reused(self, engine: CacheClipEngine) -> None:
        engine.precompute([self.LONG])
        found = explain_miss(engine, asked(self.LONG[:300]), self.LONG)
        assert found.reason == "part" and found.is_hit and 0.4 < found.share < 0.7
        assert re.search(r"\d\d% of the text's tokens .* The rest, such as '", found.explanation)
        shown = found.explanation.split("such as '")[1].split("'...")[0]
        assert shown in self.LONG[290:340]

    @pytest.mark.parametrize("form", [json.dumps, partial(unicodedata.normalize, "NFD")])
    def test_a_text_in_another_form(self, engine: CacheClipEngine, form: Callable[[str], str]) -> None:
        rest = " ".join(["R\u00e9p\u00e9t\u00e9e \u00e0 l\u2019\u00e9t\u00e9, d\u00e9j\u00e0."] * 6)
        for text, reason in ((rest, "not_in_prompt"), (f"{self.LONG} {rest}", "part")):
            engine.precompute([text])
            found = explain_miss(engine, asked(form(text)), text)
            assert found.reason == reason and "written otherwise" in found.explanation

    def test_a_header_that_the_prompt_lacks(self, engine: CacheClipEngine) -> None:
        text = f"{self.HEADER}\n\n{self.LONG}"
        engine.precompute([text])
        found = explain_miss(engine, asked(self.LONG[:500]), text)
        assert found.reason == "part" and "metadata header is not in the prompt: 'file_name" in found.explanation

    def test_texts_that_share_a_header_are_not_all_explained(self) -> None:
        texts = [f"{self.HEADER}\n\n{sentence}" for sentence in SENTENCES]
        assert plausible(texts, asked(texts[3])) == [texts[3]]
        assert plausible(texts, asked(SENTENCES[4])) == [texts[4]]
        assert plausible(texts, asked(self.HEADER)) == []
        assert plausible([], asked("x")) == [] and plausible(["", "?!"], asked("x")) == []


class TestCommand:
    @pytest.fixture
    def run(self, engine: CacheClipEngine, tmp_path: Path, cacheclip: Any) -> Callable[..., Any]:
        settings = tmp_path / "settings.toml"
        settings.write_text(f"primary = '{engine.config.primary}'\nauxiliary = '{engine.config.auxiliary}'")
        options = ("--store", engine.config.store, "--settings", settings)

        def run(prompt: str, *more: object) -> Any:
            (tmp_path / "prompt.txt").write_text(prompt)
            return cacheclip("explain-miss", tmp_path / "prompt.txt", *options, *more)

        return run

    def test_the_texts_that_the_store_knows(self, run: Callable[..., Any]) -> None:
        good = run(asked(TEXT), "--json")
        assert good.code == 0, good.err
        assert [each["reason"] for each in good.json["texts"]] == ["hit"]
        cut = run(asked(TEXT[:54]))
        assert cut.code == 1 and "miss" in cut.out and "Parts of 32" in cut.out
        none = run("Nothing of it.")
        assert none.code == 1 and "--text FILE" in none.out

    def test_a_text_without_a_source(self, engine: CacheClipEngine, run: Callable[..., Any]) -> None:
        engine.precompute([TestParts.LONG, "A text of few words, in the catalog."])
        for prompt, reason in ((TestParts.LONG[:300], "part"), ("A text of few words, in the catalog.", "hit")):
            assert [each["reason"] for each in run(asked(prompt), "--json").json["texts"]] == [reason]
        assert "in other letter case" in run(asked(TestParts.LONG.upper())).out

    def test_a_text_of_ones_own(self, run: Callable[..., Any], tmp_path: Path) -> None:
        (tmp_path / "text.txt").write_text("Some other text that was expected here, of some length.")
        result = run(asked(TEXT), "--text", tmp_path / "text.txt", "--json")
        assert result.code == 1 and result.json["texts"][0]["reason"] == "not_in_prompt"

    def test_no_store(self, cacheclip: Any, tmp_path: Path) -> None:
        (tmp_path / "prompt.txt").write_text("x")
        result = cacheclip("explain-miss", tmp_path / "prompt.txt", "--store", tmp_path / "none")
        assert "there is no store" in result.err and not (tmp_path / "none").exists()
