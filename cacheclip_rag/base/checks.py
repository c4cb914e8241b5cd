"""Checks of settings. This module does not import torch."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any
from urllib.parse import urlsplit

from .errors import ConfigurationError
from .guests import STORES, guests
from .paths import HOT_SCHEMES, SCHEMES, is_url, split_hot
from .urls import HIDDEN, shown_url

ALIASES = {
    "model": "primary",
    "model_name": "primary",
    "auxiliary_model_name": "auxiliary",
    "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
}
"""Names that LlamaIndex, LangChain or transformers use for a setting. Engine and adapters accept all of them."""


def aliases_of(known: Collection[str]) -> dict[str, str]:
    """The :data:`ALIASES` of some settings."""
    return {alias: name for alias, name in ALIASES.items() if name in known}


def by_real_names(settings: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Settings with aliases replaced by the names of ``known`` settings. Raises ConfigurationError: a setting is given
    twice, under two names."""
    aliases, named = aliases_of(known), {}
    for alias, value in settings.items():
        name = aliases.get(alias, alias)
        if name in named:
            raise ConfigurationError(f"{name} was given twice, once as {alias}. Give it once.")
        named[name] = value
    return named


def refuse_unknown(what: str, names_given: Iterable[str], known: Sequence[str]) -> None:
    """Raise ConfigurationError, with what may be meant, for names that are neither ``known`` nor :data:`ALIASES` of
    them. ``what`` they are stands in the message (``option``)."""
    names = (*known, *aliases_of(known))
    if unknown := sorted(set(names_given).difference(names)):
        hint = did_you_mean(unknown, names)
        raise ConfigurationError(f"unknown {what} {', '.join(unknown)}.{hint} Known: {', '.join(known)}.")


def did_you_mean(unknown: str | Iterable[str], known: Iterable[str]) -> str:
    """`` Did you mean 'X'?`` with the nearest known name of each unknown one; empty if none is near."""
    known = list(known)
    several = [unknown] if isinstance(unknown, str) else unknown
    close = [match for name in several for match in get_close_matches(name, known, 1)]
    return f" Did you mean {', '.join(map(repr, dict.fromkeys(close)))}?" if close else ""


def path_as_text(value: Any) -> Any:
    """A path as a string; other values as they are."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def model_place(value: Any) -> Any:
    """A model's name as a string; of a folder or file that is there, its absolute path, so that a change of the working
    directory has no effect. Other values as they are."""
    name = path_as_text(value)
    if not isinstance(name, str) or not name:
        return name
    place = os.path.expanduser(name)
    is_there = os.path.isfile(place) or os.path.isfile(os.path.join(place, "config.json"))
    return os.path.abspath(place) if is_there else name


def store_place(value: Any) -> Any:
    """A store's URL as a string, or its folder's absolute path. Other values as they are. Raises ConfigurationError: a
    URL that lacks a slash. It is not quoted, and would be a folder that is named by its password."""
    text = path_as_text(value)
    if not isinstance(text, str) or not text:
        return text
    if re.match(r"[A-Za-z][\w+.-]+:/(?!/)", text):
        raise ConfigurationError(
            "store must be a folder or a URL such as s3://bucket/prefix, with two slashes after the colon. Write ./ "
            "before a folder with such a name."
        )
    if not is_url(text):
        return os.path.abspath(os.path.expanduser(text))
    url, hot = split_hot(text)
    return f"{url}?hot={hot}" if hot else url


def check_store_url(store: str) -> None:
    """Raise ConfigurationError unless this is the URL of a shared store, with that of a hot tier or without."""
    url, hot = split_hot(store)
    scheme, _, rest = url.partition("://")
    if f"{HIDDEN}@" in store:
        raise ConfigurationError(
            f"the password of {shown_url(store)!r} was left out where it was shown. Give it again."
        )
    if not (scheme in SCHEMES or scheme in guests(STORES)) or not rest or "@" in rest.partition("/")[0]:
        raise ConfigurationError(
            f"store must be a folder or a URL such as s3://bucket/prefix ({', '.join(SCHEMES)}) without credentials, "
            f"which are read from the environment, got {shown_url(url)!r}."
        )
    if "?hot=" in store and not _is_server(hot):
        raise ConfigurationError(
            f"a hot tier must be a URL such as valkey://host:6379 ({', '.join(HOT_SCHEMES)}), got "
            f"{shown_url(store).partition('?hot=')[2]!r}. In a password, write what means something in URLs as %2F."
        )


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        if re.search(r"[\s\"<>]", url):  # no URL has them, and nobody could tell where this one ends
            return False
        return parts.scheme in HOT_SCHEMES and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def is_whole_number(value: Any) -> bool:
    """Whether ``value`` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole_number(name: str, value: Any, *, least: int = 0, most: int | None = None, of: str = "") -> None:
    """Raise ConfigurationError unless ``value`` of the setting ``name`` is a whole number within its bounds. ``of``:
    the counted unit for the message (``tokens``)."""
    if is_whole_number(value) and value >= least and (most is None or value <= most):
        return
    number = f"a whole number of {of}," if of else "a whole number"
    bounds = f"from {least} to {most}" if most is not None else f"{least} or more"
    comma = "" if of or most is not None else ","
    raise ConfigurationError(f"{name} must be {number}{comma} {bounds}, got {value!r}.")


def check_number(
    name: str, value: Any, says: str, *, above: float | None = None, least: float = 0.0, most: float
) -> None:
    """Raise ConfigurationError unless ``value`` is a number from ``least`` (or above ``above``) to ``most``, as the
    message ``says``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (value >= least if above is None else value > above) and value <= most:
        return
    raise ConfigurationError(f"{name} must be {says}, got {value!r}.")


def check_ratio(recompute_ratio: Any) -> None:
    check_number("recompute_ratio", recompute_ratio, "between 0 (reuse all) and 1 (recompute all)", most=1.0)


AUTO_RATIO = "auto"
"""The recompute ratio that is chosen by predicted time (:mod:`cacheclip_rag.answering.ratios`)."""


def check_ratio_and_limit(recompute_ratio: Any, max_ttft_s: Any) -> None:
    """Raise ConfigurationError unless both are None, or of their kind, and fit together."""
    if isinstance(recompute_ratio, str) and recompute_ratio != AUTO_RATIO:
        hint = did_you_mean(recompute_ratio, [AUTO_RATIO])
        raise ConfigurationError(
            f"recompute_ratio must be a number from 0 to 1 or 'auto', got {recompute_ratio!r}.{hint}"
        )
    if recompute_ratio is not None and recompute_ratio != AUTO_RATIO:
        check_ratio(recompute_ratio)
    if max_ttft_s is None:
        return
    check_number("max_ttft_s", max_ttft_s, "a positive number of seconds", above=0.0, most=1e6)
    if recompute_ratio not in (None, AUTO_RATIO):
        raise ConfigurationError(
            f"max_ttft_s={max_ttft_s!r} chooses the recompute ratio, and recompute_ratio={recompute_ratio!r} is given "
            "too. Leave one of them out."
        )


def check_share(name: str, value: Any, of: str) -> None:
    """Raise ConfigurationError unless ``value`` is a number from 0 to 1: a share ``of`` something."""
    check_number(name, value, f"a share of {of}, 0 to 1", most=1.0)


def check_probability(name: str, value: Any) -> None:
    """Raise ConfigurationError unless ``value``, called ``name`` in the message, is a number from 0 to 1."""
    check_number(name, value, "a probability, 0 to 1", most=1.0)


AUTO_CONFIDENCE = "auto"
"""The confidence gate that the certificate states."""


def check_confidence(name: str, value: Any) -> None:
    """Raise ConfigurationError unless ``value`` is a probability, 0 to 1, or ``auto``."""
    if value != AUTO_CONFIDENCE:
        check_number(name, value, "a probability, 0 to 1, or 'auto'", most=1.0)


def check_choice(name: str, value: Any, allowed: Collection[str]) -> None:
    """Raise ConfigurationError unless ``value`` is one of the ``allowed`` strings."""
    if not isinstance(value, str) or value not in allowed:
        hint = did_you_mean(value, allowed) if isinstance(value, str) else ""
        raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.{hint}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, got {value!r}.")


def check_namespace(namespace: object) -> None:
    """Raise ConfigurationError unless ``namespace`` can be the name of a tenant: 1 to 255 bytes of UTF-8."""
    if not isinstance(namespace, str) or not namespace:
        raise ConfigurationError(f"namespace must be a non-empty string, got {namespace!r}.")
    try:
        length = len(namespace.encode())
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"namespace holds half a character ({namespace[error.start]!r}), which cannot be written as UTF-8."
        ) from error
    if length > 255:
        raise ConfigurationError(f"namespace must have at most 255 bytes, got {length}. Use a digest of a longer name.")


def check_parts(content: Any) -> None:
    """Raise ConfigurationError if the content of a message, or a part of it, is an image or sound."""
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict) and (kind := part.get("type", "text")) != "text":
            raise ConfigurationError(
                f"a message must have text, got one with a part of type {str(kind)[:80]!r}. Models read no images or "
                "sound here: write as text what matters in it, or leave it out."
            )
