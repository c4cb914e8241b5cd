"""What chunks may be computed behind, beside the shared prefix: text that stands for the passages of a prompt.

A chunk that is computed as the first thing a user says has keys and values that differ from those it has in the middle
of a prompt, most of all by an offset that hardly depends on what stands before it. Any passages will do; these were
made up, name nobody and answer nothing.
"""

from __future__ import annotations

__all__ = ["LEADS"]

_PASSAGES = (
    "Alder Tomlin Reave (born 15 July 1912) was an English painter who lived in Leeds for most of his life "
    "and taught at the school of art there. He died in 1987.",
    "The river Arle rises in the hills north of Dunford and flows south through the town of Mellow, where it "
    "is crossed by a stone bridge built in 1824.",
)

LEADS: dict[str, str] = {"prefix": "", "passages": "\n\n".join(_PASSAGES) + "\n\n"}
"""Text by the value of ``behind``."""
