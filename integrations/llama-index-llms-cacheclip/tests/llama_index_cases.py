"""What tests of several files need: embeddings, events, plans, threads and processes."""

from __future__ import annotations

import zlib
from typing import Any

from cacheclip_testing import fake_of
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.llms.cacheclip import CacheClipFusionEvent, CacheClipLLM


class WordEmbedding(BaseEmbedding):
    """Counts of hashed words: deterministic, and close for texts that share words."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.0] * 64
        for word in text.lower().replace(".", " ").replace("?", " ").split():
            vector[zlib.crc32(word.encode()) % 64] += 1.0
        return vector

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class Events(BaseEventHandler):
    """Fusion events and names of all others, in order."""

    fusions: list[CacheClipFusionEvent] = []
    names: list[str] = []

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.names.append(event.class_name())
        if isinstance(event, CacheClipFusionEvent):
            self.fusions.append(event)


def scripted(llm: CacheClipLLM, *texts: str) -> list[str]:
    """Puts words into the model's mouth; returns the list that its prompts, as text, will be in."""
    llm.max_tokens = 100
    runtime = fake_of(llm.engine)
    runtime.prompts.clear()
    runtime.says = list(texts)
    return runtime.prompts
