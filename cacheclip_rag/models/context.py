"""A model's context length, and whether it knows tools, without loading the model."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

from .packaged.catalogue import PACKAGED_MODELS, packaged_name
from .packaged.pull import model_folder


def known_context(name: str) -> int | None:
    """Context of a model in tokens, from the catalogue or its config file. None if the model is not on this machine, or
    its config does not say. Opens no connection. Raises OSError, ValueError: the config file cannot be read."""
    if (packaged := packaged_name(name)) and not Path(name).is_dir():
        return PACKAGED_MODELS[packaged].context_tokens
    file = _file(name, "config.json")
    return _read_context(file) if file else None


def is_here(name: str) -> bool:
    """Whether a model's files are on this machine. False for runtimes of other packages."""
    if (packaged := packaged_name(name)) and not Path(name).is_dir():
        return (model_folder(packaged) / "config.json").is_file()
    return _file(name, "config.json") is not None


def knows_tools(name: str) -> bool | None:
    """Whether the chat template of a model uses tools. None if the model is neither packaged nor on this machine. Opens
    no connection."""
    if (packaged := packaged_name(name)) and not Path(name).is_dir():
        return PACKAGED_MODELS[packaged].tools
    found = [file for each in ("chat_template.jinja", "tokenizer_config.json") if (file := _file(name, each))]
    return any(map(_mentions_tools, found)) if found else None


@lru_cache
def _mentions_tools(file: str) -> bool:
    try:
        text = Path(file).read_text(encoding="utf-8")
        template = json.loads(text).get("chat_template") or "" if file.endswith(".json") else text
    except (OSError, ValueError):
        return False
    return re.search(r"\btools\b", str(template)) is not None


def _file(name: str, file: str) -> str | None:
    local = Path(name).expanduser() / file
    if local.is_file():
        return str(local.resolve())
    if name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, file)
    return cached if isinstance(cached, str) else None


@lru_cache
def _read_context(file: str) -> int | None:
    config = json.loads(Path(file).read_text(encoding="utf-8"))
    text_config = config.get("text_config") or {}
    tokens = config.get("max_position_embeddings") or text_config.get("max_position_embeddings")
    return int(tokens) if tokens else None
