"""Tiny models of a checkpoint's class: they have all that it has, and mistakes that 16 bits hide show in them."""

import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_testing import build_class, build_model, make_tokenizer, tiny_of_class, tiny_spec, verdicts
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheclip_rag import ModelError, UnsupportedModelError
from cacheclip_rag.measuring import FusedCache, ModelRuntime
from cacheclip_rag.models.load import load_model, unload_models
from cacheclip_rag.runtime.transformers import attention, attention_pattern, proof, state_map, structure, twin
from cacheclip_rag.runtime.transformers.rotary import Reading
from tests.conftest import Logs, Models, Patch, raising, some_of
from tests.models.test_proof import skip_unless_known


def _rule(**change: Callable[[Any], Any]) -> Callable[[Patch, Any], None]:
    """Another rule of the attention."""
    rule = attention.AttentionRule

    def changed(**settings: Any) -> Any:
        return rule(**{key: change.get(key, lambda same: same)(value) for key, value in settings.items()})

    return lambda patch, model: patch.setattr(attention, "AttentionRule", changed)


def _other_mask(patch: Patch, model: Any) -> None:
    """A row sees its successor, too."""
    module = sys.modules[type(model).__module__]
    more = {"or_mask_function": lambda batch, head, row, key: key == row + 1}
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        if make := getattr(module, name, None):
            patch.setattr(module, name, lambda *args, make=make, **inputs: make(*args, **{**inputs, **more}))


def _unknown_input(patch: Patch, model: Any) -> None:
    attending = [each for each in model.modules() if "Attention" in type(each).__name__ and hasattr(each, "layer_idx")]
    for kind in {type(each) for each in attending}:
        passing = partialmethod(kind.forward, block_indices=torch.zeros(1))
        patch.setattr(kind, "forward", passing)


def _late(patch: Patch, model: Any) -> None:
    """Stored keys are three positions off."""
    fill = FusedCache.fill
    patch.setattr(
        FusedCache, "fill", lambda self, kv, *, slot, position: fill(self, kv, slot=slot, position=position + 3)
    )


ANY: dict[str, Callable[[Patch, Any], None]] = {
    "scale": _rule(scaling=lambda scaling: 1.1 * scaling),
    "positions": _late,
    "mask": _other_mask,
    "input": _unknown_input,
}
"""Mistakes of every class."""
SOME: dict[str, Callable[[Patch, Any], None]] = {
    "window": _rule(window=lambda window: window and window + 1),
    "softcap": _rule(softcap=lambda softcap: None),
    "sinks": _rule(sinks=lambda sinks: None),
}
"""Mistakes of classes that have what is changed."""
SPECIAL = {
    **dict.fromkeys(("cohere2", "exaone4", "gemma3_text", "ministral", "mistral", "olmo3"), ("window",)),
    **{"gemma2": ("window", "softcap"), "vaultgemma": ("softcap",), "granite_swa": ("window", "sinks")},
    "gpt_oss": ("window", "sinks"),
}
_LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096},
    **{"short_factor": [1.0] * 48, "long_factor": [1.0 + n / 8 for n in range(48)]},
}
_TEXTS = [name for name in verdicts()["exact"] if name in CONFIG_MAPPING and not CONFIG_MAPPING[name].sub_configs]


def _planted() -> list[tuple[str, str]]:
    """One mistake for each class, in turns, and those of what it has."""
    turns = [(name, [*ANY][number % len(ANY)]) for number, name in enumerate(_TEXTS)]
    return turns + [(name, mistake) for name in _TEXTS for mistake in SPECIAL.get(name, ())]


def test_many_classes_have_mistakes() -> None:
    assert len({name for name, _ in _planted()}) >= 40 and {what for _, what in _planted()} == {*ANY, *SOME}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(400)


@pytest.mark.some(3)
@pytest.mark.usefixtures("home")
@some_of(5, planted=_planted())
def test_a_mistake_is_refused_in_16_bits(planted: tuple[str, str], tokenizer: Any, monkeypatch: Patch) -> None:
    name, mistake = planted
    skip_unless_known(name)
    monkeypatch.setattr(proof, "_SEEDS", proof._SEEDS[:1])
    model = tiny_of_class(name).to(torch.bfloat16)
    {**ANY, **SOME}[mistake](monkeypatch, model)
    with pytest.raises(UnsupportedModelError):
        proof.prove(ModelRuntime(model, tokenizer, name="tiny", fingerprint="none"))


@pytest.mark.some(1)
@some_of(40, name=[name for name in _TEXTS if name != "phi3"])
def test_weights_of_another_class_or_without_a_tensor_are_refused(name: str, tmp_path: Path) -> None:
    skip_unless_known(name)
    folder, other = build_class(tmp_path / "own", name), build_class(tmp_path / "other", "phi3")
    weights = load_file(folder / "model.safetensors")
    lacking = next(key for key in sorted(weights) if ".0." in key)
    save_file({key: each for key, each in weights.items() if key != lacking}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="lacks|damaged"):
        load_model(folder)
    (folder / "model.safetensors").rename(other / "model.safetensors")
    with pytest.raises(ModelError, match="lacks|damaged"):
        load_model(other)


def _seen(**change: Any) -> Callable[[Patch], None]:
    """The structure of a model is seen otherwise."""
    see = structure.kept_structure
    return lambda patch: patch.setattr(
        ModelRuntime, "_find_structure", staticmethod(lambda *args: replace(see(*args), **change))
    )


UNLIKE: dict[str, tuple[Callable[[Patch], None], str]] = {
    "beam": (lambda patch: patch.delitem(attention_pattern._OF_ROWS, "attention_scaling"), "a pass failed"),
    "diffllama": (_seen(reads_cached=True), "steps by"),
    "glm4v_moe": (lambda patch: patch.setitem(attention_pattern._OF_ROWS, "position_ids", 1), "a pass failed"),
    "nanochat": (_seen(readings=(Reading(),) * 4), "moved by"),
}
"""Classes that differ from others: queries that are scaled by position, values that are cached in another order, three
positions a token, keys that turn the other way. And the mistake that forgets it, with the reason of the refusal."""


@pytest.mark.some(1)
@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_special_of_a_class_is_seen(name: str, home: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    skip_unless_known(name)
    folder = build_class(tmp_path, name)
    load_model(folder)
    unload_models()
    for file in (home / "proofs").glob("*.json"):
        file.unlink()
    plant, reason = UNLIKE[name]
    plant(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(folder)


def test_one_that_its_own_weights_do_not_show_is_refused(home: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """A window that is longer than the probe."""
    folder = str(build_model(tmp_path, tiny_spec("mistral", sliding_window=512)))
    load_model(folder, dtype="bfloat16")
    SOME["window"](monkeypatch, None)
    unload_models()
    for file in (home / "proofs").glob("*.json"):
        file.unlink()
    with pytest.raises(UnsupportedModelError, match="failed the proof"):
        load_model(folder, dtype="bfloat16")


@pytest.mark.some(2)
@some_of(13, name=[*verdicts()["exact"], *verdicts()["recurrent"]], dtype=["float32"])
def test_a_class_of_the_documentation_is_exact(name: str, dtype: str, home: Path, tmp_path: Path) -> None:
    skip_unless_known(name)
    if name in verdicts()["recurrent"] and state_map.LinearAttentionLayer is None:
        pytest.skip("this transformers is too old")
    assert load_model(build_class(tmp_path, name), dtype=dtype).encode([5, 6, 7]).shape[3] == 3


@pytest.mark.parametrize("name", ["deepseek_v32", "gpt2", "stablelm"])
def test_one_that_it_names_as_refused_is_none(name: str, home: Path, tmp_path: Path) -> None:
    skip_unless_known(name)
    with pytest.raises(UnsupportedModelError, match=re.escape(verdicts()["refused"][name])):
        load_model(build_class(tmp_path, name))


def test_without_a_tiny_model_the_weights_are_compared_in_all_ways(
    home: Path, tiny_models: Models, monkeypatch: Patch, caplog: Logs
) -> None:
    monkeypatch.setattr(twin, "shrunk_config", raising(RuntimeError("a size is missing")))
    with caplog.at_level(logging.INFO, "cacheclip_rag"):
        runtime = load_model(tiny_models["llama"], dtype="bfloat16")
    assert "on its own weights alone: its config makes no tiny model (RuntimeError: a size is missing)" in caplog.text
    (memo,) = (home / "proofs").glob("*.json")
    assert json.loads(memo.read_text())["gaps"].keys() >= {*proof._WHOLE} and runtime.rotary.hands_tables


class TestConfigs:
    @pytest.mark.parametrize("name", ["deepseek_v3", "gemma3_text", "gemma3n_text", "gpt_oss", "llama4_text", "qwen3"])
    def test_keep_each_kind_of_layer(self, name: str) -> None:
        skip_unless_known(name)
        config = CONFIG_MAPPING[name]()
        small = twin.shrunk_config(config)
        kinds, few = (getattr(each, "layer_types", None) or [] for each in (config, small))
        assert {*few} == {*kinds} and len(few) in (0, small.num_hidden_layers)
        assert 4 <= small.num_hidden_layers <= 12 and small.hidden_size == 64 and type(small) is type(config)

    def test_have_short_windows_chunks_and_limits(self) -> None:
        small = twin.shrunk_config(CONFIG_MAPPING["gpt_oss"]())
        assert small.sliding_window == 24 and small.rope_parameters["original_max_position_embeddings"] == 32
        longrope = CONFIG_MAPPING["phi3"](rope_parameters=_LONGROPE, original_max_position_embeddings=4096)
        rope = twin.shrunk_config(longrope).rope_parameters
        assert rope["original_max_position_embeddings"] == 4096 and rope["long_factor"] == _LONGROPE["long_factor"][:8]

    def test_keep_numbers_of_layers_and_the_last_one(self) -> None:
        """Rows leave the last layer, and those before it, in another way."""
        kept = twin.shrunk_config(CONFIG_MAPPING["deepseek_v3"](first_k_dense_replace=3))
        assert kept.first_k_dense_replace == 2 and kept.num_hidden_layers == 4
        kept = twin.shrunk_config(CONFIG_MAPPING["qwen3_moe"](mlp_only_layers=[5, 7], num_hidden_layers=12))
        assert kept.mlp_only_layers == [1, 2] and kept.num_hidden_layers == 4
        kinds = [*["sliding_attention"] * 3, "full_attention"] * 3 + ["sliding_attention"]
        small = twin.shrunk_config(CONFIG_MAPPING["gpt_oss"](layer_types=kinds, num_hidden_layers=13))
        assert small.layer_types == ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]

    def test_of_other_weights_are_the_same(self, tiny_models: Models) -> None:
        first, second = (load_model(tiny_models[name]).model for name in ("llama", "llama-rope-linear"))
        assert twin.described(first) == twin.described(first) != twin.described(second)

    def test_that_stay_large_are_none(self, tiny_models: Models, monkeypatch: Patch) -> None:
        model = load_model(tiny_models["llama"]).model
        monkeypatch.setattr(twin, "shrunk_config", lambda config, **_: type(config)())
        with pytest.raises(ValueError, match="its tiny model has 6738415616 weights"):
            twin.make_twin(model)


def test_weights_are_no_zeros_and_random_numbers_of_others_stay(tiny_models: Models) -> None:
    model = load_model(tiny_models["gemma2"]).model
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    made = twin.make_twin(model)
    assert torch.equal(torch.rand(1), expected) and not made.training
    assert all(weight.dtype == torch.float32 and float(weight.detach().std()) > 0.05 for weight in made.parameters())
