import pytest

from tests.conftest import CHUNKS
from tests.fusion.cases import Case, make_case

_cases: dict[str, Case] = {}


@pytest.fixture
def case(primary: str, tiny_models: dict[str, str]) -> Case:
    """Three stored chunks in a prompt, for every model of the matrix. One for all its tests: leave it as it is."""
    if primary not in _cases:
        _cases[primary] = make_case(primary, tiny_models["auxiliary"], CHUNKS[:3])
    found = _cases[primary]
    found.engine.prefixes.clear()  # starts that an earlier test answered would be exact here
    return found
