"""Which names a distribution takes from cacheclip-rag, and which of them stand in modules that are not public."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

PACKAGE = "cacheclip_rag"
PUBLIC = (
    "",
    *"adapters guards measuring methods models planning plugins runtime selection store".split(),
)
"""Modules of the package that others may import; the package itself is the empty name."""


def names_taken(folder: Path) -> set[str]:
    """What the modules of a folder take from the core, as ``room.module.name``: by imports at import time, in
    functions and for type checkers, and as attributes of modules. A module that is imported whole stands as itself."""
    files = list(folder.rglob("*.py"))
    if not files:
        raise ValueError(f"expected a folder with the modules of a distribution, got {folder}, which has none.")
    taken = {name for path in files for name in _taken(ast.parse(path.read_text(encoding="utf-8")))}
    return {name.removeprefix(PACKAGE).removeprefix(".") for name in taken}


def _taken(module: ast.Module) -> Iterator[str]:
    whole: dict[str, str] = {PACKAGE: PACKAGE}  # what is imported, by the name that it has in the module
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE and not node.level:
            names = {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            yield from names.values()
            whole |= {own: name for own, name in names.items() if name.removeprefix(f"{PACKAGE}.") in PUBLIC}
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == PACKAGE:
                    yield each.name
                    whole |= {each.asname: each.name} if each.asname else {}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in whole and all(map(str.isidentifier, rest.split("."))):
                yield f"{whole[first]}.{rest}"


def names_outside_the_door(folder: Path) -> set[str]:
    """Names that the modules of a folder take from modules that are not public, and names of public modules that are
    not in their ``__all__``.

    Raises:
        ValueError: there is no module in the folder.

    >>> assert not names_outside_the_door(Path(my_package.__file__).parent)
    """
    return {name for name in names_taken(folder) if not _is_public(name)}


def _is_public(name: str) -> bool:
    """Whether a name is a public module, or begins with one of its public names."""
    home = max((each for each in PUBLIC if not each or f"{name}.".startswith(f"{each}.")), key=len)
    own = name.removeprefix(home).lstrip(".").partition(".")[0]
    module = import_module(f"{PACKAGE}.{home}".rstrip("."))
    names = getattr(module, "__all__", None) or [each for each in vars(module) if not each.startswith("_")]
    return own in ("", "*", *names) or own.startswith("__")
