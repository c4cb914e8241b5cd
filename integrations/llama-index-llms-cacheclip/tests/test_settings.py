"""Settings of model and transform are the adapters' shared ones, and each call follows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing.plugin import CHUNKS, rag_prompt
from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform

from cacheclip_rag import ConfigurationError
from cacheclip_rag.adapters import EngineFields, ServedFields
from cacheclip_rag.methods import preset

PROMPT = "Where did the keeper live?"


def ask(llm: CacheClipLLM, prompt: str = PROMPT, **options: Any) -> dict[str, Any]:
    """Statistics of an answer."""
    return dict(llm.complete(prompt, **options).additional_kwargs["cacheclip"])


@pytest.mark.parametrize(("kind", "shared"), [(CacheClipLLM, ServedFields), (CacheClipTransform, EngineFields)])
def test_fields_are_the_shared_ones(kind: Any, shared: Any) -> None:
    """LlamaIndex's base classes hide none."""
    for name, field in shared.model_fields.items():
        own = kind.model_fields[name]
        assert own.description and own.description == field.description, f"{name} has another description"
        assert own.annotation == field.annotation, f"{name} has another type"
        assert getattr(kind(), name) == getattr(shared(), name), f"{name} has another default"
    assert kind(primary="some/model").model_name == kind(model="some/model").primary == "some/model"
    for wrong in ({"dtype": "float7"}, {"colour": "red"}):
        with pytest.raises(ConfigurationError):  # not wrapped by pydantic
            kind(**wrong)


def test_the_transform_has_the_engines_fields_alone() -> None:
    assert set(CacheClipTransform.model_fields) == set(EngineFields.model_fields)
    with pytest.raises(ConfigurationError, match="unknown field max_new_tokens"):
        CacheClipTransform(max_new_tokens=3)


def test_options_of_a_call(tiny_models: dict[str, str]) -> None:
    settings: Any = {"primary": tiny_models["llama"], "auxiliary": None, "max_tokens": 1}
    told = CacheClipLLM(**settings, method="full", system_prompt="You answer in the manner of the keeper of a lamp.")
    assert ask(told)["prompt_tokens"] > ask(CacheClipLLM(**settings, method="full"))["prompt_tokens"]
    assert ask(told, max_new_tokens=3, stop_sequences=["x"])["generated_tokens"] > 1
    with pytest.raises(ConfigurationError, match="max_tokens was given twice"):
        ask(told, max_new_tokens=2, max_tokens=3)
    llm = CacheClipLLM(**settings, method="full")
    llm.engine.precompute(CHUNKS[:2], method="epic")
    stats = ask(llm, rag_prompt(CHUNKS[:2]), method=preset("epic").at(0.3))
    assert (stats["method"], stats["nominal_ratio"]) == ("epic", 0.3)


def test_equal_settings_share_an_engine(tiny_models: dict[str, str], tmp_path: Path) -> None:
    settings: Any = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"], "store": tmp_path}
    llm, transform = CacheClipLLM(**settings, temperature=0.5, method="direct"), CacheClipTransform(**settings)
    assert llm.engine is transform.engine is not CacheClipLLM(**settings, namespace="other").engine
    again = CacheClipLLM.from_engine(llm.engine, max_new_tokens=3)
    assert again.engine is again.model_copy(update={"method": "full"}).engine is llm.engine and again.max_tokens == 3
