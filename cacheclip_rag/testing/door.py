"""Which names a distribution takes from this package, and which of them stand in modules that are not public."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = "cacheclip_rag"
PUBLIC = (
    "",
    *"adapters guards measuring methods models planning plugins runtime selection store testing testing.plugin".split(),
)
"""Modules of the package that others may import; the package itself is the empty name."""


def names_taken(folder: Path) -> set[str]:
    """What the modules of a folder import from this package, as ``room.module.name``: at import time, in functions and
    for type checkers. A module that is imported whole stands as itself."""
    taken: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE and not node.level:
                taken |= {f"{node.module}.{each.name}" for each in node.names}
            elif isinstance(node, ast.Import):
                taken |= {each.name for each in node.names if each.name.split(".")[0] == PACKAGE}
    return {name.removeprefix(PACKAGE).removeprefix(".") for name in taken}


def names_outside_the_door(folder: Path) -> set[str]:
    """Names that the modules of a folder take from modules that are not public.

    >>> assert not names_outside_the_door(Path(my_package.__file__).parent)
    """
    return {name for name in names_taken(folder) if name not in PUBLIC and name.rpartition(".")[0] not in PUBLIC}
