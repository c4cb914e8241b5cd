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
    "The Northern Line Company was founded in 1903 by two brothers. It built railway carriages until 1931, "
    "when it was sold to a larger firm and its works in Hadley were closed.",
    "In biology, a clade is a group of organisms that consists of a common ancestor and all of its "
    "descendants. Clades are nested, one in another, as each branch in turn splits into smaller branches.",
    "The Quiet Harbour is a 1956 drama film directed by Anna Renn and starring Peter Holt. It tells the story "
    "of a fisherman who returns to his village after ten years at sea. The film won two prizes.",
    "The annual report says that sales rose by four per cent in the second quarter, while costs remained the "
    "same. The board expects a similar result for the rest of the year and proposes no change of the dividend.",
    "To install the program, copy the files to a folder of your choice and start the setup. You can change the "
    "settings later in the menu. If an error occurs, look at the log file first.",
    "The battle was fought on a plain east of the city in the spring of 1422. Both armies lost more than a "
    "thousand men, and neither side gained ground. A treaty was signed in the following year.",
)

LEADS: dict[str, str] = {"prefix": "", "passages": "\n\n".join(_PASSAGES) + "\n\n"}
"""Text by the value of ``behind``."""
