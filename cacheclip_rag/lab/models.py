"""Access to transformers models for the laboratory."""

from __future__ import annotations

from ..base.errors import ConfigurationError
from ..runtime.base import Runtime
from ..runtime.transformers.model import ModelRuntime

__all__ = ["transformers_model"]


def transformers_model(runtime: Runtime | None) -> ModelRuntime:
    """The runtime itself, for code that needs the transformers model (evaluation, training).

    Raises:
        ConfigurationError: another kind of runtime runs this model, or its KV cannot be reused.
    """
    if isinstance(runtime, ModelRuntime):
        return runtime
    name = "none" if runtime is None else repr(runtime.name)
    raise ConfigurationError(
        f"expected a transformers model whose KV can be reused, got {name}. Name a supported folder or hub id."
    )
