"""Where the KV of a prompt comes from: stored or captured chunks, the auxiliary's scores, known starts of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..selection.scoring import AuxiliaryScorer
    from .caches import ChunkCaches
    from .captured import CapturedChunks
    from .prefix_cache import Match, PrefixCache

__all__ = ["Sources"]


@dataclass(frozen=True, slots=True)
class Sources:
    """The parts of an engine that one method needs."""

    primary: ChunkCaches
    """Chunk caches of the primary, computed behind the method's chunk context."""
    prefix: ChunkCaches
    """The same for the shared prefix alone: whose KV every prompt begins with."""
    auxiliary: AuxiliaryScorer | None
    """None if the method needs no auxiliary model."""
    captured: CapturedChunks | None
    """Caches from answered prompts, for the method that takes them in place of stored ones; else None."""
    prefixes: PrefixCache
    """Exact KV of the starts of earlier prompts."""

    def holds(self, text: str) -> bool:
        """Whether the KV of a chunk is there for every model that the method needs."""
        if self.captured is not None:
            return text in self.captured
        return text in self.primary and (self.auxiliary is None or text in self.auxiliary.caches)

    def match(self, ids: Sequence[int], *, usable: bool = True) -> Match:
        """The longest start of the prompt that the prefix cache holds, never its last token: its logits are needed."""
        return self.prefixes.match(list(ids[:-1]) if usable else [])
