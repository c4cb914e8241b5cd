"""Opens a store, wherever it is."""

from __future__ import annotations

from os import PathLike

from ..base.paths import is_url
from .chunk_store import ChunkStore


def open_chunk_store(
    store: str | PathLike[str] | None,
    max_bytes: int | None = None,
    memory_bytes: int = 0,
    codec: str | None = None,
) -> ChunkStore:
    """A store in a folder, in memory (None), or in object storage (a URL); other arguments are those of
    :meth:`ChunkStore.open`.

    Args:
        codec: of the engine, for shared stores that hold several.

    Raises:
        StoreError: the folder holds a store of an older format, or there is no store at the URL. Storage that does not
            answer is a warning.
        MissingExtraError: the extra ``shared`` is not installed.
    """
    if not is_url(store):
        return ChunkStore.open(str(store) if store else None, max_bytes, memory_bytes)
    from .shared.place import SharedPlace
    from .shared.store import SharedStore

    return SharedStore.at(SharedPlace(str(store)), codec=codec, memory_bytes=memory_bytes)
