"""Methods as nested mappings, for certificates, reports and variants files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from inspect import isabstract
from typing import Any

from ..base.checks import did_you_mean
from ..base.errors import ConfigurationError
from ..selection.budget import Grouping, TokenBudget
from ..selection.scorers import Scorer
from .base import Method

_TYPE = "type"
_FAMILIES: tuple[type, ...] = (Scorer, TokenBudget, Grouping, Method)
"""Base classes whose subclasses a mapping may name by ``type``."""


def describe(part: Any) -> dict[str, Any]:
    """A method, or a part of a method, as nested mappings ``{"type": ..., field: value}``, ready for JSON.

    Types from other packages are given by their full name, so that two types never share a name.
    """
    values = {each.name: getattr(part, each.name) for each in fields(part)}
    nested = {name: describe(value) if is_dataclass(value) else value for name, value in values.items()}
    return {_TYPE: _type_name(type(part)), **nested}


def vary(method: Method, changes: Mapping[str, Any]) -> Method:
    """``method`` with other settings.

    Args:
        changes: new values by field. The value for a part (scorer, budget, grouping) may be a mapping. If it names
            another ``type``, a new part is made, with defaults for missing fields; otherwise the present part is
            changed. The value may also be an instance, or the name of a type.

    Raises:
        ConfigurationError: an unknown field or type, or an invalid value.

    >>> vary(preset("cacheclip"), {"correction": 0.0, "budget": {"grouping": {"type": "Tokens"}}})
    """
    changed = _varied(method, changes, method.name)
    assert isinstance(changed, Method)
    return changed


def _varied(part: Any, changes: Mapping[str, Any], where: str) -> Any:
    wanted = changes.get(_TYPE, _type_name(type(part)))
    values = {name: value for name, value in changes.items() if name != _TYPE}
    if wanted == _type_name(type(part)):
        _check_fields(type(part), values, where)
        return replace(
            part, **{name: _value(getattr(part, name), new, f"{where}.{name}") for name, new in values.items()}
        )
    family = next(family for family in _FAMILIES if isinstance(part, family))
    return _made(_type_of(family, wanted, where), values, where)


def _made(cls: type, values: Mapping[str, Any], where: str) -> Any:
    """A new part; nested mappings must name their types."""
    _check_fields(cls, values, where)
    try:
        return cls(**{name: _value(None, value, f"{where}.{name}") for name, value in values.items()})
    except TypeError as error:  # a field without a default is missing
        raise ConfigurationError(f"{where} of type {cls.__name__} is not complete: {error}.") from error


def _value(old: Any, new: Any, where: str) -> Any:
    if isinstance(new, Mapping):
        if is_dataclass(old):
            return _varied(old, new, where)
        if _TYPE not in new:
            raise ConfigurationError(f"{where} must name its type, got {dict(new)!r}.")
        rest = {name: value for name, value in new.items() if name != _TYPE}
        return _made(_type_of(None, new[_TYPE], where), rest, where)
    if is_dataclass(old) and isinstance(new, str):
        return _varied(old, {_TYPE: new}, where)
    return new


def _check_fields(cls: type, values: Mapping[str, Any], where: str) -> None:
    known = [each.name for each in fields(cls)]
    for name in values:
        if name not in known:
            raise ConfigurationError(
                f"{where} has no field {name!r}.{did_you_mean(name, known)} Fields of {cls.__name__}: "
                f"{', '.join(known)}."
            )


def _type_of(family: type | None, wanted: object, where: str) -> type:
    known: dict[str, type] = {}
    for base in _FAMILIES[:-1] if family is None else (family,):
        known.update((_type_name(each), each) for each in _concrete(base))
    if not isinstance(wanted, str) or wanted not in known:
        raise ConfigurationError(
            f"{where} must be of type {', '.join(sorted(known))}, got {wanted!r}.{did_you_mean(str(wanted), known)}"
        )
    return known[wanted]


def _concrete(base: type) -> Iterator[type]:
    """Classes that can be instantiated, including users' own subclasses."""
    derived: list[type] = base.__subclasses__()
    for cls in derived:
        yield from _concrete(cls)
    if not isabstract(base):
        yield base


def _type_name(cls: type) -> str:
    is_ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
    return cls.__name__ if is_ours else f"{cls.__module__}.{cls.__qualname__}"
