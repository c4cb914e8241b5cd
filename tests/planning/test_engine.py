"""An engine without the primary's weights: what it refuses, and what it says of whom."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_testing import build_class
from cacheclip_testing.plugin import CHUNKS, rag_prompt

from cacheclip_rag import CacheClipEngine, ConfigurationError, ModelError, UnsupportedModelError
from cacheclip_rag.methods import preset
from cacheclip_rag.models import load_model
from cacheclip_rag.planning import CallerLeft, FusionPlan, PlanningEngine, Waiter, load_planning, model_files
from tests.models.test_proof import skip_unless_known


@pytest.fixture
def options(tiny_models: dict[str, str], tmp_path: Path) -> dict[str, Any]:
    found = {"primary": tiny_models["llama"], "auxiliary": None, "store": str(tmp_path / "store"), "method": "epic"}
    CacheClipEngine(**found).precompute(CHUNKS)
    return found


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"store": None}, "X's workers read chunks from a store"),
        ({"finish": "verify"}, "finish has no effect on answers of X"),
        ({"max_ttft_s": 1.0}, "max_ttft_s has no effect on answers of X"),
        ({"recompute_ratio": "auto"}, "not chosen by time for X"),
    ],
)
def test_settings_without_effect(options: dict[str, Any], changed: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        PlanningEngine(answers="X", **{**options, **changed})


def test_why_nothing_is_fused(options: dict[str, Any]) -> None:
    engine = PlanningEngine(answers="X", **options)
    assert engine.why_never(preset("epic")) is engine.why_never(preset("full")) is None
    assert "which X does not give" in str(engine.why_never(replace(preset("epic"), min_confidence=0.5)))
    default = PlanningEngine(**{**options, "method": "auto"})
    assert default.make_method() == preset("epic-corrected") and default.why_never(default.make_method()) is None
    with pytest.raises(ConfigurationError, match="nothing would be reused: min_confidence needs"):
        PlanningEngine(**{**options, "min_confidence": 0.5}).warm_up()


def test_a_caller_who_leaves(options: dict[str, Any]) -> None:
    """The search for given documents ends."""
    engine, caller = PlanningEngine(**options), Waiter()
    with engine.asking(caller):
        assert engine.plan(rag_prompt(CHUNKS), documents=CHUNKS).fusion is not None
        caller.leave()
        with pytest.raises(CallerLeft):
            engine.plan(rag_prompt(CHUNKS), documents=CHUNKS)


def test_keys_turn_to_their_positions_and_back(tiny_models: dict[str, str]) -> None:
    ids, whole, runtime = list(range(5, 25)), load_model(tiny_models["llama"]), load_planning(tiny_models["llama"])
    kv = whole.encode(ids)
    placed = runtime.placed(kv)
    torch.testing.assert_close(runtime.position_free(placed.clone(), 0), kv)
    for layer, there in zip(placed, whole.prefill(torch.tensor(ids), len(ids))[0].layers, strict=True):
        torch.testing.assert_close(layer[0], there.keys[0, :, : len(ids)], atol=1e-5, rtol=1e-4)
    assert (runtime.position_free(placed.clone(), 1) - kv).abs().max() > 0.1, "the twin: one position off"


def test_a_plan_that_reads_nothing() -> None:
    plan = FusionPlan.computing([3, 1, 4, 1, 5], 3, model="m", rope_pin="", namespace="north")
    assert plan.used_pieces == [] and (plan.num_ready, plan.num_rows) == (3, 5)
    assert len(replace(plan, correction=0.5).used_pieces) == 1, "what is computed is compared with what is stored"


def test_files_that_change_while_they_are_loaded(tiny_models: dict[str, str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_models["llama"], tmp_path / "model"))
    with model_files(str(folder)) as files:
        assert files == load_planning(folder).files
    config = folder / "config.json"
    with pytest.raises(ModelError, match="changed while it was loaded"), model_files(str(folder)):
        config.write_text(config.read_text() + " ")


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("glm4", ""),
        ("nanochat", ""),
        ("smollm3", ""),
        ("deepseek_v3", "does not read keys and values as cached"),
        ("gemma4_text", "KV of several shapes"),
        ("lfm2_moe", "layers that convolve"),
    ],
)
def test_a_class_that_no_list_names_is_planned_or_refused(name: str, why: str, tmp_path: Path) -> None:
    skip_unless_known(name)
    folder = str(build_class(tmp_path, name))
    if why:
        with pytest.raises(UnsupportedModelError, match=why):
            load_planning(folder)
        return
    planning, whole = load_planning(folder), load_model(folder)
    assert (planning.widths, planning.fingerprint) == (whole.widths, whole.fingerprint)
    kv = whole.encode(range(5, 25))
    cache = whole.new_cache(20)
    cache.fill(kv, slot=0, position=0)
    expected = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
    assert torch.equal(planning.placed(kv), expected)
    assert not torch.allclose(planning.placed(kv.roll(1, 3))[:, 0], expected[:, 0].roll(1, 2))
