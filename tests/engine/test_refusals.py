"""How the engine refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine, Chunk, EngineConfig, Fresh, SamplingParams, get_engine
from cacheclip_rag.answering import models
from cacheclip_rag.base.errors import ConfigurationError, DownloadError, PromptTooLongError, UnknownModelError
from cacheclip_rag.methods import preset
from cacheclip_rag.methods.recompute import Recompute
from tests.conftest import Logs, Make, Patch, spied
from tests.engine.asking import SHORT, rag

HALF = "A text of some length with half of an emoji: \ud83d and more."
LONG = "word " * 5000
SENSELESS: list[dict[str, Any]] = [
    *({"method": each} for each in ("nonsense", Recompute, None)),
    *({name: -1} for name in ("memory_bytes", "prefix_cache_bytes", "max_bytes")),
    *({name: ""} for name in ("primary", "namespace", "store")),
    *({name: None} for name in ("primary", "namespace")),
    *({name: 5} for name in ("store", "auxiliary", "system_prompt")),
    {"chunk_context": "nonsense"},
    {"dtype": "float64"},
    {"codec": "int3"},
    {"on_miss": "explode"},
    {"memory_bytes": "1 GB"},
    {"max_bytes": 1.5},
]


class TestRefusals:
    def test_prompt_too_long_says_by_how_much(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        many = [f"{n}. {chunks[n % 4]}" for n in range(60)]
        with pytest.raises(
            PromptTooLongError, match=r"\d+ tokens, \d+ more than the 2047 .*last \d+ of its 60 chunks"
        ) as caught:
            engine.generate(rag(many), SHORT, documents=many)
        words = str(caught.value).split()
        total, excess = int(words[words.index("tokens,") - 1]), int(words[words.index("more") - 1])
        assert total - excess == 2047
        drop = int(words[words.index("last") + 1])
        engine.generate(rag(many[:-drop]), SamplingParams(max_tokens=1), documents=many, method="full")
        assert drop > 5
        with pytest.raises(PromptTooLongError):  # nor does the advice throw away much more than it must
            engine.generate(rag(many[: -(drop - 3)]), SHORT, documents=many)

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            *((each, r"empty|at least one") for each in ("", "  \n", [], [Fresh("")], [Fresh(""), Chunk("")], ())),
            *((each, "segments") for each in (5, b"text", {"role": "user"}, iter(["x"]), None, [[]], ["x"])),
            (HALF, "half a character"),
        ],
    )
    def test_prompts(self, engine: CacheClipEngine, prompt: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            engine.generate(prompt, SHORT)

    @pytest.mark.parametrize(
        ("params", "options", "message"),
        [
            (SHORT, {"question": 5}, "question"),
            ({"max_tokens": 3}, {}, "SamplingParams"),
            (SHORT, {"method": "nonsense"}, "full, prefix, direct, "),
        ],
    )
    def test_options_of_a_call(self, engine: CacheClipEngine, params: Any, options: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            engine.generate("Hello", params, **options)

    @pytest.mark.parametrize("texts", ["one string", [1], None, 5, [b"bytes"]])
    def test_texts_of_another_type(self, engine: CacheClipEngine, texts: Any) -> None:
        """A single string would otherwise be taken for a list of letters."""
        for call in (engine.precompute, engine.release, lambda t: engine.generate("Hello", SHORT, documents=t)):
            with pytest.raises(ConfigurationError, match=r"list of texts|must be a string"):
                call(texts)
        assert engine.store.stats().entries == 0

    @pytest.mark.parametrize(
        ("text", "error", "message"),
        [
            *((blank, ConfigurationError, "empty or blank") for blank in ("", "  \n ")),
            (HALF, ConfigurationError, "half a character"),
            (LONG, PromptTooLongError, "smaller chunks"),
        ],
        ids=["empty", "blank", "half", "long"],
    )
    def test_texts(self, engine: CacheClipEngine, text: str, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            engine.precompute([text])
        assert engine.store.stats().entries == 0
        if text == LONG:
            with pytest.raises(PromptTooLongError, match="shorten the question"):
                engine.generate(text, SHORT)

    def test_a_prompt_that_cannot_fit_is_not_even_tokenised(
        self, engine: CacheClipEngine, chunks: list[str], monkeypatch: Patch
    ) -> None:
        """Its bytes are proof enough; a megabyte would take a second."""
        engine.precompute(chunks)
        calls = spied(monkeypatch, engine.primary, "tokenize")
        with pytest.raises(PromptTooLongError, match=r"at least \d+ tokens, \d+ more than the 2047 .*longer context"):
            engine.generate(rag([*chunks, "lamp " * 200_000]), SHORT)
        assert max((len(text) for text, *_ in calls), default=0) < 10_000
        engine.generate(rag(chunks), SHORT)

    def test_no_auxiliary(self, make: Callable[..., CacheClipEngine], chunks: list[str]) -> None:
        engine = make(auxiliary=None)
        with pytest.raises(ConfigurationError, match=r"auxiliary.*full, prefix, direct"):
            engine.generate(rag(chunks), SHORT)
        with pytest.raises(ConfigurationError, match="auxiliary"):
            engine.generate(rag(chunks), SHORT, method=preset("cacheclip").at(0.3))
        engine.precompute(chunks)
        assert engine.generate(rag(chunks), SHORT, method="direct").stats.hits == 4
        assert engine.generate(rag(chunks), SHORT, method="full").stats.method == "full"
        assert engine.auxiliary is None

    @pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), float("inf"), "x", True, [0.2]])
    def test_ratio_out_of_range(self, ratio: Any) -> None:
        with pytest.raises(ConfigurationError, match="recompute_ratio"):
            EngineConfig(recompute_ratio=ratio)
        with pytest.raises(ConfigurationError, match="recompute_ratio"):
            preset("cacheclip").at(ratio)

    @pytest.mark.parametrize("options", SENSELESS, ids=str)
    def test_senseless_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            CacheClipEngine(**options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"method": "caheclip"}, "Did you mean 'cacheclip'"),
            ({"dtype": "bflaot16"}, "Did you mean 'bfloat16'"),
            ({"chunk_context": "passage"}, "Did you mean 'passages'"),
            ({"tempo": 3}, "unknown option"),
            (
                {"recompute_ration": 0.2},
                r"option recompute_ration\. Did you mean 'recompute_ratio'.* Known: primary.*ratio",
            ),
        ],
    )
    def test_near_misses_are_named(self, options: dict[str, Any], message: str) -> None:
        for build in (CacheClipEngine, get_engine):
            with pytest.raises(ConfigurationError, match=message):
                build(**options)

    def test_however_a_store_is_named_it_is_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        named = [EngineConfig(store=name) for name in (tmp_path / "st", str(tmp_path / "st"), "st", "./x/../st")]
        assert len(set(named)) == 1
        assert EngineConfig(store="~/st").store == str(Path.home() / "st")

    def test_which_ratio_counts(self, make: Callable[..., CacheClipEngine]) -> None:
        """That of the call, else the instance's own; for names and the engine's own method the engine's, if it has
        one."""
        mine, engine = preset("epic").at(0.3), make(recompute_ratio=0.1)
        assert engine.make_method(mine).nominal_ratio == 0.3 and engine.make_method(mine, 0.9).nominal_ratio == 0.9
        assert engine.make_method("epic").nominal_ratio == 0.1 and engine.make_method("epic", 0.9).nominal_ratio == 0.9
        assert make().make_method("epic") == preset("epic")
        own = make(method=mine)
        assert own.make_method() == mine and make(method=mine, recompute_ratio=0.1).make_method() == mine.at(0.1)
        assert engine.make_method("direct", 0.9) == preset("direct"), "a name without a ratio ignores it"
        with pytest.raises(ConfigurationError, match="'direct' has no recompute ratio, got 0.9"):
            engine.make_method(preset("direct"), 0.9)

    @pytest.mark.parametrize(("default", "method"), [("cacheclip", "direct"), ("auto", "direct"), ("auto", None)])
    def test_other_methods_work_while_the_auxiliary_cannot_be_had(
        self, make: Make, chunks: list[str], caplog: Logs, default: str, method: str | None
    ) -> None:
        engine = make(auxiliary="nobody/no-such-model", method=default)
        first = engine.generate(rag(chunks), SHORT, method=method, documents=chunks)
        assert (first.stats.hits, first.stats.misses) == (0, 4)
        assert "without the auxiliary" in caplog.text
        again = engine.generate(rag(chunks), SHORT, method=method).stats
        assert (again.hits, again.method) == (4, method or "epic-corrected")
        assert chunks[0] in engine.chunk_caches(with_auxiliary=False)[0]
        assert engine.release(chunks) == 4
        for call in (
            lambda: engine.generate(rag(chunks), SHORT, method="cacheclip"),
            lambda: engine.precompute(chunks),
        ):
            with pytest.raises(DownloadError):
                call()

    def test_a_name_that_no_auxiliary_can_have_is_refused_before_the_primary_loads(
        self, make: Make, chunks: list[str], monkeypatch: Patch
    ) -> None:
        loaded = spied(monkeypatch, models, "load_any")
        engine = make(auxiliary="smollm-135m")
        for call in (lambda: engine.generate(rag(chunks), SHORT), lambda: engine.precompute(chunks)):
            with pytest.raises(UnknownModelError, match=r"Did you mean 'packaged:smollm2-135m'\? Packaged names"):
                call()
        assert loaded == []

    def test_call_options_have_the_adapters_names(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        short = engine.generate(rag(chunks), max_tokens=2, seed=1)
        assert len(short.token_ids) == 2
        assert engine.generate(rag(chunks), SamplingParams(max_tokens=9), max_tokens=2).token_ids == short.token_ids
        *_, last = engine.stream(rag(chunks), max_tokens=2, stop=None)
        assert last.answer is not None and last.answer.token_ids == short.token_ids
        assert engine.generate(rag(chunks), max_new_tokens=2, stop_sequences=()).token_ids == short.token_ids
        with pytest.raises(ConfigurationError, match="max_tokens was given twice, once as max_new_tokens"):
            engine.generate("Hello", max_tokens=2, max_new_tokens=2)
        with pytest.raises(ConfigurationError, match=r"unknown call option max_token\. Did you mean 'max_tokens'\?"):
            engine.generate("Hello", max_token=2)
        with pytest.raises(ConfigurationError, match="stop must be a string or a list"):
            engine.generate("Hello", stop=5)
