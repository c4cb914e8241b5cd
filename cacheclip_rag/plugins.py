"""The door: what another distribution may bring to this package, and what it may take from it.

It brings objects by entry points, which are loaded when they are first needed:

| group | an entry point is | such as |
|---|---|---|
| ``cacheclip.commands`` | a function that gets :class:`Commands` and adds commands to ``cacheclip`` | ``cacheclip_lab.commands:register`` |
| ``cacheclip.runtimes`` | a subclass of :class:`ModelLoader`, asked whether a model's name is its own | ``cacheclip_llamacpp.loader:GgufLoader`` |
| ``cacheclip.stores`` | for a scheme of URLs, what opens such a store | ``s3 = cacheclip_shared:opener`` |
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
    from .base.checks import check_choice, did_you_mean
    from .base.clock import PhaseClock
    from .base.machine import processor_name, unit_name
    from .base.paths import atomic_path, cache_home, expanded, fsync_folder, is_url
    from .base.progress import progress_bar
    from .base.python import python_command, python_environment
    from .base.urls import shown_url
    from .cli.common import JsonOption, Rows, VariantsOption, format_bytes, print_json, print_tables
    from .cli.options import CommandSettings, engine_options
    from .cli.plugins import Commands, Companion
    from .cli.tables import Table
    from .fusion.in_order import OrderedRuntime, PlacedKV, fuse_in_order
    from .methods.correction import Chunks, Split, offsets
    from .models.checkpoints import TransformersLoader
    from .models.fingerprint import FileState, file_digest, states_of
    from .models.loaders import ModelLoader, uses_tools
    from .models.memory import check_room, free_bytes
    from .runtime.base import CALL_MARKERS, REASONING_MARKERS, Message, State, known_reasoning, markers_among
    from .runtime.transformers.architectures import check_architecture
    from .runtime.transformers.chat_template import render_chat_template
    from .runtime.transformers.constraint import Grammars, SchemaConstraint
    from .runtime.transformers.continued import ContinuedMatch
    from .runtime.transformers.prefix_cache import Match
    from .runtime.transformers.rotary import Tables, rotate
    from .runtime.transformers.text import ChatText, check_encodable, check_process, quiet_transformers
    from .runtime.transformers.weight_files import check_tensors

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
    "format_bytes": "..cli.common",
    "print_json": "..cli.common",
    "print_tables": "..cli.common",
    # a runtime
    "CALL_MARKERS": "..runtime.base",
    "REASONING_MARKERS": "..runtime.base",
    "ChatText": "..runtime.transformers.text",
    "Chunks": "..methods.correction",
    "ContinuedMatch": "..runtime.transformers.continued",
    "FileState": "..models.fingerprint",
    "Grammars": "..runtime.transformers.constraint",
    "ModelLoader": "..models.loaders",
    "Match": "..runtime.transformers.prefix_cache",
    "Message": "..runtime.base",
    "OrderedRuntime": "..fusion.in_order",
    "PhaseClock": "..base.clock",
    "PlacedKV": "..fusion.in_order",
    "SchemaConstraint": "..runtime.transformers.constraint",
    "Split": "..methods.correction",
    "State": "..runtime.base",
    "Tables": "..runtime.transformers.rotary",
    "TransformersLoader": "..models.checkpoints",
    "check_architecture": "..runtime.transformers.architectures",
    "check_encodable": "..runtime.transformers.text",
    "check_process": "..runtime.transformers.text",
    "check_room": "..models.memory",
    "check_tensors": "..runtime.transformers.weight_files",
    "file_digest": "..models.fingerprint",
    "free_bytes": "..models.memory",
    "fuse_in_order": "..fusion.in_order",
    "known_reasoning": "..runtime.base",
    "markers_among": "..runtime.base",
    "offsets": "..methods.correction",
    "quiet_transformers": "..runtime.transformers.text",
    "render_chat_template": "..runtime.transformers.chat_template",
    "rotate": "..runtime.transformers.rotary",
    "states_of": "..models.fingerprint",
    "uses_tools": "..models.loaders",
    # what guests of all kinds share
    "atomic_path": "..base.paths",
    "cache_home": "..base.paths",
    "check_choice": "..base.checks",
    "did_you_mean": "..base.checks",
    "expanded": "..base.paths",
    "fsync_folder": "..base.paths",
    "is_url": "..base.paths",
    "processor_name": "..base.machine",
    "progress_bar": "..base.progress",
    "python_command": "..base.python",
    "python_environment": "..base.python",
    "shown_url": "..base.urls",
    "unit_name": "..base.machine",
}
__all__ = [
    "CALL_MARKERS",
    "REASONING_MARKERS",
    "ChatText",
    "Chunks",
    "CommandSettings",
    "Commands",
    "Companion",
    "ContinuedMatch",
    "FileState",
    "Grammars",
    "JsonOption",
    "ModelLoader",
    "Match",
    "Message",
    "OrderedRuntime",
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
    "check_choice",
    "check_encodable",
    "check_process",
    "check_room",
    "check_tensors",
    "did_you_mean",
    "engine_options",
    "expanded",
    "file_digest",
    "format_bytes",
    "free_bytes",
    "fsync_folder",
    "fuse_in_order",
    "is_url",
    "known_reasoning",
    "markers_among",
    "offsets",
    "print_json",
    "print_tables",
    "processor_name",
    "progress_bar",
    "python_command",
    "python_environment",
    "quiet_transformers",
    "render_chat_template",
    "rotate",
    "shown_url",
    "states_of",
    "unit_name",
    "uses_tools",
]
__getattr__ = late_names(__name__, _HOMES)
