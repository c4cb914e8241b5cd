"""What other distributions bring: objects by entry point, loaded when they are first needed.

At import they would close a circle: they import this package.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from .errors import CacheClipError, ConfigurationError, first_line

logger = logging.getLogger(__name__)

GROUPS = [f"cacheclip.{each}" for each in "commands measurements methods observers runtimes stores".split()]
"""Groups of entry points that are read; others that begin so are misspelt."""
STORES = "cacheclip.stores"
"""Group of what opens stores, by the scheme of their URLs."""
MEASUREMENTS = "cacheclip.measurements"
"""Group of what measures an engine, by name: ``certificates`` and ``ratios``."""

_T = TypeVar("_T")


@cache
def guests(group: str) -> Mapping[str, Sequence[EntryPoint]]:
    """Entry points of a group such as ``cacheclip.commands`` by name, in alphabetical order; none is loaded. Several
    have one name if distributions do not know of one another."""
    by_name: dict[str, dict[str, EntryPoint]] = {}
    installed = entry_points()
    for other in (each for each in installed.groups - {*GROUPS} if each.startswith("cacheclip")):
        _warn_of_unread(*installed.select(group=other))
    for each in sorted(installed.select(group=group), key=lambda each: (each.name, each.value)):
        by_name.setdefault(each.name, {}).setdefault(each.value, each)
    return {name: tuple(each.values()) for name, each in by_name.items()}


@cache  # once
def _warn_of_unread(guest: EntryPoint, *others: EntryPoint) -> None:
    near = " or ".join(get_close_matches(guest.group, GROUPS, 1) or GROUPS)
    logger.warning("nothing reads entry points %s of %s. Did you mean %s?", guest.group, distribution(guest), near)


def load_guest(group: str, name: str, expected: str, fits: Callable[[Any], bool] = callable) -> Any:
    """The object of an entry point that there is (:func:`guests`).

    Args:
        expected: what it must be, for messages, such as ``a function``.
        fits: whether it is that.

    Raises:
        ConfigurationError: two distributions bring it; its module cannot be imported; it is something else. The
            message names the distribution.
    """
    [known, *others] = guests(group)[name]
    if others:
        brought = " and ".join(f"{distribution(each)} ({each.value})" for each in (known, *others))
        raise ConfigurationError(f"two distributions bring {name!r} as {group}: {brought}. Uninstall one of them.")
    try:
        guest = _loaded(known)
    except (Exception, SystemExit) as error:  # whatever its module does when it is imported
        raise unusable(group, name, f"{type(error).__name__}: {first_line(error)}") from error
    return fitting(group, name, guest, expected, fits)


def fitting(group: str, name: str, guest: _T, expected: str, fits: Callable[[Any], bool]) -> _T:
    """What an entry point's object is or returned, unless it is something else, as for :func:`load_guest`."""
    if not fits(guest):
        raise unusable(group, name, f"expected {expected}, got {guest!r}")
    return guest


def ask_guest(group: str, name: str, question: Callable[[Any], _T], expected: str, fits: Any = callable) -> _T:
    """What an entry point's object answers. Its errors are ConfigurationErrors that name its distribution; other
    arguments are those of :func:`load_guest`."""
    guest = load_guest(group, name, expected, fits)
    try:
        return question(guest)
    except CacheClipError as error:  # which says what to do
        raise ConfigurationError(f"{brought_by(group, name)}: {error}") from error
    except (Exception, SystemExit) as error:
        raise unusable(group, name, f"{type(error).__name__}: {first_line(error)}") from error


def measurement(name: str, kind: type[_T], *arguments: Any) -> _T:
    """The installed subclass of ``kind`` under this name, made with these arguments; without one, ``kind`` itself.
    Raises ConfigurationError: it cannot be used."""
    if name not in guests(MEASUREMENTS):
        return kind(*arguments)

    def fits(guest: Any) -> bool:
        return isinstance(guest, type) and issubclass(guest, kind)

    made: _T = ask_guest(MEASUREMENTS, name, lambda guest: guest(*arguments), f"a subclass of {kind.__name__}", fits)
    return made


def lacking(guest: object, protocol: type) -> list[str]:
    """Functions of a protocol that an object does not have."""
    names = (name for name in vars(protocol) if not name.startswith("_"))
    return [name for name in names if not callable(getattr(guest, name, None))]


def unusable(group: str, name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot use {brought_by(group, name)}: {why}. Install the version of it that belongs to this version of "
        "cacheclip-rag, or uninstall it."
    )


def brought_by(group: str, name: str) -> str:
    """An entry point and its distribution, for messages."""
    [guest, *_] = guests(group)[name]
    return f"{name!r} ({guest.value}) of {distribution(guest)} as {group}"


@cache
def _loaded(guest: EntryPoint) -> Any:
    return guest.load()


def distribution(guest: EntryPoint) -> str:
    """Name and version of the distribution that brings an entry point."""
    return f"{guest.dist.name} {guest.dist.version}" if guest.dist else "an unknown distribution"
