"""Shared parts of the adapters for LlamaIndex and LangChain."""

from __future__ import annotations

from .settings import ALIASES, EngineFields, ModelFields

__all__ = ["ALIASES", "EngineFields", "ModelFields"]
