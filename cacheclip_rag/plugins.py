"""The door: what another distribution may bring to this package, and what it may take from it.

It brings objects by entry points, which are loaded when they are first needed:

| group | an entry point is | such as |
|---|---|---|
| ``cacheclip.commands`` | a function that gets :class:`Commands` and adds commands to ``cacheclip`` | ``cacheclip_lab.commands:register`` |
| ``cacheclip.runtimes`` | a subclass of :class:`ModelLoader`, asked whether a model's name is its own | ``cacheclip_llamacpp.loader:GgufLoader`` |
| ``cacheclip.stores`` | for a scheme of URLs, a :class:`~cacheclip_rag.store.StoreKind` | ``s3 = cacheclip_shared.kind`` |
| ``cacheclip.observers`` | a function that gets an engine's config and returns an :class:`~cacheclip_rag.guards.Observer`, or None | |
| ``cacheclip.methods`` | for a preset's name, its :class:`~cacheclip_rag.methods.Method` | ``mine = my_package:METHOD`` |

A runtime that computes tokens only in the order of the prompt has the calls of :class:`OrderedRuntime`, and
:func:`fuse_in_order` as its ``fuse``.

It takes from here, from the package itself (engine, settings, answers, errors), and from ``adapters``, ``guards``,
``measuring``, ``methods``, ``models``, ``planning``, ``runtime``, ``selection``, ``store`` and ``testing``. Everything
else may change without a word. ``cacheclip_rag.testing.door`` tells whether a distribution keeps to that.
"""  # noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING

from .base.late import late_names

if TYPE_CHECKING:
    from .base.checks import (
        check_choice,
        check_namespace,
        check_number,
        check_probability,
        check_ratio_and_limit,
        check_whole_number,
        did_you_mean,
        is_whole_number,
    )
    from .base.errors import is_panic
    from .base.machine import unit_name
    from .base.paths import atomic_path, cache_home, expanded, fsync_folder, is_url, split_hot
    from .base.progress import progress_bar
    from .base.python import own_folder, python_command, python_environment
    from .base.urls import shown_url
    from .cli.common import (
        BackendOption,
        ExistingStoreOption,
        JsonOption,
        NamespaceOption,
        Rows,
        VariantsOption,
        check_backend,
        format_bytes,
        parse_bytes,
        print_json,
        print_names,
        print_tables,
    )
    from .cli.companions import Companion
    from .cli.options import CommandSettings, checked_model, engine_options, existing_folder, model_place
    from .cli.plugins import Commands
    from .cli.tables import Table
    from .fusion.in_order import OrderedRuntime, PlacedKV, fuse_in_order
    from .models.loaders import ModelLoader

__all__ = [
    "BackendOption",
    "CommandSettings",
    "Commands",
    "Companion",
    "ExistingStoreOption",
    "JsonOption",
    "ModelLoader",
    "NamespaceOption",
    "OrderedRuntime",
    "PlacedKV",
    "Rows",
    "Table",
    "VariantsOption",
    "atomic_path",
    "cache_home",
    "check_backend",
    "check_choice",
    "check_namespace",
    "check_number",
    "check_probability",
    "check_ratio_and_limit",
    "check_whole_number",
    "checked_model",
    "did_you_mean",
    "engine_options",
    "existing_folder",
    "expanded",
    "format_bytes",
    "fsync_folder",
    "fuse_in_order",
    "is_panic",
    "is_url",
    "is_whole_number",
    "late_names",
    "model_place",
    "own_folder",
    "parse_bytes",
    "print_json",
    "print_names",
    "print_tables",
    "progress_bar",
    "python_command",
    "python_environment",
    "shown_url",
    "split_hot",
    "unit_name",
]

_HOMES = {
    # for commands
    "BackendOption": "..cli.common",
    "CommandSettings": "..cli.options",
    "Commands": "..cli.plugins",
    "Companion": "..cli.companions",
    "ExistingStoreOption": "..cli.common",
    "JsonOption": "..cli.common",
    "NamespaceOption": "..cli.common",
    "Rows": "..cli.common",
    "Table": "..cli.tables",
    "VariantsOption": "..cli.common",
    "check_backend": "..cli.common",
    "checked_model": "..cli.options",
    "engine_options": "..cli.options",
    "existing_folder": "..cli.options",
    "format_bytes": "..cli.common",
    "model_place": "..cli.options",
    "parse_bytes": "..cli.common",
    "print_json": "..cli.common",
    "print_names": "..cli.common",
    "print_tables": "..cli.common",
    # for runtimes
    "ModelLoader": "..models.loaders",
    "OrderedRuntime": "..fusion.in_order",
    "PlacedKV": "..fusion.in_order",
    "fuse_in_order": "..fusion.in_order",
    # for guests of all kinds
    "atomic_path": "..base.paths",
    "cache_home": "..base.paths",
    "check_choice": "..base.checks",
    "check_namespace": "..base.checks",
    "check_number": "..base.checks",
    "check_probability": "..base.checks",
    "check_ratio_and_limit": "..base.checks",
    "check_whole_number": "..base.checks",
    "did_you_mean": "..base.checks",
    "expanded": "..base.paths",
    "fsync_folder": "..base.paths",
    "is_panic": "..base.errors",
    "is_url": "..base.paths",
    "is_whole_number": "..base.checks",
    "own_folder": "..base.python",
    "progress_bar": "..base.progress",
    "python_command": "..base.python",
    "python_environment": "..base.python",
    "shown_url": "..base.urls",
    "split_hot": "..base.paths",
    "unit_name": "..base.machine",
}
__getattr__ = late_names(__name__, _HOMES)
