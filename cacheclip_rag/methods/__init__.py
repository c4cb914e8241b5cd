"""Methods by name. To add one: a file with a :class:`Method` dataclass, a line here, a row in the test matrix.

The registry holds import paths, not classes, so that names can be checked before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from .base import Method

__all__ = [
    "DEFAULT_METHOD",
    "METHODS",
    "check_auxiliary",
    "check_method",
    "check_ratio",
    "create",
    "method_class",
    "spec_of",
]

METHODS: dict[str, str] = {
    "full": "full:Full",
    "prefix": "prefix:Prefix",
    "direct": "direct:Direct",
    "direct_gapped": "direct:DirectGapped",
    "ape": "ape:Ape",
    "epic": "epic:Epic",
    "cacheblend": "cacheblend:CacheBlend",
    "cacheclip": "cacheclip:CacheClip",
    "query_attention": "query_attention:QueryAttention",
    "prophetkv": "query_attention:ProphetKV",
    "qcfuse": "query_attention:QCFuse",
    "infoflow": "query_attention:InfoFlow",
    "key_bounds": "key_bounds:KeyBounds",
    "mixed": "mixed:Mixed",
    "anchored": "mixed:Anchored",
    "random": "random:Random",
    "oracle": "oracle:Oracle",
    "cachecraft": "cachecraft:CacheCraft",
    "block": "block:BlockAttention",
    "link": "link:KVLink",
    "map_reduce": "map_reduce:MapReduce",
    "map_rerank": "map_reduce:MapRerank",
}
"""Name to ``module:Class`` in this package."""

DEFAULT_METHOD = "auto"
"""No method of its own: ``cacheclip`` where the engine's auxiliary model has a head set, ``anchored`` elsewhere
(:meth:`~cacheclip_rag.engine.CacheClipEngine.make_method`)."""


def check_method(method: str) -> None:
    """Raise ConfigurationError, listing the known methods, unless ``method`` is ``auto`` or names one of them (settings
    may follow the name, as in ``epic:k_init=16``; they are checked when the method is made)."""
    if method != DEFAULT_METHOD and method.partition(":")[0] not in METHODS:
        raise ConfigurationError(
            f"method must be {DEFAULT_METHOD} (which takes no settings) or one of {', '.join(METHODS)}, got {method!r}."
        )


def check_ratio(recompute_ratio: float) -> None:
    """Raise ConfigurationError unless the ratio is a number from 0 to 1."""
    number = isinstance(recompute_ratio, int | float) and not isinstance(recompute_ratio, bool)
    if not number or not 0.0 <= recompute_ratio <= 1.0:
        raise ConfigurationError(
            f"recompute_ratio must be between 0 (reuse all) and 1 (recompute all), got {recompute_ratio!r}."
        )


def check_auxiliary(method: Method, auxiliary: str | None) -> None:
    """Raise ConfigurationError if the method needs an auxiliary model and there is none."""
    if method.needs_auxiliary and not auxiliary:
        others = [name for name in METHODS if not create(name, {}).needs_auxiliary]
        raise ConfigurationError(
            f"method {method.name!r} needs an auxiliary model and none is set. Set one (auxiliary), or use a method "
            f"that needs none: {', '.join(others)}."
        )


def method_class(method: str) -> type[Method]:
    """The class registered under the name that ``method`` begins with."""
    check_method(method)
    if method == DEFAULT_METHOD:
        raise ConfigurationError(f"an engine chooses what {method!r} means; name a method here: {', '.join(METHODS)}.")
    module, _, cls = METHODS[method.partition(":")[0]].partition(":")
    found: type[Method] = getattr(import_module(f".{module}", __name__), cls)
    return found


def create(method: str, settings: Mapping[str, Any]) -> Method:
    """Make a method from its name and from engine settings, taking those it declares.

    Args:
        method: a name, or a name with settings of its own, which win: ``epic:k_init=16``,
            ``query_attention:layers=upper:window=1``. Methods that are settings of another (``mixed``) carry theirs
            behind slashes: ``mixed:first=cacheclip/layers=all:second=epic``.

    Raises:
        ConfigurationError: an unknown method or setting, or a value that the method refuses.
    """
    cls = method_class(method)
    defaults = {field.name: field.default for field in fields(cls)}
    chosen = {key: value for key, value in settings.items() if key in defaults}
    for part in method.split(":")[1:]:
        key, separator, value = part.partition("=")
        if not separator or key not in defaults:
            raise ConfigurationError(
                f"settings of method {cls.name!r} are written name=value, with names among "
                f"{', '.join(defaults) or 'none'}; got {part!r}."
            )
        chosen[key] = _parse(cls.name, key, value, type(defaults[key]))
    return cls(**chosen)


def spec_of(method: Method, settings: Mapping[str, Any] | None = None) -> str:
    """A method as :func:`create` takes it together with ``settings`` (default none): its name, and what of it they do
    not give, but for the ratio."""
    given = {**{field.name: field.default for field in fields(method)}, **(settings or {})}
    own = {field.name: getattr(method, field.name) for field in fields(method) if field.name != "recompute_ratio"}
    return ":".join([method.name, *(f"{name}={value}" for name, value in own.items() if value != given[name])])


def _parse(method: str, key: str, value: str, kind: type) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ConfigurationError(f"{key} of method {method!r} must be true or false, got {value!r}.")
        return value.lower() == "true"
    try:
        return kind(value)
    except ValueError:
        raise ConfigurationError(
            f"{key} of method {method!r} must be of type {kind.__name__}, got {value!r}."
        ) from None
