"""Head sets that come with the package: readable, bound to their models, and in the wheel."""

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from cacheclip_testing.tiny import AUXILIARY, build_model, make_tokenizer

from cacheclip_rag import CacheClipEngine, ModelError
from cacheclip_rag.models import load as load_module, weights_digest
from cacheclip_rag.models.load import load_model
from cacheclip_rag.planning import PlanningEngine
from cacheclip_rag.selection import heads as module
from cacheclip_rag.selection.heads import _SHIPPED, HeadSet, model_digest, shipped_set
from tests.conftest import CHUNKS, Logs, Models, Patch, rag_prompt

ROOT = Path(__file__).parents[2]
SETS = sorted(_SHIPPED.glob("*.safetensors"))


def test_there_is_one_for_the_default_auxiliary() -> None:
    assert SETS


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_a_set_says_what_it_is_for_and_where_it_comes_from(path: Path) -> None:
    heads = HeadSet.load(path)
    assert heads.about["weights"], "engines name them"
    assert heads.about["command"] == "finetune" and "Apache-2.0" in heads.about["data"]
    assert {"auxiliary", "primary", "seed", "samples", "settings"} <= set(heads.about)
    assert path.stat().st_size < 64 * 1024
    assert "/" not in "".join(map(str, heads.about["given_from"])), "no path of a machine"


def test_the_wheel_holds_them(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = ZipFile(wheel).namelist()
    assert {f"cacheclip_rag/selection/shipped/{path.name}" for path in SETS} <= set(names)


@pytest.mark.slow
def test_the_packaged_auxiliary_is_one_of_its_models() -> None:
    runtime = load_model("packaged:smollm2-135m")
    assert [path.stem for path in SETS] == [model_digest(runtime)[:16]], "engines look for it under this digest"
    [heads] = [HeadSet.load(path) for path in SETS]
    assert heads.auxiliary_sha256 == weights_digest(runtime.fingerprint)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("rope_theta", "same"), [(100000, True), (10000, False)], ids=["SmolLM2", "SmolLM"])
def test_the_hub_has_one_of_its_models(tmp_path: Path, rope_theta: int, same: bool) -> None:
    """Config and tokenizer as they are published, which differ from those of the GGUF file."""
    published = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_scaling": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": rope_theta,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 49152,
        "initializer_range": 0.041666666666666664,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    converted = Path(load_module.resolve("packaged:smollm2-135m"))
    shutil.copy(converted / "tokenizer_config.json", tmp_path)
    shutil.copy(converted / "tokenizer.json", tmp_path)
    (tmp_path / "model.safetensors").symlink_to(converted / "model.safetensors")
    split_digits(tmp_path / "tokenizer.json")
    [path] = SETS
    assert (path.stem == model_digest(load_module.load_planning(tmp_path))[:16]) == same


def split_digits(file: Path) -> None:
    """As the tokenizer of SmolLM2 does it, and not that of its GGUF file."""
    tokenizer = json.loads(file.read_text())
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
    file.write_text(json.dumps(tokenizer))


class TestOtherWeights:
    """Of a set made for the tiny auxiliary: who else may use it."""

    @pytest.fixture
    def heads(self, tiny_models: Models, tmp_path: Path, monkeypatch: Patch) -> HeadSet:
        monkeypatch.setattr(module, "_SHIPPED", tmp_path / "shipped")
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
        module._log_other_weights.cache_clear()
        runtime = load_model(tiny_models["auxiliary"])
        about = {"weights": "Tiny-Instruct Q4_1"}
        heads = HeadSet(weights_digest(runtime.fingerprint), ((0, 1), (1, 0)), torch.tensor([0.25, 0.75]), about=about)
        heads.save(tmp_path / "shipped" / f"{model_digest(runtime)[:16]}.safetensors")
        return heads

    @pytest.fixture
    def other(self, tmp_path: Path) -> Path:
        return build_model(tmp_path / "other", AUXILIARY, vocab_size=300, seed=7)

    def test_the_same_model_with_other_weights_uses_it_and_says_so_once(
        self, heads: HeadSet, other: Path, tiny_models: Models, caplog: Logs
    ) -> None:
        caplog.set_level(logging.INFO, "cacheclip_rag.selection.heads")
        [own] = [shipped_set(load_model(tiny_models["auxiliary"]))]
        assert own is not None and own.digest() == heads.digest() and not caplog.records
        models = {"primary": tiny_models["llama"], "auxiliary": str(other)}
        for _ in range(2):
            engine = CacheClipEngine(**models)
            found = engine.head_set
            assert found is not None and found.heads == heads.heads and torch.equal(found.weights, heads.weights)
            found.check(engine.auxiliary)
            assert engine.make_method().name == "cacheclip"
        [said] = [record.getMessage() for record in caplog.records if record.name.endswith(".heads")]
        assert "made from Tiny-Instruct Q4_1 weights; used with other weights of the same architecture" in said

    def test_certificates_tell_the_weights_apart(self, heads: HeadSet, other: Path, tiny_models: Models) -> None:
        engines = [
            CacheClipEngine(primary=tiny_models["llama"], auxiliary=auxiliary, chunk_context="prefix")
            for auxiliary in (tiny_models["auxiliary"], str(other))
        ]
        one, two = (engine.parts.certificates.identity(engine.make_method("cacheclip")) for engine in engines)
        assert one.auxiliary_sha256 != two.auxiliary_sha256 and one.digest() != two.digest()

    def test_a_planner_without_the_primarys_weights_has_it(
        self, heads: HeadSet, other: Path, tiny_models: Models, tmp_path: Path
    ) -> None:
        """Without a head set, the default method would need the primary's weights, and the planner would refuse."""
        options: Any = {"primary": tiny_models["llama"], "auxiliary": str(other), "store": str(tmp_path / "store")}
        CacheClipEngine(**options).precompute(CHUNKS)
        planner = PlanningEngine(**options)
        planner.warm_up()
        assert planner.plan(rag_prompt(CHUNKS)).fusion is not None

    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        "change",
        [
            {"num_hidden_layers": 3},
            {"num_key_value_heads": 4},
            {"architecture": "qwen2"},
            {"vocab_size": 301},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        ],
        ids=str,
    )
    def test_other_models_do_not(self, heads: HeadSet, tmp_path: Path, change: dict[str, Any]) -> None:
        spec = {**AUXILIARY, **change}
        runtime = load_model(build_model(tmp_path / "model", spec, vocab_size=spec.pop("vocab_size", 300), seed=1))
        assert shipped_set(runtime) is None

    def test_a_model_with_another_tokenizer_does_not(self, heads: HeadSet, other: Path) -> None:
        """But one that only splits digits otherwise does."""
        assert shipped_set(load_model(other)) is not None
        changed = Path(shutil.copytree(other, other.parent / "changed"))
        make_tokenizer(300, ["Quite different words, of which it learns others."]).save_pretrained(changed)
        assert shipped_set(load_model(changed)) is None
        split_digits(other / "tokenizer.json")
        assert shipped_set(load_model(other)) is not None

    def test_a_head_set_of_ones_own_keeps_its_weights(self, heads: HeadSet, other: Path, tiny_models: Models) -> None:
        runtime = load_model(other)
        with pytest.raises(ModelError, match="made for an auxiliary model with digest"):
            heads.check(runtime)
        own = replace(heads, auxiliary_sha256=weights_digest(runtime.fingerprint), heads=((0, 0), (1, 1)))
        primary = load_model(tiny_models["llama"]).fingerprint
        own.save(module.head_set_path(own.auxiliary_sha256, weights_digest(primary)))
        found = module.find_head_set(runtime, primary)
        assert found is not None and found.digest() == own.digest()
