"""Shared parts of the adapters for LlamaIndex and LangChain."""

from __future__ import annotations

from .served import ServedFields
from .settings import ALIASES, EngineFields, ModelFields
from .skipped import warn_skipped

__all__ = ["ALIASES", "EngineFields", "ModelFields", "ServedFields", "warn_skipped"]
