"""Trained contexts that come with the package."""

from __future__ import annotations

from pathlib import Path

import cacheclip_rag
from cacheclip_rag.chunks import trained as module
from cacheclip_rag.chunks.trained import TrainedContext

FOLDER = Path(cacheclip_rag.__file__).parent / "chunks" / "shipped"


def test_each_is_whole_small_and_found_under_its_name() -> None:
    assert FOLDER == module._SHIPPED
    for path in FOLDER.glob("*"):
        found = TrainedContext.load(path)
        assert path.name == f"{found.primary_sha256[:16]}.safetensors" and path.stat().st_size < 4e6
        assert found.about["command"] == "train-context" and found.about["held_out"][0]["change"][2] < 1
