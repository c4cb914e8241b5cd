"""Training of a chunk context on a tiny model: prompts, teacher, job and command."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cacheclip_rag import CacheClipEngine, EngineConfig
from cacheclip_rag.chunks.trained import TrainedContext, trained_context_path
from cacheclip_rag.cli import app
from cacheclip_rag.errors import ConfigurationError, ModelError
from cacheclip_rag.lab.training import context as module
from cacheclip_rag.lab.training import folder as folder_module
from cacheclip_rag.lab.training import reading as reading_module
from cacheclip_rag.lab.training.context import ContextSettings, ContextTraining, HeldOut, Learned, train_context
from cacheclip_rag.lab.training.folder import Interrupted
from cacheclip_rag.lab.training.reading import Reading, Readings
from cacheclip_rag.lab.training.report import context_table, context_verdict
from cacheclip_rag.lab.training.teaching import Teacher, choose_some, distances
from cacheclip_rag.methods import preset
from cacheclip_rag.runtime.base import weights_digest
from tests.conftest import CHUNKS
from tests.fusion.cases import BROKEN, gap
from tests.training.stopping import stopper

SETTINGS = ContextSettings(steps=4, batch=1, held_out=2, check_every=2)
ROOM = 450


@pytest.fixture(scope="module")
def config(tiny_models: dict[str, str]) -> EngineConfig:
    return EngineConfig(primary=tiny_models["llama"], auxiliary=None)


@pytest.fixture(scope="module")
def teacher(config: EngineConfig) -> Teacher:
    return Teacher(config)


@pytest.fixture(scope="module")
def whole(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> ContextTraining:
    """A run from end to end, for all tests that read it."""
    return train_context(config, SETTINGS, folder=tmp_path_factory.mktemp("whole") / "work")


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    passages = [{"title": "", "text": text} for text in CHUNKS]
    record = {"id": "1", "task": "own", "question": "When was the lighthouse built?", "answers": ["1847"]}
    path.write_text(json.dumps({**record, "chunks": passages, "meta": {}}) + "\n")
    return path


def kept_tensors(training: ContextTraining) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (path,) = training.folder.glob("context-*.safetensors")
    found: dict[str, torch.Tensor] = load_file(path)
    return found


class TestReadings:
    def test_a_number_is_always_the_same_prompt(self, teacher: Teacher) -> None:
        first, second = (Readings(teacher.runtime, seed=3) for _ in range(2))
        assert [first[n] for n in (0, 5, -1)] == [second[n] for n in (0, 5, -1)]
        assert first[0] != first[1] and first[0] != Readings(teacher.runtime, seed=4)[0]

    def test_within_limits(self, teacher: Teacher, records: Path, tmp_path: Path) -> None:
        notes = tmp_path / "notes.md"
        notes.write_text("# Notes\n\n" + "\n\n".join(CHUNKS))
        for data in ([], [records], [notes, records]):
            readings = Readings(teacher.runtime, data, seed=1, context_tokens=ROOM)
            for reading in (readings[n] for n in range(-4, 12)):
                assert 2 <= len(reading.chunks) <= 8 and len(set(reading.chunks)) == len(reading.chunks)
                assert sum(len(teacher.runtime.tokenize(chunk)) for chunk in reading.chunks) <= ROOM
                assert len(reading.questions) == 3 and all(all(pair) for pair in reading.questions)

    def test_data_is_used(self, teacher: Teacher, records: Path) -> None:
        readings = Readings(teacher.runtime, [records], seed=1, context_tokens=ROOM)
        found = [readings[n] for n in range(20)]
        asked = [reading for reading in found if ("When was the lighthouse built?", "1847") in reading.questions]
        assert asked and all(any("1847" in chunk for chunk in reading.chunks) for reading in asked)
        assert any(set(reading.chunks) - set(CHUNKS) for reading in found), "and synthetic texts too"

    def test_what_is_held_out_is_in_no_training_prompt(self, teacher: Teacher, tmp_path: Path) -> None:
        notes = tmp_path / "notes.txt"
        words = "The keeper of lamp {n} rowed home at dawn, slept until noon, and wrote {n} letters to a brother. "
        notes.write_text("\n\n".join(words.format(n=n) * 4 for n in range(100, 130)))
        # every record shares passages with others
        chunks = [{"title": "", "text": words.format(n=n) * 2} for n in range(40)]
        questions = {f"Which lamp has number {n}?" for n in range(40)}
        lines = [
            {
                "id": str(n),
                "task": "t",
                "question": f"Which lamp has number {n}?",
                "answers": [f"lamp {n} "],
                "chunks": [chunks[n], *chunks[20:25]],
                "meta": {},
            }
            for n in range(40)
        ]
        records = tmp_path / "records.jsonl"
        records.write_text("\n".join(map(json.dumps, lines)))
        both = learning, held_out = [
            Readings(teacher.runtime, [notes, records], context_tokens=ROOM, held_out=part) for part in (False, True)
        ]
        parts = [{chunk for n in range(60) for chunk in readings[n].chunks} for readings in (learning, held_out)]
        assert not parts[0] & parts[1] and all(any("lamp" in chunk for chunk in part) for part in parts)
        asked = [{q for n in range(60) for q, _ in readings[n].questions if q in questions} for readings in both]
        assert asked[0] and asked[1] and not asked[0] & asked[1]
        assert learning.sha256 != held_out.sha256

    def test_synthetic_texts_are_of_other_kinds(self, teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
        made, splits = reading_module.synthetic_samples, []

        def recorded(split: Any, *args: Any, **options: Any) -> Any:
            splits.append(split)
            return made(split, *args, **options)

        monkeypatch.setattr(reading_module, "synthetic_samples", recorded)
        for held_out, split in ((False, "train"), (True, "test")):
            splits.clear()
            _ = Readings(teacher.runtime, context_tokens=ROOM, held_out=held_out)[0]
            assert set(splits) == {split}

    def test_too_little_data_is_judged_by_synthetic_texts(self, teacher: Teacher, records: Path) -> None:
        found = Readings(teacher.runtime, [records], context_tokens=ROOM, held_out=True)[0]
        assert not set(found.chunks) & set(CHUNKS)

    def test_data_without_text(self, teacher: Teacher, tmp_path: Path) -> None:
        (tmp_path / "short.txt").write_text("Too short.")
        with pytest.raises(ConfigurationError, match="expected text to learn from in .*short.txt, found no passage"):
            Readings(teacher.runtime, [tmp_path / "short.txt"])
        with pytest.raises(ConfigurationError, match="no prompt with two chunks fits 20 tokens"):
            _ = Readings(teacher.runtime, context_tokens=20)[0]


class TestTeacher:
    READING = Reading(tuple(CHUNKS[:3]), (("Who was the last keeper?", "Nobody knows."), ("When?", "1847")))

    def test_it_reads_as_full_prefill(self, teacher: Teacher, config: EngineConfig) -> None:
        for number in range(3):
            prompt = teacher.read(self.READING, number)
            engine = teacher._engine(number)
            row = 0
            for ending in prompt.endings:
                ids = torch.cat((prompt.ids, ending))
                _, logits = engine.primary.prefill(ids, len(ids))
                row += len(ending)
                at = int((prompt.answers == row - 1).nonzero())
                assert gap(prompt.logits[at], logits) < 1e-4
            assert int(prompt.first.sum()) == 2 and len(prompt.first) == len(prompt.answers) == len(prompt.logits)
        assert teacher.read(self.READING, 0).num_prefix != teacher.read(self.READING, 1).num_prefix

    def test_everything_recomputed_is_no_distance(self, teacher: Teacher) -> None:
        prompt, context = teacher.read(self.READING, 0), teacher.passages(0)
        with torch.no_grad():
            everything = torch.ones(len(prompt.ids), dtype=torch.bool)
            kl, error, same = distances(teacher.runtime, prompt, context, everything, 0.5)
            assert float(kl.max()) < 1e-6 and float(error) < 1e-6 and bool(same.all())
            kl, error, same = distances(teacher.runtime, prompt, context, torch.zeros_like(everything), 0.5)
            assert float(kl.mean()) > 1e-3 and float(error) > 1e-3 and not bool(same.all())

    def test_nothing_recomputed_is_what_engines_answer_behind_it(
        self, teacher: Teacher, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The KV that is trained and the KV that an engine puts before chunks have the same effect."""
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path))
        runtime, begin = teacher.runtime, teacher.passages(1)
        moved = begin + 0.3 * torch.randn(begin.shape, generator=torch.Generator().manual_seed(0))
        context = TrainedContext(weights_digest(runtime.fingerprint), moved.bfloat16())
        context.save(trained_context_path(context.primary_sha256))
        prompt = teacher.read(self.READING, 1)
        seen: list[torch.Tensor] = []

        def record(full: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            seen.append(logits)
            return torch.zeros(len(logits))

        monkeypatch.setattr("cacheclip_rag.lab.training.teaching.kl_divergence", record)
        with torch.no_grad():
            nothing = torch.zeros(len(prompt.ids), dtype=torch.bool)
            for kv in (context.kv, begin):
                distances(runtime, prompt, kv, nothing, 0.0)
        engine = CacheClipEngine(replace(teacher._engine(1).config, chunk_context="auto"))
        from cacheclip_rag.lab.evaluation.questions import ask
        from cacheclip_rag.lab.evaluation.records import Record, RecordChunk

        record_ = Record("", "", self.READING.questions[0][0], ("",), tuple(RecordChunk("", c) for c in CHUNKS[:3]), {})
        asked = ask(engine, record_)
        engine.precompute(CHUNKS[:3], method="direct")
        found = engine.prefill(asked.segments, method=preset("direct"))
        assert found.stats.hits == 3
        assert gap(seen[0][0], found.logits) < 1e-4 and gap(seen[1][0], found.logits) > BROKEN

    def test_choices(self, teacher: Teacher) -> None:
        prompt = teacher.read(self.READING, 0)
        slots = torch.cat(prompt.spans)
        assert not choose_some(prompt, 0.0, random.Random(0)).any()
        for ratio in (0.05, 0.2, 0.3):
            chosen = choose_some(prompt, ratio, random.Random(0))
            assert torch.equal(chosen, choose_some(prompt, ratio, random.Random(0)))
            count, budget = int(chosen.sum()), round(ratio * len(slots))
            assert int(chosen[slots].sum()) == count and budget <= count < budget + 8
            assert all(chosen[start] for start in prompt.starts)


class TestLearned:
    def test_it_begins_where_it_is_told(self) -> None:
        begin = torch.randn(2, 2, 1, 6, 4)
        learned = Learned(begin)
        assert torch.equal(learned.kv(), begin)
        assert learned.unit.shape == (2, 2, 1, 1, 1) and bool((learned.unit > 0).all())


class TestJob:
    def test_what_it_finds(self, whole: ContextTraining, teacher: Teacher) -> None:
        assert (whole.step, whole.steps) == (4, 4) and [each["step"] for each in whole.history] == [0, 2, 4]
        context = whole.context
        assert context is not None and context.kv.shape == teacher.passages(0).shape
        context.check(teacher.runtime)
        assert not torch.equal(context.kv, teacher.passages(0).bfloat16())
        assert context.about["command"] == "train-context" and context.about["settings"]["steps"] == 4
        assert [each.ratio for each in whole.figures] == [0.0, 0.2]
        for each in whole.figures:
            assert len(each.before) == len(each.after) == 2 and each.before != each.after

    def test_the_loss_falls_on_one_prompt(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is learned by heart comes closer: the gradient points the right way."""
        losses: list[float] = []
        backward = module._Training._backward

        def same(self: Any, number: int) -> float:
            losses.append(backward(self, 0))
            return losses[-1]

        monkeypatch.setattr(module._Training, "_backward", same)
        settings = replace(SETTINGS, steps=12, held_out=1, check_every=100, learning_rate=0.05)
        train_context(config, settings, folder=tmp_path / "work")
        assert losses[-1] < 0.9 * losses[0]

    def test_the_steps_are_adams(self, config: EngineConfig, teacher: Teacher, tmp_path: Path) -> None:
        """A reference that is written out: schedule, losses, average and what it begins with."""
        settings = ContextSettings(
            steps=3, batch=2, held_out=1, check_every=100, warmup=2, learning_rate=0.05, average=0.6, correction=0.4
        )
        found = train_context(config, settings, folder=tmp_path)
        begin = teacher.passages(0).float()
        unit = (begin - begin.mean(3, keepdim=True)).std(dim=(2, 3, 4), keepdim=True)
        change = torch.zeros_like(begin, requires_grad=True)
        first, second, average = (torch.zeros_like(begin) for _ in range(3))
        readings = Readings(teacher.runtime, context_tokens=min(450, teacher.runtime.reuse_tokens // 2))
        for step in range(3):
            loss = torch.tensor(0.0)
            for number in (2 * step, 2 * step + 1):
                rng = random.Random(f"0/{number}/tokens")
                prompt = teacher.read(readings[number], number)
                ratio = 0.0 if rng.random() < 0.5 else rng.uniform(0.05, 0.3)
                chosen = choose_some(prompt, ratio, rng)
                kl, error, _ = distances(teacher.runtime, prompt, begin + unit * change, chosen, 0.4)
                loss = loss + (0.5 * kl[prompt.first].mean() + 0.5 * kl.mean() + 0.02 * error) / 2
            (gradient,) = torch.autograd.grad(loss, change)
            gradient = gradient * min(1.0, 1.0 / float(gradient.norm()))
            rate = 0.05 * (0.5, 1.0, 1.0)[step] * 0.5 * (1 + math.cos(math.pi * step / 3))
            first = 0.9 * first + 0.1 * gradient
            second = 0.98 * second + 0.02 * gradient.square()
            corrected = (second / (1 - 0.98 ** (step + 1))).sqrt() + 1e-8
            with torch.no_grad():
                change -= rate * first / (1 - 0.9 ** (step + 1)) / corrected
            average = 0.6 * average + 0.4 * change.detach()
        expected = begin + unit * average / (1 - 0.6**3)
        kept = kept_tensors(found)
        # where a gradient is near 0, a step is its rounding's sign: single numbers differ, and all together do not
        for mine, theirs, size in (
            (kept["change"], change.detach(), change.detach()),
            (kept["kv"], expected, expected - begin),
        ):
            assert float((mine - theirs).norm()) < 1e-3 * float(size.norm())
            assert gap(mine, theirs) < 1e-2 * float(size.abs().max())

    def test_the_check_is_of_what_is_kept(self, config: EngineConfig, whole: ContextTraining, teacher: Teacher) -> None:
        room = min(1200, teacher.runtime.reuse_tokens // 2)
        readings = Readings(teacher.runtime, context_tokens=room, held_out=True)
        kept = whole.context.kv  # type: ignore[union-attr]
        for figures in whole.figures:
            for number in range(2):
                prompt = teacher.read(readings[number], number)
                chosen = choose_some(prompt, figures.ratio, random.Random(number))
                for context, seen, same_first in (
                    (kept, figures.after, figures.same_after),
                    (teacher.passages(number), figures.before, figures.same_before),
                ):
                    with torch.no_grad():
                        kl, _, same = distances(teacher.runtime, prompt, context, chosen, SETTINGS.correction)
                    assert seen[number] == pytest.approx(float(kl.mean()), rel=1e-4)
                    assert same_first[number] == int((same & prompt.first).sum())

    def test_numbers_that_are_not_finite_end_it(
        self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before they are saved."""
        backward = module._Training._backward

        def broken(self: Any, number: int) -> float:
            loss = backward(self, number)
            if number == 2:
                self.learned.change.grad[0] = float("nan")
            return loss

        with monkeypatch.context() as patch:
            patch.setattr(module._Training, "_backward", broken)
            with pytest.raises(ModelError, match="expected finite gradients at step 3, got nan: torch.float32"):
                train_context(config, SETTINGS, folder=tmp_path)
        assert train_context(config, SETTINGS, folder=tmp_path, minutes=1e-6).step == 3

    def test_other_texts_begin_anew(self, config: EngineConfig, tmp_path: Path) -> None:
        data, folder = tmp_path / "notes.txt", tmp_path / "work"
        for number, words in enumerate(("At dawn the keeper rowed home. ", "At dusk the keeper rowed out. ")):
            data.write_text("\n\n".join(f"{n} {words}" * 8 for n in range(30)))
            train_context(config, SETTINGS, data=[data], folder=folder, minutes=1e-6)
            assert len(list(folder.glob("context-*"))) == number + 1

    @pytest.mark.parametrize("at", [1, 2, 4])
    def test_an_interrupted_run_goes_on_to_the_same_end(
        self, config: EngineConfig, whole: ContextTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
    ) -> None:
        folder = tmp_path / "work"
        with monkeypatch.context() as patch:
            stop, _ = stopper(patch)
            stop(module._Training, "_backward", at)
            with pytest.raises(Interrupted, match="the work so far is saved"):
                train_context(config, SETTINGS, folder=folder)
        stop, counts = stopper(monkeypatch)
        stop(module._Training, "_backward", 99)
        again = train_context(config, SETTINGS, folder=folder)
        assert counts["_backward"] == 5 - at
        mine, theirs = kept_tensors(again), kept_tensors(whole)
        assert mine.keys() == theirs.keys() == {"change", "mean", "exp_avg", "exp_avg_sq", "kv"}
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert again.history == whole.history and again.figures == whole.figures
        assert again.context is not None and whole.context is not None and again.context.sha256 == whole.context.sha256

    def test_minutes_are_kept(self, config: EngineConfig, whole: ContextTraining, tmp_path: Path) -> None:
        folder = tmp_path / "work"
        for step in (1, 2, 3):
            part = train_context(config, SETTINGS, folder=folder, minutes=1e-6)
            assert (part.step, part.context, part.figures, part.is_better) == (step, None, (), False)
        last = train_context(config, SETTINGS, folder=folder, minutes=1e-6)
        assert last.context is not None and last.context.sha256 == whole.context.sha256  # type: ignore[union-attr]

    def test_a_finished_run_computes_nothing(
        self, config: EngineConfig, whole: ContextTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = Path(shutil.copytree(whole.folder, tmp_path / "work"))
        monkeypatch.setattr(module, "distances", None)
        again = train_context(config, SETTINGS, folder=folder)
        assert again.figures == whole.figures and again.context.sha256 == whole.context.sha256  # type: ignore[union-attr]

    def test_a_check_with_other_figures_is_made_again(
        self, config: EngineConfig, whole: ContextTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One of a version that counted no first tokens."""
        folder = Path(shutil.copytree(whole.folder, tmp_path / "work"))
        inputs: list[Any] = []
        monkeypatch.setattr(module, "digest_of", lambda about: inputs.append(about) or folder_module.digest_of(about))
        train_context(config, SETTINGS, folder=folder)
        older = [{name: value for name, value in asdict(each).items() if "same" not in name} for each in whole.figures]
        about = [each for each in inputs[-1] if each != list(asdict(whole.figures[0]))]
        header = {"digest": folder_module.digest_of(about), "figures": json.dumps(older)}
        (path,) = folder.glob("figures-*")
        folder_module.save({}, header, path)
        assert folder_module.load(path, header["digest"]) is not None
        assert train_context(config, SETTINGS, folder=folder).figures == whole.figures

    def test_other_settings_begin_anew(self, config: EngineConfig, whole: ContextTraining, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(whole.folder, tmp_path / "work"))
        other = train_context(config, replace(SETTINGS, seed=1), folder=folder, minutes=1e-6)
        assert other.step == 1 and len(list(folder.glob("context-*"))) == 2

    def test_damaged_work_is_done_again(self, config: EngineConfig, whole: ContextTraining, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(whole.folder, tmp_path / "work"))
        for path in folder.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-50])
        assert train_context(config, SETTINGS, folder=folder, minutes=1e-6).step == 1

    def test_the_usual_folder_is_the_models(
        self, config: EngineConfig, teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path))
        found = train_context(config, SETTINGS, minutes=1e-6)
        assert found.folder == tmp_path / "training" / teacher.runtime.fingerprint[:16] and found.folder.is_dir()

    @pytest.mark.parametrize("name", ["steps", "batch", "held_out", "check_every", "warmup"])
    def test_bad_settings(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match=f"{name} must be 1 or more, got 0"):
            replace(SETTINGS, **{name: 0})

    def test_bad_wishes(self, config: EngineConfig, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="minutes must be above 0, got 0"):
            train_context(config, SETTINGS, minutes=0.0, folder=tmp_path)

    @pytest.mark.parametrize("name", ["gemma3", "qwen2-sliding", "gpt-oss"])
    def test_other_architectures(self, tiny_models: dict[str, str], tmp_path: Path, name: str) -> None:
        settings = replace(SETTINGS, steps=1, held_out=1)
        found = train_context(EngineConfig(primary=tiny_models[name], auxiliary=None), settings, folder=tmp_path)
        assert found.context is not None and bool(found.context.kv.isfinite().all())


class TestVerdict:
    def training(
        self, whole: ContextTraining, alone: Sequence[float], recomputed: float, same: Sequence[int] = (2, 2)
    ) -> ContextTraining:
        """``same``: equal first tokens of the first prompt with the learned context, alone and with recomputation. With
        the one in use there are two."""
        ones, used = (1.0,) * len(alone), (2,) * len(alone)
        alone_, some = (
            HeldOut(ratio, ones, after, ones, ones, used, (count, *used[1:]))
            for ratio, after, count in zip((0.0, 0.2), (tuple(alone), (recomputed,) * len(alone)), same, strict=True)
        )
        return replace(whole, figures=(alone_, some))

    def test_it_must_be_better_alone_and_not_worse_with_recomputation(self, whole: ContextTraining) -> None:
        assert self.training(whole, [0.7, 0.8, 0.9], 1.0).is_better
        assert not self.training(whole, [0.7, 0.8, 0.9], 1.01).is_better
        assert not self.training(whole, [0.5, 0.9, 1.3], 0.5).is_better, "the interval reaches 1"
        assert not replace(whole, figures=()).is_better

    def test_it_must_not_lose_first_tokens(self, whole: ContextTraining) -> None:
        assert self.training(whole, [0.7, 0.8, 0.9], 0.9, same=(3, 2)).is_better
        for same in ((1, 3), (3, 1)):
            training = self.training(whole, [0.7, 0.8, 0.9], 0.9, same=same)
            assert not training.is_better and "no fewer first tokens" in context_verdict(training)
            assert [row[-2:] for row in context_table(training)[1]] == [["6", f"{4 + each}"] for each in same]


class TestCommand:
    def run(self, *args: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, ["train-context", *args], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result

    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
        return tmp_path / "home"

    def test_from_training_to_use(self, config: EngineConfig, home: Path, records: Path) -> None:
        small = ["--primary", config.primary, "--steps", "2", "--batch", "1", "--held-out", "2", "--data", str(records)]
        stopped = json.loads(self.run(*small, "--minutes", "0.000001", "--json").stdout)
        assert (stopped["steps_done"], stopped["is_complete"], stopped["path"]) == (1, False, None)
        assert stopped["is_better"] is None and not CacheClipEngine(config).context_of().trained
        done = json.loads(self.run(*small, "--overwrite", "--json").stdout)
        path = trained_context_path(weights_digest(CacheClipEngine(config).primary.fingerprint))
        assert done["is_complete"] and done["path"] == str(path) and len(done["held_out"]) == 2
        assert CacheClipEngine(config).context_of().trained == done["sha256"] == TrainedContext.load(path).sha256
        again = json.loads(self.run(*small, "--json").stdout)
        assert again["path"] == str(path) and again["sha256"] == done["sha256"], "it is in use already"

    def test_it_is_judged_against_the_one_that_it_would_replace(
        self, config: EngineConfig, whole: ContextTraining, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = trained_context_path(weights_digest(CacheClipEngine(config).primary.fingerprint))
        whole.context.save(path)  # type: ignore[union-attr]
        given = []
        monkeypatch.setattr(module, "train_context", lambda *_, rival, **__: given.append(rival) or whole)
        for option in ([], ["--overwrite"], ["--out", str(home / "other")]):
            self.run("--primary", config.primary, *option)
        assert [each and each.sha256 for each in given] == [whole.context.sha256, None, None]  # type: ignore[union-attr]

    @pytest.mark.parametrize("is_better", [True, False])
    def test_it_is_kept_only_if_it_is_better(
        self, config: EngineConfig, whole: ContextTraining, tmp_path: Path, monkeypatch: Any, is_better: bool
    ) -> None:
        after = (0.5, 0.6) if is_better else (1.5, 1.6)
        held_out = HeldOut(0.0, (1.0, 1.0), after, (1.0, 1.0), after, (1, 2), (2, 1))
        found = replace(whole, figures=(held_out, replace(held_out, ratio=0.2)))
        monkeypatch.setattr(module, "train_context", lambda *_, **__: found)
        out = tmp_path / "own.safetensors"
        result = self.run("--primary", config.primary, "--out", str(out))
        assert out.is_file() == is_better == (f"Trained context: {out}" in result.stdout)
        assert ("It was not kept" in result.stdout) == (not is_better) == ("is not better" in result.stdout)
        assert ("No engine looks there" in result.stdout) == is_better
        assert "Distance from full prefill" in result.stdout and ("-45%" in result.stdout) == is_better
        self.run("--primary", config.primary, "--out", str(out), "--overwrite")
        assert out.is_file()

    def test_stopped_by_hand(self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stop, _ = stopper(monkeypatch)
        stop(module._Training, "_backward", 2)
        work = tmp_path / "work"
        options = ["--steps", "3", "--batch", "1", "--held-out", "1", "--work", str(work)]
        result = self.run("--primary", config.primary, *options, code=130)
        assert result.stderr.splitlines()[-1] == (
            f"cacheclip: stopped. The work so far is saved in {work}; the same command continues from there."
        )

    def test_bad_paths(self, config: EngineConfig, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigurationError, match="expected a folder for working files"):
            self.run("--primary", config.primary, "--work", str(tmp_path / "file"))
        with pytest.raises(ConfigurationError, match="a trained context is a file, but .* is a folder"):
            self.run("--primary", config.primary, "--out", str(tmp_path))
