"""Python processes that this package starts. None of them runs code of the folder in which the user happens to be: a
``pip.py`` or a ``vllm`` beside the documents is not imported, whatever the environment's relative paths say."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .folder import open_folder
from .paths import cache_home

_PLACES = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONPYCACHEPREFIX", "PYTHONSTARTUP")
"""Variables that say where Python finds code, compiled code too."""


def python_command(*arguments: str) -> list[str]:
    """The command of a Python that puts neither the current folder nor a script's into ``sys.path``."""
    return [sys.executable, "-P", *arguments]


def python_environment(**more: str) -> dict[str, str]:
    """The environment of such a process: what it starts is told the same. Of places of code, absolute paths stay, and
    relative ones, which depend on the current folder, are left out, as are those in ``/proc``, such as
    ``/proc/self/cwd``; an empty part of ``PYTHONPATH`` is the folder."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **more}
    for name in _PLACES:
        places = environment.pop(name, "").split(os.pathsep)
        if kept := os.pathsep.join(filter(_stays, places)):
            environment[name] = kept
    if home := os.environ.get("CACHECLIP_HOME"):
        environment["CACHECLIP_HOME"] = os.path.abspath(os.path.expanduser(home))
    return environment


def _stays(place: str) -> bool:
    """Whether a place is the same for each process, wherever that runs."""
    return os.path.isabs(place) and Path(os.path.normpath(place)).parts[1:2] != ("proc",)


def own_folder() -> Path:
    """A folder in which a process may run for long: it belongs to this user, and nobody puts code into it."""
    with open_folder(cache_home().absolute(), "run", make=True) as folder:
        return folder.path
