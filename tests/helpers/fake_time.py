"""Time that passes only while somebody sleeps, so that measured seconds are exact."""

import threading
from typing import Any

import pytest
from cacheclip_testing import throttled

from cacheclip_rag.store import ahead


class FakeTime:
    """In place of the module ``time`` for the given modules; default: for
    :mod:`cacheclip_testing.throttled` and what measures it.

    Who sleeps wakes so many seconds after the time that its thread read last: sleeps of several threads overlap.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        self._now = 0.0
        self._lock = threading.Lock()
        self._read = threading.local()
        for module in modules or (ahead, throttled):
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        self._read.at = now = self._now
        return now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now = max(self._now, getattr(self._read, "at", self._now) + seconds)
