"""What the distribution takes of the core is public."""

from __future__ import annotations

from pathlib import Path

import cacheclip_ingest
from cacheclip_testing import names_outside_the_door


def test_it_takes_only_what_is_public() -> None:
    assert names_outside_the_door(Path(cacheclip_ingest.__file__).parent) == set()
