"""Names of packaged models, and what is known of a model by its name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cacheclip_rag import CacheClipEngine, MissingExtraError, UnknownModelError
from cacheclip_rag.models import known_context, knows_tools, load_model, resolve


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def folder(tiny_models: dict[str, str]) -> Path:
    return Path(tiny_models["llama"])


def test_packaged_models_with_and_without_their_prefix_are_one(folder: Path, home: Path) -> None:
    shutil.copytree(folder, home / "models" / "smollm2-135m")
    one, other = load_model("packaged:smollm2-135m"), load_model("smollm2-135m")
    assert one is other and one.fingerprint == load_model(str(folder)).fingerprint
    assert known_context("packaged:smollm2-135m") == known_context("smollm2-135m") == 8192
    assert knows_tools("packaged:smollm2-135m") is False
    assert known_context("packaged:smollm2-135m.gguf") == known_context("packaged:smollm2-135m.GGUF") == 8192
    assert knows_tools("packaged:qwen2.5-coder-0.5b.gguf") is True
    with pytest.raises(UnknownModelError, match=r"Did you mean 'packaged:smollm2-135m'\?"):
        resolve("packaged:smollm2")


def test_a_gguf_file_without_llama_cpp(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said before anything is fetched."""
    for module in ("checkpoints", "loaders"):
        monkeypatch.setattr(f"cacheclip_rag.models.{module}.guests", lambda group: {"packaged": ()})
    with pytest.raises(MissingExtraError, match="what runs 'packaged:smollm2-135m.gguf' is not .*/cacheclip-llamacpp"):
        CacheClipEngine(primary="packaged:smollm2-135m.gguf", auxiliary=None).precompute(["The lamp burned whale oil."])
    assert not (home / "downloads").exists()
