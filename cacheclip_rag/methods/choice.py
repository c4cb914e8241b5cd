"""Which method a call computes by."""

from __future__ import annotations

from collections.abc import Callable

from ..checks import check_ratio
from ..chunks.context import ChunkContext
from ..config import EngineConfig
from . import DEFAULT_METHOD, check_auxiliary, check_method, preset
from .base import Method

__all__ = ["choose_method", "context_of"]


def choose_method(
    config: EngineConfig, method: str | Method | None, recompute_ratio: float | None, has_head_set: Callable[[], bool]
) -> Method:
    """The method of that name, or that instance, at this ratio.

    Args:
        method: default the engine's. ``auto`` is ``cacheclip`` where the auxiliary model can be had and has a head set,
            and else ``anchored``.
        recompute_ratio: default the engine's for the engine's method and for names, else the instance's own. A preset
            without a ratio ignores it.
        has_head_set: asked for ``auto`` alone; to know it loads the models.

    Raises:
        ConfigurationError: an unknown name, a ratio out of range or given beside an instance that has none, or no
            auxiliary model where the method needs one.
    """
    given = config.method if method is None else method
    check_method(given)
    ratio = recompute_ratio
    if ratio is None and (method is None or isinstance(method, str)):
        ratio = config.recompute_ratio
    if given == DEFAULT_METHOD:
        given = "cacheclip" if has_head_set() else "anchored"
    chosen = preset(given) if isinstance(given, str) else given
    if ratio is not None:
        check_ratio(ratio)
        if chosen.has_ratio or (recompute_ratio is not None and not isinstance(given, str)):
            chosen = chosen.at(ratio)
    check_auxiliary(chosen, config.auxiliary)
    return chosen


def context_of(config: EngineConfig, method: str | Method | None) -> ChunkContext | None:
    """What chunks are computed behind for a method (default the engine's); None: what the settings say."""
    given = config.method if method is None else method
    check_method(given)
    if given == DEFAULT_METHOD:
        return None  # both methods that it may be leave it to the settings
    return (preset(given) if isinstance(given, str) else given).context
