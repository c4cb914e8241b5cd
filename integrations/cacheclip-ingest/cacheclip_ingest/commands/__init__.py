"""Commands of ``cacheclip`` on documents: ingest, ask, store remove; and what its other commands ask about
documents."""

from __future__ import annotations

from cacheclip_rag.plugins import Commands

from .ask import ask
from .companion import DocumentsBeside
from .ingest import ingest
from .remove import remove
from .tables import AskTable, IngestTable


def register(commands: Commands) -> None:
    """Called by the command line of the core, which found this function by its entry point."""
    commands.add("ingest", ingest, IngestTable)
    commands.add("ask", ask, AskTable)
    commands.add("store remove", remove)
    commands.keep_beside(DocumentsBeside())
