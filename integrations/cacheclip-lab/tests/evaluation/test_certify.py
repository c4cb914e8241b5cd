"""Certification on tiny models: every check passes on a right implementation, and the right one fails on a wrong."""

from __future__ import annotations

import gc
import json
import statistics
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cacheclip_lab.certificates.verdicts as certificates
import cacheclip_lab.evaluation.certify as module
import pytest
import torch
from cacheclip_lab.certificates import Guarantee, PromisedGate
from cacheclip_lab.evaluation import edits as edited, exactness, guarantee as guarantees
from cacheclip_lab.evaluation.certificate import saved_certificate
from cacheclip_lab.evaluation.certify import RATIOS, certify
from cacheclip_lab.evaluation.conversations import questions_of
from cacheclip_lab.evaluation.edits import edits
from cacheclip_lab.evaluation.exactness import check_exactness
from cacheclip_lab.evaluation.lab import Lab, planned_runs
from cacheclip_lab.evaluation.prompts import EvaluationPrompt, bundled_prompts
from cacheclip_lab.evaluation.records import Record, RecordChunk
from cacheclip_testing.plugin import CACHECLIP, CHUNKS, QUESTION
from typer.testing import CliRunner

from cacheclip_rag import CacheClipEngine, CertificateError, ConfigurationError, EngineConfig, SamplingParams
from cacheclip_rag.cli import app
from cacheclip_rag.measuring import FusedCache, kl_divergence
from cacheclip_rag.methods import preset, vary
from cacheclip_rag.runtime.transformers import attention
from cacheclip_rag.runtime.transformers.attention_pattern import AttentionPattern, Block

PROMPT = EvaluationPrompt(tuple(CHUNKS[:3]), QUESTION, None)


def short_prompts(count: int) -> list[EvaluationPrompt]:
    """Bundled prompts with a quarter of each chunk: the tiny models read three times as many tokens as real ones."""
    bundled = bundled_prompts(count)
    return [replace(each, chunks=tuple(text[:110] for text in each.chunks), question="Who?") for each in bundled]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "bundled_prompts", short_prompts)
    monkeypatch.setattr(module, "_QUICK_PROMPTS", 2)
    monkeypatch.setattr(exactness, "_GREEDY_TOKENS", 4)
    monkeypatch.setattr(module, "ANSWER_TOKENS", 6)
    monkeypatch.setattr(module, "RATIOS", (0.2,))


@pytest.fixture
def config(tiny_models: dict[str, str]) -> EngineConfig:
    return EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], **CACHECLIP)


def engine_for(folder: str, auxiliary: str, **options: Any) -> CacheClipEngine:
    engine = CacheClipEngine(**{"primary": folder, "auxiliary": auxiliary, **CACHECLIP, **options})
    engine.precompute(PROMPT.chunks)
    return engine


class TestExactness:
    @pytest.mark.some(2)
    def test_passes_on_every_architecture(self, primary: str, tiny_models: dict[str, str]) -> None:
        result = check_exactness(engine_for(primary, tiny_models["auxiliary"]), PROMPT)
        failed = {name: check for name, check in result["checks"].items() if not check["passed"]}
        assert result["passed"] and not failed
        assert set(result["checks"]) == {"full_prefill", "ratio_1", "ratio_0", "first_chunk", "no_future", "greedy"}
        assert 0 < result["noise_floor"]["logits"] < 1e-3

    @pytest.fixture
    def leaky(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The mask of the published implementations, aligned to the bottom-right corner."""
        import cacheclip_rag.runtime.transformers.model as runtime

        def plan(rows: torch.Tensor, device: torch.device | None = None, *_: object) -> AttentionPattern:
            visible = torch.arange(int(rows[-1]) + 1 - len(rows), int(rows[-1]) + 1)
            return AttentionPattern([Block.of(slice(0, len(rows)), slice(0, int(rows[-1]) + 1), visible, device)])

        monkeypatch.setattr(runtime, "causal_pattern", plan)

    @pytest.mark.parametrize("primary", ["llama", "gemma3"], indirect=True)
    def test_twin_mask_that_sees_the_future(self, primary: str, tiny_models: dict[str, str], leaky: None) -> None:
        checks = check_exactness(engine_for(primary, tiny_models["auxiliary"]), PROMPT)["checks"]
        assert not checks["no_future"]["passed"]

    @pytest.mark.some(2)
    @pytest.mark.parametrize(
        ("primary", "dtype"), [("llama", "bfloat16"), ("qwen2-rope-yarn", "float32")], indirect=["primary"]
    )
    def test_twin_keys_moved_to_wrong_positions(
        self, primary: str, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch, dtype: str
    ) -> None:
        original = FusedCache.filling
        engine = engine_for(primary, tiny_models["auxiliary"], dtype=dtype)
        num_prefix = engine.parts.models.caches_after_prefix.num_prefix

        def filling(self: FusedCache, *arguments: Any) -> Any:
            tables_of = FusedCache.tables_of

            def moved(cache: FusedCache, slots: Any) -> Any:
                return tables_of(cache, slots + 2 * (slots >= num_prefix))

            with monkeypatch.context() as patch:
                patch.setattr(FusedCache, "tables_of", moved)
                return original(self, *arguments)

        monkeypatch.setattr(FusedCache, "filling", filling)
        assert not check_exactness(engine, PROMPT)["checks"]["first_chunk"]["passed"]

    @pytest.mark.parametrize("primary", ["gemma2"], indirect=True)
    def test_twin_window_forgotten(
        self, primary: str, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rule, engine = attention.AttentionRule, engine_for(primary, tiny_models["auxiliary"])
        monkeypatch.setattr(attention, "AttentionRule", lambda **given: rule(**{**given, "window": None}))
        checks = check_exactness(engine, PROMPT)["checks"]
        assert not checks["full_prefill"]["passed"] and not checks["ratio_1"]["passed"]

    def test_does_not_disturb_other_engines(self, tiny_models: dict[str, str]) -> None:
        """Checks borrow the loaded model for plain transformers' attention, while others answer with it."""
        engine = engine_for(tiny_models["llama"], tiny_models["auxiliary"])
        expected = engine.generate(PROMPT.text, max_tokens=8).token_ids
        checking = threading.Thread(target=lambda: [check_exactness(engine, PROMPT) for _ in range(2)])
        checking.start()
        answers = []
        while checking.is_alive():
            answers.append(engine.generate(PROMPT.text, max_tokens=8).token_ids)
        answers.append(engine.generate(PROMPT.text, max_tokens=8).token_ids)  # after the last check
        assert len(answers) > 1 and set(answers) == {expected}
        assert engine.primary.model.config._attn_implementation == attention.ATTENTION_NAME


class TestCertify:
    def test_what_it_holds(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(module, "RATIOS", RATIOS)
        monkeypatch.setattr(certificates, "_warned", set())
        certificate = certify(config, quick=True)
        assert "cacheclip certify" not in caplog.text, "that is what runs"
        assert certificate.exactness["passed"]
        assert [row.ratio for row in certificate.ratios] == [0.0, 0.05, 0.1, 0.2, 0.3, 0.5]
        assert certificate.ratio == 0.2 and certificate.prompts == 2 and certificate.quick
        assert certificate.verdict == next(row.verdict for row in certificate.ratios if row.ratio == 0.2)
        for row in certificate.ratios:
            assert row.effective_ratio == pytest.approx(row.ratio, abs=0.01)
            assert row.charged_ratio == pytest.approx(row.effective_ratio)
        # a model of random weights that never saw the chunks together: far from full prefill, and it is told
        assert certificate.ratios[0].answer_kl["mean"] > certificate.thresholds["answer_kl"]
        assert certificate.ratios[0].verdict == "not faithful"

    def test_the_promise_is_that_of_the_prompts_answers(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same questions asked by hand. Few random answers are equal: it is told that nothing is promised."""
        monkeypatch.setattr(guarantees, "bundled_prompts", lambda count: short_prompts(count // 50))
        found = certify(config, quick=True, max_differ=0.1).guarantee
        assert found and (found.most, found.n, found.gates, found.chunks) == (0.1, 2, (), (5, 5))
        engine, lengths = CacheClipEngine(config), []
        for each in short_prompts(2):
            text = "\n\n".join(map(str.strip, each.chunks)) + f"\n\nQuestion: {each.question}\nAnswer:"
            lengths.append(engine.plan(text, method="full").layout.num_tokens)
        assert found.prompt_tokens == (min(lengths), max(lengths))

    @pytest.mark.long
    @pytest.mark.parametrize(("differing", "sure_of", "least"), [(0, 0.1, 0.9), (3, 0.6, 0.9), (20, 0.9, None)])
    def test_answers_of_an_evaluation_make_the_promise(
        self, config: EngineConfig, kept: Callable[..., Path], differing: int, sure_of: float, least: float | None
    ) -> None:
        """Answers are planted in a real folder. Of 60, three that differ are one too many, below the gate they are
        none. An engine takes what was found."""
        items = kept() / "items.jsonl"
        full, own = map(json.loads, items.read_text().splitlines())
        full |= {"answer": "same"}
        sure = {"confidence": 0.9, "later_confidence": 0.9, "confidence_to_difference": None}
        unsure = {"answer": "other", **sure, "confidence": sure_of}
        owns = [{**own, "answer": "same", **(unsure if number < differing else sure)} for number in range(60)]
        lines = [{**item, "id": f"{number}"} for number, each in enumerate(owns) for item in (full, each)]
        items.write_text("".join(json.dumps(line) + "\n" for line in lines))
        certificate = certify(config, quick=True, max_differ=0.1, answers=items.parent)
        assert certificate.guarantee and certificate.guarantee.n == 60
        gates = [(e.ratio, e.min_confidence, e.differing, round(e.cost, 2)) for e in certificate.guarantee.gates]
        # the strictest of those that cost the same
        assert gates == ([] if least is None else [(0.2, least, 0, round(own["charged_ratio"] + differing / 60, 2))])
        certificate.save()
        engine = CacheClipEngine(replace(config, min_confidence="auto"))
        if least is None:
            with pytest.raises(CertificateError, match="60 prompts do not show"):
                engine.make_method()
        else:
            assert engine.make_method() == replace(preset("cacheclip"), min_confidence=least)

    @pytest.fixture
    def kept(self, config: EngineConfig, tmp_path: Path) -> Callable[..., Path]:
        """A folder of answers with these settings."""

        def ask(config: EngineConfig = config, ratio: float = 0.2, **changes: Any) -> Path:
            records = [Record("q", "", "Who?", ("she",), tuple(RecordChunk("", text) for text in CHUNKS[:3]), {})]
            runs = planned_runs(["cacheclip"], [ratio], config, {"cacheclip": vary(preset("cacheclip"), changes)})
            Lab("kept", records, config, runs, tmp_path / "kept").run()
            return tmp_path / "kept"

        return ask

    @pytest.mark.some(3)
    @pytest.mark.parametrize("setting", ["backend", "auxiliary_heads_sha256", "primary_tokenizer_sha256", "codec"])
    def test_answers_of_other_settings_make_no_promise(
        self, config: EngineConfig, kept: Callable[..., Path], setting: str
    ) -> None:
        """Nor those that do not say. The error names what differs."""
        folder = kept()
        settings = json.loads((folder / "settings.json").read_text())
        (folder / "settings.json").write_text(json.dumps(settings | {setting: "other"}))
        with pytest.raises(ConfigurationError, match=f"and there {setting} is 'other'. Run cacheclip eval again"):
            certify(config, quick=True, max_differ=0.1, answers=folder)
        del settings[setting]
        (folder / "settings.json").write_text(json.dumps(settings))
        with pytest.raises(ConfigurationError, match=f"and there {setting} is not recorded. Run cacheclip eval again"):
            certify(config, quick=True, max_differ=0.1, answers=folder)

    @pytest.mark.parametrize(
        ("settings", "changes", "named"),
        [
            ({"system_prompt": "Answer as a pirate."}, {}, "system_prompt is 'Answer as a pirate.'"),
            ({"chunk_context": "passages"}, {}, "chunk_context_sha256 is"),
            # With a gate, answers are full prefill's where the method is unsure: they say nothing about weaker gates.
            ({}, {"min_confidence": 0.9}, "min_confidence is 0.9 in cacheclip@0.2)"),
            ({}, {"correction": 0.25}, "0.25 in cacheclip@0.2)"),
        ],
    )
    def test_answers_that_were_asked_otherwise_make_no_promise(
        self,
        config: EngineConfig,
        kept: Callable[..., Path],
        settings: dict[str, Any],
        changes: dict[str, Any],
        named: str,
    ) -> None:
        folder = kept(replace(config, **settings), **changes)
        with pytest.raises(ConfigurationError) as error:
            certify(config, quick=True, max_differ=0.1, answers=folder)
        assert named in str(error.value) and "Run cacheclip eval" in str(error.value)

    @pytest.mark.long
    @pytest.mark.parametrize("planted", [False, True])
    def test_turns_are_compared_with_full_prefill_of_the_same_history(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, planted: bool
    ) -> None:
        """Brute force, with an engine that nothing else was asked. Planted: no turn continues the one before."""
        config = replace(config, recompute_ratio=0.3)
        with monkeypatch.context() as patched:
            if planted:
                patched.setattr("cacheclip_rag.answering.pipeline.least_computed", lambda plan, *_: plan)
            turns = certify(config, quick=True, turns=3).turns
        assert [each.turn for each in turns] == [1, 2, 3] and not turns[0].continued_tokens
        engine = CacheClipEngine(config)
        prompt, method = short_prompts(2)[1], engine.make_method()
        engine.precompute(prompt.chunks)
        messages, found = list[dict[str, str]](), list[tuple[float, int, int]]()
        for turn in questions_of(prompt, 3, 0):
            messages.append({"role": "user", "content": turn.question if messages else turn.text})
            full = engine.prefill(messages, method=preset("full")).logits
            own = engine.prefill(messages, method=method).logits
            answer = engine.generate(messages, SamplingParams(max_tokens=6))
            kl = float(kl_divergence(full, own))
            found.append((kl, answer.stats.continued_tokens, answer.stats.prompt_tokens))
            messages.append({"role": "assistant", "content": answer.text})
        assert all(continued > 0 for _, continued, _ in found[1:])
        expected = [(pytest.approx(kl, rel=1e-3, abs=1e-5), *sizes) for kl, *sizes in found]
        seen = [(each.first_token_kl["mean"], each.continued_tokens, each.prompt_tokens) for each in turns]
        assert (seen == expected) is not planted

    @pytest.mark.long
    def test_turns_at_ratio_1_are_exact_and_the_worst_turn_is_the_verdict(self, config: EngineConfig) -> None:
        certificate = certify(replace(config, recompute_ratio=1.0), quick=True, turns=3)
        assert [each.verdict for each in certificate.turns] == ["exact"] * 3 and certificate.verdict == "exact"
        certificate.save()
        bad = replace(certificate, turns=(*certificate.turns[:2], replace(certificate.turns[2], verdict="faithful")))
        bad.save()
        assert saved_certificate(bad.identity) == replace(bad, verdict="faithful")
        replace(certificate, turns=()).save()  # as measured without conversations: those of before stay
        assert saved_certificate(bad.identity) == replace(bad, verdict="faithful")

    @pytest.mark.long
    @pytest.mark.parametrize("planted", [False, True])
    def test_edited_prompts_are_compared_with_full_prefill(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, planted: bool
    ) -> None:
        """Brute force, with an engine that nothing else was asked. Planted: of the earlier prompt nothing is kept."""
        with monkeypatch.context() as patched:
            if planted:
                patched.setattr("cacheclip_rag.runtime.prompt_cache.PromptCache.insert", lambda *_, **__: 0)
            rows = {row.edit: row for row in certify(config, quick=True, turns=2).edits}
        engine = CacheClipEngine(replace(config, moved="on"))
        prompts, found = short_prompts(2), list[tuple[float, int]]()
        for number, prompt in enumerate(prompts):
            old, new = edits(prompt.chunks, prompts[1 - number].chunks[0], prompt.question)["header"]
            engine.prefixes.clear()
            full = engine.prefill(new, method=preset("full")).logits
            engine.generate(old, SamplingParams(max_tokens=1), method="prefix")
            own = engine.prefill(new, method=engine.make_method())
            found.append((float(kl_divergence(full, own.logits)), own.stats.moved_tokens))
        assert planted or [*rows] == ["header", "deleted", "replaced", "inserted", "reversed", "summarised"]
        expected = [pytest.approx(statistics.fmean(each), rel=1e-3, abs=1e-5) for each in zip(*found, strict=True)]
        seen = [] if planted else [rows["header"].first_token_kl["mean"], rows["header"].moved_tokens]
        assert (seen == expected) is not planted and expected[1].expected > 100

    def test_edits_keep_two_prompts(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        """Beside the one that is compared: a long prompt's KV is large."""
        engine, prompts, counted, keep = CacheClipEngine(config), short_prompts(2), list[int](), edited._keep

        def kept(*args: Any) -> None:
            gc.collect()
            counted.append(sum(type(each) is FusedCache for each in gc.get_objects()))
            keep(*args)

        monkeypatch.setattr(edited, "_keep", kept)
        pairs = edits(prompts[0].chunks, prompts[1].chunks[0], prompts[0].question)
        before = sum(type(each) is FusedCache for each in gc.get_objects())
        assert len([*edited.measured_edits(engine, pairs, engine.make_method(), 2)]) == 6
        assert max(counted) - before <= 4, counted

    def test_questions_of_a_conversation(self) -> None:
        for number, prompt in enumerate(each for each in bundled_prompts(24) if each.needle):
            asked = questions_of(prompt, 5, number)
            needles = {each.needle for each in asked} - {None}
            assert len({each.question for each in asked}) == 5 and prompt.needle in needles and len(needles) == 3
            assert all(prompt.text.count(needle) == 1 for needle in needles)

    def test_answers_of_others_make_none(self, config: EngineConfig, kept: Callable[..., Path], tmp_path: Path) -> None:
        asked: dict[str, Any] = {"max_differ": 0.1, "answers": kept(ratio=0.3)}
        message = r"expected answers of method 'cacheclip'.*--methods full,cacheclip"
        with pytest.raises(ConfigurationError, match=message):
            certify(config, **asked)
        with pytest.raises(ConfigurationError, match=r"certified models.*dtype is 'float32'.*another folder"):
            certify(replace(config, dtype="bfloat16"), **asked)
        with pytest.raises(ConfigurationError, match="expected the folder of a comparison.*--out"):
            certify(config, max_differ=0.1, answers=tmp_path)
        with pytest.raises(ConfigurationError, match="max_differ must be a share from 0.01 to 0.5, got 10"):
            certify(config, max_differ=10)

    def test_a_gate_of_the_engine_is_left_out(self, config: EngineConfig) -> None:
        found = certify(replace(config, min_confidence=1.0), quick=True)
        assert [row.effective_ratio for row in found.ratios] == pytest.approx([0.0, 0.2], abs=0.01)

    def test_method_without_a_ratio(self, config: EngineConfig) -> None:
        certificate = certify(replace(config, method="direct"), quick=True)
        assert [row.ratio for row in certificate.ratios] == [0.0] and certificate.ratio == 0.0
        assert certificate.auxiliary is None and certificate.identity.auxiliary_sha256 is None

    def test_failed_checks_make_it_not_faithful(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(*args: Any) -> dict[str, Any]:
            return {"passed": False, "noise_floor": {"logits": 0.0, "kl": 0.0}, "checks": {}, "prompt_tokens": 1}

        monkeypatch.setattr(module, "check_exactness", failing)
        certificate = certify(replace(config, recompute_ratio=1.0), quick=True)
        assert certificate.verdict == "not faithful"
        assert {row.verdict for row in certificate.ratios} == {"not faithful"}

    def test_prompts_without_a_needle(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "bundled_prompts", lambda count: short_prompts(1))
        with pytest.raises(ConfigurationError, match="none of the 1 prompts hides one.*at least one has a needle"):
            certify(config)

    def test_nothing_to_certify(self, config: EngineConfig) -> None:
        with pytest.raises(ConfigurationError, match="reuses nothing"):
            certify(replace(config, method="full"))
        with pytest.raises(ConfigurationError, match="auxiliary"):
            certify(replace(config, auxiliary=None))

    @pytest.mark.long
    def test_prompts_that_were_not_reused_certify_nothing(
        self, config: EngineConfig, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Longer than the rotary pin: plain prefill, which would pass every check."""
        long = next(each for each in bundled_prompts(24) if each.needle)
        monkeypatch.setattr(module, "bundled_prompts", lambda count: [long])
        with pytest.raises(ConfigurationError, match="not reused.*change above 512"):
            certify(replace(config, primary=tiny_models["phi3-longrope"]), quick=True)

    def test_a_method_of_ones_own(self, config: EngineConfig) -> None:
        method = vary(preset("cacheclip"), {"budget": {"ratio": 1.0, "grouping": {"size": 4}}})
        certificate = certify(config, method=method, quick=True)
        assert (certificate.ratio, certificate.verdict) == (1.0, "exact")
        assert certificate.ratios[-1].agreement == 1.0 and certificate.ratios[-1].answer_kl["max"] < 1e-6
        assert certificate.identity.method_settings["budget"]["grouping"]["size"] == 4

    def test_folder_that_cannot_be_written_is_noticed_before(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "file"))
        with pytest.raises(CertificateError, match="cannot be written"):
            certify(replace(config, primary="never-looked-for"))


class TestCommand:
    @pytest.fixture
    def arguments(self, tiny_models: dict[str, str]) -> list[str]:
        models = ["--primary", tiny_models["llama"], "--auxiliary", tiny_models["auxiliary"]]
        return ["certify", *models, "--quick"]

    def test_json(self, arguments: list[str]) -> None:
        result = CliRunner().invoke(app, [*arguments, "--ratio", "1.0", "--json"])
        assert result.exit_code == 0, result.output
        [line] = result.stdout.splitlines()
        value = json.loads(line)
        assert value["verdict"] == "exact" and Path(value["path"]).is_file()
        assert value["thresholds"] and value["identity"]["transformers"] and value["identity"]["cacheclip_rag"]

    def test_found_wanting_is_exit_code_1(self, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "160")
        result = CliRunner().invoke(app, [*arguments, "--ratio", "0.05", "--turns", "3"])
        assert result.exit_code == 1
        shown = " ".join(result.stdout.split())
        for word in ("continued", "nominal", "charged", "Noise floor", "no_future", "Certificate:"):
            assert word in shown, word
        assert "Turns of conversations at ratio 0.05" in shown and "Verdict at ratio 0.05: not faithful" in shown
        assert "0.1 nats at the first token and 0.05 along" in shown

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--max-differ", "0.1"], "--quick"),
            (["--max-differ", "0.1", "--backend", "vllm"], "--max-differ needs many prompts"),
            (["--settings", "{answers}"], "for --max-differ, which is missing"),
        ],
    )
    def test_a_promise_needs_many_prompts(
        self, arguments: list[str], tmp_path: Path, options: list[str], message: str
    ) -> None:
        (tmp_path / "own.toml").write_text('[certify]\nanswers = "there"\n')
        given = [each.format(answers=tmp_path / "own.toml") for each in options]
        result = CliRunner().invoke(app, [*arguments, *given])
        assert isinstance(result.exception, ConfigurationError) and message in str(result.exception)

    @pytest.mark.long
    def test_a_promise_is_printed(self, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """Exit code 1 if no gate holds, whatever the verdict."""
        monkeypatch.setattr(module, "_PROMPTS", 2)
        gate = PromisedGate(0.05, 0.4, 3, 0.0912, 0.456)
        for gates, code, said in (((gate,), 0, "takes the first row"), ((), 1, "No gate that costs less")):
            made = Guarantee(0.1, 0.95, 100, gates, (900, 1200), (5, 5), (2, 32))
            with monkeypatch.context() as patch:
                patch.setattr(module, "asked_answers", lambda *_: {})
                patch.setattr(module, "guarantee_of", lambda *_, made=made: made)
                result = CliRunner().invoke(app, [*arguments[:-1], "--ratio", "0.05", "--max-differ", "0.1"])
            text = " ".join(result.stdout.split())
            assert result.exit_code == code and said in text, result.output
            assert "Shown by 100 prompts, and holds for such: prompts of 900-1,200 tokens, 5 chunks" in text
            assert ("3 of 100" in text and "9.1%" in text and "0.46" in text) == bool(gates)


class TestPrompts:
    def test_more_are_other_prompts_with_the_same_questions(self) -> None:
        """Needles stand once and never in the first chunk, which is exact by itself."""
        many = bundled_prompts(200)
        assert many[:24] == bundled_prompts(24) and len({prompt.text for prompt in many}) == 200
        assert len({prompt.question for prompt in many}) == 24
        assert len([prompt for prompt in many[:24] if prompt.needle]) == 12
        for prompt in many:
            if not prompt.needle:
                assert "access number of" not in prompt.text
                continue
            assert prompt.text.count(prompt.needle) == 1 and prompt.needle not in prompt.chunks[0]
            assert prompt.text.count("access number of") == 4  # three places, and the question

    def test_questions_are_answered_behind_the_first_chunk(self) -> None:
        """A question about it would measure nothing."""
        from cacheclip_lab.evaluation.prompts import _data

        data = _data()
        for number, prompt in enumerate(p for p in bundled_prompts(24) if not p.needle):
            for index in data["questions"][number]["passages"]:
                assert any(data["passages"][index]["text"] in chunk for chunk in prompt.chunks[1:])
