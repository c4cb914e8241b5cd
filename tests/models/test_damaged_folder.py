"""Model folders that are damaged, or made to harm: one of our errors says so, whatever the libraries raise."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cacheclip_rag import CacheClipEngine, CacheClipError, ConfigurationError, ModelError
from cacheclip_rag.models.load import load_any, load_planning
from cacheclip_rag.store import CODECS
from tests.conftest import Models


def in_json(name: str, *path: str, value: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        whole = found = json.loads((folder / name).read_text())
        for step in path[:-1]:
            found = found[int(step) if step.isdigit() else step]
        found[path[-1]] = value
        (folder / name).write_text(json.dumps(whole))

    return damage


def around(*before: str, **tokens: Any) -> dict[str, Any]:
    """A post-processor that puts tokens before a text."""
    single = [
        *({"SpecialToken": {"id": name, "type_id": 0}} for name in before),
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


FIELDS: dict[str, dict[str, Any]] = {
    "no heads": {"num_attention_heads": 0},
    "no key heads": {"num_key_value_heads": 0},
    "no layers": {"num_hidden_layers": 0},
    "minus layers": {"num_hidden_layers": -1},
    "no width": {"hidden_size": 0},
    "endless layers": {"num_hidden_layers": float("inf")},
    "layers beyond memory": {"num_hidden_layers": 10**9},
    "layers of text": {"num_hidden_layers": "three"},
    "types of no layer": {"layer_types": []},
    "a width of 300 digits": {"hidden_size": 10**300},
    "an end of 300 digits": {"eos_token_id": 10**300},
    "no vocabulary": {"vocab_size": 0},
    "no context": {"max_position_embeddings": 0},
    "a context of text": {"max_position_embeddings": "long"},
    "a rope of text": {"rope_parameters": "default"},
    "a rope that divides by 0": {"rope_parameters": {"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4}},
    "a rope of base 0": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
    "outputs of another form": {"return_dict": None},
    "endless labels": {"num_labels": 10**9},
}
"""Of the config."""
PARTS: dict[str, tuple[str, Any]] = {
    "no tokens": ("model.vocab", {}),
    "a token twice": ("model.vocab", {"a": 0, "b": 0}),
    "a huge id": ("model.vocab", {"a": 2**40}),
    "merges of nothing": ("model.merges", [["no", "such"]]),
    "no pre-tokenizer": ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "("}}),
    "no model": ("model", None),
    "an added token of a huge id": ("added_tokens.0.id", 2**31),
    "a post-processor without its tokens": ("post_processor", around("[no]")),
    "a post-processor of a huge id": (
        "post_processor",
        around("[no]", **{"[no]": {"id": "[no]", "ids": [2**31], "tokens": ["[no]"]}}),
    ),
    "a post-processor that drops the text": ("post_processor", {**around(), "single": []}),
    "a post-processor of text": ("post_processor", "x"),
    "a post-processor of another kind": (
        "post_processor",
        {"type": "BertProcessing", "sep": ["x", 7], "cls": ["y", 10**6]},
    ),
    "a normalizer of nothing": ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
    "a normalizer that drops the text": ("normalizer", {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}),
    "pieces of no length": ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    "a decoder that drops the text": ("decoder", {"type": "Strip", "content": "x", "start": 10**9, "stop": 10**9}),
    "a cut to no tokens": (
        "truncation",
        {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0},
    ),
}
"""Of the tokenizer."""
LENGTHS = ("x", "", [], {"a": 1}, None, 1.5, -1, float("inf"), float("nan"), 10**300, True)
TEXTS = {
    "a list as config": ("config.json", "[]"),
    "deep config": ("config.json", "[" * 100_000),
    "a template of half a block": ("chat_template.jinja", "{% for"),
    "a template that divides by 0": ("chat_template.jinja", "{{ 1 // 0 }}"),
    "a template that calls itself": ("chat_template.jinja", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"),
    "a template out of its list": ("chat_template.jinja", "{{ messages[99].content.a.b }}"),
    "a huge template": ("chat_template.jinja", "{{ 10 ** 10 ** 3 * 1.5 }}"),
    "weights of half a file": ("model.safetensors", "\x10" * 40),
}
DAMAGES: dict[str, Callable[[Path], Any]] = {
    **{name: in_json("config.json", *field, value=field[[*field][0]]) for name, field in FIELDS.items()},
    **{name: in_json("tokenizer.json", *path.split("."), value=value) for name, (path, value) in PARTS.items()},
    **{
        f"a longest text of {value!r}": in_json("tokenizer_config.json", "model_max_length", value=value)
        for value in LENGTHS
    },
    **{name: lambda folder, f=file, t=text: (folder / f).write_text(t) for name, (file, text) in TEXTS.items()},
}


HARMLESS = {
    "an end of 300 digits",
    "types of no layer",
    "merges of nothing",
    "a token twice",
    "an added token of a huge id",
    "a decoder that drops the text",
    "a cut to no tokens",
    "outputs of another form",
    *(name for name in DAMAGES if name.startswith("a longest text of ")),
}
"""Transformers reads some of them, and the model answers."""


@pytest.mark.some(15)
@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.filterwarnings("ignore")
def test_one_of_our_errors(tiny_models: Models, tmp_path: Path, name: str) -> None:
    """Loading it, planning with it, and asking it."""
    folder = Path(shutil.copytree(tiny_models["llama"], tmp_path / "model"))
    DAMAGES[name](folder)
    raised = []
    for use in (load_any, load_planning, ask):
        try:
            use(str(folder))
        except CacheClipError as error:
            raised.append(error)
    assert raised or name in HARMLESS, "what is damaged is not used"
    assert all(map(str, raised))


def ask(folder: str) -> None:
    CacheClipEngine(primary=folder, auxiliary=None, method="full").generate("How old is the lighthouse?", max_tokens=2)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_weights_that_are_no_numbers(tiny_models: Models, tmp_path: Path, number: float, temperature: float) -> None:
    folder = Path(shutil.copytree(tiny_models["llama"], tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3] = number
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = CacheClipEngine(primary=str(folder), auxiliary=None, method="full")
    with pytest.raises(ModelError, match="no numbers"):
        engine.generate("How old is the lighthouse?", max_tokens=2, temperature=temperature, seed=1)


@pytest.mark.parametrize("name", [name for name in CODECS if name != "opaque"])
def test_what_a_codec_cannot_hold(name: str) -> None:
    """A number beyond float16, in keys and in values, positive and negative."""
    codec = CODECS[name]
    for place in ((0, 0, 1, 2), (1, 1, 3, 0)):
        for number in (1e6, -1e6):
            layer = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(1))
            layer[place] = number
            if name == "float16":
                with pytest.raises(ConfigurationError, match="1e\\+06"):
                    codec.encode(layer)
            else:
                codec.encode(layer)
