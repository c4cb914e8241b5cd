"""What the suites take from the core, they take as everybody does."""

from __future__ import annotations

from pathlib import Path

import cacheclip_testing
from cacheclip_testing import names_outside_the_door


def test_the_core_is_entered_by_its_door() -> None:
    assert names_outside_the_door(Path(cacheclip_testing.__file__).parent) == set()
