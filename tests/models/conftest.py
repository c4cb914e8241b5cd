"""Where verdicts and fingerprints of models are kept."""

from pathlib import Path

import pytest

from cacheclip_rag.models.load import unload_models
from tests.conftest import Patch


@pytest.fixture
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder of the test's own: those of other tests are not known."""
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    unload_models()
    return tmp_path / "home"
