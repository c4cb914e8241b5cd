"""Calibration finds the head that looks at evidence: one is planted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, EngineConfig
from cacheclip_rag.base.errors import ConfigurationError, ModelError
from cacheclip_rag.base.progress import progress_bar
from cacheclip_rag.lab.evaluation.reference import Reference
from cacheclip_rag.lab.evaluation.scores import token_f1
from cacheclip_rag.lab.training import calibrate as module
from cacheclip_rag.lab.training import folder
from cacheclip_rag.lab.training import outcomes as outcomes_module
from cacheclip_rag.lab.training.calibrate import (
    SHIPPED,
    Candidate,
    best_of,
    calibrate,
    combined,
    in_turn,
    ranking_and_checking,
    recall_of,
)
from cacheclip_rag.lab.training.families import FAMILIES, Sample, synthetic_samples
from cacheclip_rag.lab.training.features import look
from cacheclip_rag.lab.training.folder import Interrupted
from cacheclip_rag.lab.training.outcomes import (
    AnsweredSamples,
    Outcome,
    answered_rightly,
    downstream,
    f1_share,
    may_replace,
    same_answers,
    same_first,
)
from cacheclip_rag.lab.training.prompts import segments_of
from cacheclip_rag.lab.training.report import calibration_json, calibration_note, calibration_table, ranking_tables
from cacheclip_rag.methods import preset
from cacheclip_rag.methods.settings import vary
from cacheclip_rag.runtime.base import weights_digest
from cacheclip_rag.selection import heads as heads_module
from cacheclip_rag.selection.auxiliary_pass import MAX_QUESTION_TOKENS
from cacheclip_rag.selection.heads import HeadSet, model_digest, shipped_set
from cacheclip_rag.selection.packed_chunks import score_chunks
from tests.training.conftest import made, short_samples
from tests.training.planted import PLANTED, build_planted

pytestmark = pytest.mark.usefixtures("with_short_samples")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_planted(tmp_path_factory.mktemp("planted") / "model")


@pytest.fixture(scope="module")
def config(planted: str, tiny_models: dict[str, str]) -> EngineConfig:
    return EngineConfig(primary=tiny_models["llama"], auxiliary=planted)


def candidate(name: str, kl: float, *, first: int, answers: int, recall: float, f1: float = 0.5) -> Candidate:
    """Made up: 10 prompts."""
    outcomes = made(kl, first, answers, f1=f1)
    return Candidate(name, HeadSet("a" * 64, ((0, 0),), torch.ones(1)), recall, recall, outcomes)


def full_answer(engine: CacheClipEngine, sample: Sample) -> str:
    """Full prefill's greedy answer, 16 tokens."""
    prefilled = engine.prefill(segments_of(engine, sample), method=preset("full"), question=sample.question)
    return Reference.of(engine, prefilled, 16).answer


class TestCalibrate:
    def test_a_planted_head_is_found(self, config: EngineConfig, tmp_path: Path) -> None:
        found = calibrate(config, num_samples=21, num_prompts=2, folder=tmp_path)
        best, second = found.ranking[:2]
        assert (best.layer, best.head) == PLANTED and best.recall > second.recall + 0.1
        candidates = {each.name: each for each in found.candidates}
        assert PLANTED in candidates["best 4"].heads.heads and all(each.heads.sinks == 4 for each in found.candidates)
        assert found.heads.digest() == candidates[found.chosen].heads.digest()
        assert found.chosen == best_of(found.candidates).name
        assert candidates[found.chosen].kl <= 1.1 * min(each.kl for each in found.candidates)
        assert all(len(each.outcomes) == 2 and each.kl >= 0 for each in found.candidates)
        for cells, each in zip(calibration_table(found)[1], found.candidates, strict=True):
            first, answers = (f"{same(each.outcomes) / 2:.0%}" for same in (same_first, same_answers))
            share = f1_share(each.outcomes)
            assert cells[-3:] == [first, answers, "" if share is None else f"{share:.0%}"]
        right = found.heads.about["right"]
        assert right in ("0 of 2", "1 of 2", "2 of 2") and f": {right}." in calibration_note(found)

    def test_layers_are_ranked_by_the_mean_of_their_heads(self, config: EngineConfig, tmp_path: Path) -> None:
        found = calibrate(config, num_samples=9, num_prompts=0, folder=tmp_path)
        caches = CacheClipEngine(config).parts.auxiliary_caches
        whole = short_samples("train", 9)
        samples = [whole[number] for number in ranking_and_checking(whole)[0]]
        expected = []
        for layer in range(2):
            seen = [look(caches, each, [layer], sinks=4) for each in samples]
            recalls = [recall_of(each.scores[0].mean(0), each)[0] for each in seen]
            expected.append(sum(recalls) / len(recalls))
        assert {each.layer: each.recall for each in found.layers} == pytest.approx(dict(enumerate(expected)))
        assert found.layers[0].layer == PLANTED[0] and found.layers[0].recall > found.layers[1].recall
        heads, layers = (rows for _, rows in ranking_tables(found).values())
        assert len(heads) == 8 and heads[0][0] == "1.2" and [row[0] for row in layers] == ["1", "0"]
        assert calibration_json(found)["layers"] == [[each.layer, each.recall] for each in found.layers]

    def test_the_same_seed_gives_the_same(self, config: EngineConfig, tmp_path: Path) -> None:
        one, other, another = (
            calibrate(config, num_samples=9, num_prompts=1, seed=seed, folder=tmp_path / str(number))
            for number, seed in enumerate((0, 0, 1))
        )
        assert one.ranking == other.ranking != another.ranking
        assert one.heads.digest() == other.heads.digest()

    def test_an_interrupted_run_goes_on_where_it_was(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stopped while reading, then while the primary is asked: nothing is done twice, and the end is the same."""
        wishes: dict[str, Any] = {"num_samples": 9, "num_prompts": 2}
        whole = calibrate(config, **wishes, folder=tmp_path / "whole")
        looks: list[str] = []
        original = folder.look

        def look(caches: Any, sample: Any, *args: Any, **options: Any) -> Any:
            looks.append(sample.question)
            if len(looks) == 4:
                raise KeyboardInterrupt
            return original(caches, sample, *args, **options)

        monkeypatch.setattr(folder, "look", look)
        with pytest.raises(Interrupted) as stopped:
            calibrate(config, **wishes, folder=tmp_path / "parts")
        assert stopped.value.folder == tmp_path / "parts"
        followed: list[int] = []
        digests = {each.heads.digest() for each in whole.candidates}
        follow = Reference.follow

        def follow_some(self: Any, *args: Any, **options: Any) -> Any:
            followed.append(1)
            if len(followed) == len(digests) + 2:
                raise KeyboardInterrupt
            return follow(self, *args, **options)

        monkeypatch.setattr(Reference, "follow", follow_some)
        with pytest.raises(Interrupted):
            calibrate(config, **wishes, folder=tmp_path / "parts")
        assert len(looks) == 10 and len(set(looks)) == 9, "only the one that was interrupted"
        resumed = calibrate(config, **wishes, folder=tmp_path / "parts")
        assert len(followed) == 2 * len(digests) + 1, "every set once a prompt, and the one that was interrupted again"
        assert (resumed.ranking, resumed.layers) == (whole.ranking, whole.layers)
        assert [(each.name, each.outcomes) for each in resumed.candidates] == [
            (each.name, each.outcomes) for each in whole.candidates
        ]
        assert resumed.heads.digest() == whole.heads.digest()

    def test_what_was_kept_of_others_is_not_taken(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wishes: dict[str, Any] = {"num_samples": 6, "num_prompts": 1, "folder": tmp_path}
        calibrate(config, **wishes)
        looks: list[str] = []
        original = folder.look

        def look(caches: Any, sample: Any, *args: Any, **options: Any) -> Any:
            looks.append(sample.question)
            return original(caches, sample, *args, **options)

        monkeypatch.setattr(folder, "look", look)
        calibrate(config, **wishes)
        assert not looks
        calibrate(replace(config, system_prompt="Be brief."), **wishes)
        assert len(looks) == 6
        calibrate(config, **wishes, seed=1)
        assert len(looks) == 12
        for path in tmp_path.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-50])
        calibrate(config, **wishes)
        assert len(looks) == 18, "damaged files are made again"

    def test_without_the_primary_evidence_decides(self, config: EngineConfig, tmp_path: Path) -> None:
        found = calibrate(config, num_samples=9, num_prompts=0, folder=tmp_path)
        assert found.chosen == max(found.candidates, key=lambda each: each.recall).name
        assert all(each.outcomes == () for each in found.candidates)
        assert calibration_table(found)[1][0][-4:] == [""] * 4
        figures = calibration_json(found)["candidates"]["last layer"]
        assert figures["answer_kl"] == [] and figures["equal_answers"] is figures["first_token_agreement"] is None

    def test_without_prompts_no_bar_is_shown(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        titles: list[str] = []

        def bar(title: str, *args: Any, **options: Any) -> Any:
            titles.append(title)
            return progress_bar(title, *args, **options)

        for each in (module, outcomes_module):
            monkeypatch.setattr(each, "progress_bar", bar)
        found = calibrate(config, num_samples=6, num_prompts=0, folder=tmp_path)
        assert titles == ["reading"] and "right" not in found.heads.about
        assert "KL" not in calibration_note(found) and "without the chunk starts" in calibration_note(found)

    def test_what_comes_with_the_package_is_a_candidate(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runtime: Any = CacheClipEngine(config).auxiliary
        heads = HeadSet(weights_digest(runtime.fingerprint), (PLANTED,), torch.ones(1), sinks=4, about={"seed": 7})
        monkeypatch.setattr(heads_module, "_SHIPPED", tmp_path)
        path = tmp_path / f"{model_digest(runtime)[:16]}.safetensors"
        assert shipped_set(runtime) is None
        heads.save(path)
        found = calibrate(config, num_samples=12, num_prompts=0, folder=tmp_path / "work")
        assert found.candidates[-1].name == found.chosen == "comes with the package", "the planted head alone"
        assert found.heads.digest() == heads.digest() and found.heads.about["command"] == "calibrate"
        replace(heads, auxiliary_sha256="b" * 64).save(path)
        assert shipped_set(runtime).digest() == heads.digest(), "made from other weights"  # type: ignore[union-attr]
        replace(heads, sinks=0).save(path)
        found = calibrate(config, num_samples=12, num_prompts=0, folder=tmp_path / "work")
        assert "comes with the package" not in [each.name for each in found.candidates], (
            "looks do not show what it scores"
        )

    def test_the_best_of_the_nearest(self) -> None:
        """KL first, then equal answers, equal first tokens, F1, recall: each decides where those before tie."""
        far = candidate("far", 0.2, first=10, answers=10, recall=0.9)
        nearest = candidate("nearest", 0.1, first=5, answers=4, recall=0.5)
        best = {
            "answers": candidate("answers", 0.105, first=5, answers=5, recall=0.1, f1=0.1),
            "first": candidate("first", 0.105, first=6, answers=4, recall=0.1, f1=0.1),
            "f1": candidate("f1", 0.105, first=5, answers=4, recall=0.1, f1=0.6),
            "recall": candidate("recall", 0.105, first=5, answers=4, recall=0.6),
        }
        for some in (["answers", "first", "f1", "recall"], ["first", "f1", "recall"], ["f1", "recall"], ["recall"]):
            order = [far, *(best[name] for name in reversed(some)), nearest]
            assert best_of(order).name == best_of(order[::-1]).name == some[0]
        assert best_of([far, nearest]).name == "nearest"

    def test_first_tokens_of_the_packages_set_are_kept(self) -> None:
        nearest = candidate("nearest", 0.1, first=5, answers=5, recall=0.9)
        second = candidate("second", 0.15, first=6, answers=2, recall=0.2)
        shipped = candidate(SHIPPED, 0.2, first=6, answers=6, recall=0.9)
        assert best_of([nearest, shipped]).name == SHIPPED
        assert best_of([nearest, second, shipped]).name == "second", "the nearest of those that are left"
        assert best_of([replace(nearest, outcomes=made(0.1, 6, 5)), second, shipped]).name == "nearest"
        assert best_of([nearest, second, replace(shipped, name="best 4")]).name == "nearest", "replaces nothing"

    def test_what_may_replace_what(self) -> None:
        old = made(0.2, first=5, answers=5)
        assert may_replace(old, old) and may_replace(made(0.1, first=6, answers=0), old), "answers refuse nothing"
        assert not may_replace(made(0.1, first=4, answers=9), old) and not may_replace(made(0.21, 9, 9), old)
        assert may_replace((replace(old[0], answer_kl=9.0),), (replace(old[0], answer_kl=5.0),)), "a nat at most"

    def test_bad_wishes_are_refused(self, config: EngineConfig) -> None:
        with pytest.raises(ConfigurationError, match="at least 6 samples, and prompts from 0 on; got 5 and 10"):
            calibrate(config, num_samples=5)
        with pytest.raises(ConfigurationError, match="no auxiliary model to calibrate"):
            calibrate(replace(config, auxiliary=None))

    def test_a_tokenizer_without_offsets_is_refused(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        auxiliary = CacheClipEngine(config).auxiliary
        monkeypatch.setattr(auxiliary, "has_offsets", False)
        with pytest.raises(ModelError, match="has no character offsets"):
            calibrate(config, num_samples=9)


class TestLook:
    def test_it_scores_as_the_engine_does(self, config: EngineConfig) -> None:
        """Every head alone, by the calibration's look and by the scorer of the engine."""
        engine = CacheClipEngine(config)
        caches, runtime = engine.parts.auxiliary_caches, engine.parts.auxiliary_caches.runtime
        [sample] = synthetic_samples("train", 1, chunk_words=20)
        seen = look(caches, sample, range(runtime.num_layers), sinks=2)
        kv = [runtime.encode(caches.tokenize(chunk).ids, caches.prefix) for chunk in sample.chunks]
        question = runtime.tokenize(sample.question).ids
        for layer in range(seen.scores.shape[0]):
            for head in range(seen.scores.shape[1]):
                heads = HeadSet("x", ((layer, head),), torch.ones(1), sinks=2)
                engines = score_chunks(runtime, caches.prefix, kv, question, heads=heads, sinks=2)
                torch.testing.assert_close(torch.cat(engines), combined(seen, heads), atol=1e-6, rtol=1e-4)
        evidence, values = recall_of(torch.cat(engines), seen, ratio=1.0)
        assert evidence == values == 1.0

    def test_of_a_long_question_it_sees_what_an_engine_asks_with(self, config: EngineConfig) -> None:
        engine = CacheClipEngine(config)
        caches, runtime = engine.parts.auxiliary_caches, engine.parts.auxiliary_caches.runtime
        [sample] = synthetic_samples("train", 1, chunk_words=20)
        tail = f"{sample.question} " * 20
        ids = runtime.tokenize(tail).ids
        assert len(ids) > MAX_QUESTION_TOKENS
        long = replace(sample, question=tail)
        seen = look(caches, long, [0, 1])
        kv = [runtime.encode(caches.tokenize(chunk).ids, caches.prefix) for chunk in sample.chunks]
        engines = score_chunks(runtime, caches.prefix, kv, ids[-MAX_QUESTION_TOKENS:], pooled=True)
        torch.testing.assert_close(torch.cat(engines), seen.scores[-1].mean(0), atol=1e-6, rtol=1e-4)

    def test_evidence_is_marked_in_tokens(self, config: EngineConfig) -> None:
        caches = CacheClipEngine(config).parts.auxiliary_caches
        for sample in synthetic_samples("train", 7, chunk_words=20):
            seen = look(caches, sample, [0])
            start = 0
            for number, chunk in enumerate(sample.chunks):
                tokens = caches.tokenize(chunk)
                wanted = {c for n, a, b in sample.evidence if n == number for c in range(a, b)}
                for index, (a, b) in enumerate(tokens.offsets):
                    assert bool(seen.evidence[start + index]) == bool(wanted & set(range(a, b)))
                start += len(tokens)
            assert bool((seen.evidence | ~seen.values).all()), "values lie within evidence"


class TestSharingOut:
    @pytest.mark.parametrize("count", [18, 21, 90, 96])
    def test_every_family_ranks_and_checks(self, count: int) -> None:
        samples = synthetic_samples("train", count, chunk_words=20)
        rank, check = ranking_and_checking(samples)
        assert sorted([*rank, *check]) == list(range(count)) and abs(len(check) - count / 3) < 1
        for side in (rank, check):
            assert {samples[number].family for number in side} == set(FAMILIES["train"])

    def test_given_ones_too_and_no_side_is_empty(self) -> None:
        written = synthetic_samples("train", 18, chunk_words=20)
        given = [replace(written[0], family=family) for family in "aaaaaabbb"]
        rank, check = ranking_and_checking([*written, *given])
        for side in (rank, check):
            assert {[*written, *given][number].family for number in side} == {*FAMILIES["train"], "a", "b"}
        for families in ("aaaaaa", "abcdef"):
            assert all(ranking_and_checking([replace(written[0], family=family) for family in families]))

    def test_given_ones_are_tried_among_the_others(self) -> None:
        assert in_turn(range(12), 8, 99) == [0, 8, 1, 2, 9, 3, 4, 10, 5, 6, 11, 7]
        assert in_turn(range(0, 96, 5), 96, 36) == list(range(0, 96, 5)), "written ones alone stay in order"
        assert in_turn(range(8), 0, 4) == [0, 2, 5, 7] and in_turn([], 8, 4) == in_turn(range(8), 4, 0) == []


class TestAnsweredRightly:
    def test_those_that_are_come_first(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = CacheClipEngine(config)
        kept = folder.Kept(tmp_path, folder.engine_inputs(engine))
        [wrong, other] = synthetic_samples("test", 2, chunk_words=20)
        prefilled = engine.prefill(segments_of(engine, other), method=preset("full"))
        said = Reference.of(engine, prefilled, 40).answer.split()
        right = replace(other, parts=((said[-1],), ("said by nobody", said[0].upper())))
        half = replace(other, parts=((said[-1],), ("said by nobody",)))
        assert answered_rightly(engine, [wrong, right, other], 1, kept=kept) == ([right], 1, 0)
        assert answered_rightly(engine, [wrong, half, right], 1, kept=kept).samples == [right], "every part"
        assert answered_rightly(engine, [wrong, right], 2, kept=kept) == ([right, wrong], 1, 0), "others fill up"
        assert answered_rightly(engine, [right], 0) == ([], 0, 0)
        monkeypatch.setattr(engine, "prefill", None)
        assert answered_rightly(engine, [wrong, right], 2, kept=kept).samples == [right, wrong], "asked once"

    def test_what_has_no_short_answer_is_not_asked(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = CacheClipEngine(config)
        monkeypatch.setattr(engine, "prefill", None)
        samples = [replace(each, parts=()) for each in synthetic_samples("test", 2, chunk_words=20)]
        found = answered_rightly(engine, samples, 2)
        assert found == (samples, 0, 2) and found.summary == "0 of 2, and 2 have no short right answer"
        assert AnsweredSamples(samples, 1, 0).summary == "1 of 2"


class TestDownstream:
    def test_only_sets_that_are_new_are_measured(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = CacheClipEngine(config)
        samples = synthetic_samples("test", 2, chunk_words=20)
        kept = folder.Kept(tmp_path, folder.engine_inputs(engine))
        first = downstream(engine, samples, [preset("direct")], kept=kept)
        both = downstream(engine, samples, [preset("epic"), preset("direct")], kept=kept)
        assert both[1] == first[0] and both == downstream(engine, samples, [preset("epic"), preset("direct")])
        monkeypatch.setattr(engine, "prefill", None)
        assert downstream(engine, samples, [preset("direct"), preset("epic")], kept=kept) == both[::-1]
        with pytest.raises(TypeError):
            downstream(engine, samples, [preset("direct")], ratio=0.3, kept=kept)

    def test_outcomes_are_of_all_settings_of_a_method(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With another default of a method, or of a part of one, it is measured anew."""
        engine = CacheClipEngine(config)
        samples = synthetic_samples("test", 1, chunk_words=20)
        kept = folder.Kept(tmp_path, folder.engine_inputs(engine))
        runtime: Any = engine.auxiliary
        heads = HeadSet(weights_digest(runtime.fingerprint), (PLANTED,), torch.ones(1))
        asking = vary(preset("anchored"), {"scorer": {"first": "AuxiliaryAttention"}})
        sets = [heads, asking]
        before = downstream(engine, samples, sets, kept=kept)
        asked: list[str] = []
        prefill = engine.prefill

        def counting(*args: Any, **options: Any) -> Any:
            asked.append(options["method"].name)
            return prefill(*args, **options)

        monkeypatch.setattr(engine, "prefill", counting)
        assert downstream(engine, samples, sets, kept=kept) == before and not asked
        others = {"cacheclip": vary(preset("cacheclip"), {"budget": {"chunk_starts": 0.25}}), "full": preset("full")}
        monkeypatch.setattr(outcomes_module, "preset", others.__getitem__)
        sets[1] = vary(asking, {"scorer": {"first": {"sinks": 2}}})
        downstream(engine, samples, sets, kept=kept)
        assert asked == ["full", "cacheclip", "anchored"]

    def test_it_is_the_engines_own_prefill_and_leaves_the_engine_as_it_was(self, config: EngineConfig) -> None:
        engine = CacheClipEngine(config)
        samples = synthetic_samples("test", 2, chunk_words=20)
        runtime: Any = engine.auxiliary
        last = HeadSet.of_layers(weights_digest(runtime.fingerprint), "last", runtime.num_layers, 4)
        planted = replace(last, heads=(PLANTED,), weights=torch.ones(1))
        found = downstream(
            engine,
            samples,
            [
                last,
                planted,
                preset("direct"),
                vary(preset("cacheclip"), {"scorer": {"pooled": True, "layers": "last"}}),
            ],
        )
        assert engine.head_set is None and not any(engine.is_stored(chunk) for chunk in samples[0].chunks)
        assert found[0] == found[3], "every head of the last layer is the last layer"
        assert found[0] != found[1] != found[2] and all(one.first_token_kl > 0 for each in found for one in each)
        [exact] = downstream(engine, samples, [preset("epic")], ratio=1.0)
        assert all(one.first_token_kl < 1e-5 and one.answer_kl < 1e-5 for one in exact)
        assert all(one.first_agrees and one.equal_answer and one.f1 == one.full_f1 for one in exact)

    def test_equal_tokens_are_those_of_the_greedy_answers(self, config: EngineConfig) -> None:
        """Against answers that are decoded, not followed; some begin like full prefill's and go on otherwise."""
        engine = CacheClipEngine(config)
        samples = synthetic_samples("test", 4, chunk_words=20)
        method = preset("epic").at(0.9)
        samples[0] = replace(samples[0], answer=full_answer(engine, samples[0]))
        [found] = downstream(engine, samples, [method], ratio=0.9)
        assert found[0].full_f1 == 1.0 and 0.0 < found[0].f1 < 1.0, "its answer begins like full prefill's"
        kinds = []
        for sample, outcome in zip(samples, found, strict=True):
            answers = []
            texts = []
            for each in (preset("full"), method):
                engine.precompute(sample.chunks, method=each)
                engine.prefixes.clear()
                prefilled = engine.prefill(segments_of(engine, sample), method=each, question=sample.question)
                reference = Reference.of(engine, prefilled, 16)
                answers.append(reference.ids)
                texts.append(reference.answer)
            full, fused = answers
            kinds.append((full[0] == fused[0], full == fused))
            assert (outcome.first_agrees, outcome.equal_answer) == kinds[-1]
            assert [outcome.full_f1, outcome.f1] == [token_f1(text, [sample.answer]) for text in texts]
        assert set(kinds) == {(True, False), (False, False)}

    def test_results_with_other_figures_are_measured_again(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Results of a version that kept two figures."""
        engine = CacheClipEngine(config)
        samples = synthetic_samples("test", 1, chunk_words=20)
        kept = folder.Kept(tmp_path, folder.engine_inputs(engine))
        about = outcomes_module._about(samples[0], preset("direct"), outcomes_module.RATIO)
        older = {name: value for name, value in about.items() if name != "figures"}
        kept.keep_outcome(older, (0.25, 0.5))
        assert kept.outcome(older) == (0.25, 0.5) and kept.outcome(about) is None
        [[outcome]] = downstream(engine, samples, [preset("direct")], kept=kept)
        assert outcome == downstream(engine, samples, [preset("direct")])[0][0] and outcome.answer_kl != 0.5
        assert len(list(tmp_path.glob("outcome-*"))) == 2
        kept.keep_outcome(about, (0.25, 0.5, 1.0, 0.0, 0.75, 0.8))
        monkeypatch.setattr(engine, "prefill", None)
        found = downstream(engine, samples, [preset("direct")], kept=kept)
        assert found == [[Outcome(0.25, 0.5, first_agrees=True, equal_answer=False, f1=0.75, full_f1=0.8)]]
        assert found[0][0].first_agrees is True and found[0][0].equal_answer is False

    def test_an_engine_in_use_is_not_touched(self, config: EngineConfig, tmp_path: Path) -> None:
        engine = CacheClipEngine(config, store=tmp_path / "store")
        with pytest.raises(AssertionError, match="not a user's store"):
            downstream(engine, synthetic_samples("test", 1), [preset("direct")])
