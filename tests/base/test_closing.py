"""What is closed can be closed by ``with``."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing.door import PACKAGE, PUBLIC

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.guards import Observer
from cacheclip_rag.planning import PlanningEngine
from cacheclip_rag.store import Backend, CatalogView, TieredStore


def public_classes() -> Iterator[type]:
    for name in PUBLIC:
        module = import_module(f"{PACKAGE}.{name}".rstrip("."))
        for each in getattr(module, "__all__", ()):
            if inspect.isclass(found := getattr(module, each)):
                yield found


def test_with_closes_whatever_has_close() -> None:
    closed = {each for each in public_classes() if callable(getattr(each, "close", None))}
    assert closed >= {CacheClipEngine, PlanningEngine, TieredStore, Backend, Observer}
    assert {each for each in closed if not hasattr(each, "__enter__")} == {CatalogView}, "a protocol"


def test_an_engine_is_closed_at_the_end_of_the_block_and_after_an_error(tiny_models: Any, tmp_path: Path) -> None:
    class Closed(Observer):
        times = 0

        def close(self) -> None:
            self.times += 1

    observer, options = Closed(), dict[str, Any](primary=tiny_models["llama"], auxiliary=None, store=tmp_path)
    with CacheClipEngine(**options) as engine:
        engine.observers.append(observer)
        assert engine.generate("A question.", max_tokens=1).text and observer.times == 0
    with pytest.raises(ZeroDivisionError), engine:
        _ = 1 / (observer.times - 1)
    assert observer.times == 2 and engine.generate("A question.", max_tokens=1).text, "it may be used again"
