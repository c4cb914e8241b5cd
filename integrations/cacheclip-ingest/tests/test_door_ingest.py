"""What the distribution takes of the core is public."""

from __future__ import annotations

from pathlib import Path

import cacheclip_ingest

from cacheclip_rag.testing.door import names_outside_the_door

TO_COME = {"chunks.batches.in_batches", "chunks.caches.ChunkCaches", "prompt.segments.chunk_texts"}
"""Names for the cost of an ingestion, which the core will say."""


def test_it_takes_only_what_is_public() -> None:
    assert names_outside_the_door(Path(cacheclip_ingest.__file__).parent) == TO_COME
