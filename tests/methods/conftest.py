from collections.abc import Callable

import pytest

from tests.conftest import CHUNKS
from tests.fusion.cases import Case, make_case
from tests.fusion.conftest import case

__all__ = ["case"]


@pytest.fixture
def case_of(tiny_models: dict[str, str]) -> Callable[[str], Case]:
    """A case of one's own by the model's name: to be changed at will."""
    return lambda name: make_case(tiny_models[name], tiny_models["auxiliary"], CHUNKS[:3])


@pytest.fixture(scope="module")
def one_chunk(tiny_models: dict[str, str]) -> Case:
    """One chunk right behind the shared prefix. One for all tests of a module: leave it as it is."""
    return make_case(tiny_models["llama"], tiny_models["auxiliary"], CHUNKS[:1], opening="")
