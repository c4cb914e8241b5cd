"""Names that a module imports at first use, and names of earlier versions that are gone, with what to use instead: the
tables of ``removed.toml``."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pkgutil import get_data
from typing import Any

from .errors import ConfigurationError

_TABLES: dict[str, dict[str, str]] = tomllib.loads((get_data(__package__, "removed.toml") or b"").decode())
METHODS, SETTINGS, OPTIONS, MODULES, NAMES = _TABLES.values()


class RemovedModules:
    """A finder of modules, the last one to be asked, which finds none and says where those that are gone are now."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """None. Raises ImportError with the sentence of a module that is gone. (``from package import name`` would not
        show a ModuleNotFoundError.)"""
        if name in MODULES:
            raise ImportError(MODULES[name], name=name)


def refuse_removed_modules() -> None:
    """From now on, imports of modules that are gone are refused with their sentences."""
    if RemovedModules not in sys.meta_path:
        sys.meta_path.append(RemovedModules)


def refuse_removed(names: Iterable[str], table: Mapping[str, str]) -> None:
    """Raise ConfigurationError with the sentence of each of the ``names`` that is in ``table``."""
    sentences = [table[name] for name in names if name in table]
    if sentences:
        raise ConfigurationError(" ".join(sentences))


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
