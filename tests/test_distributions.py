"""The distributions of this repository have one version, know one another by it, and each can be built by itself."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag import __version__

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted(path.parent for path in ROOT.glob("integrations/*/pyproject.toml"))
CORE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROJECTS: dict[str, dict[str, Any]] = {
    folder.name: tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in FOLDERS
}


def requirements(project: dict[str, Any]) -> list[str]:
    """All that a distribution needs, its extras included."""
    extras = project.get("optional-dependencies", {}).values()
    return [*project["dependencies"], *(each for extra in extras for each in extra)]


def ours(requirement: str) -> tuple[str, set[str], str] | None:
    """Name, extras and version of a requirement of a distribution of this repository."""
    [(name, extras, version)] = re.findall(r"^([\w.-]+)(?:\[([\w,-]+)\])?(.*)$", requirement)
    return (name, {*filter(None, extras.split(","))}, version) if name in {*PROJECTS, CORE["name"]} else None


@pytest.mark.parametrize("name", PROJECTS)
def test_a_distribution(name: str) -> None:
    project, folder = PROJECTS[name], ROOT / "integrations" / name
    assert (project["name"], project["version"]) == (name, __version__)
    assert f"cacheclip-rag=={__version__}" in project["dependencies"]
    assert (folder / "README.md").read_text().startswith(f"# {name}\n")
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert f"GUEST={name}" in (folder / "Makefile").read_text() or name == "cacheclip-llamacpp"
    assert list(folder.glob("tests/**/test_door*.py"))


def test_they_need_one_another_at_one_version() -> None:
    needed = [
        found for project in (CORE, *PROJECTS.values()) for each in requirements(project) if (found := ours(each))
    ]
    assert len(needed) > 12
    for name, extras, version in needed:
        known = (PROJECTS.get(name) or CORE).get("optional-dependencies", {})
        assert extras <= {*known}, (name, extras)
        assert version in (f"=={__version__}", "") and (version or name == CORE["name"]), (name, version)


def test_every_distribution_is_an_extra_of_the_core() -> None:
    named = {found[0] for each in requirements({**CORE, "dependencies": []}) if (found := ours(each))}
    assert {*PROJECTS} <= named


def test_one_file_installs_a_clone() -> None:
    lines = [
        line.strip() for line in (ROOT / "integrations/all.txt").read_text().splitlines() if not line.startswith("#")
    ]
    named = {re.sub(r"\[.*", "", line.removeprefix("-e ./integrations/")) for line in lines if "integrations" in line}
    assert lines[0] == "-e .[all]" and named == {*PROJECTS} - {"cacheclip-llamacpp"}


def test_links_of_a_release_work_outside_the_repository() -> None:
    release = module("release")
    page = release.absolute_links((ROOT / "README.md").read_text(), "https://example.org/me/it", "v1")
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 15 and all(each.startswith("https://") for each in links)
    assert "![Ingest once, answer many times](https://example.org/me/it/raw/v1/docs/pages/images/flow.svg)" in page
    assert (
        release.absolute_links("[a](#b) [c](d.md)", "https://e", "v1", "x/") == "[a](#b) [c](https://e/blob/v1/x/d.md)"
    )


@pytest.mark.parametrize("folder", [ROOT, *FOLDERS], ids=lambda each: each.name)
def test_metadata_of_a_release(folder: Path) -> None:
    text = module("release").with_urls((folder / "pyproject.toml").read_text(), "https://example.org/it", "v1")
    project = tomllib.loads(text)["project"]
    assert {"Homepage", "Changelog", "Documentation"} <= {*project["urls"]} and "Typing :: Typed" in project[
        "classifiers"
    ]


def module(name: str) -> Any:
    """A script of the folder ``integrations``."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"integrations/{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
