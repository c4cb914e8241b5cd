"""Runs ``cacheclip`` as its entry point does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
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


_WITHOUT_TORCH = """
import contextlib, io, json, sys
sys.modules["torch"] = None
from cacheclip_rag.cli import main
ran = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, code, out, err = ["cacheclip", *arguments], 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as error:
            code = error.code or 0
    ran.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(ran))
"""


def run_without_torch(*commands: Sequence[object]) -> list[CommandRun]:
    """Run commands, each a sequence of arguments, in a process of their own, in which torch cannot be imported: what
    cannot work must be refused before anything heavy is."""
    command = python_command("-c", _WITHOUT_TORCH, json.dumps([[*map(str, arguments)] for arguments in commands]))
    done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [CommandRun(*ran) for ran in json.loads(done.stdout)]
