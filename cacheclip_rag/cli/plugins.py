"""Commands that other distributions bring: functions under the entry point ``cacheclip.commands``, which get
:class:`Commands` and add to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import typer
from typer.models import CommandInfo

from ..base.errors import ConfigurationError
from ..base.guests import guests, load_guest
from ..config import EngineConfig
from .options import SettingsCommand
from .tables import TABLES, Table

GROUP = "cacheclip.commands"


class Companion(Protocol):
    """What a distribution keeps in stores beside chunk caches, such as documents."""

    def config(self, store: str, typed: Mapping[str, Any]) -> EngineConfig | None:
        """Settings of an engine on a store, as the companion's data there need them, with those that the user typed;
        None: it keeps nothing in this store.

        Raises:
            ConfigurationError: what was typed contradicts the data.
        """

    def counts(self, folder: Path) -> dict[str, int]:
        """How many of each thing, for ``cacheclip store stats``."""

    def problems(self, folder: Path) -> list[str]:
        """What is wrong with its files, for ``cacheclip store verify``."""

    def repair(self, folder: Path) -> list[str]:
        """Mend its files, for ``cacheclip store repair``. Returns what was done."""

    def texts(self, folder: Path) -> Iterable[str]:
        """Its texts, for ``cacheclip explain-miss``."""


@dataclass(frozen=True, slots=True)
class Commands:
    """What a distribution adds to."""

    app: typer.Typer
    groups: Mapping[str, typer.Typer] = field(default_factory=dict)
    """Commands of commands, such as ``store``, by name."""

    def add(
        self, name: str, command: Callable[..., None], table: type[Table] | None = None, *, takes_flags: bool = False
    ) -> None:
        """Add a command.

        Args:
            name: such as ``eval``, or ``store remove`` for one of a group.
            table: of its settings in a file of ``--settings``.
            takes_flags: whether options that it does not declare are no error (``typer.Context.args`` has them).
        """
        group, _, own = name.rpartition(" ")
        context = {"allow_extra_args": True, "ignore_unknown_options": True} if takes_flags else None
        app = self.groups[group] if group else self.app
        app.command(own, cls=SettingsCommand, context_settings=context)(command)
        if table is not None:
            TABLES[name] = table

    def keep_beside(self, companion: Companion) -> None:
        """Ask a companion wherever a command looks into a store."""
        COMPANIONS.append(companion)


COMPANIONS: list[Companion] = []
"""Of the distributions whose commands were loaded."""


class CommandLine(typer.Typer):
    """A command line that loads the commands of other distributions when its commands are first asked for, so that
    those may import this package's options."""

    groups: Mapping[str, typer.Typer] = {}
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
                    register(Commands(self, self.groups))
        return self._commands

    @registered_commands.setter
    def registered_commands(self, commands: list[CommandInfo]) -> None:
        self._commands = commands

    def load_later(self, groups: Mapping[str, typer.Typer]) -> None:
        """Look for other distributions' commands at the next use."""
        self.groups, self._is_loaded = groups, False
