"""The door: what another distribution may bring to this package, and what it may take from it.

It brings objects by entry points, which are loaded when they are first needed:

| group | an entry point is | such as |
|---|---|---|
| ``cacheclip.commands`` | a function that gets :class:`Commands` and adds commands to ``cacheclip`` | ``cacheclip_lab.commands:register`` |
| ``cacheclip.runtimes`` | a loader of models, asked whether a model's name is its own | ``cacheclip_llamacpp:loader`` |
| ``cacheclip.stores`` | for a scheme of URLs, what opens such a store | ``s3 = cacheclip_shared:opener`` |
| ``cacheclip.observers`` | a function that gets an engine's config and returns an :class:`~cacheclip_rag.guards.Observer`, or None | |
| ``cacheclip.methods`` | for a preset's name, its :class:`~cacheclip_rag.methods.Method` | ``mine = my_package:METHOD`` |

It takes from here, from the package itself (engine, settings, answers, errors), and from ``adapters``, ``guards``,
``measuring``, ``methods``, ``models``, ``planning``, ``runtime``, ``selection``, ``store`` and ``testing``. Everything
else may change without a word. ``cacheclip_rag.testing.door`` tells whether a distribution keeps to that.
"""  # noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING

from .base.late import late_names

if TYPE_CHECKING:
    from .base.checks import check_choice, did_you_mean
    from .base.machine import processor_name, unit_name
    from .base.paths import atomic_path, cache_home, expanded, is_url
    from .base.progress import progress_bar
    from .base.urls import shown_url
    from .cli.common import JsonOption, Rows, VariantsOption, print_json, print_tables
    from .cli.options import CommandSettings, engine_options
    from .cli.plugins import Commands, Companion
    from .cli.tables import Table

_HOMES = {
    # a command of the command line
    "CommandSettings": "..cli.options",
    "Commands": "..cli.plugins",
    "Companion": "..cli.plugins",
    "JsonOption": "..cli.common",
    "Rows": "..cli.common",
    "Table": "..cli.tables",
    "VariantsOption": "..cli.common",
    "engine_options": "..cli.options",
    "print_json": "..cli.common",
    "print_tables": "..cli.common",
    # what guests of all kinds share
    "atomic_path": "..base.paths",
    "cache_home": "..base.paths",
    "check_choice": "..base.checks",
    "did_you_mean": "..base.checks",
    "expanded": "..base.paths",
    "is_url": "..base.paths",
    "processor_name": "..base.machine",
    "progress_bar": "..base.progress",
    "shown_url": "..base.urls",
    "unit_name": "..base.machine",
}
__all__ = [
    "CommandSettings",
    "Commands",
    "Companion",
    "JsonOption",
    "Rows",
    "Table",
    "VariantsOption",
    "atomic_path",
    "cache_home",
    "check_choice",
    "did_you_mean",
    "engine_options",
    "expanded",
    "is_url",
    "print_json",
    "print_tables",
    "processor_name",
    "progress_bar",
    "shown_url",
    "unit_name",
]
__getattr__ = late_names(__name__, _HOMES)
