"""What the models share: their settings, and the engine behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from pydantic import BaseModel, ConfigDict, Field, model_validator

from cacheclip_rag import __version__
from cacheclip_rag.aio import iterate_in_thread
from cacheclip_rag.config import EngineConfig
from cacheclip_rag.errors import ConfigurationError, PromptTooLongError
from cacheclip_rag.methods import DEFAULT_METHOD
from cacheclip_rag.models.packaged.catalogue import DEFAULT_AUXILIARY, DEFAULT_PRIMARY
from cacheclip_rag.sampling import merge_call_options

if TYPE_CHECKING:
    from typing import Self

    from cacheclip_rag import Answer, CacheClipEngine, StreamEvent

__all__ = [
    "ContextTooLongError",
    "ModelFields",
    "ending",
    "langchain_errors",
    "last_answer",
    "last_answer_async",
    "origin",
]

_SAMPLING = ("max_tokens", "temperature", "top_p", "stop", "seed")
_OWN = ("store", "namespace", "dtype", "device", "auxiliary")


class ContextTooLongError(PromptTooLongError, ContextOverflowError):
    """A prompt or a document with more tokens than the model's context, as LangChain's own code catches it."""


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
    """How chunks are reused: ``cacheclip``, ``anchored``, ``direct``, …; ``auto`` chooses between the first two,
    see :class:`~cacheclip_rag.config.EngineConfig`."""
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

    @model_validator(mode="after")
    def _set_cacheclip_version(self) -> Self:
        """Traces say which version answered, from the LangChain on that keeps versions."""
        if hasattr(self, "_add_version"):
            self._add_version("cacheclip-rag", __version__)
        return self

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
        self, prompt: Any, stop: list[str] | None, options: dict[str, Any], carried: Sequence[Document | str] = ()
    ) -> Callable[[], Iterator[StreamEvent]]:
        """The engine's stream, ready to run: everything is checked now, the engine is touched where it is run."""
        options = {name: value for name, value in options.items() if name != "stream"}
        given = _candidates([*_listed(options.pop("documents", None) or ()), *carried])
        if stop is not None:
            options["stop"] = stop
        settings = merge_call_options(self._call_settings(), options)

        def events() -> Iterator[StreamEvent]:
            with langchain_errors():
                yield from self.engine.generate_stream(prompt, **settings, candidates=given)

        return events

    def _precompute(self, documents: Iterable[Document]) -> None:
        deque(self._precomputing(documents), maxlen=0)

    async def _aprecompute(self, documents: Iterable[Document]) -> None:
        """The same in a thread of its own; cancelled, it stops at the next document."""
        async for _ in iterate_in_thread(lambda: self._precomputing(documents)):
            pass

    def _precomputing(self, documents: Iterable[Document]) -> Iterator[None]:
        """Store the KV of those that hold text, and of those with an id where it comes from."""
        engine = self.engine
        with langchain_errors():
            for document in documents:
                if document.page_content.strip():
                    source, whole = origin(document)
                    engine.precompute(
                        [document.page_content], method=self.method, source=source or None, document=whole
                    )
                yield

    def _stored_tokens(self, answer: Answer) -> int:
        """Tokens of chunks that were missing, and are stored after the answer."""
        stores = self._engine_config().on_miss == "store" and not self.engine.primary.unsupported
        return answer.stats.missed_tokens if stores else 0

    def _call_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_SAMPLING, "method", "recompute_ratio")}


def ending(answer: Answer) -> dict[str, Any]:
    """What metadata says of a finished answer."""
    return {"finish_reason": answer.finish_reason, "cacheclip": answer.stats.to_dict()}


def last_answer(events: Iterable[StreamEvent]) -> Answer:
    """The answer that a stream ends with."""
    *_, last = events
    assert last.answer is not None, "a stream ends with its answer"
    return last.answer


async def last_answer_async(events: Callable[[], Iterator[StreamEvent]]) -> Answer:
    """The same in a thread of its own; cancelled, it stops before the next token."""
    return last_answer([event async for event in iterate_in_thread(events)])


def origin(document: Document) -> tuple[str, str]:
    """Where its chunk cache comes from: the document's id, and the ``source`` in its metadata, which it is a part of;
    each may be empty."""
    return document.id or "", str(document.metadata.get("source") or "")


def _listed(documents: Iterable[Document | str] | Document | str) -> list[Document | str]:
    return [documents] if isinstance(documents, Document | str) else list(documents)


def _candidates(documents: Iterable[Document | str]) -> dict[str, list[tuple[str, str]]]:
    """The texts of ``documents``, blank ones left out, each with the origins of those that have an id. Raises
    ConfigurationError for anything else."""
    found: dict[str, list[tuple[str, str]]] = {}
    for document in documents:
        if not isinstance(document, Document | str):
            raise ConfigurationError(f"documents must be Documents or strings, got {type(document).__name__}.")
        text = document if isinstance(document, str) else document.page_content
        if text.strip():
            origins = found.setdefault(text, [])
            if isinstance(document, Document) and document.id:
                origins.append(origin(document))
    return found


@contextmanager
def langchain_errors() -> Iterator[None]:
    """What LangChain has an error of its own for is that too."""
    try:
        yield
    except PromptTooLongError as error:
        raise ContextTooLongError(str(error)) from error
