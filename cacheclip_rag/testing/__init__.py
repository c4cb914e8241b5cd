"""Suites that third parties inherit to prove their own parts, and tiny models to run them on.

Needs pytest. Import the class that you inherit from its module: ``from cacheclip_rag.testing.backends import ...``.
"""

from __future__ import annotations

import pytest

__all__: list[str] = []

pytest.register_assert_rewrite(
    *(f"cacheclip_rag.testing.{name}" for name in ("backends", "llama_index", "methods", "runtimes"))
)
