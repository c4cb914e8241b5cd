"""A callback that collects the fusion statistics of a chain's answers, and a chain that has them in its output."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, merge_configs
from langchain_core.runnables.utils import AddableDict
from langchain_core.tracers.context import register_configure_hook

_KEY = "cacheclip"


class CacheClipStatsHandler(BaseCallbackHandler):
    """Collects the fusion statistics of every answer of our models, also of streamed answers, whatever the chain makes
    of their text.

    >>> handler = CacheClipStatsHandler()
    >>> chain.invoke({"input": "How tall is it?"}, config={"callbacks": [handler]})
    >>> handler.stats[-1]["hits"]
    """

    def __init__(self) -> None:
        self.stats: list[dict[str, Any]] = []
        """One mapping for each answer, in the order in which the answers ended."""
        self._lock = threading.Lock()

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        for generation, *_ in response.generations:
            found = generation.generation_info or {}
            if isinstance(generation, ChatGeneration):
                found = {} if _is_cached(generation) else generation.message.response_metadata
            if _KEY in found:
                with self._lock:
                    self.stats.append(found[_KEY])


def _is_cached(generation: ChatGeneration) -> bool:
    """Whether an answer comes from LangChain's response cache, which sets its cost to 0 and keeps all else."""
    return "total_cost" in (getattr(generation.message, "usage_metadata", None) or {})


_active: ContextVar[CacheClipStatsHandler | None] = ContextVar("cacheclip_stats", default=None)
register_configure_hook(_active, inheritable=True)


@contextmanager
def collect_cacheclip_stats() -> Iterator[CacheClipStatsHandler]:
    """Collect the statistics of all answers in this block, like LangChain's ``get_usage_metadata_callback``.

    >>> with collect_cacheclip_stats() as collected:
    ...     chain.invoke({"input": "How tall is it?"})
    >>> collected.stats[-1]["reused_tokens"]
    """
    handler = CacheClipStatsHandler()
    token = _active.set(handler)
    try:
        yield handler
    finally:
        _active.reset(token)


def with_cacheclip_stats(chain: Runnable[Any, Any]) -> Runnable[Any, dict[str, Any]]:
    """The same chain, with the fusion statistics of all its answers in its output, under the key ``cacheclip``.

    A chain whose output is no mapping gets one, with its output under the key ``output``. In streams, the statistics
    come last.

    >>> chain = with_cacheclip_stats(create_retrieval_chain(retriever, documents_chain))
    >>> chain.invoke({"input": "How tall is it?"})["cacheclip"][-1]["hits"]
    """
    return _WithStats(chain)


class _WithStats(Runnable[Any, dict[str, Any]]):
    """See :func:`with_cacheclip_stats`."""

    def __init__(self, chain: Runnable[Any, Any]) -> None:
        self.chain = chain
        self.name = chain.get_name()

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        handler = CacheClipStatsHandler()
        output = self.chain.invoke(input, _observed(config, handler), **kwargs)
        return {**_as_mapping(output), _KEY: handler.stats}

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        handler = CacheClipStatsHandler()
        output = await self.chain.ainvoke(input, _observed(config, handler), **kwargs)
        return {**_as_mapping(output), _KEY: handler.stats}

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[dict[str, Any]]:
        handler = CacheClipStatsHandler()
        for part in self.chain.stream(input, _observed(config, handler), **kwargs):
            yield _as_mapping(part)
        yield AddableDict({_KEY: handler.stats})

    async def astream(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        handler = CacheClipStatsHandler()
        async for part in self.chain.astream(input, _observed(config, handler), **kwargs):
            yield _as_mapping(part)
        yield AddableDict({_KEY: handler.stats})


def _observed(config: RunnableConfig | None, handler: CacheClipStatsHandler) -> RunnableConfig:
    return merge_configs(ensure_config(config), {"callbacks": [handler]})


def _as_mapping(output: Any) -> dict[str, Any]:
    return output if isinstance(output, dict) else AddableDict({"output": output})
