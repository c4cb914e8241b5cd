"""Puts the statistics of an answer's prompts into LlamaIndex's ``response.metadata``, with any synthesizer.

Stock synthesizers keep only the text of what an LLM returns. So the statistics take another way: while a synthesizer
runs (a span of LlamaIndex's instrumentation), and while its stream is read, every LLM of this package writes its
statistics into a list, which is in the response's metadata.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from inspect import BoundArguments
from typing import Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler

__all__ = ["collected"]

_SYNTHESIZERS = "llama_index.core.response_synthesizers.base"
_CALLS = (".synthesize", ".asynthesize")
_KEY = "cacheclip"


class _Synthesis(BaseSpan):
    """A running synthesizer."""

    statistics: list[dict[str, Any]] = Field(default_factory=list)
    has_prompts: bool = False
    """Whether an LLM of this package was called."""
    metadata: Any = None
    """The response's, once there is one."""
    outer: _Synthesis | None = None
    """The synthesizer within which this one runs."""

    def publish(self) -> None:
        if self.has_prompts and self.metadata is not None:
            self.metadata[_KEY] = self.statistics


_running: ContextVar[_Synthesis | None] = ContextVar("cacheclip_synthesis", default=None)


def collected() -> list[dict[str, Any]] | None:
    """The list that gets the statistics of each answer to the synthesizer that runs, when the answer is complete.
    None: no synthesizer runs."""
    running = _running.get()
    if running is None:
        return None
    running.has_prompts = True
    running.publish()
    return running.statistics


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
    """Opens a list for each synthesizer that starts, and gives it to the response."""

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
        if not id_.partition("-")[0].endswith(_CALLS):
            return None
        span = _Synthesis(id_=id_, parent_id=parent_span_id, tags=tags or {}, outer=_running.get())
        _running.set(span)
        return span

    def prepare_to_exit_span(
        self, id_: str, bound_args: BoundArguments, instance: Any = None, result: Any = None, **kwargs: Any
    ) -> _Synthesis | None:
        span = self.open_spans.get(id_)
        if span is None:
            return None
        _running.set(span.outer)
        span.metadata = getattr(result, "metadata", None)
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


get_dispatcher(_SYNTHESIZERS).add_span_handler(_Collector())
