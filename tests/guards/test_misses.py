"""What statistics and warnings say of texts that were not reused."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from cacheclip_rag import CacheClipEngine, EngineConfig, SamplingParams
from tests.conftest import SENTENCES, Logs

LONG = " ".join(SENTENCES[:6])
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


class TestStatistics:
    def test_stored_for_other_settings(self, engine: CacheClipEngine, config: EngineConfig) -> None:
        other = CacheClipEngine(replace(config, system_prompt="Another system prompt."))
        answer = other.generate(asked(TEXT), SamplingParams(max_tokens=1))
        assert (answer.stats.hits, answer.stats.misses, answer.stats.unusable) == (0, 1, 1)
        assert "for another model, dtype, system prompt" in str(answer.stats.fallback)
        assert other.generate(asked(TEXT), SamplingParams(max_tokens=1)).stats.unusable == 0, "it was stored meanwhile"

    def test_given_and_not_in_the_prompt(self, engine: CacheClipEngine) -> None:
        given = [TEXT, "A text that this prompt does not hold, of some length.", " "]
        answer = engine.generate(asked(TEXT), SamplingParams(max_tokens=1), documents=given)
        assert (answer.stats.hits, answer.stats.misses, answer.stats.not_found) == (1, 0, 1)

    def test_given_and_a_part_of_a_stored_text(self, engine: CacheClipEngine) -> None:
        engine.precompute([LONG])
        for given, absent in ((" ".join(SENTENCES[2:4]), 0), (SENTENCES[4], 0), (SENTENCES[7], 1)):
            assert engine.plan(asked(LONG), documents=[given]).not_found == absent
        quoted = "\n".join(f"> {line}" for line in textwrap.wrap(LONG[:300], 100))
        assert engine.plan(asked(quoted), documents=[SENTENCES[1]]).not_found == 0
        assert engine.plan(asked(quoted), documents=[SENTENCES[5]]).not_found == 1

    def test_partial_hits(self, engine: CacheClipEngine) -> None:
        engine.precompute([LONG])
        stats = engine.generate(asked(LONG[:300]), SamplingParams(max_tokens=1)).stats
        assert (stats.hits, stats.partial_hits) == (1, 1) and 0.4 < (stats.partial_share or 0) < 0.7
        stats = engine.generate(asked(TEXT), SamplingParams(max_tokens=1)).stats
        assert (stats.hits, stats.partial_hits, stats.partial_share) == (1, 0, None)

    def test_a_store_of_no_use_is_said_once(self, engine: CacheClipEngine, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(2):
            engine.generate("What was logged?", SamplingParams(max_tokens=1), documents=["Something else altogether."])
        assert caplog.text.count("reuses nothing of this store") == 1
        assert "no stored chunk found in the prompt, and 1 given documents are not in it" in caplog.text

    def test_a_greeting_is_not(self, engine: CacheClipEngine, caplog: Logs) -> None:
        """Nor does it use up the one warning, also of what is stored for other settings."""
        other = CacheClipEngine(replace(engine.config, system_prompt="Another system prompt."))
        for each, text in ((engine, "Something else altogether, which is new. " * 40), (other, asked(TEXT))):
            caplog.clear()
            each.generate("Hello", SamplingParams(max_tokens=1))
            assert "reuses nothing of this store" not in caplog.text
            each.generate(text, SamplingParams(max_tokens=1))
            assert caplog.text.count("reuses nothing of this store") == 1
        assert "1 are for another model" in caplog.text

    def test_an_empty_store_names_what_fills_it(self, config: EngineConfig, caplog: Logs) -> None:
        """Unless the answer fills it."""
        long = "Something else altogether, which is new. " * 40
        filled = CacheClipEngine(replace(config, method="direct", namespace="filled"))
        filled.generate(asked(LONG), SamplingParams(max_tokens=1), documents=[LONG])
        for method, said in (("full", 0), ("direct", 1)):
            engine = CacheClipEngine(config, method=method)
            for prompt in ("What was logged?", long, long):
                engine.generate(prompt, SamplingParams(max_tokens=1))
            assert caplog.text.count("nothing is precomputed") == said, method
        for hook in ("CacheClipTransform.from_llm(llm)", "CacheClipVectorStore(store, llm)", "cacheclip ingest"):
            assert hook in caplog.text
