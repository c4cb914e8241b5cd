"""One list of settings for all adapters, with the names and defaults of the engine."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine, EngineConfig, SamplingParams
from cacheclip_rag.adapters import ALIASES, ModelFields
from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.methods import preset
from tests.adapters.plain_model import PlainComponent, PlainModel

KINDS: list[Any] = [PlainModel, PlainComponent]
PROMPT = "Where did the keeper live?"


def ask(llm: PlainModel, prompt: str, **options: Any) -> dict[str, Any]:
    """Statistics of an answer."""
    return llm.ask(prompt, **options).stats.to_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_paths_do_not_depend_on_the_working_directory(
    kind: Any, tiny_models: dict[str, str], tmp_path: Path, monkeypatch: Any
) -> None:
    for name in ("llama", "auxiliary"):
        (tmp_path / name).symlink_to(tiny_models[name])
    monkeypatch.chdir(tmp_path)
    component = kind(primary="llama", auxiliary="./auxiliary", store="store", max_bytes=10**9)
    engine = component.engine
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert component.engine is engine, "and not an empty store of another name"
    assert engine.config.store == str(tmp_path / "store")
    engine.precompute(["One text."])
    copied = kind(**{name: getattr(component, name) for name in ("primary", "auxiliary", "store", "engine_kwargs")})
    assert copied.engine is engine and not [*(tmp_path / "elsewhere").iterdir()]
    monkeypatch.chdir(tmp_path)
    if kind is PlainModel:
        assert kind(model="llama", base_url="http://127.0.0.1:1/v1").primary == "llama", "a server's name"


def test_names_and_defaults_are_those_of_the_engine() -> None:
    defaults = {f.name: getattr(made, f.name) for made in (EngineConfig(), SamplingParams()) for f in fields(made)}
    assert len(ModelFields.model_fields) >= 15
    for name, field in ModelFields.model_fields.items():
        assert field.description, f"{name} has no description"
        if name != "engine_kwargs":
            assert defaults[name] == (tuple(PlainModel().stop) if name == "stop" else getattr(PlainModel(), name)), name


@pytest.mark.parametrize("alias", list(ALIASES))
def test_aliases(alias: str) -> None:
    name = ALIASES[alias]
    value: Any = {"max_tokens": 7, "stop": ["x"]}.get(name, "some-model")
    assert getattr(PlainModel(**{alias: value}), name) == value
    with pytest.raises(ConfigurationError, match=f"{name} was given twice"):
        PlainModel(**{alias: value, name: value})


def test_calls_and_components_take_aliases(tiny_models: dict[str, str]) -> None:
    llm = PlainModel(model=tiny_models["llama"], auxiliary=None, method="full")
    assert ask(llm, PROMPT, max_new_tokens=2, stop_sequences=["x"])["prompt_tokens"] > 0
    with pytest.raises(ConfigurationError, match="max_tokens was given twice"):
        ask(llm, PROMPT, max_new_tokens=2, max_tokens=3)
    assert PlainComponent(model="a").primary == "a"
    with pytest.raises(ConfigurationError, match="unknown field max_new_tokens"):
        PlainComponent(max_new_tokens=3)


@pytest.mark.parametrize("kind", KINDS)
def test_store_and_models_may_be_paths(kind: Any, tmp_path: Path) -> None:
    component = kind(store=tmp_path / "store")
    assert component.store == str(tmp_path / "store") == json.loads(json.dumps(component.store))
    assert component.engine is kind(store=str(tmp_path / "store")).engine
    component = kind(model_name=tmp_path / "model", auxiliary=tmp_path / "small")
    assert (component.primary, component.auxiliary) == (str(tmp_path / "model"), str(tmp_path / "small"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_of_the_engine_has_the_same_name(kind: Any) -> None:
    """Also those without a field: they are kept with ``engine_kwargs``."""
    per_call = {"method", "recompute_ratio", "max_ttft_s", "finish"} if kind is PlainComponent else set()
    for each in fields(EngineConfig):
        if each.name not in per_call:
            kind(**{each.name: getattr(EngineConfig(), each.name)})
    component, both = kind(codec="int8", engine_kwargs={"memory_bytes": 5}), {"codec": "int8", "memory_bytes": 5}
    assert component.engine_kwargs == both and component.engine is kind(engine_kwargs=both).engine
    assert kind.from_engine(component.engine, on_miss="ignore").engine_kwargs == {**both, "on_miss": "ignore"}
    with pytest.raises(ConfigurationError, match="codec was given twice"):
        kind(codec="int8", engine_kwargs={"codec": "int8"})
    with pytest.raises(ConfigurationError, match="auxiliary_codec is gone: use codec"):
        kind(auxiliary_codec="int8")
    with pytest.raises(ConfigurationError, match=r"unknown field auxilary\. Did you mean 'auxiliary'\?"):
        kind(auxilary="smollm2-135m")


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up(kind: Any, tiny_models: dict[str, str]) -> None:
    component = kind(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"])
    assert component.warm_up().models == (tiny_models["llama"], tiny_models["auxiliary"])


def test_the_system_prompt_opens_a_conversation(tiny_models: dict[str, str]) -> None:
    settings: Any = {"primary": tiny_models["llama"], "auxiliary": None, "max_tokens": 1, "method": "full"}
    told = PlainModel(**settings, system_prompt="You answer in the manner of the keeper of a lighthouse.")
    assert ask(told, PROMPT)["prompt_tokens"] > ask(PlainModel(**settings), PROMPT)["prompt_tokens"]


def test_from_engine(tiny_models: dict[str, str]) -> None:
    settings: Any = {"primary": tiny_models["llama"], "auxiliary": None, "method": "direct", "recompute_ratio": 0.3}
    engine = CacheClipEngine(**settings, memory_bytes=5)
    llm = PlainModel.from_engine(engine, max_new_tokens=3)
    assert llm.engine is engine and llm.model_copy(update={"method": "full"}).engine is engine
    assert (llm.method, llm.recompute_ratio, llm.max_tokens) == ("direct", 0.3, 3)
    assert llm.engine_kwargs == {"memory_bytes": 5}
    assert llm.model_copy(update={"namespace": "other"}).engine is not engine


def test_a_method_may_be_an_instance(tiny_models: dict[str, str], chunks: list[str]) -> None:
    """It has its own ratio, which the field's default must not contradict."""
    method = preset("epic").at(0.3)
    settings: Any = {"primary": tiny_models["llama"], "auxiliary": None, "max_tokens": 1}
    settings["namespace"] = PlainModel.__module__
    prompt = f"{chunks[0]}\n\n{chunks[1]}\n\n{PROMPT}"
    for llm, options in (
        (PlainModel(**settings, method=method), {}),
        (PlainModel(**settings, method="full"), {"method": method}),
    ):
        llm.engine.precompute(chunks[:2], method=method)
        stats = ask(llm, prompt, **options)
        assert (stats["method"], stats["nominal_ratio"]) == ("epic", 0.3)
    with pytest.raises(ConfigurationError, match="method must be a name or a Method, got int"):
        PlainModel(method=3)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"top_p": 0, "presence_penalty": -2, "frequency_penalty": 2}, {}),
        *(({"stop": nothing}, {"stop": ()}) for nothing in ("", [], [""], ["", None], None)),
        ({"stop": ["", "END"]}, {"stop": ("END",)}),
    ],
)
def test_values_of_the_server_are_taken(given: dict[str, Any], meant: dict[str, Any]) -> None:
    """As fields, and as options of a call."""
    for params in (PlainModel(**given)._call_options({}).params, PlainModel()._call_options(given).params):
        for name, value in {**given, **meant}.items():
            assert getattr(params, name) == value


def test_choices_of_the_server_are_taken() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools[1:]}}
    assert PlainModel()._call_options({"tools": tools, "tool_choice": allowed}).tools == (tools[1],)
    for nothing in ({"response_format": {}}, {"response_format": {"type": None}}, {"tool_choice": {}}):
        assert PlainModel()._call_options(nothing) == PlainModel()._call_options({})


def test_none_is_the_default() -> None:
    """As a field, and as an option of a call; of fields in which None means something, it stays."""
    names = [*ModelFields._sampling_names(), "max_new_tokens", "finish", "method", "recompute_ratio"]
    plain = PlainModel()
    for name in names:
        as_field, as_option = PlainModel(**{name: None})._call_options({}), plain._call_options({name: None})
        assert as_field == as_option == plain._call_options({})
    others = dict.fromkeys(("primary", "namespace", "dtype", "engine_kwargs", "chat_template_kwargs"))
    assert PlainModel(**others)._engine_config() == plain._engine_config()
    assert PlainModel(auxiliary=None).auxiliary is None and PlainModel(temperature=None, max_tokens=7).max_tokens == 7


def test_options_that_change_nothing_are_taken() -> None:
    """Of OpenAI's clients, as the server takes them."""
    nothing = {"n": 1, "logit_bias": {}, "user": "u", "logprobs": False, "top_logprobs": 0, "service_tier": "auto"}
    llm = PlainModel()
    assert llm._call_options({**nothing, "functions": None, "max_tokens": 3}).params.max_tokens == 3
    for wrong in ({"n": 2}, {"logit_bias": {"1": 5}}, {"logprobs": True}, {"top_logprobs": 2}, {"store": "s3://b/p"}):
        with pytest.raises(ConfigurationError):
            llm._call_options(wrong)


WRONG: list[dict[str, Any]] = [
    {"top_p": -0.1},
    {"max_tokens": 0},
    {"frequency_penalty": 2.5},
    {"recompute_ratio": 1.5},
    {"method": "magic"},
    {"engine_kwargs": {"recompute_ratio": 0.5}},
    {"engine_kwargs": {"system_prompt": "x"}},
    {"colour": "red"},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        PlainModel(**wrong)
