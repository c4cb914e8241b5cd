"""A model's context length, and whether it knows tools, without loading the model."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import CacheClipError
from ..base.paths import expanded
from .fingerprint import states_of
from .load import is_gguf, packaged_gguf, resolve
from .packaged.catalogue import PACKAGED_MODELS, PackagedModel, packaged_name
from .packaged.pull import gguf_path, model_folder

if TYPE_CHECKING:
    from ..runtime.llamacpp.weights import GgufWeights


def known_context(name: str) -> int | None:
    """Context of a model in tokens, from the catalogue, its config file or the header of its GGUF file. None if the
    model is not on this machine, or its config does not say. Opens no connection. Raises OSError, ValueError: the
    config file cannot be read."""
    if packaged := _packaged(name):
        return packaged.context_tokens
    if is_gguf(name):
        header = _header(name)
        return int((header and header.meta("{}.context_length")) or 0) or None
    file = _file(name, "config.json")
    return _read_context(file) if file else None


def is_here(name: str) -> bool:
    """Whether a model's files are on this machine. False for runtimes of other packages."""
    if packaged := _packaged(name):
        own = gguf_path(packaged.name) if is_gguf(name) else model_folder(packaged.name) / "config.json"
        return own.is_file()
    return expanded(name).is_file() if is_gguf(name) else _file(name, "config.json") is not None


def knows_tools(name: str) -> bool | None:
    """Whether the chat template of a model uses tools. None if the model is neither packaged nor on this machine. Opens
    no connection."""
    if packaged := _packaged(name):
        return packaged.tools
    if is_gguf(name):
        header = _header(name)
        return None if header is None else _uses_tools(header.template)
    found = [file for each in ("chat_template.jinja", "tokenizer_config.json") if (file := _file(name, each))]
    return any(map(_mentions_tools, found)) if found else None


def _packaged(name: str) -> PackagedModel | None:
    """The packaged model that ``name`` means, as a folder or as a GGUF file."""
    packaged = packaged_name(packaged_gguf(name) or name)
    return PACKAGED_MODELS[packaged] if packaged and not Path(name).is_dir() else None


def _header(name: str) -> GgufWeights | None:
    """Header of a GGUF file; None if it cannot be read: loading the model reports the reason."""
    from ..runtime.llamacpp.weights import read_header

    try:
        file = resolve(name)
        return read_header(file, name, states_of([file]))
    except CacheClipError:
        return None


@lru_cache
def _mentions_tools(file: str) -> bool:
    try:
        text = Path(file).read_text(encoding="utf-8")
        template = json.loads(text).get("chat_template") or "" if file.endswith(".json") else text
    except (OSError, ValueError):
        return False
    return _uses_tools(template)


def _uses_tools(template: object) -> bool:
    return re.search(r"\btools\b", str(template)) is not None


def _file(name: str, file: str) -> str | None:
    local = expanded(name) / file
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
