"""How the engine refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine, Chunk, EngineConfig, Fresh, SamplingParams, get_engine
from cacheclip_rag.base.errors import (
    ConfigurationError,
    DownloadError,
    PromptTooLongError,
    UnknownModelError,
)
from cacheclip_rag.methods import preset
from cacheclip_rag.methods.recompute import Recompute
from tests.engine.asking import SHORT, rag


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

    def test_question_too_long(self, engine: CacheClipEngine) -> None:
        with pytest.raises(PromptTooLongError, match="shorten the question"):
            engine.generate("word " * 5000, SHORT)

    def test_a_prompt_that_cannot_fit_is_not_even_tokenised(
        self, engine: CacheClipEngine, chunks: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its bytes are proof enough; a megabyte would take a second."""
        engine.precompute(chunks)
        runtime, lengths = engine.primary, []
        monkeypatch.setattr(
            runtime,
            "tokenize",
            lambda text, **options: lengths.append(len(text)) or type(runtime).tokenize(runtime, text, **options),
        )
        with pytest.raises(PromptTooLongError, match=r"at least \d+ tokens, \d+ more than the 2047 .*longer context"):
            engine.generate(rag([*chunks, "lamp " * 200_000]), SHORT)
        assert max(lengths, default=0) < 10_000
        engine.generate(rag(chunks), SHORT)

    def test_chunk_too_long(self, engine: CacheClipEngine) -> None:
        with pytest.raises(PromptTooLongError, match="smaller chunks"):
            engine.precompute(["word " * 5000])
        assert not engine.is_stored("word " * 5000)

    @pytest.mark.parametrize("prompt", ["", "  \n", [], [Fresh("")], [Fresh(""), Chunk("")], ()])
    def test_empty_prompt(self, engine: CacheClipEngine, prompt: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"empty|at least one"):
            engine.generate(prompt, SHORT)

    @pytest.mark.parametrize("text", ["", "  \n "])
    def test_empty_chunk(self, engine: CacheClipEngine, text: str) -> None:
        with pytest.raises(ConfigurationError, match="empty or blank"):
            engine.precompute([text])

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

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("method", "nonsense"),
            ("method", Recompute),
            ("method", None),
            ("chunk_context", "nonsense"),
            ("dtype", "float64"),
            ("codec", "int3"),
            ("on_miss", "explode"),
            ("primary", ""),
            ("memory_bytes", -1),
            ("prefix_cache_bytes", -1),
            ("max_bytes", -1),
            ("memory_bytes", "1 GB"),
            ("max_bytes", 1.5),
            ("namespace", None),
            ("namespace", ""),
            ("primary", None),
            ("store", ""),
            ("store", 5),
            ("auxiliary", 3),
            ("system_prompt", 3),
        ],
    )
    def test_senseless_options(self, option: str, value: Any) -> None:
        with pytest.raises(ConfigurationError):
            CacheClipEngine(**{option: value})

    def test_unknown_option_lists_the_known(self) -> None:
        with pytest.raises(
            ConfigurationError, match=r"option recompute_ration\. Did you mean .* Known: primary.*recompute_ratio"
        ):
            CacheClipEngine(recompute_ration=0.2)
        with pytest.raises(ConfigurationError, match="unknown option"):
            get_engine(tempo=3)

    def test_however_a_store_is_named_it_is_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        named = [EngineConfig(store=name) for name in (tmp_path / "st", str(tmp_path / "st"), "st", "./x/../st")]
        assert len(set(named)) == 1
        assert EngineConfig(store="~/st").store == str(Path.home() / "st")

    @pytest.mark.parametrize("prompt", [5, b"text", {"role": "user", "content": "x"}, iter(["x"]), None, [[]], ["x"]])
    def test_prompt_of_another_type(self, engine: CacheClipEngine, prompt: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"segments"):
            engine.generate(prompt, SHORT)

    @pytest.mark.parametrize("texts", ["one string", [1], None, 5, [b"bytes"]])
    def test_texts_of_another_type(self, engine: CacheClipEngine, texts: Any) -> None:
        """A single string would otherwise be taken for a list of letters."""
        for call in (engine.precompute, engine.release, lambda t: engine.generate("Hello", SHORT, documents=t)):
            with pytest.raises(ConfigurationError, match=r"list of texts|must be a string"):
                call(texts)
        assert engine.store.stats().entries == 0

    def test_question_of_another_type(self, engine: CacheClipEngine) -> None:
        with pytest.raises(ConfigurationError, match="question"):
            engine.generate("Hello", SHORT, question=5)  # type: ignore[arg-type]

    def test_params_of_another_type(self, engine: CacheClipEngine) -> None:
        with pytest.raises(ConfigurationError, match="SamplingParams"):
            engine.generate("Hello", {"max_tokens": 3})  # type: ignore[arg-type]

    def test_half_a_character(self, engine: CacheClipEngine) -> None:
        text = "A text of some length with half of an emoji: \ud83d and more."
        for call in (lambda: engine.precompute([text]), lambda: engine.generate(text, SHORT)):
            with pytest.raises(ConfigurationError, match="half a character"):
                call()

    def test_unknown_method_of_one_call(self, engine: CacheClipEngine) -> None:
        with pytest.raises(ConfigurationError, match="full, prefix, direct, "):
            engine.generate("Hello", SHORT, method="nonsense")

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
        self,
        make: Callable[..., CacheClipEngine],
        chunks: list[str],
        caplog: pytest.LogCaptureFixture,
        default: str,
        method: str | None,
    ) -> None:
        engine = make(auxiliary="nobody/no-such-model", method=default)
        first = engine.generate(rag(chunks), SHORT, method=method, documents=chunks)
        assert (first.stats.hits, first.stats.misses) == (0, 4)
        assert "without the auxiliary" in caplog.text
        again = engine.generate(rag(chunks), SHORT, method=method).stats
        assert (again.hits, again.method) == (4, method or "anchored")
        assert chunks[0] in engine.chunk_caches(with_auxiliary=False)[0]
        assert engine.release(chunks) == 4
        with pytest.raises(DownloadError):
            engine.generate(rag(chunks), SHORT, method="cacheclip")
        with pytest.raises(DownloadError):
            engine.precompute(chunks)

    @pytest.mark.parametrize(
        ("name", "error", "message"),
        [
            ("smollm-135m", UnknownModelError, r"Did you mean 'packaged:smollm2-135m'\? Packaged names"),
        ],
    )
    def test_a_name_that_no_auxiliary_can_have_is_refused_before_the_primary_loads(
        self,
        make: Callable[..., CacheClipEngine],
        chunks: list[str],
        name: str,
        error: type[Exception],
        message: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        loaded: list[str] = []
        monkeypatch.setattr("cacheclip_rag.answering.models.load_any", lambda name, **options: loaded.append(name))
        engine = make(auxiliary=name)
        for call in (lambda: engine.generate(rag(chunks), SHORT), lambda: engine.precompute(chunks)):
            with pytest.raises(error, match=message):
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

    @pytest.mark.parametrize(
        ("options", "near"),
        [
            ({"recompute_ration": 0.2}, "recompute_ratio"),
            ({"method": "caheclip"}, "cacheclip"),
            ({"dtype": "bflaot16"}, "bfloat16"),
            ({"chunk_context": "passage"}, "passages"),
        ],
    )
    def test_near_misses_are_named(self, options: dict[str, Any], near: str) -> None:
        with pytest.raises(ConfigurationError, match=f"Did you mean '{near}'"):
            EngineConfig(**options) if "recompute_ration" not in options else CacheClipEngine(**options)
