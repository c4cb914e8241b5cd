"""Options of one call: what is given by name, what the engine's settings fill in, what is refused."""

import inspect
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.answering import options
from cacheclip_rag.answering.options import CallKeywords, CallOptions
from cacheclip_rag.base.checks import aliases_of
from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.base.sampling import SamplingParams
from cacheclip_rag.config import EngineConfig
from cacheclip_rag.methods import preset

TOOL = {"name": "search"}


def test_names_of_both_kinds_and_of_frameworks() -> None:
    named = {"max_new_tokens": 3, "stop_sequences": "x", "question": "Where?", "trace": True}
    expected = CallOptions(SamplingParams(max_tokens=3, stop=("x",)), question="Where?", trace=True)
    assert CallOptions().with_options(named) == expected
    own = CallOptions(SamplingParams(max_tokens=3), finish="verify")
    nothing = dict.fromkeys(("max_tokens", "finish", "tools", "params"))
    assert own.with_options(nothing) == own, "None is as not given"
    found = CallOptions().with_options({"params": SamplingParams(max_tokens=9, seed=4), "max_tokens": 2})
    assert found.params == SamplingParams(max_tokens=2, seed=4), "a name wins over params"


def declared(kind: type) -> dict[str, Any]:
    """Types of a class's fields, without None."""
    from cacheclip_rag.methods.base import Method
    from cacheclip_rag.prompt.messages import Documents

    hints = get_type_hints(kind, vars(options), {"Method": Method, "Documents": Documents})
    return {name: hint if hint is Any else hint | None for name, hint in hints.items()}


def test_keywords_are_the_fields() -> None:
    own = {**declared(SamplingParams), **declared(CallOptions)}
    names = {each.name for kind in (SamplingParams, CallOptions) for each in fields(kind)} - {"params"}
    keywords = declared(CallKeywords)
    assert set(keywords) == names | set(aliases_of(names))
    kept = names - {"stop"}  # a call takes one string too
    assert {name: keywords[name] for name in kept} == {name: own[name] for name in kept}
    assert all(keywords[alias] == keywords[name] for alias, name in aliases_of(names).items())


@pytest.mark.parametrize("name", ["plan", "generate", "stream", "prefill"])
def test_calls_show_their_keywords(name: str) -> None:
    assert inspect.signature(getattr(CacheClipEngine, name)).parameters["keywords"].annotation == "Unpack[CallKeywords]"


@pytest.mark.parametrize(
    ("own", "given", "ratio", "limit"),
    [
        ({"recompute_ratio": 0.5}, {}, 0.5, None),
        ({"recompute_ratio": 0.5}, {"max_ttft_s": 2.0}, None, 2.0),
        ({"max_ttft_s": 2.0}, {"recompute_ratio": 0.5}, 0.5, None),
        ({"max_ttft_s": 2.0}, {"recompute_ratio": "auto"}, "auto", 2.0),
        ({"max_ttft_s": 2.0}, {"recompute_ratio": "auto", "max_ttft_s": 3.0}, "auto", 3.0),
    ],
)
def test_a_ratio_or_a_limit_takes_the_place_of_both(own: Any, given: Any, ratio: Any, limit: Any) -> None:
    found = CallOptions(**own).with_options(given)
    assert (found.recompute_ratio, found.max_ttft_s) == (ratio, limit)


@pytest.mark.parametrize(
    ("given", "ratio", "limit", "is_auto"),
    [
        ({}, "auto", 2.0, True),
        ({"method": "direct"}, "auto", 2.0, True),
        ({"method": preset("cacheclip")}, None, None, False),
        ({"recompute_ratio": 0.5}, 0.5, None, False),
        ({"recompute_ratio": "auto"}, "auto", 2.0, True),
        ({"max_ttft_s": 3.0}, None, 3.0, True),
    ],
)
def test_the_engines_settings_fill_what_a_call_leaves_out(given: Any, ratio: Any, limit: Any, is_auto: bool) -> None:
    config = EngineConfig(recompute_ratio="auto", max_ttft_s=2.0, finish="verify")
    found = CallOptions(**given).with_settings(config)
    assert (found.recompute_ratio, found.max_ttft_s, found.auto_ratio) == (ratio, limit, is_auto)
    assert found.finishes and not CallOptions(finish="none").with_settings(config).finishes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recompute_ration": 0.5}, r"unknown call option recompute_ration\. Did you mean 'recompute_ratio'\?"),
        ({"max_token": None}, r"unknown call option max_token\. Did you mean 'max_tokens'\?"),
        ({"stop": "x", "stop_sequences": "x"}, "stop was given twice, once as stop_sequences"),
        ({"finish": "verified"}, r"finish must be .*'verify'"),
        ({"question": 3}, "the question must be a string, got int"),
        ({"params": {}, "max_tokens": 3}, "params must be SamplingParams, got dict"),
        ({"recompute_ratio": 2}, "recompute_ratio must be between 0"),
        ({"recompute_ratio": 0.5, "max_ttft_s": 2.0}, "Leave one of them out"),
        ({"tools": TOOL}, "tools must be a list of definitions"),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CallOptions().with_options(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("enable_thinking", "must be a JSON object"),
        (["enable_thinking"], "must be a JSON object"),
        ({"chat_template": "{{ 1 }}"}, "cannot set 'chat_template'"),
        ({"messages": []}, "cannot set 'messages'"),
        ({"add_generation_prompt": False}, "cannot set"),
        ({"bos_token": "x"}, "cannot set"),
        ({"a b": 1}, "cannot set"),
        ({1: 1}, "cannot set"),
        ({"x": {1, 2}}, "must be JSON"),
        ({"x": float("nan")}, "must be JSON"),
        ({"x": "y" * 20_000}, "20009 characters"),
    ],
)
def test_variables_of_a_template(given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CallOptions().with_options({"chat_template_kwargs": given})
    assert CallOptions().with_options({"chat_template_kwargs": {"x": False}}).chat_template_kwargs == {"x": False}
