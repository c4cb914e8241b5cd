"""Reads entries of a store, and writes nothing: for processes that carry out plans of another one.

There is no catalog here. Uses are not recorded, limits are not applied, and a damaged payload stays where it is: the
process that plans does all this.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from ..base.paths import is_url, split_hot
from .codecs import HEAD_BYTES, Frame, FrameError, FrameSink, StoredKV, keeps
from .disk import DiskBackend
from .opening import store_kind
from .tiers import Tiers


@lru_cache(maxsize=256)
def _tiers_at(url: str, namespace: str, codec: str | None) -> Tiers:
    """One for all plans: an outage is waited for once."""
    return store_kind(url).tiers(url, namespace, codec)


class StoreReader:
    """One tenant's entries of a store."""

    def __init__(
        self, store: str | Path, namespace: str, codec: str | None = None, *, heads: slice | None = None
    ) -> None:
        """
        Args:
            store: folder, or URL of a shared store.
            codec: of the payloads that are wanted, where a shared store has several.
            heads: read no other KV heads where that reads less: from a folder, of payloads with checksums of heads.
                Others have all heads.
        """
        self.store, self.namespace = store, namespace
        self._heads = heads
        is_shared = is_url(store)
        self._tiers = _tiers_at(str(store), namespace, codec) if is_shared else Tiers([DiskBackend(Path(store))])

    def get(self, key: str, *, codec: str) -> StoredKV:
        """The KV of a key, compared with its checksums. Raises FrameError if the payload is missing, damaged, of a
        coarser codec, or another tenant's; OSError if it cannot be read now."""
        if (of_heads := self._heads_of(key, codec)) is not None:
            return of_heads
        sink = FrameSink(key)
        try:
            payload = self._tiers.find(key, sink)
            if payload is not None:
                frame = sink.frame or Frame.parse(payload[0], key)
                frame.verify(sink.verified)
        except FrameError as error:
            raise FrameError(f"entry {key[:12]}… cannot be used: {error}") from error
        if payload is None:
            raise FrameError(f"entry {key[:12]}… is not in {split_hot(str(self.store))[0]}")
        self._check(frame, codec)
        self._tiers.promote(key, *payload)
        return StoredKV(frame)

    def _heads_of(self, key: str, codec: str) -> StoredKV | None:
        """The wanted heads; None where the whole must be read, which also says what is wrong with it."""
        backend = self._tiers.last
        if self._heads is None or not isinstance(backend, DiskBackend):
            return None
        with suppress(FrameError):
            head = backend.head(key, HEAD_BYTES)
            frame = Frame.parse(head[0], key, num_bytes=head[1]) if head is not None else None
            if frame is not None and frame.heads and self._heads.stop - self._heads.start < frame.shape[2]:
                self._check(frame, codec)
                part, ranges = frame.of_heads(self._heads)
                if backend.read_parts(key, ranges):
                    part.verify_heads()
                    return StoredKV(part)
        return None

    def _check(self, frame: Frame, codec: str) -> None:
        if frame.namespace != self.namespace:
            raise FrameError(f"entry {frame.key[:12]}… belongs to another tenant")
        if not keeps(frame.codec, codec):
            raise FrameError(f"entry {frame.key[:12]}… is stored as {frame.codec}, which is coarser than {codec}")
