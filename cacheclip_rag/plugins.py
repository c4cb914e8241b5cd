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
    from .base.clock import PhaseClock
    from .base.database import Database, FormatError, OutageWarning, may_be_whole, set_aside
    from .base.errors import is_panic
    from .base.machine import processor_name, unit_name
    from .base.paths import atomic_path, cache_home, expanded, fsync_folder, is_url, split_hot
    from .base.progress import progress_bar
    from .base.python import own_folder, python_command, python_environment
    from .base.tensor_files import READ_ERRORS, read_tensors, write_tensors
    from .base.urls import shown_url
    from .cli.common import (
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
    from .methods.correction import Chunks, Split, offsets
    from .models.checkpoints import TransformersLoader
    from .models.fingerprint import FileState, file_digest, states_of
    from .models.loaders import ModelLoader, uses_tools
    from .models.memory import check_room, free_bytes
    from .runtime.base import CALL_MARKERS, REASONING_MARKERS, Message, State, known_reasoning, markers_among
    from .runtime.kept_kv import KVMatch
    from .runtime.transformers.architectures import check_architecture
    from .runtime.transformers.chat_template import render_chat_template
    from .runtime.transformers.constraint import Grammars, SchemaConstraint
    from .runtime.transformers.rotary import Tables, rotate
    from .runtime.transformers.text import ChatText, check_encodable, check_process, quiet_transformers
    from .runtime.transformers.weight_files import check_tensors

_HOMES = {
    "CALL_MARKERS": "..runtime.base",
    "READ_ERRORS": "..base.tensor_files",
    "REASONING_MARKERS": "..runtime.base",
    "ChatText": "..runtime.transformers.text",
    "Chunks": "..methods.correction",
    "CommandSettings": "..cli.options",
    "Commands": "..cli.plugins",
    "Companion": "..cli.companions",
    "Database": "..base.database",
    "ExistingStoreOption": "..cli.common",
    "FileState": "..models.fingerprint",
    "FormatError": "..base.database",
    "Grammars": "..runtime.transformers.constraint",
    "JsonOption": "..cli.common",
    "KVMatch": "..runtime.kept_kv",
    "Message": "..runtime.base",
    "ModelLoader": "..models.loaders",
    "NamespaceOption": "..cli.common",
    "OrderedRuntime": "..fusion.in_order",
    "OutageWarning": "..base.database",
    "PhaseClock": "..base.clock",
    "PlacedKV": "..fusion.in_order",
    "Rows": "..cli.common",
    "SchemaConstraint": "..runtime.transformers.constraint",
    "Split": "..methods.correction",
    "State": "..runtime.base",
    "Table": "..cli.tables",
    "Tables": "..runtime.transformers.rotary",
    "TransformersLoader": "..models.checkpoints",
    "VariantsOption": "..cli.common",
    "atomic_path": "..base.paths",
    "cache_home": "..base.paths",
    "check_architecture": "..runtime.transformers.architectures",
    "check_backend": "..cli.common",
    "check_choice": "..base.checks",
    "check_encodable": "..runtime.transformers.text",
    "check_namespace": "..base.checks",
    "check_number": "..base.checks",
    "check_probability": "..base.checks",
    "check_process": "..runtime.transformers.text",
    "check_ratio_and_limit": "..base.checks",
    "check_room": "..models.memory",
    "check_tensors": "..runtime.transformers.weight_files",
    "check_whole_number": "..base.checks",
    "checked_model": "..cli.options",
    "did_you_mean": "..base.checks",
    "engine_options": "..cli.options",
    "existing_folder": "..cli.options",
    "expanded": "..base.paths",
    "file_digest": "..models.fingerprint",
    "format_bytes": "..cli.common",
    "free_bytes": "..models.memory",
    "fsync_folder": "..base.paths",
    "fuse_in_order": "..fusion.in_order",
    "is_panic": "..base.errors",
    "is_url": "..base.paths",
    "is_whole_number": "..base.checks",
    "known_reasoning": "..runtime.base",
    "markers_among": "..runtime.base",
    "may_be_whole": "..base.database",
    "model_place": "..cli.options",
    "offsets": "..methods.correction",
    "own_folder": "..base.python",
    "parse_bytes": "..cli.common",
    "print_json": "..cli.common",
    "print_names": "..cli.common",
    "print_tables": "..cli.common",
    "processor_name": "..base.machine",
    "progress_bar": "..base.progress",
    "python_command": "..base.python",
    "python_environment": "..base.python",
    "quiet_transformers": "..runtime.transformers.text",
    "read_tensors": "..base.tensor_files",
    "render_chat_template": "..runtime.transformers.chat_template",
    "rotate": "..runtime.transformers.rotary",
    "set_aside": "..base.database",
    "shown_url": "..base.urls",
    "split_hot": "..base.paths",
    "states_of": "..models.fingerprint",
    "unit_name": "..base.machine",
    "uses_tools": "..models.loaders",
    "write_tensors": "..base.tensor_files",
}
__all__ = [
    "CALL_MARKERS",
    "READ_ERRORS",
    "REASONING_MARKERS",
    "ChatText",
    "Chunks",
    "CommandSettings",
    "Commands",
    "Companion",
    "Database",
    "ExistingStoreOption",
    "FileState",
    "FormatError",
    "Grammars",
    "JsonOption",
    "KVMatch",
    "Message",
    "ModelLoader",
    "NamespaceOption",
    "OrderedRuntime",
    "OutageWarning",
    "PhaseClock",
    "PlacedKV",
    "Rows",
    "SchemaConstraint",
    "Split",
    "State",
    "Table",
    "Tables",
    "TransformersLoader",
    "VariantsOption",
    "atomic_path",
    "cache_home",
    "check_architecture",
    "check_backend",
    "check_choice",
    "check_encodable",
    "check_namespace",
    "check_number",
    "check_probability",
    "check_process",
    "check_ratio_and_limit",
    "check_room",
    "check_tensors",
    "check_whole_number",
    "checked_model",
    "did_you_mean",
    "engine_options",
    "existing_folder",
    "expanded",
    "file_digest",
    "format_bytes",
    "free_bytes",
    "fsync_folder",
    "fuse_in_order",
    "is_panic",
    "is_url",
    "is_whole_number",
    "known_reasoning",
    "late_names",
    "markers_among",
    "may_be_whole",
    "model_place",
    "offsets",
    "own_folder",
    "parse_bytes",
    "print_json",
    "print_names",
    "print_tables",
    "processor_name",
    "progress_bar",
    "python_command",
    "python_environment",
    "quiet_transformers",
    "read_tensors",
    "render_chat_template",
    "rotate",
    "set_aside",
    "shown_url",
    "split_hot",
    "states_of",
    "unit_name",
    "uses_tools",
    "write_tensors",
]
__getattr__ = late_names(__name__, _HOMES)
