"""Names that a package imports at first use, so that importing the package stays cheap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__``, which finds each name in its module. Modules are named from within the package,
    as ``settings`` or, in another room, ``..base.checks``."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name] if homes[name].startswith(".") else f".{homes[name]}", package), name)

    return find
