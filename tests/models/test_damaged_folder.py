"""Model folders that are damaged, or made to harm: one of our errors says so, whatever the libraries raise."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cacheclip_rag import CacheClipEngine, CacheClipError, ConfigurationError, ModelError
from cacheclip_rag.models.load import load_any, load_planning
from cacheclip_rag.store import CODECS
from tests.conftest import Models


def in_json(name: str, *path: str | int, value: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        whole = found = json.loads((folder / name).read_text())
        for step in path[:-1]:
            found = found[step]
        found[path[-1]] = value
        (folder / name).write_text(json.dumps(whole))

    return damage


def in_config(**field: Any) -> Callable[[Path], None]:
    ((name, value),) = field.items()
    return in_json("config.json", name, value=value)


in_tokenizer = partial(in_json, "tokenizer.json")


def around(*before: str, **tokens: Any) -> dict[str, Any]:
    """A post-processor that puts tokens before a text."""
    single = [
        *({"SpecialToken": {"id": name, "type_id": 0}} for name in before),
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def text(name: str, written: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(written) and None


DAMAGES: dict[str, Callable[[Path], None]] = {
    "no heads": in_config(num_attention_heads=0),
    "no key heads": in_config(num_key_value_heads=0),
    "no layers": in_config(num_hidden_layers=0),
    "minus layers": in_config(num_hidden_layers=-1),
    "endless layers": in_config(num_hidden_layers=float("inf")),
    "no width": in_config(hidden_size=0),
    "a width of 300 digits": in_config(hidden_size=10**300),
    "an end of 300 digits": in_config(eos_token_id=10**300),
    "no vocabulary": in_config(vocab_size=0),
    "no context": in_config(max_position_embeddings=0),
    "a context of text": in_config(max_position_embeddings="long"),
    "types of no layer": in_config(layer_types=[]),
    "a rope of text": in_config(rope_parameters="default"),
    "a rope that divides by 0": in_config(rope_parameters={"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4}),
    "a rope of base 0": in_config(rope_parameters={"rope_type": "default", "rope_theta": 0}),
    "a list as config": text("config.json", "[]"),
    "deep config": text("config.json", "[" * 100_000),
    "no tokens": in_tokenizer("model", "vocab", value={}),
    "a token twice": in_tokenizer("model", "vocab", value={"a": 0, "b": 0}),
    "a huge id": in_tokenizer("model", "vocab", value={"a": 2**40}),
    "merges of nothing": in_tokenizer("model", "merges", value=[["no", "such"]]),
    "no pre-tokenizer": in_tokenizer("pre_tokenizer", value={"type": "Split", "pattern": {"Regex": "("}}),
    "no model": in_tokenizer("model", value=None),
    "an added token of a huge id": in_tokenizer("added_tokens", 0, "id", value=2**31),
    **{
        f"a longest text of {value!r}": in_json("tokenizer_config.json", "model_max_length", value=value)
        for value in ("x", "", [], {"a": 1}, None, 1.5, -1, float("inf"), float("nan"), 10**300, True)
    },
    "a post-processor without its tokens": in_tokenizer("post_processor", value=around("[no]")),
    "a post-processor of a huge id": in_tokenizer(
        "post_processor", value=around("[no]", **{"[no]": {"id": "[no]", "ids": [2**31], "tokens": ["[no]"]}})
    ),
    "a post-processor that drops the text": in_tokenizer("post_processor", value={**around(), "single": []}),
    "a post-processor of text": in_tokenizer("post_processor", value="x"),
    "a post-processor of another kind": in_tokenizer(
        "post_processor", value={"type": "BertProcessing", "sep": ["x", 7], "cls": ["y", 10**6]}
    ),
    "a normalizer of nothing": in_tokenizer(
        "normalizer", value={"type": "Replace", "pattern": {"String": ""}, "content": "x"}
    ),
    "a normalizer that drops the text": in_tokenizer(
        "normalizer", value={"type": "Replace", "pattern": {"Regex": "."}, "content": ""}
    ),
    "pieces of no length": in_tokenizer("pre_tokenizer", value={"type": "FixedLength", "length": 0}),
    "a decoder that drops the text": in_tokenizer(
        "decoder", value={"type": "Strip", "content": "x", "start": 10**9, "stop": 10**9}
    ),
    "a cut to no tokens": in_tokenizer(
        "truncation", value={"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0}
    ),
    "outputs of another form": in_config(return_dict=None),
    "endless labels": in_config(num_labels=10**9),
    "layers beyond memory": in_config(num_hidden_layers=10**9),
    "layers of text": in_config(num_hidden_layers="three"),
    "a template of half a block": text("chat_template.jinja", "{% for"),
    "a template that divides by 0": text("chat_template.jinja", "{{ 1 // 0 }}"),
    "a template that calls itself": text("chat_template.jinja", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"),
    "a template out of its list": text("chat_template.jinja", "{{ messages[99].content.a.b }}"),
    "a huge template": text("chat_template.jinja", "{{ 10 ** 10 ** 3 * 1.5 }}"),
    "weights of half a file": lambda folder: (folder / "model.safetensors").write_bytes(b"\x10" * 40) and None,
}


HARMLESS = {
    *("an end of 300 digits", "types of no layer", "merges of nothing", "a token twice", "an added token of a huge id"),
    *(name for name in DAMAGES if name.startswith("a longest text of ")),
    "a decoder that drops the text",
    "a cut to no tokens",
    "outputs of another form",
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
