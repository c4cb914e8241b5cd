"""Tests that implementations outside this package inherit, so that they prove what the package relies on.

Needs pytest. Import the class that you inherit from its module: ``from cacheclip_rag.testing.llama_index import ...``.
"""

from __future__ import annotations

import pytest

__all__: list[str] = []

pytest.register_assert_rewrite("cacheclip_rag.testing.llama_index")
