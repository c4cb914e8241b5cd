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

__all__ = ["METHODS", "check_auxiliary", "check_method", "check_ratio", "create", "method_class"]

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


def check_ratio(recompute_ratio: float) -> None:
    """Raise ConfigurationError unless the ratio is a number from 0 to 1."""
    if not isinstance(recompute_ratio, int | float) or not 0.0 <= recompute_ratio <= 1.0:
        raise ConfigurationError(
            f"recompute_ratio must be between 0 (reuse all) and 1 (recompute all), got {recompute_ratio!r}."
        )


def check_auxiliary(method: Method | type[Method], auxiliary: str | None) -> None:
    """Raise ConfigurationError if the method needs an auxiliary model and there is none."""
    if method.needs_auxiliary and not auxiliary:
        others = [name for name in METHODS if not method_class(name).needs_auxiliary]
        raise ConfigurationError(
            f"method {method.name!r} needs an auxiliary model and none is set. Set one (auxiliary), or use a method "
            f"that needs none: {', '.join(others)}."
        )


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
