"""Runs that the user stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["stopper"]


def stopper(monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[[Any, str, int], None], dict[str, int]]:
    """``stop(owner, name, at)``, after which the ``at``-th call of that function is interrupted, and how often each was
    called."""
    counts: dict[str, int] = {}

    def stop(owner: Any, name: str, at: int) -> None:
        original = getattr(owner, name)

        def stopping(*args: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            if counts[name] == at:
                raise KeyboardInterrupt
            return original(*args, **options)

        monkeypatch.setattr(owner, name, stopping)

    return stop, counts
