"""A model's context length, without loading the model."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from .packaged.catalogue import PACKAGED_MODELS

__all__ = ["known_context"]


def known_context(name: str) -> int | None:
    """Context of a model in tokens, from the catalogue or its config file. None if the model is not on this machine, or
    its config does not say. Opens no connection.

    Raises:
        OSError, ValueError: the config file cannot be read.
    """
    if name in PACKAGED_MODELS and not Path(name).is_dir():
        return PACKAGED_MODELS[name].context_tokens
    file = _config_file(name)
    return _read_context(file) if file else None


def _config_file(name: str) -> str | None:
    local = Path(name).expanduser() / "config.json"
    if local.is_file():
        return str(local.resolve())
    if name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    return cached if isinstance(cached, str) else None


@lru_cache
def _read_context(file: str) -> int | None:
    config = json.loads(Path(file).read_text(encoding="utf-8"))
    text_config = config.get("text_config") or {}
    tokens = config.get("max_position_embeddings") or text_config.get("max_position_embeddings")
    return int(tokens) if tokens else None
