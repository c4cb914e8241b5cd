"""Commands that other distributions bring: functions under the entry point ``cacheclip.commands``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import typer
from typer.models import CommandInfo

from ..base.errors import ConfigurationError
from ..base.guests import guests, load_guest
from .options import SettingsCommand
from .tables import TABLES, Table

GROUP = "cacheclip.commands"


@dataclass(frozen=True, slots=True)
class Commands:
    """What a plug-in adds to."""

    app: typer.Typer

    def add(self, name: str, command: Callable[..., None], table: type[Table] | None = None) -> None:
        """Add a command, and the table of its settings in a file of ``--settings``."""
        self.app.command(name, cls=SettingsCommand)(command)
        if table is not None:
            TABLES[name] = table


class CommandLine(typer.Typer):
    """A command line that loads the commands of other distributions when its commands are first asked for, so that
    those may import this package's options."""

    _commands: list[CommandInfo]
    _is_loaded = True
    """While the package's own commands are added."""

    @property
    def registered_commands(self) -> list[CommandInfo]:
        if not self._is_loaded:
            self._is_loaded = True
            for name in guests(GROUP):
                try:
                    register = load_guest(GROUP, name)
                except ConfigurationError as error:  # the other commands work
                    typer.echo(f"cacheclip: {error}", err=True)
                else:
                    register(Commands(self))
        return self._commands

    @registered_commands.setter
    def registered_commands(self, commands: list[CommandInfo]) -> None:
        self._commands = commands

    def load_later(self) -> None:
        """Look for other distributions' commands at the next use."""
        self._is_loaded = False
