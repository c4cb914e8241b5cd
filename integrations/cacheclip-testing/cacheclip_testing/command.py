"""Runs ``cacheclip`` as its entry point does."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from cacheclip_rag.plugins import python_command, python_environment

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True, slots=True)
class CommandRun:
    """What a command did."""

    code: int
    """Exit code."""
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """What ``--json`` printed."""
        return cast(dict[str, Any], json.loads(self.out))


def run_command(patch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str], *arguments: object) -> CommandRun:
    """Run a command in this process."""
    from cacheclip_rag.plugins import main

    patch.setattr(sys, "argv", ["cacheclip", *map(str, arguments)])
    code: object = 0
    try:
        main()
    except SystemExit as error:
        code = error.code
    printed = captured.readouterr()
    return CommandRun(code if isinstance(code, int) else 0, printed.out, printed.err)


def run_without_torch(*arguments: object) -> CommandRun:
    """Run a command in a process of its own, in which torch cannot be imported: what cannot work must be refused before
    anything heavy is."""
    program = "import sys; sys.modules['torch'] = None; from cacheclip_rag.cli import main; main()"
    command, environment = python_command("-c", program, *map(str, arguments)), python_environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return CommandRun(done.returncode, done.stdout, done.stderr)
