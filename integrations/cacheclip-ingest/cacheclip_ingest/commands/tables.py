"""Tables of a settings file for commands on documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cacheclip_rag.adapters import check_template_kwargs
from cacheclip_rag.plugins import Table


@dataclass(frozen=True, slots=True)
class AskTable(Table):
    """``[ask]``"""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as ``{ enable_thinking = false }``."""

    def __post_init__(self) -> None:
        check_template_kwargs(self.chat_template_kwargs)


@dataclass(frozen=True, slots=True)
class IngestTable(Table):
    """``[ingest]``"""

    overlap_tokens: int | None = None
    """Tokens shared by neighbouring chunks; None: as the store has them, at first 0."""
    kv: str = "all"
    """KV that is stored: of ``all`` texts, or, in a shared store, of ``hot`` ones: those that answers use."""
