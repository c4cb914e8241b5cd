"""Methods as nested mappings: written down for certificates and reports, and changed by variants files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from inspect import isabstract
from typing import Any

from ..errors import ConfigurationError
from ..selection.budget import TokenBudget
from ..selection.grouping import Grouping
from ..selection.scorers import Scorer
from .base import Method

__all__ = ["describe", "vary"]

_TYPE = "type"
_FAMILIES: tuple[type, ...] = (Scorer, TokenBudget, Grouping, Method)
"""Parts whose type a mapping may name."""


def describe(part: Any) -> dict[str, Any]:
    """A method, or a part of one, as ``{"type": ..., field: value}`` with parts nested; JSON can write it.

    A type from outside this package goes by its full name, so that no two types look alike.
    """
    values = {each.name: getattr(part, each.name) for each in fields(part)}
    nested = {name: describe(value) if is_dataclass(value) else value for name, value in values.items()}
    return {_TYPE: _type_name(type(part)), **nested}


def vary(method: Method, changes: Mapping[str, Any]) -> Method:
    """``method`` with other settings.

    Args:
        changes: new values by field. A part (scorer, budget, grouping) takes a mapping of its own: with the ``type`` of
            another class, a new part that has the defaults of its fields for what the mapping leaves out; else the part
            as it is with these changes. A part is also taken as it is made (an instance), or by its type's name alone.

    Raises:
        ConfigurationError: an unknown field or type, or a value that is refused.

    >>> vary(preset("cacheclip"), {"correction": 0.0, "budget": {"grouping": {"type": "Tokens"}}})
    """
    changed = _varied(method, changes, method.name)
    assert isinstance(changed, Method)
    return changed


def _varied(part: Any, changes: Mapping[str, Any], where: str) -> Any:
    wanted = changes.get(_TYPE, _type_name(type(part)))
    given = {name: value for name, value in changes.items() if name != _TYPE}
    if wanted == _type_name(type(part)):
        _check_fields(type(part), given, where)
        return replace(
            part, **{name: _value(getattr(part, name), new, f"{where}.{name}") for name, new in given.items()}
        )
    return _made(_type_of(_family_of(part), wanted, where), given, where)


def _made(cls: type, given: Mapping[str, Any], where: str) -> Any:
    """A new part; nested mappings are made by their type alone."""
    _check_fields(cls, given, where)
    try:
        return cls(**{name: _value(None, value, f"{where}.{name}") for name, value in given.items()})
    except TypeError as error:  # a field without a default
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


def _check_fields(cls: type, given: Mapping[str, Any], where: str) -> None:
    known = [each.name for each in fields(cls)]
    for name in given:
        if name not in known:
            raise ConfigurationError(
                f"{where} has no field {name!r}.{_hint(name, known)} Fields of {cls.__name__}: {', '.join(known)}."
            )


def _type_of(family: type | None, wanted: object, where: str) -> type:
    known: dict[str, type] = {}
    for base in _FAMILIES[:-1] if family is None else (family,):
        known.update((_type_name(each), each) for each in _concrete(base))
    if not isinstance(wanted, str) or wanted not in known:
        raise ConfigurationError(
            f"{where} must be of type {', '.join(sorted(known))}, got {wanted!r}.{_hint(str(wanted), list(known))}"
        )
    return known[wanted]


def _family_of(part: Any) -> type:
    return next(family for family in _FAMILIES if isinstance(part, family))


def _concrete(base: type) -> Iterator[type]:
    """Classes that can be made, those that users derived included."""
    derived: list[type] = base.__subclasses__()
    for cls in derived:
        yield from _concrete(cls)
    if not isabstract(base):
        yield base


def _type_name(cls: type) -> str:
    is_ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
    return cls.__name__ if is_ours else f"{cls.__module__}.{cls.__qualname__}"


def _hint(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, 1)
    return f" Did you mean {close[0]!r}?" if close else ""
