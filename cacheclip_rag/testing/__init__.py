"""Conformance suites that third parties inherit to test their own parts, and tiny models for tests.

Needs pytest. Import each class from its module: ``from cacheclip_rag.testing.backends import ...``.
"""

from __future__ import annotations

import pytest

__all__: list[str] = []

pytest.register_assert_rewrite(
    *(f"cacheclip_rag.testing.{name}" for name in ("backends", "llama_index", "methods", "runtimes"))
)
