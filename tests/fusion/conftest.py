from __future__ import annotations

import pytest

from tests.fusion.cases import Case, make_case


@pytest.fixture
def case(primary: str, tiny_models: dict[str, str], chunks: list[str]) -> Case:
    """Three stored chunks in a prompt, for every model of the matrix."""
    return make_case(primary, tiny_models["auxiliary"], chunks[:3])
