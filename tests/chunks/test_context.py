"""Chunk contexts: two names, and what earlier versions had."""

from pathlib import Path

import pytest
from cacheclip_ingest import Library, LibrarySettings

from cacheclip_rag import EngineConfig
from cacheclip_rag.base.errors import ConfigurationError


@pytest.mark.parametrize("name", ["auto", "trained"])
def test_values_that_are_gone_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"chunk_context='{name}' is gone: use chunk_context='passages'"):
        EngineConfig(chunk_context=name)


def test_a_store_of_an_earlier_version_opens(tmp_path: Path) -> None:
    """Its default was auto, which without a trained context was passages."""
    known = Library(tmp_path)
    known.fix_settings(LibrarySettings(chunk_context="passages"))
    assert known.settings == LibrarySettings()
    known.close()
    other = Library(tmp_path / "older")
    with pytest.raises(ConfigurationError, match="made with chunk_context 'passages', not 'auto'"):
        other.fix_settings(LibrarySettings(chunk_context="auto"))  # an older version records this
    assert other.settings == LibrarySettings()
    other.close()
