"""Reads entries of a store folder, and writes nothing: for processes that carry out plans of another one.

There is no catalog here. Uses are not recorded, limits are not applied, and a damaged payload stays where it is: the
process that plans does all this.
"""

from __future__ import annotations

from pathlib import Path

from .codecs import Frame, FrameError, FrameSink, StoredKV, keeps
from .disk import DiskBackend


class StoreReader:
    """One tenant's entries of a store folder."""

    def __init__(self, folder: str | Path, namespace: str) -> None:
        self.folder, self.namespace = Path(folder), namespace
        self._backend = DiskBackend(self.folder)

    def get(self, key: str, *, codec: str) -> StoredKV:
        """The KV of a key, compared with its checksums. Raises FrameError if the payload is missing, damaged, of a
        coarser codec, or another tenant's; OSError if it cannot be read now."""
        sink = FrameSink(key)
        data = self._backend.read(key, sink)
        if data is None:
            raise FrameError(f"entry {key[:12]}… is not in {self.folder}")
        frame = sink.frame or Frame.parse(data, key)
        if frame.namespace != self.namespace:
            raise FrameError(f"entry {key[:12]}… belongs to another tenant")
        if not keeps(frame.codec, codec):
            raise FrameError(f"entry {key[:12]}… is stored as {frame.codec}, which is coarser than {codec}")
        frame.verify(sink.verified)
        return StoredKV(frame)
