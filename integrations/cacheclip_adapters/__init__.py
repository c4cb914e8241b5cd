"""Shared parts of the adapters for LlamaIndex and LangChain."""

from __future__ import annotations

from cacheclip_rag.base.checks import ALIASES

from .served import ServedFields
from .settings import EngineFields, ModelFields, Tokenizer, warn_skipped

__all__ = ["ALIASES", "EngineFields", "ModelFields", "ServedFields", "Tokenizer", "warn_skipped"]
