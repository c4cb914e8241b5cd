"""What the tests of both frameworks share."""

from __future__ import annotations

from typing import Any

import pytest

from cacheclip_rag import CacheClipEngine


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The ``question`` of every call of an engine, in order."""
    found: list[str | None] = []
    stream = CacheClipEngine.stream

    def spying(*arguments: Any, **options: Any) -> Any:
        found.append(options["question"])
        return stream(*arguments, **options)

    monkeypatch.setattr(CacheClipEngine, "stream", spying)
    return found
