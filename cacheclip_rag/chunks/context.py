"""Chunk contexts: the text after which a chunk is precomputed.

The KV of a chunk at the start of a prompt differs from its KV in the middle of a prompt, mostly by an offset that
hardly depends on the text before it. So any passages can stand for that text. The passages below are invented.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.checks import check_choice
from ..base.keys import json_digest
from ..base.names import SETTINGS, refuse_removed


@dataclass(frozen=True, slots=True)
class ChunkContext:
    """What comes before a chunk while it is precomputed, after the shared prefix. It is part of the chunk's store
    key."""

    text: str = ""
    """Text between the shared prefix and the chunk. It stands for the text that precedes the chunk in a prompt."""

    @property
    def sha256(self) -> str:
        """SHA-256, for certificate identities, in the form of those that are there: with a field that is gone."""
        return json_digest({"isolated": False, "text": self.text})


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
"""Values of the setting ``chunk_context``: the shared prefix only, or the prefix and passages."""


def check_chunk_context(name: object) -> None:
    """Raise ConfigurationError unless ``name`` is a chunk context's name."""
    refuse_removed([f"chunk_context={name}"], SETTINGS)
    check_choice("chunk_context", name, CONTEXTS)


def context_name(context: ChunkContext) -> str:
    """Value of the setting ``chunk_context`` that means this context; ``own`` if a method made it."""
    return next((name for name, known in CONTEXTS.items() if known == context), "own")
