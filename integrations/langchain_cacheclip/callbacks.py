"""A callback that collects the fusion statistics of a chain's answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tracers.context import register_configure_hook

__all__ = ["CacheClipStatsHandler", "collect_cacheclip_stats"]


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
                found = generation.message.response_metadata
            if "cacheclip" in found:
                with self._lock:
                    self.stats.append(found["cacheclip"])


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
