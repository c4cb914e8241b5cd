"""Time that passes only while a throttled store waits, so that measured seconds are exact."""

from __future__ import annotations

import threading

import pytest

from cacheclip_rag.store import ahead
from cacheclip_rag.testing import throttled


class FakeTime:
    """In place of the module ``time`` for :mod:`cacheclip_rag.testing.throttled` and what measures it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 0.0
        self._lock = threading.Lock()
        for module in (ahead, throttled):
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds
