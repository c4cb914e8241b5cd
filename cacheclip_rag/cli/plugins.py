"""Commands that other distributions bring: functions under the entry point ``cacheclip.commands``, which get
:class:`Commands` and add to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command
from typer.models import CommandInfo

from ..base.errors import ConfigurationError, MissingExtraError
from ..base.guests import ask_guest, distribution, guests, lacking
from ..base.names import OPTIONS, refuse_removed
from .companions import COMPANIONS, Companion
from .options import SettingsCommand
from .tables import BROUGHT, TABLES, Table

GROUP = "cacheclip.commands"
_EXPECTED = "a function that gets Commands (see cacheclip_rag.plugins)"
FAILED: dict[str, str] = {}
"""Why commands are missing, by the entry points that bring them."""


@dataclass(frozen=True, slots=True)
class Commands:
    """What a distribution adds to."""

    app: typer.Typer
    groups: Mapping[str, typer.Typer] = field(default_factory=dict)
    """Commands of commands, such as ``store``, by name."""
    owner: str = "another distribution"
    """Name and version of the distribution."""
    owners: dict[str, str] = field(default_factory=dict)
    """Who brought each command that is not this package's."""

    def add(
        self, name: str, command: Callable[..., None], table: type[Table] | None = None, *, takes_flags: bool = False
    ) -> None:
        """Add a command.

        Args:
            name: such as ``eval``, or ``store remove`` for one of a group.
            table: of its settings in a file of ``--settings``.
            takes_flags: whether options that it does not declare are no error (``typer.Context.args`` has them).

        Raises:
            ConfigurationError: there is such a command, no such group, or typer cannot make options of its parameters.
        """
        group, _, own = name.rpartition(" ")
        if group and group not in self.groups:
            raise ConfigurationError(
                f"expected a command of its own, or of one of the groups {', '.join(self.groups)}, got {name!r}."
            )
        context = {"allow_extra_args": True, "ignore_unknown_options": True} if takes_flags else None
        app = self.groups[group] if group else self.app
        taken = [each.name for each in app.registered_commands] + [each.name for each in app.registered_groups]
        if own in taken:
            raise ConfigurationError(
                f"cacheclip {name} is a command of {self.owners.get(name, 'cacheclip-rag')} already. Give that of "
                f"{self.owner} another name."
            )
        alone = typer.Typer(add_completion=False)
        alone.command(own)(command)
        get_command(alone)  # here, where it is known whose command it is
        app.command(own, cls=SettingsCommand, context_settings=context)(command)
        self.owners[name] = self.owner
        if table is not None:
            TABLES[name] = table

    def keep_beside(self, companion: Companion) -> None:
        """Ask a companion wherever a command looks into a store. Raises ConfigurationError: it lacks a function."""
        if lacks := lacking(companion, Companion):
            raise ConfigurationError(f"expected a Companion, got {companion!r} without {', '.join(lacks)}.")
        COMPANIONS.append(companion)


class CommandGroup(TyperGroup):
    """Commands of which what is gone, or not installed, is refused with what to do instead."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        refuse_removed(args[:1], OPTIONS)
        if args and self.get_command(ctx, args[0]) is None:
            name = args[0] if ctx.parent is None else f"{ctx.info_name} {args[0]}"
            if BROUGHT.get(name) in FAILED:
                raise ConfigurationError(f"cacheclip {name} is missing: {FAILED[BROUGHT[name]]}")
            if name in BROUGHT:
                raise MissingExtraError(f"cacheclip {name}", BROUGHT[name])
        return super().resolve_command(ctx, args)


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
            self._is_loaded, owners = True, dict[str, str]()
            for name, [guest, *_] in guests(GROUP).items():
                commands = Commands(self, self.groups, distribution(guest), owners)
                try:
                    ask_guest(GROUP, name, methodcaller("__call__", commands), _EXPECTED)
                except ConfigurationError as error:  # the other commands work
                    FAILED[name] = str(error)
                    typer.echo(f"cacheclip: {error} Commands of it are missing.", err=True)
        return self._commands

    @registered_commands.setter
    def registered_commands(self, commands: list[CommandInfo]) -> None:
        self._commands = commands

    def load_later(self, groups: Mapping[str, typer.Typer]) -> None:
        """Look for other distributions' commands at the next use."""
        self.groups, self._is_loaded = groups, False
