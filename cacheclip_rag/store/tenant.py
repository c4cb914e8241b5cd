"""One tenant's view of a store: its entries and texts, and nobody else's.

A key of another tenant is answered exactly as a key that does not exist: by the same look-up, with the same work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from ..base.checks import check_namespace
from ..base.closing import Closing
from ..base.database import is_busy, waiting_at_most
from ..base.errors import StoreError
from ..base.keys import text_digest
from ..finding.texts import text_row
from .codecs import (
    CODECS,
    Frame,
    FrameError,
    FrameSink,
    OtherVersionError,
    StoredKV,
    checked_frame,
    encode_frame,
    most_bytes,
    new_memory,
)
from .entries import Entry
from .eviction import PROMPTS
from .tiered import TieredStore

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

Shape = Sequence[int]
"""Of KV: ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``; a :class:`~cacheclip_rag.store.KVShape` if layers
differ."""

_USES = 64
"""Uses after which they are recorded."""
_MOST_USES = 64 * _USES
"""Uses that are remembered while another process has the catalog."""
_MOST_HEADER_BYTES = 1 << 20
_ANY: Mapping[str, Shape] = {}
FAILURES = (FrameError, OSError, MemoryError, StoreError)
"""Why a payload may not be read."""


class ReadBuffer:
    """Memory for one payload at a time. Reading the next payload into it overwrites the last one.

    New memory costs a page fault for every 4 kB, as long as the read itself.
    """

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def allocate(self, num_bytes: int) -> memoryview:
        """Memory for ``num_bytes`` bytes, not cleared."""
        if self._memory.nbytes < num_bytes:
            self._memory = new_memory(num_bytes)
        return self._memory[:num_bytes]


class _EntrySink(FrameSink):
    """Takes the payload of an entry, and nothing that its header does not explain."""

    def __init__(
        self, store: TieredStore, key: str, num_bytes: int, buffer: ReadBuffer | None, shape: Shape | None
    ) -> None:
        """``num_bytes``: what the entry says."""
        super().__init__(key, shape)
        self.store, self.expected, self.buffer = store, num_bytes, buffer

    def allocate(self, num_bytes: int) -> memoryview:
        if self.shape is not None and num_bytes > _MOST_HEADER_BYTES + most_bytes(self.shape):
            raise FrameError(f"it has {num_bytes} bytes, more than KV of this shape can have")
        # a payload that was replaced just now may be larger than its entry
        if num_bytes > self.expected and self.store.header(self.key) is None:
            raise FrameError(f"it has {num_bytes} bytes, which its header does not explain")
        self.memory = new_memory(num_bytes) if self.buffer is None else self.buffer.allocate(num_bytes)
        return self.memory


@dataclass(frozen=True, slots=True)
class TenantStats:
    """What a tenant holds, and its counters since the store was opened in this process."""

    entries: int
    bytes: int
    """Bytes on the medium."""
    max_bytes: int | None
    """The tenant's quota; None: only the store's limit."""
    hits: int
    misses: int

    def to_dict(self) -> dict[str, int | None]:
        return asdict(self)


class TenantStore(Closing):
    """Maps keys (see :func:`~cacheclip_rag.base.keys.chunk_key`) to a tenant's KV.

    A missing key gives None. A damaged or foreign payload is a miss, with a warning; it is removed, in a shared store
    replaced when it is computed again. A payload
    that cannot be read now (OSError of its backend) counts as a miss, with a warning, and stays. If the catalog cannot
    be used, payloads are read without it, with one warning.
    """

    def __init__(self, store: TieredStore, namespace: str) -> None:
        """Raises ConfigurationError for an empty ``namespace``."""
        check_namespace(namespace)
        self.chunk_store, self.catalog, self.namespace = store, store.catalog, namespace
        self.index = store.catalog.text_index(namespace)
        """Finds the tenant's texts in prompts."""
        self._hits = self._misses = 0
        self._uses: list[str] = []
        self._lock = threading.Lock()

    def get(self, key: str, buffer: ReadBuffer | None = None, shape: Shape | None = None) -> StoredKV | None:
        """The stored KV, or None. Counts as a use for eviction.

        Args:
            buffer: memory to read into. The KV is then valid until the next read into it.
            shape: that the KV must have, as the model's has. Any other one is damage.
        """
        return next(self.get_each([key], buffer, {key: shape} if shape is not None else {}))

    def get_each(
        self, keys: Sequence[str], buffer: ReadBuffer | None = None, shapes: Mapping[str, Shape] = _ANY
    ) -> Iterator[StoredKV | None]:
        """As :meth:`get`, for many keys in order. One query asks the catalog for all of them; payloads are read one by
        one, when they are asked for."""
        known, entries = self.look_up(keys)
        for key in keys:
            stored = self._get(key, buffer, known, entries.get(key), shapes.get(key))
            if stored is None:
                self._misses += 1
            else:
                self.record_use(key, is_hit=True)
            yield stored

    def drop_unreadable(self, keys: Sequence[str]) -> int:
        """Remove entries whose payloads on the last tier are damaged or missing; returns how many. For entries that
        another process failed to read. Reads all the payloads, which counts as no use."""
        self.chunk_store.tiers.drop_copies(keys)
        known, entries = self.look_up(keys)
        buffer = ReadBuffer()
        for key, entry in entries.items():
            self._get(key, buffer, known, entry)
        return len(entries) - len(self.look_up([*entries])[1])

    # -- in parts -----------------------------------------------------------------------------------------------------

    def reads_of(self, keys: Sequence[str]) -> dict[str, tuple[str, int]]:
        """What reading these keys would take: medium and bytes, by key. Entries in memory are left out. Reads no
        payload; empty if the catalog cannot be used."""
        tiers, reads = self.chunk_store.tiers, dict[str, tuple[str, int]]()
        for key, entry in self.look_up(keys)[1].items():
            with suppress(OSError):
                holder = tiers.holder(key)
                if not holder.in_memory:
                    reads[key] = holder.medium(key), entry.num_bytes
        return reads

    @property
    def reads_parts(self) -> bool:
        """Whether payloads outside memory can be read in parts."""
        return self.chunk_store.tiers.has_parts

    @property
    def promotes(self) -> bool:
        """Whether a faster tier gets a copy of every payload that is read as a whole."""
        return len(self.chunk_store.tiers.backends) > 1

    def promote(self, key: str, data: Buffer, tier: int) -> None:
        if tier:
            self.chunk_store.erasures.watch(self.namespace, self)
            self.chunk_store.tiers.promote(key, data, tier)

    def _get(
        self,
        key: str,
        buffer: ReadBuffer | None,
        known: bool,
        entry: Entry | None,
        shape: Shape | None = None,
        first: int = 0,
    ) -> StoredKV | None:
        """``known``: whether the catalog could be asked for ``entry``. ``first``: tier that is asked first."""
        tiers = self.chunk_store.tiers
        if known and entry is None:
            tiers.drop_copies([key])  # another process may have deleted it
            return None
        sink = _EntrySink(self.chunk_store, key, entry.num_bytes if entry is not None else 0, buffer, shape)
        tier = len(tiers.backends) - 1
        try:
            payload = tiers.find(key, sink, first)
            if payload is None:
                if entry is not None:
                    self._correct(key)
                return None
            data, tier = payload
            frame = sink.frame or checked_frame(Frame.parse(data, key), shape)
            if frame.namespace != self.namespace:
                raise FrameError("it belongs to another tenant")
            if not tiers.backends[tier].in_memory:
                frame.verify(sink.verified)
        except OtherVersionError as error:
            message = "chunk cache %s… cannot be used (%s); it is computed for this answer, and stays"
            self.chunk_store.warn_once("version", message, key[:12], error)
            return None
        except FrameError as error:
            tiers.count_damaged(tier)
            if tier < len(tiers.backends) - 1:  # only a copy
                tiers.drop_copies([key])
                return self._get(key, buffer, known, entry, shape, tier + 1)
            logger.warning("chunk cache %s… is damaged (%s); it is a miss until it is computed again", key[:12], error)
            self._remove_damaged(key)
            return None
        except (OSError, MemoryError, StoreError) as error:  # the medium failed; the payload may be intact
            message = "chunk cache %s… cannot be read now (%s); it is computed for this answer"
            self.chunk_store.warn_once(f"read {type(error)}", message, key[:12], error)
            return None
        if entry is not None and entry.codec != frame.codec:
            if tier < len(tiers.backends) - 1:  # another process has replaced it
                tiers.drop_copies([key])
                known, entries = self.look_up([key])
                return self._get(key, buffer, known, entries.get(key), shape, tier + 1)
            self._correct(key)
        self.promote(key, data, tier)
        return StoredKV(frame)

    def put(
        self,
        key: str,
        kv: torch.Tensor,
        codec: str,
        *,
        shape: Shape | None = None,
        text: str | None = None,
        of_prompt: bool = False,
    ) -> bool:
        """Store KV atomically. May evict other entries to stay within the limits.

        Args:
            kv: ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, keys before RoPE.
            codec: name in :data:`~cacheclip_rag.store.codecs.CODECS`.
            shape: as in :func:`~cacheclip_rag.store.encode_frame`.
            text: the chunk's text, for :meth:`release`; None for KV without a text (the shared prefix).
            of_prompt: KV of a prompt. It is evicted before all else, and nothing else for it.

        Returns:
            False if there is no room for the KV, which was not stored.

        Raises:
            ConfigurationError: an unknown codec, or numbers that the codec cannot store.
            StoreError: the KV could not be written; nothing stored before was changed.
        """
        digest = text_digest(text) if text is not None else PROMPTS if of_prompt else None
        row = text_row(text) if text is not None else None
        data = encode_frame(kv, codec, key, namespace=self.namespace, digest=digest, text=row, shape=shape)
        self.flush()  # evict by all uses
        if self.promotes:
            self.chunk_store.erasures.watch(self.namespace, self)
        if (is_stored := self.chunk_store.write(self.namespace, key, data)) or of_prompt:
            return is_stored
        message = "a chunk cache of %d bytes exceeds the store's limit or its tenant's, and is not stored"
        self.chunk_store.warn_once("limit", message, len(data))
        self.delete([key])  # an older version must not be read any more
        return False

    def check_writable(self) -> None:
        """Raise StoreError if nothing can be written now: another process uses the catalog, or it may only be read."""
        self.catalog.check_writable()

    def delete(self, keys: Iterable[str], *, erases: bool = True) -> int:
        """Remove entries; returns how many existed. Keys of other tenants are left alone. ``erases``: KV that processes
        hold of the tenant goes, too."""
        own = [key for key in keys if self._is_own(key)]
        if not own:
            return 0
        try:
            return self._remove(own, erases=erases)
        except OSError as error:
            raise StoreError(f"could not delete a chunk cache: {error}. Check who may write to the store.") from error

    def release(self, texts: Iterable[str], *, erases: bool = True) -> int:
        """Remove every entry of these texts, for every model and chunk context. Returns how many texts had an entry.
        ``erases``: KV that processes hold of the tenant goes, too."""
        keys = [self.catalog.keys_of(self.namespace, text_digest(text)) for text in texts]
        return sum([self.delete(of_text, erases=erases) > 0 for of_text in keys])

    def note_erasure(self) -> None:
        """Let go, everywhere, what may have read an erased text: all KV of prompts, stored or held by a process."""
        self.catalog.note_erasure(self.namespace)
        self.delete(self.catalog.keys_of(self.namespace, PROMPTS), erases=False)

    def holds_text(self, text: str) -> bool:
        """Whether there is an entry of a text. False if the catalog cannot be used."""
        with suppress(StoreError):
            return bool(self.catalog.keys_of(self.namespace, text_digest(text)))
        return False

    @property
    def has_texts(self) -> bool:
        """Whether there is an entry of any text. False if the catalog cannot be used."""
        with suppress(StoreError):
            return self.catalog.has_texts(self.namespace)
        return False

    def codec_of(self, key: str) -> str | None:
        """Codec of a key's entry, or None. Reads no payload, and does not count as a use for eviction."""
        return self.codecs_of([key]).get(key)

    def codecs_of(self, keys: Sequence[str]) -> dict[str, str]:
        """As :meth:`codec_of`, for many keys by one query of the catalog. Keys without an entry are left out."""
        known, entries = self.look_up(keys)
        if known:
            return {key: entry.codec for key, entry in entries.items() if entry.codec in CODECS}
        own = {key: frame for key in keys if (frame := self._own_header(key)) is not None}
        return {key: frame.codec for key, frame in own.items()}

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.codec_of(key) is not None

    def keys(self) -> list[str]:
        """The tenant's keys, least recently used first."""
        self.flush()
        return self.catalog.keys(self.namespace)

    def stats(self) -> TenantStats:
        """Sizes and counters."""
        total = self.catalog.total(self.namespace)
        quota = self.chunk_store.quota(self.namespace)
        return TenantStats(total.entries, total.bytes, quota, self._hits, self._misses)

    def commit(self) -> int:
        """As :meth:`TieredStore.commit`, of this tenant."""
        return self.chunk_store.commit(self.namespace)

    def close(self) -> None:
        """Close the store's handles; it may be used again afterwards."""
        self.chunk_store.erasures.unwatch(self)
        self.flush()
        self.chunk_store.close()

    def drop_kv(self) -> None:
        """It holds none: copies in tiers are dropped by what is stored (:mod:`.erasures`)."""

    def flush(self, wait_s: float = 0.0) -> None:
        """Record uses that are not recorded yet. A full disk, or a catalog that is busy for over ``wait_s``, does
        not stop a read: the uses are lost, or recorded later."""
        with self._lock:
            uses, self._uses = self._uses, []
        if not uses:
            return
        try:
            with waiting_at_most(wait_s):
                self.catalog.use(uses)
        except StoreError as error:
            logger.debug("%d uses are not recorded yet: %s", len(uses), error)
            if is_busy(error):
                with self._lock:
                    self._uses = [*uses, *self._uses][-_MOST_USES:]

    def record_use(self, key: str, *, is_hit: bool = False) -> None:
        """Count a use for eviction, as :meth:`get` does. ``is_hit``: it was read by this process, not another one."""
        self._hits += is_hit
        with self._lock:
            self._uses.append(key)
            full = len(self._uses) % _USES == 0
        if full:
            self.flush()

    def look_up(self, keys: Sequence[str]) -> tuple[bool, dict[str, Entry]]:
        """Whether the catalog could be asked, and the entries by key."""
        try:
            return True, self.catalog.entries_of(self.namespace, keys)
        except StoreError as error:
            message = "the store's catalog cannot be used; chunk caches are read without it. %s"
            self.chunk_store.warn_once("catalog", message, error)
            return False, {}

    def _is_own(self, key: str) -> bool:
        """Whether an entry, or a payload without an entry, is the tenant's or nobody's."""
        return key in self.catalog.entries_of(self.namespace, [key]) or self._own_header(key) is not None

    def _own_header(self, key: str) -> Frame | None:
        """The header of the tenant's payload; None if it is missing, another tenant's, damaged, or cannot be read."""
        with suppress(*FAILURES):
            frame = self.chunk_store.header(key)
            return frame if frame is not None and frame.namespace == self.namespace else None
        return None

    def _remove(self, keys: Sequence[str], *, erases: bool) -> int:
        return self.catalog.remove(self.namespace, keys, self.chunk_store.tiers.delete, erases=erases)

    def _correct(self, key: str) -> None:
        """Make the entry say what the medium holds."""
        try:
            self.catalog.correct(key, self.chunk_store.measure)
        except FAILURES as error:
            logger.debug("an entry was not corrected: %s", error)

    def _remove_damaged(self, key: str) -> None:
        try:
            self._remove([key], erases=False)
        except (OSError, StoreError) as error:  # a read-only store can still be read
            self.chunk_store.warn_once(
                "removal", "the damaged chunk cache %s… could not be removed: %s", key[:12], error
            )
