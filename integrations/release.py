"""Builds what is uploaded to the package index: an sdist and a wheel of every distribution. Uploads nothing.

    python integrations/release.py --url https://github.com/OWNER/REPOSITORY

Distributions are built from a copy of what git tracks, in which README's links lead to the repository at ``--url`` and
its tag of this version, so that they work outside of it.
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


def absolute_links(text: str, url: str, tag: str, folder: str = "") -> str:
    """A page whose relative links lead into the repository, at a tag; pictures as files, other paths as pages.

    Args:
        folder: of the page in the repository, with a slash at its end.
    """

    def lead(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found.group()
        kind = "raw" if mark else "blob"
        return f"{mark}[{text}]({url}/{kind}/{tag}/{folder}{target})"

    return re.sub(r"(!?)\[([^]]*)\]\(([^)\s]+)\)", lead, text)


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
    for folder in folders(to):
        where = "" if folder == to else f"{folder.relative_to(to)}/"
        page, project = folder / "README.md", folder / "pyproject.toml"
        page.write_text(absolute_links(page.read_text(encoding="utf-8"), url, tag, where), encoding="utf-8")
        project.write_text(with_urls(project.read_text(encoding="utf-8"), url, tag), encoding="utf-8")
        tomllib.loads(project.read_text(encoding="utf-8"))


def built(folder: Path) -> list[Path]:
    """Wheels and sdists in a folder."""
    return sorted(each for each in folder.iterdir() if each.name.endswith((".whl", ".tar.gz")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="address of the repository, without a slash at its end")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the files; earlier ones in it go")
    options = parser.parse_args()
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
