"""CacheClip in LlamaIndex: a response synthesizer that fills prompts with whole chunks.

>>> engine = index.as_query_engine(llm=llm, response_synthesizer=CacheClipSynthesizer(llm=llm))
"""

from __future__ import annotations

from llama_index.llms.cacheclip import CacheClipFusionEvent

from .base import CacheClipSynthesizer

__all__ = ["CacheClipFusionEvent", "CacheClipSynthesizer"]
