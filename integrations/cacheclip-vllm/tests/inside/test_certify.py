"""Certificates of what vLLM answers, and comparisons with plain prefill while it answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.certificates import verdicts as certificates
from cacheclip_lab.evaluation import certify as common
from cacheclip_lab.evaluation.served import NOT_MEASURED, certify_vllm
from cacheclip_vllm.offline import FusedLLM
from vllm_engines import CORRECTED, PROMPTS, VLLM, Setting, outcomes, outputs, started

from cacheclip_rag import CertificateError, ConfigurationError, EngineConfig

NAMES = ("shadow_checks_total", "shadow_agreement_sum", "shadow_other_first_token_total", "shadow_skipped_total")


@pytest.mark.usefixtures("alone")
def test_a_certificate(
    settings: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what was measured, the planner accepts it, and our engine does not."""
    monkeypatch.setattr(certificates, "_warned", set())
    monkeypatch.setattr(common, "_QUICK_PROMPTS", 2)
    monkeypatch.setattr(common, "ANSWER_TOKENS", 6)
    monkeypatch.setattr(common, "RATIOS", (0.5,))
    setting: Setting = settings()
    method = replace(CORRECTED, chunk_context="passages")
    config = EngineConfig(**{**setting.options, "method": method.at(1.0)})
    certificate = certify_vllm(config, quick=True, vllm=VLLM)
    assert "cacheclip certify" not in caplog.text, "that is what runs"
    exactness = certificate.exactness
    assert exactness["passed"], exactness
    assert exactness["checks"]["ratio_1"]["figure"] < 1e-4 > exactness["checks"]["first_chunk"]["figure"]
    assert exactness["checks"]["greedy"]["figure"] == 1.0 and exactness["not_measured"] == list(NOT_MEASURED)
    assert 0.0 <= exactness["noise_floor"]["logits"] < 1e-4
    assert [row.ratio for row in certificate.ratios] == [0.0, 0.5, 1.0]
    rough, _, exact = certificate.ratios
    assert exact.verdict == certificate.verdict == "exact" and exact.answer_kl["max"] < 1e-6
    assert rough.verdict == "not faithful" and rough.answer_kl["mean"] > 0.01
    assert rough.effective_ratio < 0.1 and exact.effective_ratio == 1.0
    assert certificate.identity.backend.startswith("vllm 0.") and not any(row.gate for row in certificate.ratios)

    planner = setting.planner(require_certificate=True)
    with pytest.raises(CertificateError, match="--backend vllm|certify_vllm"):
        planner.plan(PROMPTS[0], method=method.at(1.0))
    certificate.save()
    assert setting.planner(require_certificate=True).plan(PROMPTS[0], method=method.at(1.0)).fusion is not None
    with pytest.raises(CertificateError, match="not faithful"):
        setting.planner(require_certificate=True).plan(PROMPTS[0], method=method.at(0.3))
    engine = setting.engine
    assert certificates.find_certificate(engine.parts.certificates.identity(method))[0] is None


@pytest.mark.usefixtures("alone")
def test_half_precision(settings: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored keys are rotated to other positions, which rounds them. So the noise floor must have other positions too:
    vLLM's own prefills of one prompt may be equal to the last bit."""
    for name, value in (("_QUICK_PROMPTS", 2), ("ANSWER_TOKENS", 2), ("RATIOS", (1.0,))):
        monkeypatch.setattr(common, name, value)
    config = EngineConfig(**{**settings().options, "method": "cacheclip", "dtype": "bfloat16"})
    exactness = certify_vllm(config, quick=True, vllm=VLLM).exactness
    floor, checks = exactness["noise_floor"]["logits"], exactness["checks"]
    assert exactness["passed"], exactness
    assert 0.0 < checks["ratio_1"]["figure"] <= checks["ratio_1"]["limit"] == max(1e-3, 2 * floor)


@pytest.mark.usefixtures("alone")
def test_the_figures_are_those_of_our_engine(settings: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts, the same chunks but for rounding: the same KL, agreement and needles."""
    for name, value in (("_QUICK_PROMPTS", 2), ("ANSWER_TOKENS", 6), ("RATIOS", (0.3,))):
        monkeypatch.setattr(common, name, value)
    setting: Setting = settings()
    config = EngineConfig(**{**setting.options, "method": "cacheclip"})
    ours = common.certify(config, quick=True)
    theirs = certify_vllm(config, quick=True, vllm=VLLM)
    assert replace(theirs.identity, backend="") == ours.identity
    assert theirs.needle_accuracy_of_full == ours.needle_accuracy_of_full
    for left, right in zip(theirs.ratios, ours.ratios, strict=True):
        assert (left.ratio, left.verdict) == (right.ratio, right.verdict)
        assert left.agreement == pytest.approx(right.agreement)
        assert left.effective_ratio == pytest.approx(right.effective_ratio)
        for name in ("mean", "max"):
            assert left.first_token_kl[name] == pytest.approx(right.first_token_kl[name], rel=0.01, abs=1e-5)
            assert left.answer_kl[name] == pytest.approx(right.answer_kl[name], rel=0.01, abs=1e-5)


def test_the_command(settings: Any, tmp_path: Path) -> None:
    """In a process of its own, as it is used: only JSON on stdout, and the certificate is where planners look."""
    options = settings().options
    lines = ['chunk_context = "passages"', "[vllm]", *(f"{name} = {json.dumps(value)}" for name, value in VLLM.items())]
    (tmp_path / "settings.toml").write_text("\n".join(lines))
    command = [
        *(sys.executable, "-c", "from cacheclip_rag.cli import main; main()", "certify", "--backend", "vllm"),
        *("--primary", options["primary"], "--auxiliary", options["auxiliary"], "--method", "cacheclip"),
        *("--quick", "--ratio", "1.0", "--json", "--settings", str(tmp_path / "settings.toml")),
    ]
    environment = {**os.environ, "CACHECLIP_HOME": str(tmp_path), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["verdict"] == "exact" and found["quick"] and found["exactness"]["passed"]
    saved = json.loads(Path(found["path"]).read_text())
    assert tmp_path in Path(found["path"]).parents and saved["identity"] == found["identity"]
    assert saved["identity"]["backend"].startswith("vllm 0.")


def test_full_prefill_is_not_certified(settings: Any, folder: Path) -> None:
    config = EngineConfig(**{**settings().options, "method": "full"})
    with pytest.raises(ConfigurationError, match="nothing to"):
        certify_vllm(config, quick=True)


@pytest.fixture(scope="class")
def engine(settings: Any) -> Iterator[FusedLLM]:
    with started(settings()) as found:
        yield found


class TestShadow:
    def fused(self, engine: FusedLLM, setting: Setting, **options: Any) -> FusedLLM:
        engine.llm.reset_prefix_cache()
        return FusedLLM(engine.llm, setting.planner(**options))

    def counted(self, fused: FusedLLM) -> list[float]:
        found = fused.metrics.snapshot()
        return [found.get(name, 0) for name in NAMES]

    def test_what_differs_is_counted(self, engine: FusedLLM, settings: Any) -> None:
        """At ratio 1.0 nothing differs; without recompute, answers leave plain prefill's where we know they do."""
        setting: Setting = settings()
        fused = self.fused(engine, setting, shadow_rate=1.0)
        assert outcomes(outputs(fused, PROMPTS, CORRECTED.at(1.0))) == ["fused"] * 4
        assert self.counted(fused) == [4, 4.0, 0, 0]
        fused = self.fused(engine, setting, shadow_rate=1.0)
        found = outputs(fused, PROMPTS, "direct")
        plain = setting.expected(PROMPTS, "full")
        given = setting.expected(PROMPTS, "direct")
        assert [tuple(each.outputs[0].token_ids) for each in found] == given, "comparing changes no answer"
        pairs = [[*zip(a, b, strict=True)] for a, b in zip(given, plain, strict=True)]
        equal = [next((n for n, (a, b) in enumerate(each) if a != b), len(each)) for each in pairs]
        assert min(equal) < 16
        checks, agreement, other_first, skipped = self.counted(fused)
        assert (checks, skipped) == (4, 0) and agreement == pytest.approx(sum(equal) / 16)
        assert other_first == sum(n == 0 for n in equal)

    def test_a_comparison_that_fails(self, engine: FusedLLM, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        setting: Setting = settings()
        fused = self.fused(engine, setting, shadow_rate=1.0)
        generate, calls = fused.llm.generate, []

        def once(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            if len(calls) > 1:
                raise RuntimeError("planted")
            return generate(*args, **kwargs)

        monkeypatch.setattr(fused.llm, "generate", once)
        assert outcomes(outputs(fused, PROMPTS, "direct")) == ["fused"] * 4
        assert self.counted(fused) == [0, 0, 0, 4]
