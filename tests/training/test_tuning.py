"""Fine-tuning: what may change does, what may not does not, and the result scores as it was trained to."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, EngineConfig
from cacheclip_rag.errors import ConfigurationError, ModelError
from cacheclip_rag.lab.training import tuning as module
from cacheclip_rag.lab.training.families import Sample, synthetic_samples
from cacheclip_rag.lab.training.features import Seen, look, spread_over
from cacheclip_rag.lab.training.targets import attended_and_stale, attended_when_stale, chosen_by
from cacheclip_rag.lab.training.tuning import (
    Trainee,
    Tuned,
    TuningSettings,
    check_trainable,
    fitted,
    learning_and_held_out,
    loss_of,
    spaced,
    target_scale,
    train,
)
from cacheclip_rag.methods import preset
from cacheclip_rag.methods.settings import vary
from cacheclip_rag.selection.auxiliary import score_chunks
from cacheclip_rag.selection.heads import HeadSet, weights_digest

SETTINGS = TuningSettings(rank=4, batch=4, epochs=50, patience=50, learning_rate=1e-2)


class Setting:
    """A tiny auxiliary model, a head set, and a few samples seen by it."""

    def __init__(self, primary: str, auxiliary: str, with_targets: bool = False) -> None:
        self.engine = CacheClipEngine(EngineConfig(primary=primary, auxiliary=auxiliary))
        self.runtime: Any = self.engine.auxiliary
        last = self.runtime.num_layers - 1
        self.heads = HeadSet(
            weights_digest(self.runtime.fingerprint),
            ((0, 1), (last, 0), (last, 1)),
            torch.tensor([0.3, 0.4, 0.3]),
            sinks=4,
        )
        self.samples: list[Sample] = synthetic_samples("train", 4, chunk_words=25)
        seen = [
            look(self.engine.parts.auxiliary_caches, each, self.heads.layers, sinks=4, keep=last)
            for each in self.samples
        ]
        targets = [attended_and_stale(self.engine, each) if with_targets else None for each in self.samples]
        self.trainees = [Trainee.of(each, self.heads, target) for each, target in zip(seen, targets, strict=True)]

    def tuned(self, settings: TuningSettings = SETTINGS) -> Tuned:
        config = self.runtime.model.config
        return Tuned(self.heads, config.num_attention_heads, self.runtime.num_kv_heads, self.runtime.head_dim, settings)

    def engine_scores(self, sample: Sample, heads: HeadSet) -> torch.Tensor:
        caches = self.engine.parts.auxiliary_caches
        kv = [self.runtime.encode(caches.tokenize(chunk).ids, caches.prefix) for chunk in sample.chunks]
        question = self.runtime.tokenize(sample.question).ids
        return torch.cat(score_chunks(self.runtime, caches.prefix, kv, question, heads=heads))


pytestmark = pytest.mark.xdist_group("tuning")  # what is trained is shared


@pytest.fixture(scope="module", params=["auxiliary", "qwen2"])
def setting(request: pytest.FixtureRequest, tiny_models: dict[str, str]) -> Setting:
    """One for all tests: leave it as it is."""
    return Setting(tiny_models["llama"], tiny_models[request.param])


@dataclass(frozen=True)
class Training:
    """50 epochs of four samples, all four in each step."""

    tuned: Tuned
    history: list[dict[str, float]]
    weights_before: dict[str, torch.Tensor]
    keys_before: torch.Tensor


@pytest.fixture(scope="module")
def trained(setting: Setting) -> Training:
    tuned = setting.tuned()
    weights = copy.deepcopy(setting.runtime.model.state_dict())
    keys = copy.deepcopy(setting.trainees[0].last.keys)
    return Training(tuned, train(tuned, setting.trainees, setting.trainees).history, weights, keys)


class TestFitted:
    def seen(self, wanted: int, seed: int) -> Seen:
        """Heads that attend here and there, and one, number ``wanted``, to the evidence."""
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(2, 30, 40, generator=generator)
        evidence = torch.zeros(40, dtype=torch.bool)
        start = int(torch.randint(0, 30, (1,), generator=generator))
        evidence[start : start + 8] = True
        scores[wanted // 30, wanted % 30] = evidence + 0.01
        return Seen((20, 20), scores / scores.sum(-1, keepdim=True), evidence, evidence, layers=(3, 5))

    @pytest.mark.parametrize("with_targets", [False, True])
    def test_the_head_that_sees_it_counts_most(self, with_targets: bool) -> None:
        seen = [self.seen(40, seed) for seed in range(5)]
        targets = [each.evidence / each.evidence.sum() if with_targets else None for each in seen]
        heads = fitted(seen, targets, "a" * 64, SETTINGS)
        assert len(heads.heads) == 16 and heads.heads[int(heads.weights.argmax())] == (5, 10)
        assert float(heads.weights.max()) > 0.5 and float(heads.weights.sum()) == pytest.approx(1.0)
        assert heads.sinks == SETTINGS.sinks and list(heads.heads) == sorted(heads.heads)


class TestLoss:
    def test_by_hand(self) -> None:
        scores, evidence = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([False, True, True])
        target = torch.tensor([0.5, 0.5, 0.0])
        likelihood, divergence = math.log(2), 0.5 * math.log(2)
        assert float(loss_of(scores, evidence, None, 0.75, 0.0)) == pytest.approx(likelihood)
        assert float(loss_of(scores, evidence, None, 0.75, 2.0)) == pytest.approx(0.25 * likelihood)
        found = loss_of(scores, evidence, target, 0.75, 2.0)
        assert float(found) == pytest.approx(0.25 * likelihood + 0.75 * 2 * divergence)

    def test_few_targets_count_as_much_as_many(self) -> None:
        some = torch.ones(3)
        assert target_scale([some, None, None, torch.zeros(3)]) == 4.0
        assert target_scale([some, some]) == 1.0 and target_scale([None]) == target_scale([]) == 0.0


class TestTuned:
    def test_untrained_it_scores_like_the_set_it_comes_from(self, setting: Setting) -> None:
        tuned = setting.tuned()
        for sample, trainee in zip(setting.samples, setting.trainees, strict=True):
            expected = setting.engine_scores(sample, setting.heads)
            torch.testing.assert_close(tuned(trainee).detach(), expected, atol=1e-6, rtol=1e-4)

    def test_trained_the_engine_scores_as_it_was_trained(self, setting: Setting, trained: Training) -> None:
        """The module here and the auxiliary's own pass are two ways to the same numbers."""
        tuned = trained.tuned
        learned = tuned.head_set()
        assert learned.is_updated
        for sample, trainee in zip(setting.samples, setting.trainees, strict=True):
            expected = setting.engine_scores(sample, learned)
            torch.testing.assert_close(tuned(trainee).detach(), expected, atol=1e-5, rtol=1e-3)
            assert float((expected - setting.engine_scores(sample, setting.heads)).abs().max()) > 1e-4

    def test_gradient_reaches_what_should_learn_and_nothing_else(self, setting: Setting, trained: Training) -> None:
        tuned = trained.tuned
        names = {name for name, parameter in tuned.named_parameters() if parameter.requires_grad}
        assert names == {"mix", "queries_down", "queries_up", "keys_down", "keys_up"}
        for trainee in setting.trainees:
            tuned.zero_grad()
            tuned.loss(trainee).backward()
            assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in tuned.parameters())
        tuned.zero_grad()
        before, after = trained.weights_before, setting.runtime.model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not any(parameter.grad is not None for parameter in setting.runtime.model.parameters())
        assert torch.equal(trained.keys_before, setting.trainees[0].last.keys)

    def test_four_samples_are_learned_by_heart(self, trained: Training) -> None:
        history = trained.history
        assert history[-1]["loss"] < 0.5 * history[0]["loss"]
        assert max(each["held_out_found"] for each in history) > history[0]["held_out_found"] + 0.2

    def test_the_same_seed_gives_the_same(self, setting: Setting) -> None:
        settings = replace(SETTINGS, epochs=3)
        digests = []
        for seed in (0, 0, 1):
            tuned = setting.tuned(replace(settings, seed=seed))
            train(tuned, setting.trainees, setting.trainees)
            digests.append(tuned.head_set().digest())
        assert digests[0] == digests[1] != digests[2]

    def test_training_goes_on_from_a_state(self, setting: Setting) -> None:
        whole, first, second = (setting.tuned(replace(SETTINGS, epochs=n)) for n in (6, 3, 6))
        states: list[Any] = []
        expected = train(whole, setting.trainees, setting.trainees).history
        train(first, setting.trainees, setting.trainees, after_epoch=lambda state: states.append(copy.deepcopy(state)))
        resumed = train(second, setting.trainees, setting.trainees, state=states[-1]).history
        assert resumed == expected and second.head_set().digest() == whole.head_set().digest()

    def test_it_ends_at_its_best_and_stops_when_nothing_gets_better(self, setting: Setting) -> None:
        tuned = setting.tuned(replace(SETTINGS, learning_rate=1e-30, patience=3))
        history = train(tuned, setting.trainees[:3], setting.trainees[3:]).history
        assert len(history) == 4  # epoch 0, and three in which nothing moved
        assert tuned.head_set().digest() == setting.tuned().head_set().digest()
        assert not tuned.head_set().is_updated, "an update of nothing is left out"

    def test_saved_and_loaded_it_scores_the_same(self, setting: Setting, trained: Training, tmp_path: Path) -> None:
        learned = trained.tuned.head_set({"seed": 0})
        learned.save(tmp_path / "heads.safetensors")
        loaded = HeadSet.load(tmp_path / "heads.safetensors")
        for sample in setting.samples:
            assert torch.equal(setting.engine_scores(sample, loaded), setting.engine_scores(sample, learned))


class Scripted(torch.nn.Module):
    """Finds and loses in held-out samples what it is told, epoch by epoch."""

    target_scale = 1.0

    def __init__(self, found: list[float], losses: list[float]) -> None:
        super().__init__()
        self.settings = TuningSettings(epochs=len(found) - 1, patience=len(found))
        self.epoch = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.figures = [
            {"held_out_found": found, "held_out_loss": loss} for found, loss in zip(found, losses, strict=True)
        ]

    def forward(self, _: Any) -> torch.Tensor:
        raise AssertionError("what it finds is told")

    def loss(self, _: Any) -> torch.Tensor:
        self.epoch += 1
        return self.weight * 0

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": [self.weight]}]


class TestWhichEpochIsBest:
    @pytest.mark.parametrize(
        ("found", "losses", "best"),
        [
            ([0.5, 0.6, 0.6], [1.0, 1.0, 0.9], 2),
            ([0.5, 0.6, 0.598], [1.0, 1.0, 0.1], 1),
            ([0.5, 0.5005, 0.5], [1.0, 1.1, 1.2], 0),
            ([0.5, 0.4995, 0.5], [1.0, 1.0, 1.0], 0),
            # a thousandth lower an epoch, each at a lower loss: as far as a thousandth, and no farther
            ([0.5, 0.4992, 0.4984, 0.4976, 0.4968], [1.0, 0.9, 0.8, 0.7, 0.6], 1),
            # nor against one that found most without being best
            ([0.5, 0.5009, 0.4995], [1.0, 1.1, 0.9], 0),
            ([0.5, 0.5009, 0.5018], [1.0, 1.1, 1.2], 2),
        ],
    )
    def test_small_losses_do_not_add_up(
        self, found: list[float], losses: list[float], best: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        learner = Scripted(found, losses)
        figures = iter(learner.figures)
        monkeypatch.setattr(module, "_held_out", lambda *_: next(figures))
        sample = type("Sample", (), {"target": None})
        state = train(learner, [sample], [])
        assert state.best_epoch == best


class TestWhatCanBeTrained:
    @pytest.mark.parametrize(
        ("model", "reason"),
        [
            ("gemma2", "soft-capped"),
            ("gpt-oss", "attention sinks"),
            ("mistral-sliding", "sliding windows"),
            ("llama", None),
        ],
    )
    def test_models_that_attend_otherwise_are_refused(
        self, tiny_models: dict[str, str], model: str, reason: str | None
    ) -> None:
        runtime: Any = CacheClipEngine(
            EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models[model])
        ).auxiliary
        heads = HeadSet.of_layers(weights_digest(runtime.fingerprint), "last", runtime.num_layers, 2)
        if reason is None:
            check_trainable(runtime, heads)
            return
        with pytest.raises(ModelError, match=f"{reason}.*which fine-tuning does not support. Calibrate it"):
            check_trainable(runtime, heads)

    def test_a_set_that_was_tuned_already_is_refused(self, setting: Setting, trained: Training) -> None:
        with pytest.raises(ModelError, match="fine-tuned already"):
            check_trainable(setting.runtime, trained.tuned.head_set())

    @pytest.mark.parametrize(
        "wrong",
        [
            {"rank": 0},
            {"batch": 0},
            {"epochs": 1.5},
            {"learning_rate": -1.0},
            {"learning_rate": 0},
            {"target_weight": 2.0},
        ],
    )
    def test_senseless_settings_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))} must be"):
            TuningSettings(**wrong)


class TestTargets:
    def test_they_reach_what_is_learned_from(self) -> None:
        """Samples that say when to stop are not those that are learned from, and the primary is asked about these."""
        learning, held_out = learning_and_held_out(23)
        assert not set(learning) & set(held_out) and len(learning) + len(held_out) == 23 and len(held_out) == 5
        asked = spaced(learning, 6)
        assert len(set(asked)) == 6 and set(asked) <= set(learning) and asked[-1] == learning[-1]
        assert spaced(learning, 99) == learning and spaced(learning, 0) == []

    def test_short_samples_are_asked_about_too(self, tiny_models: dict[str, str]) -> None:
        engine = CacheClipEngine(EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"]))
        chunks = ("The lamp of the harbour is red.", "It was lit.")
        sample = Sample("given", chunks, "What is red?", "lamp", ((0, 0, 31),), ((0, 4, 8),))
        found = attended_and_stale(engine, sample)
        assert found is not None and float(found.sum()) == pytest.approx(1.0, abs=1e-5)
        assert not engine.is_stored(chunks[0])
        own = attended_when_stale(engine, sample, vary(preset("query_attention"), {"scorer": {"layers": "upper"}}))
        assert own.shape == found.shape and bool((own >= 0).all()) and not torch.allclose(own / own.sum(), found)

    def test_what_a_method_recomputes_of_a_sample(self, tiny_models: dict[str, str]) -> None:
        engine = CacheClipEngine(EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"]))
        [sample] = synthetic_samples("test", 1, chunk_words=30)
        engine.precompute(sample.chunks[:2])
        chosen = chosen_by(engine, sample, preset("epic"), 0.25)
        assert [engine.is_stored(chunk) for chunk in sample.chunks] == [True, True, False, False]
        total = sum(len(mask) for mask, _ in chosen)
        assert sum(int(mask.sum()) for mask, _ in chosen) == round(0.25 * total)
        for chunk, (mask, offsets) in zip(sample.chunks, chosen, strict=True):
            assert len(mask) == len(offsets) and offsets[-1][1] == len(chunk)
            count = int(mask.sum())
            assert bool(mask[:count].all()), "EPIC takes first tokens"

    def test_a_target_is_a_distribution_over_the_chunks(self, tiny_models: dict[str, str]) -> None:
        setting = Setting(tiny_models["llama"], tiny_models["auxiliary"], with_targets=True)
        for trainee in setting.trainees:
            assert trainee.target is not None and len(trainee.target) == len(trainee.evidence)
            assert float(trainee.target.sum()) == pytest.approx(1.0, abs=1e-5) and bool((trainee.target >= 0).all())
        history = train(setting.tuned(replace(SETTINGS, epochs=20)), setting.trainees, setting.trainees).history
        assert history[-1]["loss"] < history[0]["loss"]

    def test_mass_is_handed_over_by_characters(self) -> None:
        source, target = [(0, 4), (4, 6), (6, 10)], [(0, 2), (2, 6), (6, 6), (7, 10)]
        found = spread_over(torch.tensor([4.0, 2.0, 8.0]), source, target)
        assert found.tolist() == pytest.approx([2.0, 4.0, 0.0, 6.0])
        assert spread_over(torch.tensor([4.0, 2.0, 8.0]), source, source).tolist() == pytest.approx([4.0, 2.0, 8.0])
