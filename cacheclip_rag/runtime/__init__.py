"""Running a model: the protocol, and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from ..base.clock import PhaseClock
    from .base import (
        CALL_MARKERS,
        DTYPES,
        REASONING_MARKERS,
        Message,
        Runtime,
        State,
        TokenizedText,
        known_reasoning,
        markers_among,
    )
    from .kept_kv import KVMatch
    from .transformers.architectures import check_architecture
    from .transformers.chat_template import render_chat_template
    from .transformers.constraint import Grammars, SchemaConstraint
    from .transformers.rotary import Tables, rotate
    from .transformers.text import ChatText, check_encodable, check_process, quiet_transformers
    from .transformers.weight_files import check_tensors

__all__ = [
    "CALL_MARKERS",
    "DTYPES",
    "REASONING_MARKERS",
    "ChatText",
    "Grammars",
    "KVMatch",
    "Message",
    "PhaseClock",
    "Runtime",
    "SchemaConstraint",
    "State",
    "Tables",
    "TokenizedText",
    "check_architecture",
    "check_encodable",
    "check_process",
    "check_tensors",
    "known_reasoning",
    "markers_among",
    "quiet_transformers",
    "render_chat_template",
    "rotate",
]

__getattr__ = late_names(
    __name__,
    {
        "CALL_MARKERS": "base",
        "DTYPES": "base",
        "REASONING_MARKERS": "base",
        "ChatText": "transformers.text",
        "Grammars": "transformers.constraint",
        "KVMatch": "kept_kv",
        "Message": "base",
        "PhaseClock": "..base.clock",
        "Runtime": "base",
        "SchemaConstraint": "transformers.constraint",
        "State": "base",
        "Tables": "transformers.rotary",
        "TokenizedText": "base",
        "check_architecture": "transformers.architectures",
        "check_encodable": "transformers.text",
        "check_process": "transformers.text",
        "check_tensors": "transformers.weight_files",
        "known_reasoning": "base",
        "markers_among": "base",
        "quiet_transformers": "transformers.text",
        "render_chat_template": "transformers.chat_template",
        "rotate": "transformers.rotary",
    },
)
