"""What other distributions bring: objects by entry point, loaded when they are first needed.

At import they would close a circle: they import this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import ConfigurationError

STORES = "cacheclip.stores"
"""Group of what opens stores, by the scheme of their URLs."""
MEASUREMENTS = "cacheclip.measurements"
"""Group of what measures an engine, by name: ``profile``."""


@cache
def guests(group: str) -> Mapping[str, EntryPoint]:
    """Entry points of a group such as ``cacheclip.commands`` by name, in alphabetical order; none is loaded.

    Raises:
        ConfigurationError: two distributions bring the same name.
    """
    found: dict[str, EntryPoint] = {}
    for each in sorted(entry_points(group=group), key=lambda each: (each.name, each.value)):
        other = found.setdefault(each.name, each)
        if other.value != each.value:
            raise ConfigurationError(
                f"two distributions bring {each.name!r} as {group}: {_distribution(other)} ({other.value}) and "
                f"{_distribution(each)} ({each.value}). Uninstall one of them."
            )
    return found


def load_guest(group: str, name: str) -> Any:
    """The object of an entry point.

    Raises:
        ConfigurationError: no distribution brings it, or its module cannot be imported.
    """
    known = guests(group)
    if name not in known:
        raise ConfigurationError(f"no installed distribution brings {name!r} as {group}. Known: {', '.join(known)}.")
    return _loaded(known[name])


@cache
def _loaded(guest: EntryPoint) -> Any:
    try:
        return guest.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"cannot load {guest.name!r} ({guest.value}) of {_distribution(guest)}: {type(error).__name__}: {error}. "
            "Install the version of it that belongs to this version of cacheclip-rag, or uninstall it."
        ) from error


def _distribution(guest: EntryPoint) -> str:
    return guest.dist.name if guest.dist else "an unknown distribution"
