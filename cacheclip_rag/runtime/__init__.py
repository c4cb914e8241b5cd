"""Running a model: the protocol, and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from .base import DTYPES, Message, Runtime, TokenizedText

__all__ = [
    "DTYPES",
    "Message",
    "Runtime",
    "TokenizedText",
]

__getattr__ = late_names(
    __name__,
    {
        "DTYPES": "base",
        "Message": "base",
        "Runtime": "base",
        "TokenizedText": "base",
    },
)
