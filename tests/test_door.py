"""What a distribution takes from the core is told, whichever way it takes it."""

from pathlib import Path

import pytest
from cacheclip_testing import names_outside_the_door, names_taken


@pytest.mark.parametrize(
    ("source", "outside"),
    [
        ("from cacheclip_rag import CacheClipEngine, __version__, methods", set()),
        ("from cacheclip_rag.methods import Method, preset\nfrom cacheclip_rag.store import *", set()),
        ("import cacheclip_rag.methods\nprint(cacheclip_rag.__file__, cacheclip_rag.methods.preset)", set()),
        ("from cacheclip_rag.plugins import Commands\nfrom . import engine", set()),
        ("from cacheclip_rag.methods import presets", {"methods.presets"}),
        ("from cacheclip_rag.methods import _GROUP as group, preset", {"methods._GROUP"}),
        ("from cacheclip_rag.methods.base import Method", {"methods.base.Method"}),
        ("def late():\n    from cacheclip_rag.base.paths import expanded", {"base.paths.expanded"}),
        ("import cacheclip_rag.engine", {"engine"}),
        ("import cacheclip_rag.methods as kinds\nkinds._GROUP", {"methods._GROUP"}),
        (
            "from cacheclip_rag import methods\nprint(methods._GROUP.title())",
            {"methods._GROUP", "methods._GROUP.title"},
        ),
        ("import cacheclip_rag.methods\ncacheclip_rag.methods._GROUP", {"methods._GROUP"}),
        ("from cacheclip_rag import engine", {"engine"}),
    ],
)
def test_names_outside_the_door(source: str, outside: set[str], tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/module.py").write_text(source)
    assert names_outside_the_door(tmp_path) == outside
    assert names_taken(tmp_path) >= outside


def test_a_folder_without_modules_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ValueError, match="expected a folder with the modules of a distribution, got .* has none"):
            names_outside_the_door(folder)
