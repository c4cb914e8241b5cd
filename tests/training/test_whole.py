"""Fine-tuning of a whole auxiliary model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, EngineConfig
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.lab.training import folder as folder_module
from cacheclip_rag.lab.training import targets as targets_module
from cacheclip_rag.lab.training import whole as module
from cacheclip_rag.lab.training.calibrate import combined
from cacheclip_rag.lab.training.families import synthetic_samples
from cacheclip_rag.lab.training.features import look
from cacheclip_rag.lab.training.folder import Interrupted
from cacheclip_rag.lab.training.report import whole_verdict, write_report
from cacheclip_rag.lab.training.tuning import TuningSettings, train
from cacheclip_rag.lab.training.whole import WholeFineTuning, WholeSample, WholeTuned, finetune_whole
from cacheclip_rag.selection.heads import HeadSet, weights_digest
from tests.training.stopping import stopper

SETTINGS = TuningSettings(batch=2, epochs=6, patience=6, learning_rate=3e-3, sinks=2)


@pytest.fixture(params=["auxiliary", "qwen2", "qwen3", "phi3-partial"])
def auxiliary(request: pytest.FixtureRequest, tiny_models: dict[str, str]) -> str:
    return tiny_models[request.param]


class TestWholeTuned:
    def test_untrained_it_scores_like_the_engine(self, auxiliary: str, tiny_models: dict[str, str]) -> None:
        engine = CacheClipEngine(
            EngineConfig(primary=tiny_models["llama"], auxiliary=auxiliary, auxiliary_codec="float32")
        )
        caches, runtime = engine.parts.auxiliary_caches, engine.parts.auxiliary_caches.runtime
        last = runtime.num_layers - 1
        some, weights = ((0, 1), (last, 0), (last, 1)), torch.tensor([0.3, 0.3, 0.4])
        heads = HeadSet(weights_digest(runtime.fingerprint), some, weights, sinks=2)
        tuned = WholeTuned(runtime, heads, SETTINGS)
        for sample in synthetic_samples("train", 2, chunk_words=20):
            seen = look(caches, sample, heads.layers, sinks=2)
            found = tuned(WholeSample.of(caches, sample)).detach()
            torch.testing.assert_close(found, combined(seen, heads), atol=1e-5, rtol=1e-3)

    def test_only_what_lies_below_learns_and_the_auxiliary_in_use_stays(self, tiny_models: dict[str, str]) -> None:
        engine = CacheClipEngine(
            EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["qwen3"], auxiliary_codec="float32")
        )
        caches, runtime = engine.parts.auxiliary_caches, engine.parts.auxiliary_caches.runtime
        heads = HeadSet(weights_digest(runtime.fingerprint), ((0, 1), (1, 0)), torch.tensor([0.5, 0.5]), sinks=2)
        before = {name: value.clone() for name, value in runtime.model.state_dict().items()}
        tuned = WholeTuned(runtime, heads, SETTINGS)
        samples = [WholeSample.of(caches, each) for each in synthetic_samples("train", 4, chunk_words=20)]
        history = train(tuned, samples, samples).history
        assert history[-1]["loss"] < history[1]["loss"]
        assert all(torch.equal(before[name], value) for name, value in runtime.model.state_dict().items())
        changed = {name for name, value in tuned.model.state_dict().items() if not torch.equal(before[name], value)}
        for part in ("embed_tokens", "layers.0.mlp", "layers.1.self_attn.q_proj"):
            assert any(part in name for name in changed), part
        assert not any("layers.2." in name for name in changed) and "lm_head.weight" not in changed


class TestJob:
    def test_the_saved_model_scores_as_it_was_trained(self, tiny_models: dict[str, str], tmp_path: Path) -> None:
        config = EngineConfig(
            primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], auxiliary_codec="float32"
        )
        runtime: Any = CacheClipEngine(config).auxiliary
        heads = HeadSet(weights_digest(runtime.fingerprint), ((0, 1), (1, 0)), torch.tensor([0.5, 0.5]), sinks=2)
        found = finetune_whole(
            config, tmp_path / "tuned", SETTINGS, heads=heads, num_samples=10, num_targets=2, num_prompts=2
        )
        assert len(found.history) >= 2
        before, after = found.figures
        assert before.held_out_found == found.history[0]["held_out_found"] <= after.held_out_found + 1e-3
        assert len(before.answer_kl) == len(after.answer_kl) == 2 and before.answer_kl != after.answer_kl
        assert found.is_tuned and found.is_nearer == (after.kl < before.kl)
        markdown, html = (path.read_text() for path in write_report(found, tmp_path / "report"))
        assert whole_verdict(found) in markdown and "<td>after</td>" in html and "| learning_rate | 0.003 |" in markdown
        engine = CacheClipEngine(config, auxiliary=str(tmp_path / "tuned"))
        caches: Any = engine.parts.auxiliary_caches
        assert found.heads.auxiliary_sha256 == weights_digest(caches.runtime.fingerprint) != heads.auxiliary_sha256
        assert engine.head_set is not None and engine.head_set.digest() == found.heads.digest(), "beside the model"
        tuned = WholeTuned(caches.runtime, found.heads, SETTINGS)
        [sample] = synthetic_samples("test", 1, chunk_words=20)
        seen = look(caches, sample, found.heads.layers, sinks=2)
        torch.testing.assert_close(
            tuned(WholeSample.of(caches, sample)).detach(), combined(seen, found.heads), atol=1e-5, rtol=1e-3
        )

    def test_an_interrupted_run_goes_on_where_it_was(
        self, tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stopped while the primary is asked, in training, and while the trained model is measured: nothing is done
        twice, nothing half done is left where the model goes, and the end is the same."""
        config = EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"])
        runtime: Any = CacheClipEngine(config).auxiliary
        heads = HeadSet(weights_digest(runtime.fingerprint), ((0, 1), (1, 0)), torch.tensor([0.5, 0.5]), sinks=2)
        options: dict[str, Any] = {"heads": heads, "num_samples": 10, "num_targets": 3, "num_prompts": 1}

        def tune(name: str) -> WholeFineTuning:
            return finetune_whole(config, tmp_path / name, SETTINGS, work=tmp_path / f"{name}-work", **options)

        whole = tune("whole")
        stop, counts = stopper(monkeypatch)
        stop(targets_module, "attended_and_stale", 2)
        stop(folder_module, "save_state", 3)
        stop(module, "_kl", 3)  # the third run asks for the second time what was before, and then what is after
        stop(module, "load_model", 0)  # never: counted only
        for _ in range(3):
            with pytest.raises(Interrupted) as stopped:
                tune("parts")
            assert stopped.value.folder == tmp_path / "parts-work"
            assert not (tmp_path / "parts").exists() and not list(tmp_path.glob(".tmp-*"))
        assert counts["load_model"] == 1, "stopped after the model was written, before it was measured"
        resumed = tune("parts")
        assert resumed.history == whole.history and resumed.figures == whole.figures
        assert resumed.heads.digest() == whole.heads.digest()
        assert counts["attended_and_stale"] == 4 and counts["save_state"] == len(whole.history)
        assert not list((tmp_path / "parts-work").glob("state-*")), "gigabytes, of a model of size"
        assert list((tmp_path / "parts-work").glob("outcome-*")) and resumed.work == tmp_path / "parts-work"

    def test_a_model_that_gained_nothing_is_not_saved(self, tiny_models: dict[str, str], tmp_path: Path) -> None:
        config = EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"])
        runtime: Any = CacheClipEngine(config).auxiliary
        heads = HeadSet(weights_digest(runtime.fingerprint), ((0, 1), (1, 0)), torch.tensor([0.5, 0.5]), sinks=2)
        settings = replace(SETTINGS, learning_rate=1e-30, epochs=1)
        found = finetune_whole(
            config, tmp_path / "tuned", settings, heads=heads, num_samples=10, num_targets=0, num_prompts=1
        )
        assert not found.is_tuned and found.folder is None and found.is_nearer is None and found.heads is heads
        assert [each.name for each in found.figures] == ["before"] and not (tmp_path / "tuned").exists()
        assert "gained nothing: no model is saved" in whole_verdict(found)
        assert "gained nothing" in write_report(found, tmp_path / "report")[0].read_text()
        with pytest.raises(ConfigurationError, match="num_prompts must be a whole number of prompts, 0 or more"):
            finetune_whole(config, tmp_path / "tuned", settings, heads=heads, num_prompts=-1)

    def test_nothing_is_written_over(self, tiny_models: dict[str, str], tmp_path: Path) -> None:
        config = EngineConfig(
            primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], auxiliary_codec="float32"
        )
        (tmp_path / "file").touch()
        with pytest.raises(ConfigurationError, match="holds something already"):
            finetune_whole(config, tmp_path, SETTINGS)
        for work in (tmp_path / "new", tmp_path / "new" / "work"):
            with pytest.raises(ConfigurationError, match="would lie where the trained model goes"):
                finetune_whole(config, tmp_path / "new", SETTINGS, work=work)
        with pytest.raises(ConfigurationError, match="at least 10 samples, got 9"):
            finetune_whole(config, tmp_path / "new", SETTINGS, num_samples=9)
