"""Streams for frameworks, whose streams cannot withdraw text."""

from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing.plugin import CACHECLIP, CHUNKS, rag_prompt

from cacheclip_rag import CacheClipError, ConfigurationError, Event, ModelError
from cacheclip_rag.adapters import final_events
from cacheclip_rag.answering import verification
from cacheclip_rag.models import load_model
from tests.adapters.plain_model import PlainModel

PROMPT = rag_prompt(CHUNKS)


def family(kind: type[CacheClipError] = CacheClipError) -> list[type[CacheClipError]]:
    """A class of errors and all that derive from it."""
    return [kind, *(each for child in kind.__subclasses__() for each in family(child))]


def test_no_error_of_ours_is_one_that_frameworks_catch() -> None:
    """LlamaIndex's refining synthesizers log these to a logger that prints nothing, and leave the context out."""
    assert len(family()) > 10 and not [kind for kind in family() if issubclass(kind, ValueError | TypeError)]


class TestFinalEvents:
    @pytest.mark.parametrize("error", [ValueError("half a character"), TypeError("no tensor")], ids=repr)
    def test_nor_is_one_of_a_library_below(self, error: Exception) -> None:
        def events() -> Any:
            yield Event("a")
            raise error

        with pytest.raises(ModelError, match=f"could not answer: {type(error).__name__}"):
            list(final_events(events()))

    @pytest.mark.parametrize(
        ("events", "texts"),
        [
            ([Event("a", is_final=False), Event("b", is_final=False), Event("c"), Event("d")], ["", "", "abc", "d"]),
            ([Event("ab", is_final=False), Event("cd", is_final=False), Event("X", None, 3)], ["", "", "abcX"]),
            ([Event("ab"), Event("cd", is_final=False), Event("", None, 2), Event("Z")], ["ab", "", "", "Z"]),
        ],
        ids=["held", "a revision of what was held", "a revision after final text"],
    )
    def test_text_waits_until_it_is_final(self, events: list[Event], texts: list[str]) -> None:
        found = list(final_events(events))
        assert [event.text for event in found] == texts
        assert all(event.revised_from is None and event.is_final for event in found if event.text)

    def test_one_step_at_a_time(self) -> None:
        """A consumer that leaves must find the model where it left it."""
        events = iter([Event("a", is_final=False), Event("b", is_final=False)])
        next(final_events(events))
        assert [event.text for event in events] == ["b"], "it is not taken"


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


@pytest.mark.some(2)
@pytest.mark.parametrize("rows", [16, 96])
def test_streams_are_full_prefills_text(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """No piece is withdrawn: joined, they are the revised answer, though the first answer begins otherwise."""
    monkeypatch.setattr(verification, "_BLOCK_ROWS", {"cpu": rows})
    llm = PlainModel(**settings, finish="revise")
    llm.engine.precompute(CHUNKS)
    full = llm.ask(PROMPT, method="full").text
    assert llm.ask(PROMPT, finish="none").text != full
    found = llm.pieces(PROMPT)
    assert "".join(found) == full and found[0] == "", "text that may be withdrawn is held back"
    answer = llm.ask(PROMPT)
    assert answer.text == full and answer.stats.verified_tokens == 12 and answer.stats.diverged_at is not None


def test_the_setting_is_that_of_a_call(settings: dict[str, Any]) -> None:
    """Models that differ only in it share an engine."""
    plain, verifying = PlainModel(**settings), PlainModel(**settings, finish="verify")
    assert plain.finish == "none" and plain.engine is verifying.engine
    plain.engine.precompute(CHUNKS)
    answer = plain.ask(PROMPT)
    assert answer.stats.verified_tokens is None and len([piece for piece in plain.pieces(PROMPT) if piece]) > 4
    again = verifying.ask(PROMPT)
    assert again.text == answer.text and again.stats.verified_tokens == again.stats.diverged_at is not None
    assert "".join(verifying.pieces(PROMPT)) == answer.text and verifying.pieces(PROMPT)[0], "nothing to hold back"
    assert plain.ask(PROMPT, finish="verify").stats.verified_tokens == again.stats.verified_tokens
    with pytest.raises(ConfigurationError, match="finish must be one of"):
        PlainModel(**settings, finish="always")
    with pytest.raises(ConfigurationError, match="finish must be one of"):
        plain.ask(PROMPT, finish="always")
