"""What the models share: their settings, and the engine behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from pydantic import BaseModel, ConfigDict, Field

from cacheclip_rag.config import EngineConfig
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.methods import DEFAULT_METHOD
from cacheclip_rag.models.catalog import DEFAULT_AUXILIARY, DEFAULT_PRIMARY
from cacheclip_rag.sampling import merge_call_options

if TYPE_CHECKING:
    from cacheclip_rag import Answer, CacheClipEngine

__all__ = ["ModelFields", "document_texts", "ending"]

_SAMPLING = ("max_tokens", "temperature", "top_p", "stop", "seed")
_OWN = ("store", "namespace", "dtype", "device", "auxiliary")


class ModelFields(BaseModel):
    """Which engine a model works with, and how it decodes. It holds configuration only: weights load at first use.

    Models with equal settings share one engine in a process.

    Raises:
        ConfigurationError: an unknown field, or a value out of range.
    """

    model_config = ConfigDict(populate_by_name=True)

    model_name: str = Field(default=DEFAULT_PRIMARY, alias="model")
    """Primary model: local folder, packaged name or hub id."""
    auxiliary: str | None = DEFAULT_AUXILIARY
    """Small model that scores tokens; None for methods that need none."""
    store: str | None = None
    """Folder of the chunk-cache store; None keeps chunk caches in memory only."""
    namespace: str = "default"
    """Tenant: two namespaces never share an entry."""
    method: str = DEFAULT_METHOD
    """How chunks are reused: ``cacheclip``, ``direct`` or ``full``."""
    recompute_ratio: float = 0.2
    """Share of chunk tokens to recompute, 0 to 1."""
    temperature: float = 0.0
    """0 is greedy."""
    max_tokens: int = 256
    """Most new tokens of an answer."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this."""
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    """The answer ends before the first of these strings."""
    seed: int | None = None
    """Makes sampling repeatable."""
    dtype: str = "float32"
    """Compute dtype: ``float32``, ``bfloat16`` or ``float16``."""
    device: str = "cpu"
    """Device of both models."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Other fields of EngineConfig, ``system_prompt`` or ``max_bytes`` for example."""

    def __init__(self, **fields: Any) -> None:
        known = {key for name, field in type(self).model_fields.items() for key in (name, field.alias) if key}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ConfigurationError(f"unknown field {', '.join(unknown)}. Known: {', '.join(sorted(known))}.")
        super().__init__(**fields)
        self._full_config()
        merge_call_options(self._call_settings(), {})

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that changes the output: LangChain's response cache is keyed by it."""
        config = asdict(self._full_config())
        sampling = {name: getattr(self, name) for name in _SAMPLING}
        # LangChain writes the call's own stop strings over a key named "stop"
        stop = {"stop_sequences": sampling.pop("stop")}
        return {"model_name": config.pop("primary"), **config, **sampling, **stop}

    # -- configuration ------------------------------------------------------------------------------------------

    def _engine_config(self) -> EngineConfig:
        """What identifies the engine. Method and ratio go with each call, so that they do not split the store."""
        doubled = sorted(set(self.engine_kwargs) & {*_OWN, "primary", "method", "recompute_ratio"})
        if doubled:
            raise ConfigurationError(f"{', '.join(doubled)} in engine_kwargs: set the model's own field instead.")
        own = {name: getattr(self, name) for name in _OWN}
        return EngineConfig.from_options(None, {"primary": self.model_name, **own, **self.engine_kwargs})

    def _full_config(self) -> EngineConfig:
        return replace(self._engine_config(), method=self.method, recompute_ratio=self.recompute_ratio)

    @property
    def engine(self) -> CacheClipEngine:
        """The process's engine for these settings; use it to ``precompute`` documents."""
        from cacheclip_rag import get_engine

        return get_engine(self._engine_config())

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of ``text`` in the primary's own tokenizer; loads the model."""
        return list(self.engine.primary.tokenize(text).ids)

    def _bind(
        self, call: str, prompt: Any, stop: list[str] | None, options: dict[str, Any], candidates: Sequence[str] = ()
    ) -> Callable[[], Any]:
        """The engine's call, ready to run: everything is checked now, the engine is touched where it is run."""
        options = {name: value for name, value in options.items() if name != "stream"}
        given = [*document_texts(options.pop("documents", None) or ()), *candidates]
        if stop is not None:
            options["stop"] = stop
        settings = merge_call_options(self._call_settings(), options)
        return lambda: getattr(self.engine, call)(prompt, **settings, candidates=given)

    def _stored_tokens(self, answer: Answer) -> int:
        """Tokens of chunks that were missing, and are stored after the answer."""
        return answer.stats.missed_tokens if self._engine_config().on_miss == "store" else 0

    def _call_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_SAMPLING, "method", "recompute_ratio")}


def ending(answer: Answer) -> dict[str, Any]:
    """What metadata says of a finished answer."""
    return {"finish_reason": answer.finish_reason, "cacheclip": answer.stats.to_dict()}


def document_texts(documents: Iterable[Document | str] | Document | str) -> list[str]:
    """The texts of ``documents``, blank ones left out. Raises ConfigurationError for anything else."""
    documents = [documents] if isinstance(documents, Document | str) else list(documents)
    for document in documents:
        if not isinstance(document, Document | str):
            raise ConfigurationError(f"documents must be Documents or strings, got {type(document).__name__}.")
    texts = [d if isinstance(d, str) else d.page_content for d in documents]
    return [text for text in texts if text.strip()]
