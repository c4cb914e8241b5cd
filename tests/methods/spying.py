"""A method that keeps what it was asked with and what it chose, for tests that look inside."""

from __future__ import annotations

from typing import Any

import pytest

from cacheclip_rag.methods import create
from cacheclip_rag.methods.base import Method
from tests.fusion.cases import Case
from tests.methods.test_matrix import run

plain = pytest.mark.parametrize("primary", ["llama", "qwen3"], indirect=True)
"""The two plainest models, for tests with references written out by hand."""


class Spy(Method):
    """Keeps the request that a method was asked with."""

    name = "spy"

    def __init__(self, inner: Method) -> None:
        object.__setattr__(self, "inner", inner)

    def __getattribute__(self, name: str) -> Any:
        if name in ("inner", "request", "masks", "select", "score", "walk", "made"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "inner"), name)

    def score(self, request: Any) -> Any:
        return self.inner.score(request)

    def select(self, request: Any, scores: Any) -> Any:
        object.__setattr__(self, "request", request)
        object.__setattr__(self, "masks", self.inner.select(request, scores))
        return self.masks

    def walk(self, request: Any, rows: Any) -> Any:
        object.__setattr__(self, "made", self.inner.walk(request, rows))
        return self.made


def spied(case: Case, spec: str, ratio: float = 0.3) -> tuple[Any, Any]:
    spy = Spy(create(spec, {"recompute_ratio": ratio}))
    return run(case, spy), spy
