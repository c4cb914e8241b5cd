"""Servers of storage, and machines that share a store."""

from pathlib import Path

import pytest
from cacheclip_shared.testing import bucket, machine, relay, s3_address, store_url, valkey_address  # noqa: F401


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"
