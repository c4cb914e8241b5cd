"""The door: what another distribution may bring to this package, and what it may take from it.

It brings objects by entry points, which are loaded when they are first needed:

| group | an entry point is | such as |
|---|---|---|
| ``cacheclip.commands`` | a function that gets :class:`Commands` and adds commands to ``cacheclip`` | ``cacheclip_lab.commands:register`` |
| ``cacheclip.runtimes`` | a subclass of :class:`ModelLoader`, asked whether a model's name is its own | ``cacheclip_llamacpp.loader:GgufLoader`` |
| ``cacheclip.stores`` | for a scheme of URLs, a :class:`~cacheclip_rag.store.StoreKind` | ``s3 = cacheclip_shared.kind`` |
| ``cacheclip.observers`` | a function that gets an engine's config and returns an :class:`~cacheclip_rag.guards.Observer`, or None | |
| ``cacheclip.measurements`` | ``certificates``, ``ratios``: a subclass of :class:`~cacheclip_rag.measuring.Certificates`, of :class:`~cacheclip_rag.measuring.RatioChooser` | ``cacheclip_lab.timing.controllers:Controllers`` |
| ``cacheclip.methods`` | for a preset's name, its :class:`~cacheclip_rag.methods.Method` | ``mine = my_package:METHOD`` |

A runtime that computes tokens only in the order of the prompt has the calls of :class:`OrderedRuntime`, and
:func:`fuse_in_order` as its ``fuse``.

It takes from here, from the package itself (engine, settings, answers, errors), and from ``adapters``, ``guards``,
``measuring``, ``methods``, ``models``, ``planning``, ``runtime``, ``selection`` and ``store``. Everything else may
change without a word. ``names_outside_the_door`` of ``cacheclip-testing`` tells whether a distribution keeps to that.
"""  # noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING

from .base.names import late_names

if TYPE_CHECKING:
    from .base.checks import (
        check_choice as check_choice,
        check_namespace as check_namespace,
        check_number as check_number,
        check_probability as check_probability,
        check_ratio_and_limit as check_ratio_and_limit,
        check_whole_number as check_whole_number,
        did_you_mean as did_you_mean,
        is_whole_number as is_whole_number,
        store_place as store_place,
    )
    from .base.closing import Closing as Closing
    from .base.errors import is_panic as is_panic
    from .base.folder import is_file as is_file, open_folder as open_folder
    from .base.keys import json_digest as json_digest
    from .base.machine import processor_name as processor_name
    from .base.paths import (
        atomic_path as atomic_path,
        cache_home as cache_home,
        expanded as expanded,
        fsync_folder as fsync_folder,
        is_url as is_url,
        split_hot as split_hot,
        write_json as write_json,
    )
    from .base.progress import progress_bar as progress_bar
    from .base.python import (
        own_folder as own_folder,
        python_command as python_command,
        python_environment as python_environment,
    )
    from .base.urls import shown_url as shown_url
    from .cli import main as main
    from .cli.common import (
        ExistingStoreOption as ExistingStoreOption,
        JsonOption as JsonOption,
        NamespaceOption as NamespaceOption,
        check_backend as check_backend,
        format_bytes as format_bytes,
        look_after as look_after,
        parse_bytes as parse_bytes,
        print_json as print_json,
        print_names as print_names,
        show_done as show_done,
    )
    from .cli.companions import COMPANIONS as COMPANIONS, Companion as Companion
    from .cli.options import (
        CommandSettings as CommandSettings,
        checked_model as checked_model,
        engine_options as engine_options,
        existing_folder as existing_folder,
        model_place as model_place,
        no_store as no_store,
    )
    from .cli.plugins import Commands as Commands
    from .cli.tables import Table as Table
    from .fusion.answer import Fused as Fused
    from .fusion.in_order import OrderedRuntime as OrderedRuntime, PlacedKV as PlacedKV, fuse_in_order as fuse_in_order
    from .models.loaders import ModelLoader as ModelLoader
    from .prompt.layout import Span as Span


__getattr__, _LATE = late_names(
    __name__,
    {
        "..base.checks": (
            "check_choice check_namespace check_number check_probability check_ratio_and_limit check_whole_number "
            "did_you_mean is_whole_number store_place"
        ),
        "..base.closing": "Closing",
        "..base.errors": "is_panic",
        "..base.folder": "is_file open_folder",
        "..base.keys": "json_digest",
        "..base.machine": "processor_name",
        "..base.paths": "atomic_path cache_home expanded fsync_folder is_url split_hot write_json",
        "..base.progress": "progress_bar",
        "..base.python": "own_folder python_command python_environment",
        "..base.urls": "shown_url",
        "..cli": "main",
        "..cli.common": (
            "ExistingStoreOption JsonOption NamespaceOption check_backend format_bytes look_after parse_bytes "
            "print_json print_names show_done"
        ),
        "..cli.companions": "COMPANIONS Companion",
        "..cli.options": "CommandSettings checked_model engine_options existing_folder model_place no_store",
        "..cli.plugins": "Commands",
        "..cli.tables": "Table",
        "..fusion.answer": "Fused",
        "..fusion.in_order": "OrderedRuntime PlacedKV fuse_in_order",
        "..models.loaders": "ModelLoader",
        "..prompt.layout": "Span",
    },
)
__all__ = ["late_names", *_LATE]
