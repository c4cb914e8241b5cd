"""Shared parts of the laboratory's commands: settings of what is measured, options, tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheclip_rag import ConfigurationError, EngineConfig
from cacheclip_rag.plugins import CommandSettings, check_backend

_OF_A_SERVICE = (
    *("store", "max_bytes", "memory_bytes", "require_certificate", "finish", "shadow_rate", "min_confidence"),
    "max_ttft_s",
)
"""Settings that would change what is measured."""

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A table: the titles of its columns, and its rows."""
VariantsOption = Annotated[
    Path | None,
    typer.Option("--variants", help="TOML file of methods by name: each a preset with changed settings."),
]
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend",
        callback=check_backend,
        help="What runs the primary: transformers in this process, or vllm.",
    ),
]


def measured(settings: CommandSettings, **own: Any) -> EngineConfig:
    """Settings of an engine whose speed or answers are measured. Settings of a service, which the file may hold
    too, do not count.

    Raises:
        ConfigurationError: the recompute ratio is not a number.
    """
    engine = {name: value for name, value in settings.engine.items() if name not in _OF_A_SERVICE}
    config = EngineConfig.from_options(None, {**engine, **own})
    if config.recompute_ratio != config.fixed_ratio:
        raise ConfigurationError(
            f"recompute_ratio must be a number to be measured, got {config.recompute_ratio!r}. Give --ratio."
        )
    return config


def print_tables(tables: Mapping[str, Rows], *lines: str, texts: Collection[str] = ()) -> None:
    """Print tables by title, then lines of text. Columns with a title in ``texts`` are no figures."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # wide if stdout is not a terminal, so that no figure is cut off in a file
    out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)
    for title, (titles, rows) in tables.items():
        printed = Table(title=Text(title))
        for number, each in enumerate(titles):
            is_name = number == 0  # is read whole; figures' titles may take several lines
            printed.add_column(Text(each), justify="left" if is_name or each in texts else "right", no_wrap=is_name)
        for row in rows:
            printed.add_row(*map(Text, row))  # names and texts of others, in which brackets mean nothing
        out.print(printed)
    for line in lines:
        out.print(Text(line), soft_wrap=True)
