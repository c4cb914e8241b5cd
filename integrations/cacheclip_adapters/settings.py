"""Settings of the framework adapters: one list of fields for LlamaIndex and LangChain, with the engine's names and
defaults.

Only adapters import this module. It needs pydantic, which both frameworks bring along.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from cacheclip_rag.config import EngineConfig
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.sampling import SamplingParams, merge_call_options

if TYPE_CHECKING:
    from typing import Self

    from cacheclip_rag.engine import CacheClipEngine

__all__ = ["ALIASES", "EngineFields", "ModelFields"]

ALIASES = {
    "model": "primary",
    "model_name": "primary",
    "auxiliary_model_name": "auxiliary",
    "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
}
"""Names that LlamaIndex or LangChain use for a field; both adapters accept all of them."""

_ENGINE = EngineConfig()
_SAMPLING = SamplingParams()
_PER_CALL = ("method", "recompute_ratio")
"""Settings of the engine that go with each call: models that differ in nothing else share one engine and its store."""


def _path_as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value or []


class EngineFields(BaseModel):
    """Which engine a component works with. It holds configuration only: weights load when the engine is first used.

    Components with equal fields share one engine in a process, and with it a store that is in memory only. A field has
    the name and the default that it has in :class:`~cacheclip_rag.config.EngineConfig`; :data:`ALIASES` are accepted.

    Raises:
        ConfigurationError: a field or one of ``engine_kwargs`` is unknown, given twice, or out of range.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    primary: str = _ENGINE.primary
    """Model that answers: local folder, packaged name or hub id. Also ``model`` or ``model_name``."""
    auxiliary: str | None = _ENGINE.auxiliary
    """Small model that scores tokens; None for methods that need none. Also ``auxiliary_model_name``."""
    store: Annotated[str | None, BeforeValidator(_path_as_text)] = _ENGINE.store  # type: ignore[assignment]
    """Folder of the chunk-cache store; None keeps chunk caches in memory only."""
    namespace: str = _ENGINE.namespace
    """Tenant: two namespaces never share an entry."""
    method: Any = _ENGINE.method
    """How chunks are reused: the name of a method, ``auto``, or an instance of
    :class:`~cacheclip_rag.methods.base.Method`, which has its own ratio. Only a name survives ``to_dict``."""
    system_prompt: str | None = _ENGINE.system_prompt
    """System prompt that chunks are precomputed behind; it also opens conversations that bring none. None: the chat
    template's own."""
    dtype: str = _ENGINE.dtype
    """Compute dtype of both models: ``float32``, ``bfloat16`` or ``float16``."""
    device: str = _ENGINE.device
    """Device of both models."""
    engine_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Further settings of :class:`~cacheclip_rag.config.EngineConfig`, such as ``max_bytes`` or ``fallback``."""

    _engine: Any = PrivateAttr(default=None)

    def __init__(self, **fields: Any) -> None:
        super().__init__(**self._named(fields))
        self._check()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)  # a framework's own: pydantic's, for private fields, would hide it

    @classmethod
    def _named(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """``given`` with aliases replaced by the names of fields."""
        aliases = {alias: name for alias, name in ALIASES.items() if name in cls.model_fields}
        unknown = sorted(set(given) - set(cls.model_fields) - set(aliases))
        if unknown:
            known = ", ".join(sorted({*cls.model_fields, *aliases}))
            raise ConfigurationError(f"unknown field {', '.join(unknown)}. Known: {known}.")
        named: dict[str, Any] = {}
        for alias, value in given.items():
            name = aliases.get(alias, alias)
            if name in named:
                raise ConfigurationError(f"{name} was given twice, once as {alias}. Give it once.")
            named[name] = value
        return named

    @classmethod
    def from_engine(cls, engine: CacheClipEngine, **fields: Any) -> Self:
        """A component on this very engine; ``fields`` go on top of the engine's settings.

        Copies (``model_copy``) keep the engine. A component made anew from the fields, as LangChain's configurable
        fields do, works with the process's engine of equal settings instead.
        """
        component = cls(**{**cls._fields_from(engine.config), **cls._named(fields)})
        component._engine = engine
        return component

    @classmethod
    def _fields_from(cls, config: EngineConfig) -> dict[str, Any]:
        values = {field.name: getattr(config, field.name) for field in fields_of(config)}
        own = {name: values.pop(name) for name in list(values) if name in cls.model_fields}
        others = {n: v for n, v in values.items() if n not in _PER_CALL and v != getattr(_ENGINE, n)}
        return {**own, "engine_kwargs": others}

    @property
    def model_name(self) -> str:
        """The primary's name, where frameworks look for it."""
        return self.primary

    @property
    def engine(self) -> CacheClipEngine:
        """The engine in use: the one given to :meth:`from_engine` while it fits the fields, else the process's. Use it
        to ``precompute`` and to ``release``."""
        from cacheclip_rag.engine import get_engine

        config = self._engine_config()
        given: CacheClipEngine | None = self._engine
        return given if given is not None and _without_per_call(given.config) == config else get_engine(config)

    def _check(self) -> None:
        self._full_config()

    def _shared_system_prompt(self) -> str | None:
        """System prompt that belongs to the engine's shared prefix."""
        return self.system_prompt

    def _engine_config(self) -> EngineConfig:
        """What identifies the engine: everything but the settings of a call."""
        own = {*EngineFields.model_fields, *_PER_CALL} - {"engine_kwargs"}
        doubled = sorted(own.intersection(self.engine_kwargs))
        if doubled:
            raise ConfigurationError(f"{', '.join(doubled)} in engine_kwargs: set the field of that name instead.")
        options = {name: getattr(self, name) for name in own.difference(_PER_CALL)}
        options["system_prompt"] = self._shared_system_prompt()
        return EngineConfig.from_options(None, {**options, **self.engine_kwargs})

    def _full_config(self) -> EngineConfig:
        """The engine's settings with this component's own method and ratio, checked. A method that is an instance is
        checked too, but leaves the config's name as it is."""
        named = {name: getattr(self, name) for name in _PER_CALL if name in type(self).model_fields}
        if not isinstance(self.method, str):
            _check_instance(named.pop("method"))
        return replace(self._engine_config(), **named)


class ModelFields(EngineFields):
    """A language model's settings: its engine, and how it answers. Defaults of sampling are those of
    :class:`~cacheclip_rag.sampling.SamplingParams`."""

    recompute_ratio: float | None = _ENGINE.recompute_ratio
    """Share of chunk tokens to recompute, 0 to 1; None takes the method's own."""
    max_tokens: int = _SAMPLING.max_tokens
    """Most new tokens of an answer. Also ``max_new_tokens``."""
    temperature: float = _SAMPLING.temperature
    """0 is greedy."""
    top_p: float = _SAMPLING.top_p
    """Sample from the smallest set of tokens whose probability reaches this."""
    stop: Annotated[list[str], BeforeValidator(_as_list)] = Field(default_factory=lambda: list(_SAMPLING.stop))
    """The answer ends before the first of these strings; one string will do. Also ``stop_sequences``."""
    seed: int | None = _SAMPLING.seed
    """Makes sampling repeatable."""

    def _check(self) -> None:
        super()._check()
        self._call_arguments({})

    def _call_arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of ``engine.stream`` for a call with these options on top of the fields.

        Raises:
            ConfigurationError: an unknown option, or a value out of range.
        """
        own = {name: getattr(self, name) for name in (*self._sampling_names(), *_PER_CALL)}
        if not isinstance(options.get("method") or self.method, str):
            own["recompute_ratio"] = None  # the instance has its own
        return merge_call_options(own, options)

    @staticmethod
    def _sampling_names() -> list[str]:
        return [field.name for field in fields_of(SamplingParams)]


def _without_per_call(config: EngineConfig) -> EngineConfig:
    return replace(config, **{name: getattr(_ENGINE, name) for name in _PER_CALL})


def _check_instance(method: Any) -> None:
    from cacheclip_rag.methods.base import Method  # an instance exists, so that its module is loaded already

    if not isinstance(method, Method):
        raise ConfigurationError(f"method must be a name or a Method, got {type(method).__name__}.")
