"""Models that a measurement can look into."""

from __future__ import annotations

from cacheclip_rag import ConfigurationError
from cacheclip_rag.measuring import ModelRuntime
from cacheclip_rag.runtime import Runtime


def transformers_model(runtime: Runtime | None) -> ModelRuntime:
    """The runtime itself, for code that needs the transformers model.

    Raises:
        ConfigurationError: another kind of runtime runs this model, or its KV cannot be reused.
    """
    if isinstance(runtime, ModelRuntime):
        return runtime
    name = "none" if runtime is None else repr(runtime.name)
    other = "" if runtime is None or not runtime.can_extend else " To compare methods on this one: cacheclip eval."
    raise ConfigurationError(
        f"expected a transformers model whose KV can be reused, got {name}. Name a supported folder or hub id.{other}"
    )


def extending_model(runtime: Runtime) -> Runtime:
    """The runtime itself, for code that reads answers block by block.

    Raises:
        ConfigurationError: it cannot do that.
    """
    if runtime.can_extend:
        return runtime
    raise ConfigurationError(
        f"expected a model that can read a given answer, got {runtime.name!r} ({runtime.backend}). Name a transformers "
        "model or a GGUF file."
    )
