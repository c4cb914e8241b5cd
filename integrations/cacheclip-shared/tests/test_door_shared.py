"""This distribution is built on public modules of the core alone, and is found by the schemes of its URLs."""

from importlib.metadata import entry_points
from pathlib import Path

import cacheclip_shared
import pytest
from cacheclip_shared import kind
from cacheclip_testing import names_outside_the_door

from cacheclip_rag import MissingExtraError
from cacheclip_rag.store import StoreKind, open_chunk_store, store_kind


def test_it_takes_no_name_from_outside_the_door() -> None:
    assert names_outside_the_door(Path(cacheclip_shared.__file__).parent) == set()


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "file"])
def test_every_scheme_leads_here(scheme: str) -> None:
    found: StoreKind = kind  # as type checkers see it
    assert store_kind(f"{scheme}://somewhere/else") is found
    calls = [name for name in vars(StoreKind) if name[0] != "_"]
    assert calls and all(callable(getattr(found, name)) for name in calls)


def test_without_it_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "s3" in entry_points(group="cacheclip.stores").names
    monkeypatch.setattr("cacheclip_rag.store.opening.guests", lambda group: {})
    with pytest.raises(MissingExtraError, match="pip install -e './integrations/cacheclip-shared'"):
        open_chunk_store("s3://bucket/prefix")
