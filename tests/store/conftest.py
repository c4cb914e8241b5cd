"""A store on disk with two entries."""

from pathlib import Path

import pytest
from cacheclip_shared.testing import bucket, s3_address, valkey_address  # noqa: F401

from cacheclip_rag.store import TenantStore
from tests.store.samples import opened, put


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> TenantStore:
    store = opened(folder)
    put(store, 1, 2)
    return store
