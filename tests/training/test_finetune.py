"""Fine-tuning as a job, and its command; on tiny models, from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cacheclip_rag import CacheClipEngine, EngineConfig
from cacheclip_rag.base.errors import ConfigurationError, ModelError
from cacheclip_rag.cli import app
from cacheclip_rag.lab.training import finetune as module
from cacheclip_rag.lab.training.finetune import (
    IN_USE,
    OWN_ATTENTION,
    SHIPPED,
    TUNED,
    UNTUNED,
    FineTuning,
    finetune,
)
from cacheclip_rag.lab.training.outcomes import Outcome
from cacheclip_rag.lab.training.report import finetuning_json, finetuning_note, finetuning_table, finetuning_verdict
from cacheclip_rag.lab.training.targets import after_sinks
from cacheclip_rag.runtime.base import weights_digest
from cacheclip_rag.selection import heads as heads_module
from cacheclip_rag.selection.heads import HeadSet, head_set_path
from tests.training.conftest import made

SMALL: dict[str, Any] = {"num_samples": 12, "num_targets": 3, "num_prompts": 2}
pytestmark = pytest.mark.usefixtures("with_short_samples")


@pytest.fixture(scope="module")
def config(tiny_models: dict[str, str]) -> EngineConfig:
    return EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"])


@pytest.fixture(scope="module")
def heads(config: EngineConfig) -> HeadSet:
    runtime: Any = CacheClipEngine(config).auxiliary
    return HeadSet(weights_digest(runtime.fingerprint), ((0, 1), (1, 0), (1, 1)), torch.full((3,), 1 / 3), sinks=4)


def tune(config: EngineConfig, **changes: Any) -> FineTuning:
    return finetune(config, **{**SMALL, **changes})


@pytest.fixture(scope="module")
def whole(config: EngineConfig, with_short_samples: None) -> FineTuning:
    """A run from end to end, for all tests that read it."""
    return tune(config)


@pytest.mark.xdist_group("finetuning")  # runs are shared
class TestJob:
    def test_what_it_finds(self, config: EngineConfig, whole: FineTuning) -> None:
        others = ["direct", "random", "cacheblend", "epic", "anchored", "oracle", OWN_ATTENTION]
        assert list(whole.outcomes) == [UNTUNED, TUNED, *others]
        assert all(len(each) == 2 for each in whole.outcomes.values())
        assert whole.is_accepted in (True, False) and whole.heads.sinks == 4
        assert whole.about["primary_sha256"] == CacheClipEngine(config).primary.fingerprint
        assert config.primary not in json.dumps(whole.about), "no path of a machine"
        assert whole.about["right"].endswith(" of 2") and f": {whole.about['right']}." in finetuning_note(whole)
        assert whole.heads.about == whole.about

    def test_the_same_command_makes_the_same_head_set(self, config: EngineConfig, whole: FineTuning) -> None:
        again = tune(config, num_prompts=0)
        assert again.heads.digest() == whole.heads.digest() and again.is_accepted is None
        assert tune(config, num_prompts=0, seed=1).heads.digest() != whole.heads.digest()

    def test_it_is_held_against_what_comes_with_the_package(
        self, config: EngineConfig, heads: HeadSet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = replace(heads, heads=((0, 0), (0, 2), (1, 3)))
        monkeypatch.setattr(module, "shipped_set", lambda _: other)
        found = tune(config).outcomes
        assert list(found)[:3] == [UNTUNED, SHIPPED, TUNED] and IN_USE not in found
        assert len(found[SHIPPED]) == 2 and found[SHIPPED] != found[TUNED]

    def test_it_is_held_against_what_it_would_replace(self, config: EngineConfig, heads: HeadSet) -> None:
        other = replace(heads, heads=((0, 0), (0, 2), (1, 3)))
        found = tune(config, rival=other).outcomes
        assert list(found)[:3] == [UNTUNED, IN_USE, TUNED]
        assert len(found[IN_USE]) == 2 and found[IN_USE] != found[TUNED]
        with pytest.raises(ModelError, match="made for an auxiliary model with digest"):
            tune(config, rival=replace(other, auxiliary_sha256="b" * 64))

    def test_bad_wishes_are_refused(self, config: EngineConfig) -> None:
        with pytest.raises(ConfigurationError, match="at least 10 training samples, .* got 5, 3 and 2"):
            tune(config, num_samples=5)
        with pytest.raises(ConfigurationError, match="1 target"):
            tune(config, num_targets=0)
        with pytest.raises(ConfigurationError, match="no auxiliary model"):
            tune(replace(config, auxiliary=None))

    def test_its_table(self, whole: FineTuning) -> None:
        _, rows = finetuning_table(whole)
        assert [row[0] for row in rows] == list(whole.outcomes)
        with_figures = replace(whole, outcomes={"made up": made(0.25, 3, 1, 4)})
        titles, [row] = finetuning_table(with_figures)
        assert titles[-3:] == ["equal first tokens", "equal answers", "F1, share of full's"]
        assert row[-4:] == ["0.250 / 0.250", "75%", "25%", "62%"]
        values = finetuning_json(with_figures)["figures"]["made up"]
        assert (values["first_token_agreement"], values["equal_answers"]) == (0.75, 0.25)
        assert values["f1_share_of_full"] == pytest.approx(0.625)
        assert values["first_agrees"] == [True, True, True, False] and values["answer_kl"] == [0.25] * 4


class TestAcceptance:
    """Figures made up."""

    def outcomes(
        self, kl: dict[str, float] | None = None, first: dict[str, int] | None = None
    ) -> dict[str, tuple[Outcome, ...]]:
        kls = {UNTUNED: 0.5, "epic": 0.4, TUNED: 0.2, OWN_ATTENTION: 0.1} | (kl or {})
        return {name: made(each, (first or {}).get(name, 5), 5) for name, each in kls.items()}

    def test_it_is_accepted_if_nothing_is_wrong(self) -> None:
        assert module._is_accepted(self.outcomes()) is True
        assert module._is_accepted(self.outcomes({SHIPPED: 0.2})) is True, "as near"
        bad = [
            self.outcomes({TUNED: 0.4}),
            self.outcomes({SHIPPED: 0.35, TUNED: 0.36}),
            self.outcomes({IN_USE: 0.35, TUNED: 0.36}),
            self.outcomes({SHIPPED: 0.35}, {TUNED: 4}),
            self.outcomes({IN_USE: 0.35}, {TUNED: 4}),
            self.outcomes({SHIPPED: 0.35, IN_USE: 0.35}, {IN_USE: 4, TUNED: 4}),
            self.outcomes(None, {TUNED: 4}),
        ]
        assert [module._is_accepted(outcomes) for outcomes in bad] == [False] * len(bad)

    @pytest.mark.parametrize("replaced", [SHIPPED, IN_USE])
    def test_first_tokens_count_against_what_is_replaced(self, replaced: str) -> None:
        """More of them with other methods, or with the last layer where another head set is there, refuse nothing."""
        more = {"epic": 6, UNTUNED: 6, OWN_ATTENTION: 6}
        assert module._is_accepted(self.outcomes({replaced: 0.35}, more)) is True
        assert module._is_accepted(self.outcomes(None, {UNTUNED: 6})) is False, "the last layer is replaced"
        assert module._is_accepted(self.outcomes({replaced: 0.35}, {TUNED: 6})) is True

    def test_nothing_is_said_where_the_primary_was_not_asked(self) -> None:
        assert module._is_accepted({}) is None

    @pytest.mark.parametrize(
        ("is_accepted", "said"), [(True, "are better"), (False, "are not better"), (None, "was not asked")]
    )
    def test_the_verdict(self, heads: HeadSet, is_accepted: bool | None, said: str) -> None:
        outcomes = self.outcomes({SHIPPED: 0.3, IN_USE: 0.3})
        found = FineTuning(heads, is_accepted, outcomes, 1.0, {})
        verdict = finetuning_verdict(found)
        assert said in verdict
        assert ("what comes with the package" in verdict) == (is_accepted is not None)
        assert ("the head set in use" in verdict) == (is_accepted is not None)
        assert "package" not in finetuning_verdict(replace(found, outcomes=self.outcomes()))


def test_sinks_are_no_part_of_what_is_wanted() -> None:
    target = torch.tensor([0.5, 0.1, 0.1, 0.2, 0.1])
    left = after_sinks(target, (3, 2), 1)
    assert left is not None and torch.allclose(left, torch.tensor([0.0, 1 / 3, 1 / 3, 0.0, 1 / 3]))
    assert after_sinks(torch.tensor([1.0, 0.0]), (2,), 1) is None


FEW = ("[finetune]", "samples = 10")


def settings(folder: Path, *lines: str) -> list[str]:
    """``--settings`` with a file of these lines."""
    file = folder / f"{len(list(folder.glob('*.toml')))}.toml"
    file.write_text("\n".join(lines))
    return ["--settings", str(file)]


class TestCommands:
    def run(self, *args: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*args, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    def test_tuned_then_used(self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
        models = ["--primary", config.primary, "--auxiliary", str(config.auxiliary)]
        assert CacheClipEngine(config).head_set is None
        few = ["[finetune]", "samples = 10", "targets = 2", "prompts = 1"]
        first = self.run("finetune", *models, *settings(tmp_path, *few))
        engine = CacheClipEngine(config)
        assert engine.head_set is not None and engine.head_set.digest() == first["digest"]
        auxiliary, primary = engine.auxiliary, engine.primary
        path = head_set_path(weights_digest(auxiliary.fingerprint), weights_digest(primary.fingerprint))  # type: ignore[union-attr]
        assert first["path"] == str(path) and IN_USE not in first["figures"]
        other = settings(tmp_path, *few, "seed = 1")
        second = self.run("calibrate", *models, *other)
        assert IN_USE in second["figures"] and second["digest"] != first["digest"]
        used = CacheClipEngine(config).head_set
        assert used.digest() == (second if second["is_accepted"] else first)["digest"]  # type: ignore[union-attr]
        assert (second["path"] is None) == (not second["is_accepted"])
        third = self.run("finetune", *models, *other, "--overwrite")
        assert IN_USE not in third["figures"] and third["digest"] == second["digest"]
        assert CacheClipEngine(config).head_set.digest() == third["digest"]  # type: ignore[union-attr]
        path.write_bytes(b"damaged")
        with pytest.raises(ConfigurationError, match="cannot be read.* Replace it with --overwrite"):
            CliRunner().invoke(app, ["finetune", *models], catch_exceptions=False)

    @pytest.mark.parametrize("is_accepted", [True, False])
    def test_it_names_the_file_only_where_it_was_written(
        self, config: EngineConfig, heads: HeadSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_accepted: bool
    ) -> None:
        out = tmp_path / "own.safetensors"
        heads.save(out)
        found = FineTuning(replace(heads, sinks=1), is_accepted, {}, 1.0, {"right": "1 of 2"})
        monkeypatch.setattr(module, "finetune", lambda *_, **__: found)
        models = ["--primary", config.primary, "--auxiliary", str(config.auxiliary), "--out", str(out)]
        result = CliRunner().invoke(app, ["finetune", *models], catch_exceptions=False)
        assert result.exit_code == 0 and "1 of 2" in result.stdout
        assert (f"Head set: {out}" in result.stdout) == is_accepted == (HeadSet.load(out).sinks == 1)
        refused = tmp_path / "own.refused.safetensors"
        assert (f"Head set: {refused}" in result.stdout) == refused.exists() == (not is_accepted)
        assert ("The new head set was not accepted" in result.stderr) == (not is_accepted)

    @pytest.mark.parametrize("is_accepted", [True, False])
    def test_what_the_package_ships_gives_way_to_nothing_that_was_not_accepted(
        self, config: EngineConfig, heads: HeadSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_accepted: bool
    ) -> None:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(heads_module, "_SHIPPED", tmp_path / "shipped")
        heads.save(
            tmp_path / "shipped" / f"{heads_module.model_digest(CacheClipEngine(config).auxiliary)[:16]}.safetensors"
        )
        found = FineTuning(replace(heads, sinks=1), is_accepted, {}, 1.0, {})
        monkeypatch.setattr(module, "finetune", lambda *_, **__: found)
        models = ["--primary", config.primary, "--auxiliary", str(config.auxiliary)]
        result = CliRunner().invoke(app, ["finetune", *models], catch_exceptions=False)
        assert ("comes with the package" in result.stderr) == (not is_accepted)
        assert (CacheClipEngine(config).head_set.sinks == 1) == is_accepted  # type: ignore[union-attr]
