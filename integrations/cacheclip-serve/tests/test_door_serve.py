"""What this distribution takes from the core, and what it gives to others."""

from __future__ import annotations

from pathlib import Path

import cacheclip_serve
from cacheclip_testing import names_outside_the_door


def test_it_takes_names_of_public_modules_only() -> None:
    assert names_outside_the_door(Path(cacheclip_serve.__file__).parent) == set()


def test_its_names_are_there() -> None:
    assert all(getattr(cacheclip_serve, name) is not None for name in cacheclip_serve.__all__)
