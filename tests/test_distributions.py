"""The distributions of this repository have one version, know one another by it, and each can be built by itself."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from scripts import ROOT, script

from cacheclip_rag import MissingExtraError, __version__

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


def test_tests_of_guests_find_what_they_take_from_tests_of_the_core() -> None:
    """Also those that run only where llama.cpp or vLLM is."""
    for file in ROOT.glob("integrations/*/tests/**/*.py"):
        for module, names in re.findall(r"^from (tests\.[\w.]+) import (\([^)]*\)|.*)", file.read_text(), re.MULTILINE):
            place = ROOT / module.replace(".", "/")
            source = place.with_suffix(".py").read_text() if not place.is_dir() else str([*place.iterdir()])
            for name in re.findall(r"(\w+)(?: as \w+)?", re.sub("#.*", "", names)):
                assert re.search(rf"\b{name}\b", source), f"{file.name}: {module} has no {name}"


def test_they_need_one_another_at_one_version() -> None:
    needed = [ours(each) for project in (CORE, *PROJECTS.values()) for each in requirements(project)]
    needed = [each for each in needed if each]
    assert len(needed) > 12
    for name, extras, version in needed:
        known = (PROJECTS.get(name) or CORE).get("optional-dependencies", {})
        assert extras <= {*known}, (name, extras)
        assert version in (f"=={__version__}", "") and (version or name == CORE["name"]), (name, version)


def test_every_distribution_is_an_extra_of_the_core() -> None:
    named = {found[0] for each in requirements({**CORE, "dependencies": []}) if (found := ours(each))}
    assert {*PROJECTS} <= named


def test_one_file_installs_a_clone() -> None:
    lines = re.findall(r"^[^#\n]+", (ROOT / "integrations/all.txt").read_text(), re.MULTILINE)
    named = {re.sub(r"\[.*|-e ./integrations/", "", line.strip()) for line in lines if "integrations" in line}
    assert lines[0].strip() == "-e .[all]" and named == {*PROJECTS} - {"cacheclip-llamacpp"}


def test_links_of_a_release_work_outside_the_repository() -> None:
    release = script("integrations/release.py")
    page = release.absolute_links((ROOT / "README.md").read_text(), "https://example.org/me/it", "v1")
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 15 and all(each.startswith("https://") for each in links)
    assert "![Ingest once, answer many times](https://example.org/me/it/raw/v1/docs/pages/images/flow.svg)" in page
    led = release.absolute_links("[a](#b) [c](d.md)", "https://e", "v1", "x/")
    assert led == "[a](#b) [c](https://e/blob/v1/x/d.md)"


@pytest.mark.parametrize("folder", [ROOT, *FOLDERS], ids=lambda each: each.name)
def test_a_published_page_is_for_who_installs_from_the_index(folder: Path) -> None:
    release = script("integrations/release.py")
    assert all((ROOT / "README.md").read_text().count(each) == 1 for each in release.INSTALLED)
    page = release.published(folder, "x/", "https://e", "v1", release.extras_of((ROOT / "pyproject.toml").read_text()))
    optional = CORE["optional-dependencies"]
    [named] = re.findall(r'pip install "cacheclip-rag\[([\w,-]+)\]"', page)
    assert {*named.split(",")} <= {*optional}
    if folder != ROOT:
        [*_, last] = named.split(",")
        assert ours(optional[last][0])[0] == folder.name  # type: ignore[index]


@pytest.mark.parametrize("line", ["pip install -r all.txt", "See [it](other.md).", '<img src="a.svg">', "pip -e ."])
def test_what_holds_in_a_clone_alone_is_not_published(line: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"# a\n\n{line}\n")
    release = script("integrations/release.py")
    if "](" in line:  # it would be led there
        release.absolute_links = lambda text, *_: text
    with pytest.raises(SystemExit, match="expected x/README.md without what holds in a clone alone, got"):
        release.published(tmp_path, "x/", "https://e", "v1", {})


def test_a_release_is_of_what_is_committed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    release = script("integrations/release.py")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    release.check_clean()
    (tmp_path / "new.py").touch()
    with pytest.raises(SystemExit, match=r"expected a tree without changes, got\n\?\? new.py\nCommit or drop"):
        release.check_clean()


def test_what_is_missing_is_installed_from_where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install -e './integrations/cacheclip-lab' in your clone of the repository, or pip" in missing("lab")
    assert "pip install -e '.[gguf]' in your clone" in missing("gguf")
    monkeypatch.setattr("cacheclip_rag.base.errors._CLONE", ROOT / "nowhere")
    for extra in CORE["optional-dependencies"]:
        assert missing(extra) == f"X is not installed. Install it: pip install 'cacheclip-rag[{extra}]'"


def missing(extra: str) -> str:
    return str(MissingExtraError("X", extra))


@pytest.mark.parametrize("folder", [ROOT, *FOLDERS], ids=lambda each: each.name)
def test_metadata_of_a_release(folder: Path) -> None:
    release, text = script("integrations/release.py"), (folder / "pyproject.toml").read_text()
    text = release.with_urls(text, "https://example.org/it", "v1")
    project = tomllib.loads(text)["project"]
    assert {"Homepage", "Changelog", "Documentation"} <= {*project["urls"]}
    assert "Typing :: Typed" in project["classifiers"]
