"""Running a model: the protocol, and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from .base import Message, Runtime, TokenizedText

__all__ = ["Message", "Runtime", "TokenizedText"]

__getattr__ = late_names(
    __name__,
    {
        "Message": "base",
        "Runtime": "base",
        "TokenizedText": "base",
    },
)
