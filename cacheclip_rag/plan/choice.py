"""Chooses the method of a call."""

from __future__ import annotations

from collections.abc import Callable

from ..checks import check_ratio
from ..chunks.context import ChunkContext
from ..config import EngineConfig
from ..methods import DEFAULT_METHOD, check_auxiliary, check_method, preset
from ..methods.base import Method

__all__ = ["choose_method", "context_of"]


def choose_method(
    config: EngineConfig, method: str | Method | None, recompute_ratio: float | None, has_head_set: Callable[[], bool]
) -> Method:
    """The method for a call, at its recompute ratio.

    Args:
        method: a preset's name or an instance; default the engine's method. ``auto`` means ``cacheclip`` if the
            auxiliary model is available and has a head set, else ``anchored``.
        recompute_ratio: default the engine's ratio for names and for the engine's method, and the instance's own ratio
            for an instance. Presets without a ratio ignore it.
        has_head_set: called for ``auto`` only, because it loads the models.

    Raises:
        ConfigurationError: an unknown name; a ratio out of range, or for an instance without a ratio; a method that
            needs an auxiliary model and an engine without one.
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
    """The chunk context of a method (default the engine's method); None: the engine's setting decides."""
    given = config.method if method is None else method
    check_method(given)
    if given == DEFAULT_METHOD:
        return None  # both methods that auto can mean use the engine's setting
    return (preset(given) if isinstance(given, str) else given).context
