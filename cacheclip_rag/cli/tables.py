"""Tables of a settings file (``--settings``): what a command takes that hardly anybody types.

    primary = "Qwen/Qwen2.5-0.5B-Instruct"      # settings of the engine, by their names
    codec = "int8"

    [serve]                                     # for cacheclip serve
    max_running = 8

Names and values are checked strictly.
"""

from __future__ import annotations

from dataclasses import fields

from ..base.checks import check_flag, check_number, check_whole_number
from ..base.errors import ConfigurationError


class Table:
    """A table. Values of another type than their field's, and negative numbers, raise ConfigurationError."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            kind = each.type.__name__ if isinstance(each.type, type) else str(each.type)  # a text in many modules
            value, kind = getattr(self, each.name), kind.removesuffix(" | None")
            if value is None:
                continue
            if kind == "int":
                check_whole_number(each.name, value)
            elif kind == "float":
                check_number(each.name, value, "a number, 0 or more", most=float("inf"))
            elif kind == "bool":
                check_flag(each.name, value)
            elif kind == "list[str]":
                if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
                    raise ConfigurationError(f"{each.name} must be a list of non-empty strings, got {value!r}.")
            elif not isinstance(value, str) or not value:
                raise ConfigurationError(f"{each.name} must be a non-empty string, got {value!r}.")


TABLES: dict[str, type[Table]] = {}
"""By the name of their command. Commands of other distributions add theirs (:mod:`.plugins`)."""

BROUGHT = {
    **dict.fromkeys(
        ("demo", "bench", "eval", "certify", "finetune", "calibrate", "profile", "doctor", "models list"), "lab"
    ),
    **dict.fromkeys(("ingest", "ask", "store remove"), "ingest"),
    "serve": "serve",
    **dict.fromkeys((f"store {name}" for name in ("stats", "limit", "verify", "repair", "gc", "clear")), "care"),
    "explain-miss": "care",
    **dict.fromkeys(("store create", "store compact"), "shared"),
}
"""Commands of distributions of this repository, and the extra that installs each."""
