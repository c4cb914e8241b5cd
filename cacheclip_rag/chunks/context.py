"""Chunk contexts: what a chunk is precomputed behind.

A chunk that is computed as the first thing a user says has keys and values that differ from those it has in the middle
of a prompt, mostly by an offset that hardly depends on what stands before it. Any passages will do as a stand-in; these
were made up, name nobody and answer nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from ..errors import ConfigurationError

__all__ = ["CONTEXTS", "ChunkContext", "check_chunk_context"]


@dataclass(frozen=True, slots=True)
class ChunkContext:
    """What a chunk is computed behind and between. It is part of the chunk's key in the store."""

    isolated: bool = False
    """True: nothing stands before the chunk; False: the shared prefix does."""
    text: str = ""
    """Text between the shared prefix and the chunk that no prompt holds: it stands for what may come before."""
    before: str = ""
    """Special tokens that open every chunk."""
    after: str = ""
    """Special tokens that close every chunk."""

    @property
    def is_exact_after_prefix(self) -> bool:
        """Whether a chunk right behind the shared prefix has the KV of plain prefill."""
        return not self.isolated and not self.text

    @property
    def sha256(self) -> str:
        """Digest of all fields, for identities."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


_PASSAGES = (
    "Alder Tomlin Reave (born 15 July 1912) was an English painter who lived in Leeds for most of his life "
    "and taught at the school of art there. He died in 1987.",
    "The river Arle rises in the hills north of Dunford and flows south through the town of Mellow, where it "
    "is crossed by a stone bridge built in 1824.",
)

CONTEXTS: dict[str, ChunkContext] = {
    "prefix": ChunkContext(),
    "passages": ChunkContext(text="\n\n".join(_PASSAGES) + "\n\n"),
}
"""By the value of the setting ``chunk_context``: the shared prefix alone, or the prefix and a few paragraphs."""


def check_chunk_context(name: object) -> None:
    """Raise ConfigurationError unless this names a chunk context."""
    if not isinstance(name, str) or name not in CONTEXTS:
        raise ConfigurationError(f"chunk_context must be one of {', '.join(CONTEXTS)}, got {name!r}.")
