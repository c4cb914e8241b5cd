"""The ``cacheclip`` command. Options and output formats are stable: scripts rely on them.

With ``--json``, every command prints one JSON object and nothing else on stdout. After an error, stdout is empty and
one line on stderr gives the reason. Exit codes: 0 success, 1 failure (an error of this library, or documents that could
not be read), 2 bad usage.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import models
from .common import guarded
from .plugins import CommandGroup, CommandLine

__all__ = ["app", "main"]

app = CommandLine(
    name="cacheclip",
    cls=CommandGroup,
    help="Answers over your documents, with the first token several times sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cacheclip {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Answers over your documents, with the first token several times sooner."""


store = typer.Typer(cls=CommandGroup, help="The chunk-cache store.", no_args_is_help=True)
"""Its commands come from other distributions."""
app.add_typer(models.app, name="models")
app.add_typer(store, name="store")
app.load_later({"models": models.app, "store": store})


def main() -> None:
    """Entry point: runs the command. Errors of this library become one line on stderr."""
    guarded(app)
