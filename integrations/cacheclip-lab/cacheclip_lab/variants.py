"""Variants: named methods read from a TOML file, so that settings can be compared without writing code.

    [low]
    preset = "cacheclip"
    correction = 0.0
    chunk_context = "prefix"

    [low.budget]
    ratio = 0.1
    grouping = {type = "Tokens"}

    [starts-alone]
    preset = "cacheclip"
    scorer = {type = "ChunkStart"}

Every table names a preset and changed settings. Fields are those of the classes in :mod:`cacheclip_rag.methods` and
:mod:`cacheclip_rag.selection` (:func:`cacheclip_rag.methods.settings.vary`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cacheclip_rag import ConfigurationError
from cacheclip_rag.methods import DEFAULT_METHOD, PRESET_NAMES, Method, Recompute, preset, vary

from .comparators import Random

AGAIN = "full-again"
"""Full prefill in two pieces: the noise floor, because only the order of its sums differs."""
REORDERED = "full-reordered"
"""Full prefill with its chunks in another order: how much the answer depends on what a retriever decides by a hair."""
RANDOM = Recompute(Random(), name="random")
"""Random spans: the effect of the budget alone."""

_PRESET = "preset"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_TAKEN = (*PRESET_NAMES, DEFAULT_METHOD, AGAIN, REORDERED, "all")


def read_variants(path: Path | str | None, ratio: float | None = None) -> dict[str, Method]:
    """The methods of a file by name; empty for None.

    Args:
        ratio: recompute ratio of variants whose budget names none; default the preset's.

    Raises:
        ConfigurationError: the file cannot be read, or a table is not a valid variant.
    """
    if path is None:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: neither UTF-8 nor TOML
        raise ConfigurationError(f"cannot read the variants file {path}: {error}.") from error
    return {name: _at(ratio, _variant(name, table, path), table) for name, table in tables.items()}


def method_named(name: str, variants: Mapping[str, Method]) -> Method | str:
    """The variant called ``name``, else the name itself (a preset's, or unknown)."""
    return variants.get(name, name)


def _at(ratio: float | None, variant: Method, table: Mapping[str, Any]) -> Method:
    """A variant at a ratio, unless its table names another one or it has none."""
    budget = table.get("budget")
    if ratio is None or not variant.has_ratio or (isinstance(budget, Mapping) and "ratio" in budget):
        return variant
    return variant.at(ratio)


def _variant(name: str, table: Any, path: Path | str) -> Method:
    where = f"[{name}] of {path}"
    if not isinstance(table, dict):
        raise ConfigurationError(f"expected tables in {path}, each a variant, got {name} = {table!r}.")
    if name in _TAKEN or not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{where}: a variant's name is of letters, digits, '-', '_' and '.', and none of "
            f"{', '.join(_TAKEN)}. Choose another."
        )
    if not isinstance(table.get(_PRESET), str):
        raise ConfigurationError(f'{where}: expected preset = "NAME", one of {", ".join(PRESET_NAMES)}.')
    changes = {field: value for field, value in table.items() if field != _PRESET}
    try:
        return vary(preset(table[_PRESET]), {"name": name, **changes})
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error
