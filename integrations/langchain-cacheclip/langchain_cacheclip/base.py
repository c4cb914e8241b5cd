"""Shared parts of both LangChain models: settings, and calls of the engine."""

from __future__ import annotations

import inspect
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from pydantic import model_validator

from cacheclip_rag import ConfigurationError, PromptTooLongError, __version__
from cacheclip_rag.adapters import ServedFields, final_events, forced_tool, iterate_in_thread, telemetry
from cacheclip_rag.plugins import shown_url

if TYPE_CHECKING:
    from typing import Self

    from cacheclip_rag import Answer, Event


class ContextTooLongError(PromptTooLongError, ContextOverflowError):
    """A prompt or document is longer than the model's context. LangChain's code catches this as its own error."""


class LangChainFields(ServedFields):
    """The adapters' shared settings, and methods that LangChain expects of every model."""

    @model_validator(mode="after")
    def _set_cacheclip_version(self) -> Self:
        """Record this package's version for traces, if this version of LangChain supports it."""
        if hasattr(self, "_add_version"):
            self._add_version("cacheclip-rag", __version__)
        return self

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that changes the output. LangChain's response cache uses it as a key."""
        config = {**asdict(self._full_config()), "method": str(self.method)}
        sampling = {name: getattr(self, name) for name in self._sampling_names()}
        # LangChain overwrites a key named "stop" with the call's stop strings
        stop = {"stop_sequences": sampling.pop("stop")}
        variables = {"chat_template_kwargs": dict(self.chat_template_kwargs)} if self.chat_template_kwargs else {}
        places = {"base_url": self.base_url, "store": config["store"]}
        shown = {name: place and shown_url(place) for name, place in places.items()}  # traces have them, too
        return {"model_name": config.pop("primary"), **config, **shown, **sampling, **stop, **variables}

    def get_num_tokens(self, text: str) -> int:
        """Number of tokens of ``text``; loads the model. With ``base_url`` it is estimated, rather too high than too
        low: a third of the bytes."""
        return len(self.get_token_ids(text)) if self.base_url is None else -(-len(text.encode()) // 3)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of ``text`` in the primary's tokenizer. Loads the model."""
        return list(self.engine.primary.tokenize(text).ids)

    def _bind(
        self, prompt: Any, stop: list[str] | None, options: dict[str, Any], carried: Sequence[Document | str] = ()
    ) -> Callable[[], Iterator[Event]]:
        """A function that starts the engine's stream. Options are checked now; the engine is used when it is called."""
        options = {name: value for name, value in options.items() if name != "stream"}
        given = _texts([*_listed(options.pop("documents", None) or ()), *carried])
        one_call = options.pop("parallel_tool_calls", None) is False
        must_end = forced_tool(options.get("tool_choice"))[0]
        if stop is not None:
            options["stop"] = stop
        call, answering = self._call_options(options), self._answering

        def events() -> Iterator[Event]:
            with langchain_errors():
                stream = answering().stream(prompt, options=replace(call, documents=given))
                yield from final_events(stream, one_call=one_call, must_end=must_end)

        return events

    def _precompute(self, documents: Iterable[Document]) -> None:
        deque(self._precomputing(documents), maxlen=0)

    async def _aprecompute(self, documents: Iterable[Document]) -> None:
        """Like :meth:`_precompute`, in a separate thread. A cancelled call stops at the next batch of documents."""
        async for _ in iterate_in_thread(lambda: self._precomputing(documents)):
            pass

    def _precomputing(self, documents: Iterable[Document]) -> Iterator[None]:
        """Store the KV of documents that are not blank, and the sources of documents with an id. Short documents are
        computed together. A document that cannot be stored is skipped with a warning."""
        from cacheclip_rag.adapters import precompute_in_batches  # it loads torch

        texts = ((each.page_content, origin(each) if each.id else None) for each in documents)
        with langchain_errors():
            yield from precompute_in_batches(self.engine, texts, method=self.method)

    def _settle(self, documents: Sequence[Document]) -> None:
        """After documents were stored under their ids: release older texts under the same ids."""
        from cacheclip_rag.adapters import normalise_chunk

        engine, texts = self.engine, [document.page_content for document in documents]
        engine.release(sources=[document.id for document in documents if document.id], keep=texts)
        for document in documents:
            source, whole = origin(document)
            if source and document.page_content.strip():
                with suppress(ConfigurationError):  # half a character: it was skipped
                    engine.texts.add_source(normalise_chunk(document.page_content), source, whole)


def ending(answer: Answer) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason, "cacheclip": answer.stats.to_dict(), **telemetry(answer)}


def origin(document: Document) -> tuple[str, str]:
    """Source and document of a chunk: the document's id, and the ``source`` in its metadata. Each may be empty."""
    return document.id or "", str(document.metadata.get("source") or "")


logger = logging.getLogger(__name__)

_CHANGING = re.compile(
    "a?(add|append|bulk|clear|delete|drop|ingest|insert|merge|put|remove|replace|reset|update|upsert)(_|$)"
)
"""Beginnings of names of methods that change documents."""
_READING = re.compile(
    "_|a?(as|close|connect|count|create|describe|embed|exists|export|fetch|find|from|get|has|info|is|iter|len|list|"
    "lookup|max|mget|peek|persist|ping|query|read|save|scroll|search|select|similarity|stats|yield)(_|$)"
)
"""Beginnings of names of methods that do not, or that are private."""


def unchanging(store: Any, name: str) -> Any:
    """An attribute of a wrapped store. A method that changes documents, by its name, raises ConfigurationError when it
    is called: the chunk caches would not follow. Of one whose name does not tell, the first call logs what to do."""
    found = getattr(store, name)
    if not callable(found) or _READING.match(name) or not (_CHANGING.match(name) or inspect.ismethod(found)):
        return found

    def passed(*args: Any, **kwargs: Any) -> Any:
        _warn_of(type(store).__name__, name)
        return found(*args, **kwargs)

    if not _CHANGING.match(name):
        return passed

    def refused(*_: Any, **__: Any) -> Any:
        raise ConfigurationError(
            f"{name} of {type(store).__name__} changes documents in a way that their chunk caches do not follow. Use "
            "methods to add and to delete, or call it on the wrapped store, and then llm.engine.precompute(texts) and "
            "llm.engine.release(sources=ids)."
        )

    return refused


@cache
def _warn_of(kind: str, name: str) -> None:
    logger.warning(
        "%s.%s was called, and its name does not tell whether it changes documents. If it does, their chunk caches do "
        "not follow: then call llm.engine.precompute(texts) and llm.engine.release(sources=ids).",
        kind,
        name,
    )


def passed_on(attribute: str, name: str) -> tuple[Any, Any]:
    """A method, and its asynchronous form (``a`` before its name, after underscores), of what a wrapper holds under
    ``attribute``."""

    def method(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(getattr(self, attribute), name)(*args, **kwargs)

        call.__name__ = name
        return call

    public = name.lstrip("_")
    return method(name), method(name.removesuffix(public) + "a" + public)


def _listed(documents: Iterable[Document | str] | Document | str) -> list[Document | str]:
    return [documents] if isinstance(documents, Document | str) else list(documents)


def _texts(documents: Iterable[Document | str]) -> dict[str, list[tuple[str, str]]]:
    """The texts of ``documents`` without blank texts, each with the sources of documents that have an id. Raises
    ConfigurationError for other types."""
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
    """Turn PromptTooLongError into :class:`ContextTooLongError`."""
    try:
        yield
    except PromptTooLongError as error:
        raise ContextTooLongError(str(error)) from error
