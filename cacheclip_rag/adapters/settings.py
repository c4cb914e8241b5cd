"""Settings of the framework adapters: one list of fields for LlamaIndex and LangChain, with the engine's names and
defaults. It needs pydantic, which both frameworks install.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields as fields_of, replace
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PrivateAttr

from ..answering.options import CallOptions
from ..base.checks import (
    ALIASES,
    AUTO_RATIO,
    aliases_of,
    by_real_names,
    model_place,
    path_as_text,
    refuse_unknown,
    store_place,
)
from ..base.errors import ConfigurationError
from ..base.names import SETTINGS, refuse_removed
from ..base.sampling import SamplingParams
from ..base.urls import shown_url
from ..config import EngineConfig
from .forced_tools import with_tool_choice
from .neutral import changes_nothing

if TYPE_CHECKING:
    from typing import Self

    from ..engine import CacheClipEngine, WarmUp


_ENGINE = EngineConfig()
_SAMPLING = SamplingParams()
_PER_CALL = ("method", "recompute_ratio", "max_ttft_s", "finish")
"""Engine settings that are passed with each call. Models that differ only in these share one engine and its store."""
_OPTIONS = {each.name for each in fields_of(CallOptions)} - {"logprobs"} | {*ALIASES, "tool_choice", "response_format"}
"""Options of a call that are no fields here."""


def _shown(value: Any) -> Any:
    return shown_url(value) if isinstance(value, str) else value


SHOWN = PlainSerializer(_shown)
"""A field whose URL is dumped without its password, because traces hold dumps."""


def _as_list(value: Any) -> Any:
    """What stops an answer, as a list without what stops nothing."""
    stops = [value] if isinstance(value, str) else value or []
    return [each for each in stops if each not in ("", None)] if isinstance(stops, list | tuple) else stops


class EngineFields(BaseModel):
    """Settings of a component's engine. Weights load when the engine is first used.

    Components with equal fields share one engine per process, including a store in memory. Names and defaults of fields
    are those of :class:`~cacheclip_rag.config.EngineConfig`; those of frameworks are accepted too. Its other settings
    (``codec``, ``on_miss``, ``max_bytes``, ...) may be given by name as well, and are kept in ``engine_kwargs``.

    Raises:
        ConfigurationError: a field or one of ``engine_kwargs`` is unknown, given twice, or out of range.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    primary: Annotated[str, BeforeValidator(path_as_text)] = _ENGINE.primary
    """Model that answers: hub id, local folder, GGUF file, or ``packaged:NAME``. Also ``model`` or ``model_name``."""
    auxiliary: Annotated[str | None, BeforeValidator(path_as_text)] = _ENGINE.auxiliary
    """Small model that scores tokens; None for methods that need none. Also ``auxiliary_model_name``."""
    store: Annotated[str | None, BeforeValidator(path_as_text), SHOWN] = _ENGINE.store  # type: ignore[assignment]
    """Folder or URL of the chunk-cache store; None keeps chunk caches in memory only."""
    namespace: str = _ENGINE.namespace
    """Tenant. Two namespaces never share an entry."""
    method: Any = _ENGINE.method
    """How chunks are reused: a preset's name, ``auto``, or an instance of
    :class:`~cacheclip_rag.methods.base.Method` (with its own ratio). ``to_dict`` can only write names."""
    system_prompt: str | None = _ENGINE.system_prompt
    """System prompt of the shared prefix. It is also used for conversations without a system message. None: the chat
    template's default."""
    dtype: str = _ENGINE.dtype
    """Compute dtype of both models: ``float32``, ``bfloat16`` or ``float16``; ``auto``: by checkpoint and machine."""
    device: str = _ENGINE.device
    """Device of both models: ``cpu``, ``cuda``, ...; ``auto``: the best one of this machine."""
    engine_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of :class:`~cacheclip_rag.config.EngineConfig` without a field here, such as ``max_bytes`` or
    ``codec``. Giving them to the constructor by name is the same."""

    _engine: Any = PrivateAttr(default=None)

    def __init__(self, **fields: Any) -> None:
        super().__init__(**self._named(fields))
        self._check()

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return (
            (name, _shown(value) if name in ("store", "base_url") else value) for name, value in super().__repr_args__()
        )

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)  # a framework's base class may define it; pydantic's own would hide it

    @classmethod
    def _named(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values with aliases replaced by the names of fields, and settings without a field in ``engine_kwargs``."""
        aliases = aliases_of(cls.model_fields)
        others = {each.name for each in fields_of(EngineConfig)} - set(cls.model_fields) - set(_PER_CALL)
        refuse_removed(sorted(values), SETTINGS)
        refuse_unknown("field", values, sorted({*cls.model_fields, *aliases, *others}))
        further = {name: values[name] for name in values if name in others}
        doubled = sorted(set(further).intersection(values.get("engine_kwargs") or ()))
        if doubled:
            raise ConfigurationError(f"{', '.join(doubled)} was given twice, once in engine_kwargs. Give it once.")
        if further:
            values = {name: value for name, value in values.items() if name not in others}
            values["engine_kwargs"] = {**(values.get("engine_kwargs") or {}), **further}
        values = by_real_names(values, cls.model_fields)
        # for others, frameworks give None where nothing was set
        nullable = {name for name, each in cls.model_fields.items() if NoneType in get_args(each.annotation)}
        named = {name: value for name, value in values.items() if value is not None or name in nullable}
        if not named.get("base_url"):  # of a server, primary is a name
            places = {"primary": model_place, "auxiliary": model_place, "store": store_place}
            named |= {name: place(named[name]) for name, place in places.items() if name in named}
        return named

    @classmethod
    def from_engine(cls, engine: CacheClipEngine, **fields: Any) -> Self:
        """A component that uses ``engine``; ``fields`` override the engine's settings.

        Copies (``model_copy``) keep the engine. A component made again from its fields, as by LangChain's configurable
        fields, uses the process-wide engine with equal settings instead.
        """
        own, others = cls._fields_from(engine.config), cls._named(fields)
        further = {**own["engine_kwargs"], **others.get("engine_kwargs", {})}
        component = cls(**{**own, **others, "engine_kwargs": further})
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
        """The primary's name, under the name that frameworks use."""
        return self.primary

    @property
    def engine(self) -> CacheClipEngine:
        """The engine in use: the engine given to :meth:`from_engine` if it still fits the fields, else the process-wide
        engine. Use it to ``precompute`` and to ``release``."""
        from ..engine import get_engine

        config = self._engine_config()
        own: CacheClipEngine | None = self._engine
        per_call = {name: getattr(_ENGINE, name) for name in _PER_CALL}
        return own if own is not None and replace(own.config, **per_call) == config else get_engine(config)

    def warm_up(self, *, read_chunks: bool = True) -> WarmUp:
        """Do now what the first answer would wait for: load weights, open the store, read the hot chunks; see
        :meth:`~cacheclip_rag.engine.CacheClipEngine.warm_up`. It blocks for seconds: in an event loop, run it in a
        thread (``await asyncio.to_thread(llm.warm_up)``)."""
        return self.engine.warm_up(read_chunks=read_chunks)

    def unload(self) -> None:
        """Free the memory of the weights, see :meth:`~cacheclip_rag.engine.CacheClipEngine.unload`. The next answer
        loads them again."""
        self.engine.unload()

    def _check(self) -> None:
        self._full_config()

    def _shared_system_prompt(self) -> str | None:
        return self.system_prompt

    def _engine_config(self) -> EngineConfig:
        """Settings that identify the engine, without the settings of a call."""
        own = {*EngineFields.model_fields, *_PER_CALL} - {"engine_kwargs"}
        doubled = sorted(own.intersection(self.engine_kwargs))
        if doubled:
            raise ConfigurationError(f"{', '.join(doubled)} in engine_kwargs: set the field of that name instead.")
        options = {name: getattr(self, name) for name in own.difference(_PER_CALL)}
        options["system_prompt"] = self._shared_system_prompt()
        return EngineConfig.from_options(None, {**options, **self.engine_kwargs})

    def _full_config(self) -> EngineConfig:
        """The engine's settings with this component's method and ratio, checked. A method instance is checked too, but
        does not change the config's ``method``."""
        named = {name: getattr(self, name) for name in _PER_CALL if name in type(self).model_fields}
        if not isinstance(self.method, str):
            _check_instance(named.pop("method"))
        return replace(self._engine_config(), **named)


class ModelFields(EngineFields):
    """Settings of a language model: its engine and its sampling. Sampling defaults are those of
    :class:`~cacheclip_rag.base.sampling.SamplingParams`."""

    recompute_ratio: float | str | None = _ENGINE.recompute_ratio
    """Share of chunk tokens to recompute, 0 to 1; None: the method's own ratio; ``auto``: chosen by predicted time."""
    max_ttft_s: float | None = _ENGINE.max_ttft_s
    """Seconds after which the first token should be there, instead of a ratio."""
    finish: str = _ENGINE.finish
    """What becomes of an answer from approximate KV: ``none``, ``idle``, ``verify`` or ``revise``. With ``revise``, a
    stream holds text back until it is verified, because frameworks' streams cannot withdraw text."""
    max_tokens: int = _SAMPLING.max_tokens
    """Most new tokens of an answer. Also ``max_new_tokens``."""
    temperature: float = _SAMPLING.temperature
    """0 is greedy."""
    top_p: float = _SAMPLING.top_p
    """Sample from the smallest set of tokens whose probability reaches this; 0: the likeliest token."""
    top_k: int = _SAMPLING.top_k
    """Sample from this many of the likeliest tokens; 0: from all."""
    repetition_penalty: float = _SAMPLING.repetition_penalty
    """Above 1: tokens that stand in prompt or answer become less likely."""
    frequency_penalty: float = _SAMPLING.frequency_penalty
    """Taken from a token's logit for each time that it stands in the answer, -2 to 2."""
    presence_penalty: float = _SAMPLING.presence_penalty
    """Taken once from the logit of a token that stands in the answer, -2 to 2."""
    stop: Annotated[list[str], BeforeValidator(_as_list)] = Field(default_factory=lambda: list(_SAMPLING.stop))
    """The answer ends before the first of these strings. A single string is accepted. Also ``stop_sequences``."""
    seed: int | None = _SAMPLING.seed
    """Makes sampling repeatable as long as the same KV is reused; the prefix cache changes the rounding.
    ``prefix_cache_bytes=0`` over a store that does not change gives the same tokens each time."""
    json_schema: Any = _SAMPLING.json_schema
    """The answer is JSON that follows this JSON schema, a dict or JSON text. Needs the extra ``structured``; not with
    ``finish``."""

    def _check(self) -> None:
        super()._check()
        self._call_options({})

    def _call_options(self, options: Mapping[str, Any]) -> CallOptions:
        """Options of a call, in which ``options`` override the fields. What changes no answer, such as ``n=1``
        or ``user``, is left out. Raises ConfigurationError: another unknown option, or a value out of range."""
        known = {*type(self).model_fields, *_OPTIONS}
        options = with_tool_choice(
            {name: value for name, value in options.items() if name in known or not changes_nothing(name, value)}
        )
        if options.get("logprobs") is not None:
            raise ConfigurationError(
                "frameworks' messages hold no logprobs here: ask the engine or the server for them."
            )
        own = {name: getattr(self, name) for name in (*self._sampling_names(), *_PER_CALL)}
        called = options.get("method")
        if called is not None and not isinstance(called, str):
            own |= {"recompute_ratio": None, "max_ttft_s": None}  # an instance has its own ratio
        elif not isinstance(called or self.method, str) and own["recompute_ratio"] != AUTO_RATIO:
            own["recompute_ratio"] = None
        return CallOptions().with_options(own).with_options(options)

    @property
    def tokenizer(self) -> Tokenizer:
        """Token ids of a text in the primary's tokenizer, for frameworks that count: ``llm.tokenizer(text)``. It loads
        no weights, keeps none, and can be pickled."""
        return Tokenizer(self.primary, self.dtype, self.device)

    def profile_machine(self) -> Any:
        """Measure how long prefills with this component's method take here, for ``recompute_ratio="auto"`` and
        ``max_ttft_s``; see :meth:`~cacheclip_rag.engine.CacheClipEngine.profile_machine`. It blocks for minutes."""
        return self.engine.profile_machine(self.method)

    @staticmethod
    def _sampling_names() -> list[str]:
        return [field.name for field in fields_of(SamplingParams)]


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A model's tokenizer, loaded when it is first called."""

    model: str
    dtype: str
    device: str

    def __call__(self, text: str) -> list[int]:
        from ..models.load import load_tokenizer  # it loads torch

        return load_tokenizer(self.model, dtype=self.dtype, device=self.device)(text)


def _check_instance(method: Any) -> None:
    from ..methods.base import Method  # a Method instance means that torch is loaded already

    if not isinstance(method, Method):
        raise ConfigurationError(f"method must be a name or a Method, got {type(method).__name__}.")
