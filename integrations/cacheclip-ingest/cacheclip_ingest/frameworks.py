"""Documents of LangChain and LlamaIndex: objects with a text, metadata and an id. Neither framework is imported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cacheclip_rag import ConfigurationError

from .text import DocumentText

_PLACES = ("source", "file_path", "file_name", "url")
"""Metadata in which loaders of both frameworks write where a document came from."""


def is_document(value: object) -> bool:
    """Whether this is a document of a framework."""
    return hasattr(value, "page_content") or hasattr(value, "get_content")


def text_of(value: object) -> DocumentText:
    """What a reader returned, as one text: a string, a document of a framework, or several of them, which are put
    together in their order, with an empty line between them.

    Raises:
        ConfigurationError: it is something else.
    """
    if isinstance(value, DocumentText):
        return value
    if isinstance(value, str):
        return DocumentText(value)
    if is_document(value):
        return DocumentText(_content(value))
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        parts = [*value]
        if all(map(is_document, parts)):
            return DocumentText("\n\n".join(map(_content, parts)))
    raise ConfigurationError(
        f"expected a reader that returns a text, or documents of LangChain or LlamaIndex, got {type(value).__name__}."
    )


def texts_by_name(documents: Iterable[Any]) -> dict[str, DocumentText]:
    """Texts of documents by where they came from (``source``, ``file_path``, ``file_name`` or ``url`` of their
    metadata), else by their ids. Those of one place, such as the pages of a file, are one text.

    Raises:
        ConfigurationError: a document has neither a place nor an id.
    """
    found: dict[str, list[Any]] = {}
    for each in documents:
        found.setdefault(_name(each), []).append(each)
    return {name: text_of(parts) for name, parts in found.items()}


def _content(document: Any) -> str:
    content = document.page_content if hasattr(document, "page_content") else document.get_content()
    if not isinstance(content, str):
        raise ConfigurationError(f"expected a document with a text, got one with {type(content).__name__}.")
    return content


def _name(document: Any) -> str:
    metadata = getattr(document, "metadata", None) or {}
    known = [*map(metadata.get, _PLACES), getattr(document, "id_", None), getattr(document, "id", None)]
    name = next(filter(None, known), None)
    if name is None:
        raise ConfigurationError(
            "expected documents that say where they came from, or have an id, got one without: set its metadata "
            "'source' or its id. By that name it is known to be the same one in the next run."
        )
    return str(name)
