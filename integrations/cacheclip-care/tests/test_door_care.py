"""This distribution is built on public modules of the core alone."""

from pathlib import Path

import cacheclip_care
from cacheclip_testing import names_outside_the_door


def test_it_takes_no_name_from_outside_the_door() -> None:
    assert names_outside_the_door(Path(cacheclip_care.__file__).parent) == set()
