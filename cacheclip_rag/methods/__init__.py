"""Methods by name. To add one: a file with a :class:`Method` dataclass, a line here, a row in the test matrix.

The registry holds import paths, not classes, so that names can be checked before torch is loaded.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from .base import Method

__all__ = ["METHODS", "check_method", "create", "method_class"]

METHODS: dict[str, str] = {
    "full": "full:Full",
    "direct": "direct:Direct",
    "cacheclip": "cacheclip:CacheClip",
}
"""Name to ``module:Class`` in this package."""


def check_method(name: str) -> None:
    """Raise ConfigurationError, listing the known methods, unless ``name`` is one of them."""
    if name not in METHODS:
        raise ConfigurationError(f"method must be one of {', '.join(METHODS)}, got {name!r}.")


def method_class(name: str) -> type[Method]:
    """The class registered under ``name``."""
    check_method(name)
    module, _, cls = METHODS[name].partition(":")
    found: type[Method] = getattr(import_module(f".{module}", __name__), cls)
    return found


def create(name: str, settings: dict[str, Any]) -> Method:
    """Make a method by name from engine settings, taking those it declares."""
    cls = method_class(name)
    declared = {field.name for field in fields(cls)}
    return cls(**{key: value for key, value in settings.items() if key in declared})
