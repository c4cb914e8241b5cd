"""Names that a module imports at first use, so that importing it stays cheap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from .removed import NAMES


def late_names(module: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """A module's ``__getattr__``, which finds each name where it is declared, and its ``__all__``.

    Args:
        names: names, separated by spaces, by the module that declares them: relative to ``module``, as ``settings``,
            or ``..base.checks`` for another room.
    """
    homes = {name: home for home, together in names.items() for name in together.split()}

    def find(name: str) -> Any:
        if (gone := f"{module}.{name}") in NAMES:
            raise ImportError(NAMES[gone], name=module)  # from … import … would not show an AttributeError
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(homes[name] if homes[name].startswith(".") else f".{homes[name]}", module), name)

    return find, sorted(homes)
