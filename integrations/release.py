"""Builds what is uploaded to the package index: an sdist and a wheel of every distribution. Uploads nothing.

    python integrations/release.py --url https://github.com/OWNER/REPOSITORY

Distributions are built from a copy of what git tracks, whose READMEs are for readers outside of the repository: links
lead to it at ``--url`` and its tag of this version, and commands install from the index.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent

INSTALLED = {
    " Not published yet: in a clone:": "",
    "pip install -r integrations/all.txt   # or what you use: -e . -e ./integrations/langchain-cacheclip": (
        'pip install "cacheclip-rag[all]"   # or what you use: "cacheclip-rag[langchain]"'
    ),
    " `make demo` does it all.": "",
    "(`make docs`)": "(in a clone, `make docs`)",
}
"""What the core's README says of a clone, and what it says to who installs from the index."""
_EDITABLE = r'-e (?:\.(?=\s)|"?\./integrations/[\w-]+(?:\[[\w,]+\])?"?)'


def absolute_links(text: str, url: str, tag: str, folder: str = "") -> str:
    """A page whose relative links lead into the repository, at a tag; pictures as files, other paths as pages.

    Args:
        folder: of the page in the repository, with a slash at its end.
    """

    def lead(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found.group()
        kind = "raw" if mark else "tree" if target.endswith("/") else "blob"
        return f"{mark}[{text}]({url}/{kind}/{tag}/{folder}{target})"

    return re.sub(r"(!?)\[([^]]*)\]\(([^)\s]+)\)", lead, text)


def installed(text: str, extras: dict[str, str]) -> str:
    """A page whose commands install from the package index, not from a clone.

    Args:
        extras: of the core, by the distributions that they install.
    """

    def install(found: re.Match[str]) -> str:
        names = re.findall(r"\./integrations/([\w-]+(?:\[[\w,]+\])?)", found.group())
        return f'pip install "cacheclip-rag[{",".join(extras[name] for name in names)}]"'

    for there, instead in INSTALLED.items():
        text = text.replace(there, instead)
    return re.sub(rf"pip install(?: {_EDITABLE})+(?: +# in a clone of the repository)?", install, text)


def extras_of(core: str) -> dict[str, str]:
    """Extras of the core by the distributions that they install, from its pyproject.toml."""
    optional = tomllib.loads(core)["project"]["optional-dependencies"]
    return {each.partition("==")[0]: name for name, own in optional.items() if len(own) == 1 for each in own}


def published(folder: Path, where: str, url: str, tag: str, extras: dict[str, str]) -> str:
    """A distribution's README for readers outside of the repository.

    Raises:
        SystemExit: it says something that holds in a clone alone.
    """
    page = (folder / "README.md").read_text(encoding="utf-8")
    page = absolute_links(installed(page, extras), url, tag, where)
    local = r".*(?:-e \.|\./integrations|all\.txt|not published|\]\((?!https?:|#)|(?:src|href)=\"(?!https?:)).*"
    if lines := re.findall(local, page):
        raise SystemExit(
            f"expected {where}README.md without what holds in a clone alone, got {lines}. Write it so that "
            "integrations/release.py can turn it into links and commands of the index."
        )
    return page


def with_urls(pyproject: str, url: str, tag: str) -> str:
    """A pyproject.toml with links to the repository."""
    urls = {"Homepage": url, "Source": url, "Changelog": f"{url}/blob/{tag}/CHANGELOG.md", "Issues": f"{url}/issues"}
    urls["Documentation"] = f"{url}/blob/{tag}/docs/pages/index.md"
    return pyproject + "\n[project.urls]\n" + "".join(f'{name} = "{value}"\n' for name, value in urls.items())


def folders(root: Path) -> list[Path]:
    """Of the distributions, the core's first."""
    return [root, *sorted(path.parent for path in root.glob("integrations/*/pyproject.toml"))]


def copy(to: Path, url: str, tag: str) -> None:
    """What git tracks, with absolute links."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)  # of a link, the file that it leads to
    extras = extras_of((to / "pyproject.toml").read_text(encoding="utf-8"))
    for folder in folders(to):
        where = "" if folder == to else f"{folder.relative_to(to)}/"
        page, project = folder / "README.md", folder / "pyproject.toml"
        page.write_text(published(folder, where, url, tag, extras), encoding="utf-8")
        project.write_text(with_urls(project.read_text(encoding="utf-8"), url, tag), encoding="utf-8")
        tomllib.loads(project.read_text(encoding="utf-8"))


def check_clean() -> None:
    """Raises SystemExit: the tag of this version would not be what is built."""
    command = ["git", "status", "--porcelain"]
    if changed := subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout:
        raise SystemExit(f"expected a tree without changes, got\n{changed}Commit or drop them, then release.")


def built(folder: Path) -> list[Path]:
    """Wheels and sdists in a folder."""
    return sorted(each for each in folder.iterdir() if each.name.endswith((".whl", ".tar.gz")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="address of the repository, without a slash at its end")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the files; earlier ones in it go")
    options = parser.parse_args()
    check_clean()
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "cacheclip_rag/base/version.py").read_text())[0]
    options.out.mkdir(parents=True, exist_ok=True)
    for earlier in built(options.out):
        earlier.unlink()
    with TemporaryDirectory() as temporary:
        copied = Path(temporary)
        copy(copied, options.url.rstrip("/"), f"v{version}")
        for folder in folders(copied):
            subprocess.run([sys.executable, "-m", "build", "--outdir", options.out, folder], check=True, stdout=2)
    files = built(options.out)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    print(f"\nTag the commit v{version}, then upload {len(files)} files:\n\n    twine upload {options.out}/*\n")
    for file in files:
        print(f"{file.stat().st_size / 1e3:10,.0f} kB  {file.name}")


if __name__ == "__main__":
    main()
