"""What adapters for frameworks and servers share: fields of settings, streams, tools, a client of a remote server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from ..base.checks import ALIASES
    from .served import ServedFields
    from .settings import EngineFields, ModelFields, Tokenizer, warn_skipped

__all__ = ["ALIASES", "EngineFields", "ModelFields", "ServedFields", "Tokenizer", "warn_skipped"]

_HOMES = {
    "ALIASES": "..base.checks",
    "EngineFields": "settings",
    "ModelFields": "settings",
    "ServedFields": "served",
    "Tokenizer": "settings",
    "warn_skipped": "settings",
}
__getattr__ = late_names(__name__, _HOMES)
