"""The laboratory is built on public modules of the core alone."""

from __future__ import annotations

from pathlib import Path

import cacheclip_lab
from cacheclip_testing import names_outside_the_door, names_taken

FOLDER = Path(cacheclip_lab.__file__).parent


def test_it_takes_nothing_from_outside_the_door() -> None:
    assert names_outside_the_door(FOLDER) == set()
    assert "measuring.read_along" in names_taken(FOLDER)
