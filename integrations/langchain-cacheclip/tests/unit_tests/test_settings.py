"""Settings of the models are the adapters' shared ones, and each call follows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing.plugin import CACHECLIP, CHUNKS, rag_prompt
from langchain_cacheclip import CacheClipLLM, ChatCacheClip

from cacheclip_rag import ConfigurationError
from cacheclip_rag.adapters import ServedFields
from cacheclip_rag.methods import preset
from cacheclip_rag.models import load_model

KINDS: list[Any] = [ChatCacheClip, CacheClipLLM]
PROMPT = "Where did the keeper live?"


def ask(llm: Any, prompt: str = PROMPT, **options: Any) -> tuple[str, dict[str, Any]]:
    """Text and statistics of an answer."""
    if isinstance(llm, ChatCacheClip):
        message = llm.invoke(prompt, **options)
        return str(message.content), message.response_metadata["cacheclip"]
    (generation,) = llm.generate([prompt], **options).generations[0]
    return generation.text, generation.generation_info["cacheclip"]


def pieces(llm: Any, prompt: str) -> list[str]:
    """The pieces of a streamed answer."""
    return [part if isinstance(part, str) else str(part.content) for part in llm.stream(prompt)]


@pytest.mark.parametrize("kind", KINDS)
def test_fields_are_the_shared_ones(kind: Any) -> None:
    """LangChain's base classes hide none."""
    for name, field in ServedFields.model_fields.items():
        own = kind.model_fields[name]
        assert own.description and own.description == field.description, f"{name} has another description"
        assert own.annotation == field.annotation, f"{name} has another type"
        assert getattr(kind(), name) == getattr(ServedFields(), name), f"{name} has another default"
    assert kind(primary="some/model").model_name == kind(model="some/model").primary == "some/model"
    for wrong in ({"temperature": -1}, {"colour": "red"}):
        with pytest.raises(ConfigurationError):  # not wrapped by pydantic
            kind(**wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_a_call(kind: Any, tiny_models: dict[str, str]) -> None:
    settings: Any = {"primary": tiny_models["llama"], "auxiliary": None, "max_tokens": 1}
    told = kind(**settings, method="full", system_prompt="You answer in the manner of the keeper of a lighthouse.")
    assert ask(told)[1]["prompt_tokens"] > ask(kind(**settings, method="full"))[1]["prompt_tokens"]
    assert ask(told, max_new_tokens=3, stop_sequences=["x"])[1]["generated_tokens"] > 1
    with pytest.raises(ConfigurationError, match="max_tokens was given twice"):
        ask(told, max_new_tokens=2, max_tokens=3)
    llm = kind(**settings, method="full")
    llm.engine.precompute(CHUNKS[:2], method="epic")
    stats = ask(llm, rag_prompt(CHUNKS[:2]), method=preset("epic").at(0.3))[1]
    assert (stats["method"], stats["nominal_ratio"]) == ("epic", 0.3)


def test_models_with_equal_settings_share_an_engine(tiny_models: dict[str, str], tmp_path: Path) -> None:
    settings: Any = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"], "store": tmp_path}
    chat, text = ChatCacheClip(**settings), CacheClipLLM(**settings, temperature=0.5, method="direct")
    assert chat.engine is text.engine is not ChatCacheClip(**settings, namespace="other").engine
    again = ChatCacheClip.from_engine(chat.engine, max_new_tokens=3)
    assert again.engine is again.model_copy(update={"method": "full"}).engine is chat.engine and again.max_tokens == 3


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", KINDS)
def test_finish(kind: Any, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """LangChain's streams cannot withdraw text."""
    monkeypatch.setattr(load_model(tiny_models["llama"]), "eos_ids", frozenset())
    models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
    own = {"chunk_context": CACHECLIP["chunk_context"], "prefix_cache_bytes": 0}
    llm = kind(**models, method="direct", max_tokens=12, engine_kwargs=own, finish="revise")
    llm.engine.precompute(CHUNKS)
    prompt = rag_prompt(CHUNKS)
    full = ask(llm, prompt, method="full")[0]
    assert ask(llm, prompt, finish="none")[0] != full
    found = pieces(llm, prompt)
    assert "".join(found) == full and found[0] == "", "text that may be withdrawn is held back"
    text, stats = ask(llm, prompt)
    assert text == full and stats["verified_tokens"] == 12 and stats["diverged_at"] is not None
