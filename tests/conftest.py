"""Tiny models (:mod:`cacheclip_testing.tiny`), texts and engines that tests share."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
from cacheclip_testing.plugin import (  # noqa: F401
    CACHECLIP,
    CHUNKS,
    QUESTION,
    rag_prompt,
)
from cacheclip_testing.tiny import (  # noqa: F401
    CHAT_TEMPLATE,
    SENTENCES,
    TINY_MODELS,
    add_bos,
    build_auxiliary,
    build_model,
    make_tokenizer,
    tiny_spec,
)
from thinned import examples, some_of  # noqa: F401

__all__ = ["CHAT_TEMPLATE", "SENTENCES", "TINY_MODELS", "build_model", "make_tokenizer"]


Make = Callable[..., Any]
"""Makes an engine with these settings (fixture ``make``)."""
Models, Patch, Logs = dict[str, str], pytest.MonkeyPatch, pytest.LogCaptureFixture
"""Types of the fixtures ``tiny_models``, ``monkeypatch`` and ``caplog``."""
LLAMA = TINY_MODELS["llama"]
DYNAMIC = TINY_MODELS["llama-rope-dynamic"]["rope_parameters"]
of = tiny_spec


@pytest.fixture(scope="module")
def no_garbage() -> None:
    """Errors of finalizers are shown with the source around them, which is parsed: CPython 3.11 fails if this happens
    while a test parses."""
    gc.collect()


def lose(monkeypatch: pytest.MonkeyPatch, caches: Any, *texts: str) -> None:
    """These chunks cannot be read any more, as if their checksums were wrong."""
    read_ahead = caches.read_ahead

    def losing(asked: Any, **options: Any) -> Any:
        reading = read_ahead(asked, **options)
        kv = reading.kv
        reading.kv = lambda number: None if asked[number] in texts else kv(number)
        return reading

    monkeypatch.setattr(caches, "read_ahead", losing)


def spied(patch: Patch, owner: Any, name: str, before: Callable[..., Any] | None = None) -> list[tuple[Any, ...]]:
    """Positional arguments of the calls that come, each noted after ``before`` ran with all its arguments."""
    called, calls = getattr(owner, name), list[tuple[Any, ...]]()

    def spy(*args: Any, **options: Any) -> Any:
        if before is not None:
            before(*args, **options)
        calls.append(args)
        return called(*args, **options)

    patch.setattr(owner, name, spy)
    return calls


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that fails, whatever it is called with."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail
