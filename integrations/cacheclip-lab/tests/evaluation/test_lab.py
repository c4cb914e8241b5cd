"""The laboratory on tiny models: shared chunk caches, honest figures, and a run that a kill does not lose."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_lab.evaluation.gating import CONFIDENCES
from cacheclip_lab.evaluation.journal import open_journal
from cacheclip_lab.evaluation.lab import Lab, every_method, planned_runs
from cacheclip_lab.evaluation.questions import INSTRUCTION, ask
from cacheclip_lab.evaluation.records import Record, RecordChunk
from cacheclip_lab.evaluation.reference import Reference
from cacheclip_lab.evaluation.report import FILES, summarise
from cacheclip_lab.evaluation.results import Comparison
from cacheclip_lab.evaluation.scores import METRICS
from cacheclip_lab.evaluation.submission import read_submissions
from cacheclip_lab.evaluation.tables import notes
from cacheclip_testing import SENTENCES, add_bos, build_class
from cacheclip_testing.plugin import CACHECLIP, CHUNKS
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from cacheclip_rag import CacheClipEngine, Chunk, ConfigurationError, EngineConfig, Fresh, MissingExtraError
from cacheclip_rag.measuring import known_kv
from cacheclip_rag.methods import Method, preset, vary
from cacheclip_rag.methods.direct import Direct
from cacheclip_rag.runtime import TextModel

METHODS = ["direct", "epic", "cacheclip"]


def record(number: int, **meta: Any) -> Record:
    """With an answer of 8 tokens, unless ``meta`` says something else."""
    passages = tuple(RecordChunk(f"Title {n}", CHUNKS[(number + n) % 4]) for n in range(3))
    meta = {"max_tokens": 8, **meta}
    return Record(f"q{number}", "tiny", f"What is said of number {number}?", ("7316042",), passages, meta)


RECORDS = [record(number) for number in range(3)]


@pytest.fixture
def config(tiny_models: dict[str, str]) -> EngineConfig:
    models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
    return EngineConfig(**models, **CACHECLIP, system_prompt="Read and answer.")


def lab(
    config: EngineConfig, folder: Path | None = None, records: Any = RECORDS, methods: Any = METHODS, own: Any = None
) -> Lab:
    """``own``: methods by names of one's own."""
    return Lab("tiny", records, config, planned_runs(methods, [0.2, 1.0], config, own), folder)


SHORT = [RECORDS[0], replace(RECORDS[1], chunks=RECORDS[1].chunks[:2]), RECORDS[2]]
"""The second question has two chunks, the others three."""


def variant(name: str, of: str, **changes: Any) -> dict[str, Method]:
    return {name: vary(preset(of), {"name": name, **changes})}


def without_times(comparison: Comparison) -> Any:
    items = [replace(item, ttft_s=0.0, phases_s={}) for item in comparison.items]
    return replace(comparison, items=sorted(items, key=lambda item: (item.id, item.label)))


class TestRun:
    def test_figures(self, config: EngineConfig) -> None:
        comparison = lab(config).run()
        assert len(comparison.items) == 3 * (1 + 1 + 2 * 2)
        rows = summarise(comparison)["methods"]
        full, direct = rows["full"], rows["direct"]
        assert list(rows) == [run.label for run in comparison.runs]
        assert full["kl_to_full"] < 1e-6 and full["agreement_with_full"] == 1.0
        assert (full["equal_answers"], full["first_token_agreement"]) == (1.0, 1.0)
        texts = {(item.label, item.id): item.answer for item in comparison.items}
        sure = {item.label: item.confidence for item in comparison.items}
        assert sure["full"] is None and sure["direct"] is not None and sure["cacheclip@0.2"] is not None
        assert full["gate"] == [] and len(rows["cacheclip@0.2"]["gate"]) == len(CONFIDENCES)
        same = [texts["direct", each.id] == texts["full", each.id] for each in comparison.questions]
        assert direct["equal_answers"] == pytest.approx(sum(same) / 3) and direct["kl_to_full"] > 1e-4
        for name in ("epic", "cacheclip"):
            assert rows[f"{name}@1"]["kl_to_full"] < 1e-6 and rows[f"{name}@1"]["effective_ratio"] <= 1.0
            # of each answer's chunks the first is exact, and the ratio is of all chunk tokens
            assert rows[f"{name}@0.2"]["effective_ratio"] == pytest.approx(0.2, abs=0.01)
            assert rows[f"{name}@0.2"]["kl_to_full"] > 1e-4

    def test_answers_are_those_of_the_engine(self, config: EngineConfig) -> None:
        engine = CacheClipEngine(config)
        for item in lab(config, methods=["cacheclip"]).run().items:
            asked = ask(engine, next(r for r in RECORDS if r.id == item.id))
            engine.precompute(asked.chunks)
            method, _, ratio = item.label.partition("@")
            options: Any = {"method": method, "recompute_ratio": float(ratio or 0.2), "max_tokens": asked.max_tokens}
            answer = engine.generate(asked.segments, question=asked.record.question, **options)
            assert (answer.text, answer.stats.effective_ratio) == (item.answer, item.effective_ratio)

    def test_full_prefill_again_differs_by_rounding_alone(self, config: EngineConfig) -> None:
        comparison = lab(config, methods=["full-again", "direct"]).run()
        rows = summarise(comparison)["methods"]
        assert 0 < rows["full-again"]["kl_to_full"] < 1e-3 * rows["direct"]["kl_to_full"]
        assert rows["full-again"]["equal_answers"] == 1
        full = {item.id: item.answer for item in comparison.items if item.label == "full"}
        assert {item.id: item.answer for item in comparison.items if item.label == "full-again"} == full

    def test_full_prefill_reordered_reads_the_same_chunks_in_another_order(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read: list[list[str]] = []
        prefill = CacheClipEngine.prefill

        def noting(engine: CacheClipEngine, prompt: Any, **options: Any) -> Any:
            read.append([segment.text for segment in prompt])
            return prefill(engine, prompt, **options)

        monkeypatch.setattr(CacheClipEngine, "prefill", noting)
        comparison = lab(config, methods=["full-reordered"]).run()
        for full, other in zip(read[::2], read[1::2], strict=True):
            assert full != other and sorted(full) == sorted(other) and full[-1] == other[-1]
        assert {item.fallback for item in comparison.items} == {None}
        assert summarise(comparison)["methods"]["full-reordered"]["kl_to_full"] > 1e-4

    def test_every_method_there_is(self, config: EngineConfig) -> None:
        planned = planned_runs(["all"], [0.2], config)
        comparison = Lab("tiny", RECORDS[:1], config, planned).run()
        assert not comparison.skipped and {one.method.name for one in planned} == set(every_method(config)[0])
        assert [item.label for item in comparison.items] == [one.run.label for one in planned]
        for item, one in zip(comparison.items, planned, strict=True):
            assert item.fallback is None or one.method.min_confidence, item.label
            assert "answer_kl" in item.fidelity and "equal_answer" in item.fidelity, item.label
            ratios = (item.nominal_ratio, item.effective_ratio, item.effective_ratio_of_stale, item.charged_ratio)
            assert all(isinstance(ratio, float) and 0.0 <= ratio <= 1.25 for ratio in ratios), item.label

    def test_a_prompt_too_long_is_counted_not_scored(self, config: EngineConfig) -> None:
        long = replace(record(9), chunks=(RecordChunk("", " ".join(SENTENCES * 200)),))
        comparison = lab(config, records=[*RECORDS, long]).run()
        [skipped] = comparison.skipped
        assert skipped.where == "question q9" and "tokens" in skipped.reason
        assert {question.id for question in comparison.questions} == {"q0", "q1", "q2"}
        with pytest.raises(ConfigurationError, match="no question of 'tiny' could be asked. question q9: the prompt"):
            lab(config, records=[long]).run()

    def test_a_prompt_is_never_measured_after_itself(self, config: EngineConfig) -> None:
        alone = [replace(RECORDS[0], chunks=RECORDS[0].chunks[:1])]
        rows = summarise(lab(config, records=alone, methods=["prefix"]).run())["methods"]
        assert rows["prefix"]["effective_ratio"] == 1.0

    @pytest.mark.long
    def test_no_method_gains_by_those_before_it(self, config: EngineConfig) -> None:
        others = ["direct", "epic", "epic-corrected"]
        # text of its own before the first chunk, which is then not exact by itself
        records = [record(number, opening="One of the passages below says it.\n\n") for number in range(2)]
        behind = without_times(lab(config, records=records, methods=["prefix", *others]).run())
        alone = without_times(lab(config, records=records, methods=others).run())
        labels = {run.label for run in alone.runs}
        assert [item for item in behind.items if item.label in labels] == alone.items

    def test_plain_answers_are_counted(self, config: EngineConfig) -> None:
        unsure = variant("unsure", "direct", min_confidence=1.0)
        rows = summarise(lab(config, methods=["direct", "unsure"], own=unsure).run())["methods"]
        assert (rows["unsure"]["answered_plainly"], rows["direct"]["answered_plainly"]) == (3, None)

    @pytest.mark.long
    def test_chunk_caches_do_not_pile_up(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        engines = []
        made = CacheClipEngine.__init__

        def remember(self: Any, *args: Any, **options: Any) -> None:
            made(self, *args, **options)
            engines.append(self)

        monkeypatch.setattr(CacheClipEngine, "__init__", remember)
        lab(config).run()
        assert len(engines) == 1 and not any(engines[0].is_stored(p.as_read) for r in RECORDS for p in r.chunks)


class TestMethodsThatFail:
    def test_what_cannot_be_asked_is_left_out(self, config: EngineConfig) -> None:
        bad: list[tuple[dict[str, Any], str]] = [
            ({"metric": "bleu"}, "metric must be one of f1, "),
            ({"metric": ["f1"]}, "metric must be text, got ['f1']"),
            ({"max_tokens": 0}, "max_tokens must be a whole number from 1, got 0"),
            ({"max_tokens": True}, "max_tokens must be a whole number from 1, got True"),
            ({"closing": 7}, "closing must be text, got 7"),
            ({"answer_prefix": {}}, "answer_prefix must be text, got {}"),
        ]
        records = [replace(record(9, **meta), id=f"bad{n}") for n, (meta, _) in enumerate(bad)]
        one = lab(config, records=[*records, RECORDS[0]], methods=["direct"])
        comparison = one.run()
        for n, (_, reason) in enumerate(bad):
            assert one.skipped[f"bad{n}"].startswith(reason)
        assert [question.id for question in comparison.questions] == ["q0"] and len(comparison.items) == 2

    def test_what_no_record_is_to_blame_for_stops_the_run(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def absent(prediction: str, answers: Any) -> float:
            raise MissingExtraError("jieba", "lab")

        monkeypatch.setitem(METRICS, "f1", absent)
        with pytest.raises(MissingExtraError, match="pip install"):
            lab(config, methods=["direct"]).run()

    @pytest.mark.some(2)
    @pytest.mark.parametrize("error", [ConfigurationError("it does not fit."), RuntimeError("a bug")])
    def test_an_error_in_the_middle_stops_the_run_and_costs_no_question(
        self, config: EngineConfig, tmp_path: Path, error: Exception
    ) -> None:
        def fail(self: Direct, request: Any, scores: Any) -> Any:
            if len(request.layout.chunks) == 2:
                raise error
            return original(self, request, scores)

        original = Direct.select
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Direct, "select", fail)
            with pytest.raises(type(error)) as raised:
                lab(config, tmp_path / "run", SHORT, ["direct"]).run()
        told = f"{raised.value} {getattr(raised.value, '__notes__', '')}"
        assert "method 'direct' at question 'q1'" in told and str(error) in told
        comparison = lab(config, tmp_path / "run", SHORT, ["direct"]).run()
        assert not comparison.skipped and len(comparison.items) == 6

    def test_a_figure_that_is_no_number_leaves_the_question_out(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def follow(self: Reference, prefilled: Any, **options: Any) -> Any:
            distance = original(self, prefilled, **options)
            if prefilled.stats.method != "direct" or len(prefilled.layout.chunks) != 2:
                return distance
            return replace(distance, fidelity=replace(distance.fidelity, first_token_kl=float("nan")))

        original = Reference.follow
        monkeypatch.setattr(Reference, "follow", follow)
        one = lab(config, tmp_path / "run", SHORT, ["direct"])
        comparison = one.run()
        assert one.skipped == {"q1": "first_token_kl of method 'direct' is nan."}
        assert summarise(comparison)["n"] == 2


class TestResume:
    @pytest.mark.long
    def test_a_resumed_run_equals_an_uninterrupted_one(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        methods, folder = ["direct", "cacheclip"], tmp_path / "killed"
        whole = lab(config, tmp_path / "whole", methods=methods).run()
        lab(config, folder, methods=methods).run()
        journal = folder / "items.jsonl"
        lines = journal.read_bytes().splitlines(keepends=True)
        assert len(lines) == len(whole.items)
        journal.write_bytes(b"".join(lines[:7]) + lines[7][:40])  # killed while the eighth was written
        asked: list[str] = []
        original = Lab._ask

        def spy(self: Lab, engine: Any, one: Record, runs: Any) -> Any:
            for item in original(self, engine, one, runs):
                asked.append(item.label)
                yield item

        monkeypatch.setattr(Lab, "_ask", spy)
        comparison = lab(config, folder, methods=methods).run()
        assert len(asked) == len(lines) - 7
        assert without_times(comparison) == without_times(whole)
        assert len(journal.read_text().splitlines()) == len(lines)

    def test_a_variant_that_has_changed_is_refused(self, config: EngineConfig, tmp_path: Path) -> None:
        """Whatever it is called: answers of two methods must not be counted as those of one."""

        def run(correction: float) -> None:
            variants = variant("mine", "epic", correction=correction)
            lab(config, tmp_path / "run", RECORDS[:1], ["mine"], variants).run()

        run(0.5)
        with pytest.raises(ConfigurationError, match="correction of mine@0.2 is 0.5 there"):
            run(0.0)
        run(0.5)

    def test_questions_may_be_added_and_left_out(self, config: EngineConfig, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        lab(config, folder, RECORDS[:2], ["direct"]).run()
        grown = lab(config, folder, RECORDS, ["direct"]).run()
        assert len((folder / "items.jsonl").read_text().splitlines()) == 3 * 2
        assert without_times(grown) == without_times(lab(config, None, RECORDS, ["direct"]).run())
        fewer = lab(config, folder, RECORDS[1:2], ["direct"]).run()
        assert [question.id for question in fewer.questions] == ["q1"] and len(fewer.items) == 2
        assert len((folder / "items.jsonl").read_text().splitlines()) == 3 * 2

    def test_a_question_that_changed_is_refused(self, config: EngineConfig, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        lab(config, folder, RECORDS[:2], ["direct"]).run()
        changed = [RECORDS[0], *(replace(other, answers=("Another",)) for other in RECORDS[1:])]
        message = "questions that .*run holds answers to, got others with the same ids: q1 changed since.*Give these"
        with pytest.raises(ConfigurationError, match=message):
            lab(config, folder, changed, ["direct"]).run()
        lab(config, folder, [changed[0], changed[2]], ["direct"]).run()

    @pytest.mark.parametrize("name", ["codec", "transformers", "auxiliary_sha256", "prefix_cache_bytes", "methods"])
    def test_settings_that_were_not_recorded_are_another_ones(
        self, config: EngineConfig, tmp_path: Path, name: str
    ) -> None:
        """An older version recorded less: nothing says that its answers are of the same settings."""
        lab(config, tmp_path / "run", RECORDS[:1], ["direct"]).run()
        recorded = json.loads((tmp_path / "run" / "settings.json").read_text())
        del recorded[name]
        (tmp_path / "run" / "settings.json").write_text(json.dumps(recorded))
        with pytest.raises(ConfigurationError, match=f"{name} is not recorded there and .* now"):
            lab(config, tmp_path / "run", RECORDS[:1], ["direct"]).run()

    def test_other_weights_under_the_same_name_are_refused(self, config: EngineConfig, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        from cacheclip_rag.models import unload_models

        shutil.copytree(config.primary, tmp_path / "model")
        config = replace(config, primary=str(tmp_path / "model"))
        lab(config, tmp_path / "run", RECORDS[:1], ["direct"]).run()
        [file] = (tmp_path / "model").glob("*.safetensors")
        save_file({name: 2 * weights for name, weights in load_file(file).items()}, file, {"format": "pt"})
        unload_models()
        with pytest.raises(ConfigurationError, match="other settings: primary_sha256 is '.*' there and '.*' now. Use"):
            lab(config, tmp_path / "run", RECORDS[:1], ["direct"]).run()

    def test_the_auxiliary_may_come_later_and_stays_the_same(
        self, config: EngineConfig, tiny_models: dict[str, str], tmp_path: Path
    ) -> None:
        def run(auxiliary: str | None, methods: list[str]) -> Comparison:
            return lab(replace(config, auxiliary=auxiliary), tmp_path / "run", RECORDS[:1], methods).run()

        assert run(None, ["direct"]).settings["auxiliary_sha256"] is None
        run("never looked for", ["direct"])
        known = run(config.auxiliary, ["cacheclip"]).settings["auxiliary_sha256"]
        assert run(None, ["direct"]).settings["auxiliary_sha256"] == known is not None
        with pytest.raises(ConfigurationError, match="auxiliary is '.*' there and '.*' now; auxiliary_sha256 is"):
            run(tiny_models["qwen2"], ["cacheclip"])

    def test_the_day_does_not_change(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        template = shutil.copytree(config.primary, tmp_path / "dated") / "chat_template.jinja"
        dated = template.read_text().replace("assistant\n", "assistant on {{ strftime_now('%d %b %Y') }}\n")
        template.write_text(dated)
        asked: list[str] = []

        def spy(*arguments: Any, **options: Any) -> Any:
            question = ask(*arguments, **options)
            asked.append("".join(segment.text for segment in question.segments))
            return question

        monkeypatch.setattr("cacheclip_lab.evaluation.lab.ask", spy)
        config = replace(config, primary=str(template.parent))
        for count, day in ((1, "28 Feb 2031"), (2, "01 Mar 2031")):
            monkeypatch.setattr("time.strftime", lambda *_, day=day: day)
            comparison = lab(config, tmp_path / "run", RECORDS[:count], ["direct"]).run()
        assert len(asked) == 2 and all("assistant on 28 Feb 2031" in prompt for prompt in asked)
        assert comparison.settings["date"] == "28 Feb 2031"

    def test_another_machine_is_told_not_refused(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "run"
        first = notes(summarise(lab(config, folder, RECORDS[:1], ["direct"]).run()))[0]
        assert first.startswith("Measured on ") and f", {torch.get_num_threads()} threads, transformers " in first
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        summary = summarise(lab(config, folder, RECORDS[:1], ["direct", "epic"]).run())
        assert list(summary["measured_on"].values()) == [["full", "direct"], ["epic@0.2", "epic@1"]]
        told = notes(summary)[0]
        assert told.startswith("Times were measured on different machines")
        assert "those of epic@0.2, epic@1 (also) on" in told and ", 77 threads" in told

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("settings.json", "{", "settings.json is not valid JSON"),
            ("settings.json", "[]", "settings.json is not a JSON object"),
            ("items.jsonl", "{\n", "line 1 of .*items.jsonl is not valid JSON"),
            ("items.jsonl", '{"record_sha256": "", "colour": "red"}\n', "fields .* does not know: colour. Go on with"),
            ("items.jsonl", '{"record_sha256": ""}\n', "line 1 of .* is not an answer of a comparison"),
            ("items.jsonl", "{}\n", "line 1 of .* is not an answer of a comparison"),
        ],
    )
    def test_a_damaged_folder_is_told(self, tmp_path: Path, name: str, content: str, message: str) -> None:
        (folder := tmp_path / "run").mkdir()
        with open_journal(folder, {"dataset": "tiny"}, RECORDS):
            pass
        (folder / name).write_text(content)
        with pytest.raises(ConfigurationError, match=message), open_journal(folder, {"dataset": "tiny"}, RECORDS):
            pass

    @pytest.mark.parametrize("name", ["file", "file/below"])
    def test_a_file_is_no_folder(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigurationError, match="expected a folder"), open_journal(tmp_path / name, {}, []):
            pass

    def test_a_folder_of_something_else_is_refused(self, config: EngineConfig, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(ConfigurationError, match="not empty"):
            lab(config, tmp_path).run()
        assert (tmp_path / "thesis.tex").read_text() == "years of work"


class TestQuestions:
    def test_question_answering(self, config: EngineConfig) -> None:
        engine = CacheClipEngine(config)
        asked = ask(engine, record(0, max_tokens=None))
        assert [s.text for s in asked.segments if isinstance(s, Chunk)] == asked.chunks
        assert asked.chunks[0] == f"Title 0\n{CHUNKS[0]}"
        assert Fresh("\n\nQuestion: What is said of number 0?\nAnswer:") in asked.segments
        assert asked.metrics == ("f1", "em", "contains") and asked.max_tokens == 32
        prefilled = engine.prefill(asked.segments, method=lab(config).runs[0].method)
        chunks = prefilled.layout.chunks
        assert known_kv(prefilled.layout, chunks).is_exact(chunks[0]), "the instruction is shared prefix"

    def test_records_say_how_they_are_asked(self, config: EngineConfig) -> None:
        """Needles open the answer; Chinese questions have their own F1."""
        meta = {"opening": "Some are hidden.\n", "closing": "\nWhat are they?", "answer_prefix": " They are"}
        asked = ask(CacheClipEngine(config), record(0, **meta, metric="string_match_all", max_tokens=128))
        assert asked.segments[-1] == Fresh(" They are")
        assert asked.metrics[0] == "string_match_all" and asked.max_tokens == 128
        chinese = replace(record(0, max_tokens=None), question="本产品安全手册由哪家公司出版？")
        asked = ask(CacheClipEngine(config), chinese)
        assert asked.metrics[0] == "f1_zh" and asked.max_tokens == 64

    def test_a_record_may_ask_for_it_itself(self, config: EngineConfig, tmp_path: Path) -> None:
        shutil.copytree(config.primary, tmp_path / "model")
        add_bos(tmp_path / "model")
        engine = CacheClipEngine(replace(config, primary=str(tmp_path / "model")))
        asked = ask(engine, record(0, chat_template=False, first_line=True, metric="qa_f1_zh", max_tokens=None))
        assert asked.segments[:2] == [Fresh("<|endoftext|>", control=True), Fresh("Read and answer.\n\n")]
        assert [s.text for s in asked.segments if isinstance(s, Chunk)] == asked.chunks
        assert asked.first_line and asked.metrics == ("f1_zh", "em", "contains") and asked.max_tokens == 64
        assert asked.judged("\n\nA summary.\nDialogue: more") == "A summary."
        with pytest.raises(ConfigurationError, match="first_line must be true or false, got 1"):
            ask(engine, record(0, first_line=1))

    def test_only_the_first_line_is_scored(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        scored = []
        monkeypatch.setitem(METRICS, "f1", lambda answer, answers: float(not scored.append(answer)))
        monkeypatch.setattr(TextModel, "decode_ids", lambda *_: "\nA summary.\nDialogue: more")
        records = [record(0, first_line=True), record(1)]
        comparison = lab(config, records=records, methods=["direct"]).run()
        assert scored == ["A summary."] * 2 + ["\nA summary.\nDialogue: more"] * 2
        assert {item.answer for item in comparison.items} == {"\nA summary.\nDialogue: more"}


class TestPlan:
    @pytest.mark.parametrize(
        ("methods", "ratios", "labels"),
        [
            (["epic", "full", "epic"], [0.1, 0.3], ["full", "epic@0.1", "epic@0.3"]),  # full once, and first
            # ratios that print alike are two runs
            (["epic"], [0.2, 0.2000000001, 0.20, 1.0], ["full", "epic@0.2", "epic@0.2000000001", "epic@1"]),
        ],
    )
    def test_labels(self, config: EngineConfig, methods: list[str], ratios: list[float], labels: list[str]) -> None:
        assert [planned.run.label for planned in planned_runs(methods, ratios, config)] == labels

    def test_all_without_an_auxiliary_leaves_out_what_needs_one(self, config: EngineConfig) -> None:
        without = replace(config, auxiliary=None)
        methods, left_out = every_method(without)
        assert left_out == ["cacheclip", "cacheclip-gated", "cacheclip-paper"] and every_method(config)[1] == []
        labels = [planned.method.name for planned in planned_runs(["all"], [0.2], without)]
        assert labels == methods and "cacheclip" not in labels

    def test_unknown_method(self, config: EngineConfig) -> None:
        with pytest.raises(ConfigurationError, match="method must be auto, a Method or one of full"):
            planned_runs(["nonsense"], [0.2], config)


class TestCommand:
    def run(self, *arguments: Any) -> Any:
        from cacheclip_rag.cli import app

        return CliRunner().invoke(app, ["eval", *map(str, arguments)])

    @pytest.fixture
    def models(self, tiny_models: dict[str, str]) -> list[str]:
        return ["--primary", tiny_models["llama"], "--auxiliary", tiny_models["auxiliary"]]

    @pytest.fixture
    def dataset(self, tmp_path: Path) -> Path:
        path = tmp_path / "tiny.jsonl.gz"
        lines: list[dict[str, Any]] = [
            {
                **{name: getattr(r, name) for name in ("id", "task", "question", "answers")},
                "chunks": [{"title": p.title, "text": p.text} for p in r.chunks],
                "meta": {},
            }
            for r in RECORDS
        ]
        lines.append({**lines[0], "id": "odd", "meta": {"metric": "bleu"}})
        lines.append({"id": "bad", "task": "tiny", "question": "?", "answers": [], "chunks": [], "meta": {}})
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
        return path

    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        ("toml", "expected"), [("", INSTRUCTION), ('system_prompt = "Else."', "Else."), ('system_prompt = ""', None)]
    )
    def test_the_system_prompt_is_that_of_the_settings(
        self, dataset: Path, models: list[str], tmp_path: Path, toml: str, expected: str | None
    ) -> None:
        """So that answers show something about an engine with these settings."""
        (file := tmp_path / "own.toml").write_text(toml)
        options = ("--settings", file, "--methods", "direct", "--limit", "1", "--out", tmp_path / "o")
        result = self.run("--dataset", dataset, *models, *options)
        assert result.exit_code == 0, result.output
        assert json.loads((tmp_path / "o" / "settings.json").read_text())["system_prompt"] == expected

    def test_json_and_report(self, dataset: Path, models: list[str], tmp_path: Path) -> None:
        out, file = tmp_path / "out", tmp_path / "variants.toml"
        budget = "budget.first = 4\nbudget.type = 'cacheclip_lab.comparators.FixedStarts'\n"
        file.write_text(f"[four]\npreset = 'epic'\n{budget}")
        methods = ("--methods", "direct,four", "--variants", file)
        result = self.run("--dataset", dataset, *models, *methods, "--out", out, "--json")
        assert result.exit_code == 0, result.output
        summary = json.loads(result.stdout)
        assert (summary["dataset"], summary["n"], summary["skipped"]) == ("tiny", 3, 2)
        assert summary["skipped_by_reason"] == {"no answers": 1, summary["skipped_first"][1]["reason"]: 1}
        assert [one["where"] for one in summary["skipped_first"]] == ["line 5", "question odd"]
        told = result.stderr.splitlines()
        assert told[:2] == ["skipped 2 of 5 records:", "  line 5: no answers"]
        assert told[2].startswith("  question odd: metric must be one of f1, ") and "got 'bleu'" in told[2]
        assert list(summary["methods"]) == ["full", "direct", "four"]
        row = summary["methods"]["direct"]
        ratios = ("nominal_ratio", "effective_ratio", "charged_ratio")
        for key in ("f1", "em", "contains", "kl_to_full", "agreement_with_full", *ratios, "ttft_s"):
            assert isinstance(row[key], float), key
        assert row["speedup_vs_full"] > 0
        assert {path.name for path in out.iterdir()} == {"items.jsonl", "settings.json", *FILES.values()}
        assert json.loads((out / FILES["summary"]).read_text()) == summary
        again = self.run("--dataset", dataset, *models, "--methods", "direct", "--out", out)
        assert again.exit_code == 0
        assert list(json.loads((out / FILES["summary"]).read_text())["methods"]) == ["full", "direct"]

    def test_what_is_handed_in_has_figures_and_no_texts(self, dataset: Path, models: list[str], tmp_path: Path) -> None:
        (own := tmp_path / "own.toml").write_text('system_prompt = "A secret instruction."')
        (handed_in := tmp_path / "results").mkdir()
        options = ("--settings", own, "--methods", "direct", "--submit", handed_in / "tiny.json", "--json")
        result = self.run("--dataset", dataset, *models, *options)
        assert result.exit_code == 0, result.output
        text, summary = (handed_in / "tiny.json").read_text(), json.loads(result.stdout)
        [(name, made)] = read_submissions(handed_in)
        assert (name, made["dataset"]["n"], made["primary"]) == ("tiny", 3, Path(models[1]).name)
        assert made["methods"]["direct"]["kl_to_full"] == summary["methods"]["direct"]["kl_to_full"]
        assert made["versions"]["torch"] == torch.__version__ and made["machines"]
        assert made["digests"]["primary_sha256"] == summary["settings"]["primary_sha256"]
        written = [each for r in RECORDS for each in (r.id, r.question, *r.answers, *(p.text for p in r.chunks))]
        assert not [each for each in (*written, "secret", str(tmp_path)) if len(each) > 3 and each in text]
        (handed_in / "tiny.json").write_text(text.replace('"n":', '"answer": "x",\n "n":', 2))
        with pytest.raises(ConfigurationError, match="expected what cacheclip eval --submit writes"):
            list(read_submissions(handed_in))

    def test_a_folder_of_something_else_is_told_before_weights_are_loaded(self, dataset: Path, tmp_path: Path) -> None:
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
        models = ("--primary", "nobody/nothing", "--auxiliary", "none")
        result = self.run("--dataset", dataset, *models, "--methods", "direct", "--out", tmp_path / "thesis")
        assert result.exit_code != 0 and "thesis is not empty and holds no comparison" in str(result.exception)

    def test_all_without_an_auxiliary_says_what_is_left_out(self, dataset: Path, models: list[str]) -> None:
        options = (*models[:2], "--auxiliary", "none", "--methods", "all", "--limit", 1, "--json")
        result = self.run("--dataset", dataset, *options)
        assert result.exit_code == 0, result.output
        methods = json.loads(result.stdout)["methods"]
        assert "epic-corrected@0.2" in methods and "cacheclip@0.2" not in methods
        told = "'all' leaves out methods that need an auxiliary model: cacheclip, cacheclip-gated, cacheclip-paper"
        assert result.stderr.splitlines()[0] == told

    @pytest.mark.skipif("qwen3_5_text" not in CONFIG_MAPPING, reason="this transformers is too old")
    @pytest.mark.parametrize("methods", [(), ("--methods", "all")])
    def test_what_a_model_with_recurrent_layers_cannot_run_is_left_out(
        self, methods: tuple[str, ...], dataset: Path, models: list[str], tmp_path: Path
    ) -> None:
        primary = ("--primary", build_class(tmp_path / "m", "qwen3_5_text"))
        result = self.run("--dataset", dataset, *primary, *models[2:], *methods, "--limit", 1, "--json")
        assert result.exit_code == 0, result.output
        others = ["prefix"] if methods else ["full-again", "full-reordered"]
        assert list(json.loads(result.stdout)["methods"]) == ["full", *others, "direct", "epic@0.2"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "nowhere.jsonl"),
            (["--ratios", "much"], "numbers from 0 to 1"),
            (["--half", "third"], "half must be one of dev, test"),
            (["--submit", "/nowhere/file.json"], "expects a file in a folder that is there"),
        ],
    )
    def test_bad_input(self, arguments: list[str], message: str, models: list[str]) -> None:
        result = self.run(*models, "--dataset", "nowhere.jsonl", *arguments)
        assert result.exit_code != 0 and message in str(result.exception)
