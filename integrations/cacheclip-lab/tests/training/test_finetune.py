"""Fine-tuning as a job, and its command; on tiny models, from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_lab.training.finetune import finetune
from cacheclip_lab.training.targets import after_sinks
from typer.testing import CliRunner

from cacheclip_rag import CacheClipEngine, ConfigurationError, EngineConfig
from cacheclip_rag.cli import app
from cacheclip_rag.models import weights_digest
from cacheclip_rag.selection import HeadSet, head_set_path

pytestmark = pytest.mark.usefixtures("with_short_samples")


@pytest.fixture(scope="module")
def config(tiny_models: dict[str, str]) -> EngineConfig:
    return EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"])


def tune(config: EngineConfig, **changes: Any) -> HeadSet:
    return finetune(config, **{"num_samples": 10, "num_targets": 2, **changes})


class TestJob:
    @pytest.mark.long
    def test_the_same_command_makes_the_same_head_set(self, config: EngineConfig) -> None:
        found = tune(config)
        assert found.sinks == 4 and found.about["primary_sha256"] == CacheClipEngine(config).primary.fingerprint
        assert config.primary not in json.dumps(found.about), "no path of a machine"
        assert tune(config).digest() == found.digest() != tune(config, seed=1).digest()

    def test_bad_wishes_are_refused(self, config: EngineConfig) -> None:
        with pytest.raises(ConfigurationError, match="at least 10 training samples .* got 5 and 2"):
            tune(config, num_samples=5)
        with pytest.raises(ConfigurationError, match="1 target"):
            tune(config, num_targets=0)
        with pytest.raises(ConfigurationError, match="no auxiliary model"):
            tune(replace(config, auxiliary=None))


def test_sinks_are_no_part_of_what_is_wanted() -> None:
    target = torch.tensor([0.5, 0.1, 0.1, 0.2, 0.1])
    left = after_sinks(target, (3, 2), 1)
    assert left is not None and torch.allclose(left, torch.tensor([0.0, 1 / 3, 1 / 3, 0.0, 1 / 3]))
    assert after_sinks(torch.tensor([1.0, 0.0]), (2,), 1) is None


class TestCommands:
    def run(self, *args: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*args, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    @pytest.mark.long
    def test_tuned_then_used(self, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
        models = ["--primary", config.primary, "--auxiliary", str(config.auxiliary)]
        assert CacheClipEngine(config).head_set is None
        file = tmp_path / "settings.toml"
        file.write_text("[finetune]\nsamples = 10\ntargets = 2\n")
        first = self.run("finetune", *models, "--settings", str(file))
        engine = CacheClipEngine(config)
        assert engine.head_set is not None and engine.head_set.digest() == first["digest"]
        auxiliary, primary = engine.auxiliary, engine.primary
        path = head_set_path(weights_digest(auxiliary.fingerprint), weights_digest(primary.fingerprint))  # type: ignore[union-attr]
        assert first["path"] == str(path)
        file.write_text("[finetune]\nsamples = 10\ntargets = 2\nseed = 1\n")
        with pytest.raises(ConfigurationError, match="there is a head set in .* Replace it with --overwrite"):
            self.run("calibrate", *models, "--settings", str(file))
        assert HeadSet.load(path).digest() == first["digest"]
        second = self.run("calibrate", *models, "--settings", str(file), "--overwrite")
        assert second["digest"] != first["digest"] == engine.head_set.digest()
        assert CacheClipEngine(config).head_set.digest() == second["digest"]  # type: ignore[union-attr]
