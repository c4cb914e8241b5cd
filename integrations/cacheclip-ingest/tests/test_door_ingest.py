"""What the distribution takes of the core is public."""

from __future__ import annotations

from pathlib import Path

import cacheclip_ingest

from cacheclip_rag.testing.door import names_outside_the_door

SHARED_STORES = {
    *("care.room", "objects.ObjectBackend", "place.SharedPlace", "place.need", "store.SharedStore"),
    *("store.read_store_file", "table.Removal", "table.SharedText", "table.TextTable", "table.rows_of", "table.schema"),
}
"""Names of stores in object storage, which become a distribution of their own."""
TO_COME = {
    *("chunks.batches.in_batches", "chunks.caches.ChunkCaches", "prompt.segments.chunk_texts"),  # a cost of the core
}


def test_it_takes_only_what_is_public() -> None:
    allowed = {f"store.shared.{name}" for name in SHARED_STORES} | TO_COME
    assert names_outside_the_door(Path(cacheclip_ingest.__file__).parent) == allowed
