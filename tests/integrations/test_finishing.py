"""Verified finishing in frameworks, whose streams cannot withdraw text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_cacheclip import CacheClipLLM as LangChainLLM
from langchain_cacheclip import ChatCacheClip
from llama_index.llms.cacheclip import CacheClipLLM

from cacheclip_rag import Event
from cacheclip_rag.adapters.finishing import final_events
from cacheclip_rag.answering import verification
from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.models.load import load_model
from tests.conftest import CACHECLIP, CHUNKS, rag_prompt

MODELS: list[Any] = [CacheClipLLM, ChatCacheClip, LangChainLLM]
PROMPT = rag_prompt(CHUNKS)


@pytest.fixture
def settings(tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(load_model(tiny_models["llama"]), "eos_ids", frozenset())
    return {
        "primary": tiny_models["llama"],
        "auxiliary": tiny_models["auxiliary"],
        "store": str(tmp_path / "store"),
        "method": "direct",
        "max_tokens": 12,
        "engine_kwargs": {"chunk_context": CACHECLIP["chunk_context"], "prefix_cache_bytes": 0},
    }


def ask(llm: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    """Text and statistics of an answer."""
    if isinstance(llm, CacheClipLLM):
        done = llm.complete(PROMPT, **options)
        return done.text, done.additional_kwargs["cacheclip"]
    if isinstance(llm, ChatCacheClip):
        message = llm.invoke(PROMPT, **options)
        return str(message.content), message.response_metadata["cacheclip"]
    generation = llm.generate([PROMPT], **options).generations[0][0]
    return generation.text, generation.generation_info["cacheclip"]


def pieces(llm: Any) -> list[str]:
    """The pieces of a streamed answer."""
    if isinstance(llm, CacheClipLLM):
        return [part.delta or "" for part in llm.stream_complete(PROMPT)]
    if isinstance(llm, ChatCacheClip):
        return [str(part.content) for part in llm.stream(PROMPT)]
    return list(llm.stream(PROMPT))


@pytest.mark.parametrize("rows", [16, 96])
@pytest.mark.parametrize("kind", MODELS)
def test_streams_are_full_prefills_text(
    kind: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """No piece is withdrawn: joined, they are the revised answer, though the first answer begins otherwise."""
    monkeypatch.setattr(verification, "_BLOCK_ROWS", {"cpu": rows})
    llm = kind(**settings, finish="revise")
    llm.engine.precompute(CHUNKS)
    full, _ = ask(llm, method="full")
    given, _ = ask(llm, finish="none")
    assert given != full
    found = pieces(llm)
    assert "".join(found) == full
    assert found[0] == "", "text that may be withdrawn is held back"
    text, stats = ask(llm)
    assert text == full and stats["verified_tokens"] == 12 and stats["diverged_at"] is not None


@pytest.mark.parametrize("kind", MODELS)
def test_the_setting_is_that_of_a_call(kind: Any, settings: dict[str, Any]) -> None:
    """Models that differ only in it share an engine."""
    plain, verifying = kind(**settings), kind(**settings, finish="verify")
    assert plain.finish == "none" and plain.engine is verifying.engine
    plain.engine.precompute(CHUNKS)
    text, stats = ask(plain)
    assert stats["verified_tokens"] is None and len([piece for piece in pieces(plain) if piece]) > 4
    again, verified = ask(verifying)
    assert again == text and verified["verified_tokens"] == verified["diverged_at"] is not None
    assert "".join(pieces(verifying)) == text and pieces(verifying)[0], "nothing to hold back"
    assert ask(plain, finish="verify")[1]["verified_tokens"] == verified["verified_tokens"]
    with pytest.raises(ConfigurationError, match="finish must be one of"):
        kind(**settings, finish="always")
    with pytest.raises(ConfigurationError, match="finish must be one of"):
        ask(plain, finish="always")


class TestFinalEvents:
    def test_text_waits_until_it_is_final(self) -> None:
        events = [Event("a", is_final=False), Event("b", is_final=False), Event("c"), Event("d")]
        assert [event.text for event in final_events(events)] == ["", "", "abc", "d"]

    def test_a_revision_replaces_what_was_held(self) -> None:
        events = [Event("ab", is_final=False), Event("cd", is_final=False), Event("X", None, 3), Event("Y")]
        found = list(final_events(events))
        assert [event.text for event in found] == ["", "", "abcX", "Y"]
        assert all(event.revised_from is None and event.is_final for event in found)

    def test_a_revision_after_final_text(self) -> None:
        events = [Event("ab"), Event("cd", is_final=False), Event("", None, 2), Event("Z")]
        assert [event.text for event in final_events(events)] == ["ab", "", "", "Z"]

    def test_one_step_at_a_time(self) -> None:
        """A consumer that leaves must find the model where it left it."""
        taken = []

        def events() -> Any:
            for number in range(3):
                taken.append(number)
                yield Event(str(number), is_final=False)

        stream = final_events(events())
        next(stream)
        assert taken == [0]
