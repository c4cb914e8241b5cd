"""The core's tiny models and engine, and what there is to ingest."""

from __future__ import annotations

from pathlib import Path

import pytest
from cacheclip_testing.plugin import CHUNKS
from ingest_cases import Workshop


@pytest.fixture
def chunks() -> list[str]:
    return list(CHUNKS)


@pytest.fixture
def workshop(tmp_path: Path, tiny_models: dict[str, str], chunks: list[str]) -> Workshop:
    shop = Workshop(tmp_path, tiny_models)
    shop.write("a.txt", "\n\n".join(chunks[:2]))
    shop.write("b.md", "# Birds\n\n" + chunks[2])
    return shop
