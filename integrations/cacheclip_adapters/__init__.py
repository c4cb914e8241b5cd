"""What the adapters for LlamaIndex and LangChain share."""

from __future__ import annotations

from .settings import ALIASES, EngineFields, ModelFields

__all__ = ["ALIASES", "EngineFields", "ModelFields"]
