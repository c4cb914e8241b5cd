"""Which method a call computes by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..config import EngineConfig
from ..errors import ConfigurationError
from . import DEFAULT_METHOD, check_auxiliary, create
from .base import Method

__all__ = ["choose_method", "named_method"]


def choose_method(
    config: EngineConfig, method: str | Method | None, recompute_ratio: float | None, has_head_set: Callable[[], bool]
) -> Method:
    """The method that is asked for, at the ratio that is asked for; each default the engine's.

    Args:
        has_head_set: asked for ``auto`` alone, which is ``cacheclip`` where the auxiliary model has a head set and
            ``anchored`` elsewhere; to know it loads the models.

    Raises:
        ConfigurationError: unknown methods or settings, a ratio beside a method that was made already, or no auxiliary
            model where the method needs one.
    """
    if isinstance(method, Method):
        chosen = method
        if recompute_ratio is not None:
            raise ConfigurationError(
                f"recompute_ratio={recompute_ratio} was given beside a {type(method).__name__} that has its own "
                "settings. Give the ratio to the method, or the method by name."
            )
    else:
        chosen = named_method(config, method, recompute_ratio, has_head_set)
    check_auxiliary(chosen, config.auxiliary)
    return chosen


def named_method(
    config: EngineConfig, name: str | None, recompute_ratio: float | None, has_head_set: Callable[[], bool]
) -> Method:
    """The same by name alone, whether or not the auxiliary model that it needs is configured."""
    settings = config if recompute_ratio is None else replace(config, recompute_ratio=recompute_ratio)
    name = name or config.method
    if name == DEFAULT_METHOD:
        name = "cacheclip" if has_head_set() else "anchored"
    return create(name, settings.method_settings())
