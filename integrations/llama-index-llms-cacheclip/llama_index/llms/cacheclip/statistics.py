"""Puts the statistics of an answer's prompts into LlamaIndex's ``response.metadata``, with any synthesizer and with
LlamaIndex's chat engines.

Synthesizers and chat engines keep only the text of what an LLM returns. So the statistics take another way: while one
of them runs (a span of LlamaIndex's instrumentation), and while its stream is read, every LLM of this package writes
its statistics into a list, which is in the response's metadata.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from inspect import BoundArguments
from typing import Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.bridge.pydantic import Field
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler

_DISPATCHERS = (
    *("response_synthesizers.base", "response_synthesizers.generation"),
    *("chat_engine.simple", "chat_engine.context", "chat_engine.condense_question"),
    "chat_engine.condense_plus_context",
)
"""Modules of ``llama_index.core`` whose spans are watched."""
_SYNTHESES = (".synthesize", ".asynthesize")
_CHATS = (".chat", ".achat", ".stream_chat", ".astream_chat")
_KEY = "cacheclip"


class _Synthesis(BaseSpan):
    """A running synthesizer, or a running chat engine with all prompts of its turn."""

    is_chat: bool = False
    statistics: list[dict[str, Any]] = Field(default_factory=list)
    has_prompts: bool = False
    """Whether an LLM of this package was called."""
    response: Any = None
    """Once there is one."""
    outer: _Synthesis | None = None
    """The synthesizer or chat engine within which this one runs."""

    def publish(self) -> None:
        if not self.has_prompts or self.response is None:
            return
        metadata = getattr(self.response, "metadata", None)
        if metadata is None and self.is_chat:  # streams of chat engines have no such field
            metadata = self.response.metadata = {}
        if metadata is not None:
            metadata[_KEY] = self.statistics


_running: ContextVar[_Synthesis | None] = ContextVar("cacheclip_synthesis", default=None)


def collector() -> Callable[[dict[str, Any]], None] | None:
    """A function that takes the statistics of an answer to the synthesizer and the chat engine that run, when the
    answer is complete. None: none of them runs."""
    span = _running.get()
    if span is None:
        return None
    takers = [span]
    while (span := span.outer) is not None:
        takers += [span] if span.is_chat else []
    for taker in takers:
        taker.has_prompts = True
        taker.publish()

    def collect(statistics: dict[str, Any]) -> None:
        for taker in takers:
            taker.statistics.append(statistics)

    return collect


@contextmanager
def _while_running(span: _Synthesis) -> Iterator[None]:
    token = _running.set(span)
    try:
        yield
    finally:
        _running.reset(token)


def _read(stream: Generator[Any, None, None], span: _Synthesis) -> Generator[Any, None, None]:
    with closing(stream):
        while True:
            with _while_running(span):
                try:
                    item = next(stream)
                except StopIteration:
                    return
            yield item


async def _aread(stream: AsyncGenerator[Any, None], span: _Synthesis) -> AsyncGenerator[Any, None]:
    async with aclosing(stream):
        while True:
            with _while_running(span):
                try:
                    item = await anext(stream)
                except StopAsyncIteration:
                    return
            yield item


class _Collector(BaseSpanHandler[_Synthesis]):
    """Opens a list for each synthesizer or chat engine that starts, and gives it to the response."""

    @classmethod
    def class_name(cls) -> str:
        return "CacheClipStatistics"

    def new_span(
        self,
        id_: str,
        bound_args: BoundArguments,
        instance: Any = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> _Synthesis | None:
        is_chat = isinstance(instance, BaseChatEngine)
        if not id_.partition("-")[0].endswith(_CHATS if is_chat else _SYNTHESES):
            return None
        outer = _running.get()
        span = _Synthesis(id_=id_, parent_id=parent_span_id, tags=tags or {}, is_chat=is_chat, outer=outer)
        _running.set(span)
        return span

    def prepare_to_exit_span(
        self, id_: str, bound_args: BoundArguments, instance: Any = None, result: Any = None, **kwargs: Any
    ) -> _Synthesis | None:
        span = self.open_spans.get(id_)
        if span is None:
            return None
        _running.set(span.outer)
        span.response = result
        span.publish()
        if isinstance(result, StreamingResponse):  # the LLM may be called when the stream is read
            result.response_gen = _read(result.response_gen, span)
        elif isinstance(result, AsyncStreamingResponse):
            result.response_gen = _aread(result.response_gen, span)
        return span

    def prepare_to_drop_span(
        self,
        id_: str,
        bound_args: BoundArguments,
        instance: Any = None,
        err: BaseException | None = None,
        **kwargs: Any,
    ) -> _Synthesis | None:
        return self.prepare_to_exit_span(id_, bound_args, instance)


_collector = _Collector()
for _name in _DISPATCHERS:
    get_dispatcher(f"llama_index.core.{_name}").add_span_handler(_collector)
