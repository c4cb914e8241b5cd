"""Methods. Users name a preset (:data:`PRESET_NAMES`, :func:`preset`) or pass a :class:`Method` instance.

To add a preset: a row in :mod:`~cacheclip_rag.methods.presets`, and its name here. Importing this package does not load
torch, so that front ends can check names quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.checks import did_you_mean
from ..base.errors import ConfigurationError
from ..base.guests import guests, load_guest
from ..base.names import METHODS, late_names, refuse_removed

if TYPE_CHECKING:
    from ..runtime.base import Runtime
    from .base import Method as Method
    from .presets import PRESET_NOTES as PRESET_NOTES, PRESETS as PRESETS
    from .recompute import Chunks as Chunks, Recompute as Recompute, Split as Split, offsets as offsets
    from .settings import describe as describe, vary as vary


PRESET_NAMES = tuple("full prefix direct epic epic-corrected cacheclip cacheclip-gated cacheclip-paper".split())

_GROUP = "cacheclip.methods"
"""Entry points of methods that other distributions bring, by name."""
DEFAULT_METHOD = "auto"
"""The engine chooses: ``cacheclip`` if its auxiliary model has a head set, else ``epic-corrected``, or ``epic`` where
chunks are moved as a whole (:meth:`~cacheclip_rag.engine.CacheClipEngine.make_method`)."""


def preset(name: str) -> Method:
    """The preset called ``name``.

    Raises:
        ConfigurationError: no preset has this name, or the name is ``auto``, which only an engine can resolve.
    """
    check_method(name)
    if name == DEFAULT_METHOD:
        raise ConfigurationError(f"only an engine can resolve {name!r}. Name a preset here: {', '.join(PRESET_NAMES)}.")
    if name in PRESET_NAMES:
        from .presets import PRESETS

        return PRESETS[name]
    from .base import Method

    method: Method = load_guest(
        _GROUP, name, f"a Method with the name {name!r}", lambda each: isinstance(each, Method) and each.name == name
    )
    return method


def check_method(method: object) -> None:
    """Raise ConfigurationError, listing the presets, unless ``method`` is ``auto``, a preset's name or a Method."""
    if isinstance(method, str):
        if method == DEFAULT_METHOD or method in PRESET_NAMES or method in guests(_GROUP):
            return
        refuse_removed([method], METHODS)
        raise ConfigurationError(
            f"method must be {DEFAULT_METHOD}, a Method or one of {', '.join((*PRESET_NAMES, *guests(_GROUP)))}, got "
            f"{method!r}.{did_you_mean(method, PRESET_NAMES)}"
        )
    from .base import Method  # a Method instance means that torch is loaded already

    if not isinstance(method, Method):
        raise ConfigurationError(f"method must be a name or a Method, got {type(method).__name__}.")


def check_auxiliary(method: Method, auxiliary: str | None) -> None:
    """Raise ConfigurationError if the method needs an auxiliary model and there is none."""
    if method.needs_auxiliary and not auxiliary:
        others = [name for name in PRESET_NAMES if not preset(name).needs_auxiliary]
        raise ConfigurationError(
            f"method {method.name!r} needs an auxiliary model and none is set. Set one (auxiliary), or use a method "
            f"that needs none: {', '.join(others)}."
        )


def check_reads(method: Method, runtime: Runtime) -> None:
    """Raise ConfigurationError if the method chooses parts of chunks and the runtime moves whole ones."""
    if runtime.computed_edges[0] and method.reuses_chunks and not _takes_whole_chunks(method):
        others = [name for name in PRESET_NAMES if _takes_whole_chunks(preset(name))]
        raise ConfigurationError(
            f"method {method.name!r} chooses tokens within chunks, and {runtime.name!r} has recurrent "
            f"layers, whose state is moved over a whole chunk. Use another method ({', '.join(others)})."
        )


def _takes_whole_chunks(method: Method) -> bool:
    return not (method.needs_auxiliary or method.mean_change)


__getattr__, _LATE = late_names(
    __name__,
    {
        "base": "Method",
        "presets": "PRESETS PRESET_NOTES",
        "recompute": "Chunks Recompute Split offsets",
        "settings": "describe vary",
    },
)
__all__ = [*"DEFAULT_METHOD PRESET_NAMES check_auxiliary check_method check_reads preset".split(), *_LATE]
