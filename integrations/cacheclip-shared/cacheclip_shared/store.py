"""A store in object storage behind the interface of one in a folder."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from cacheclip_rag import StoreError
from cacheclip_rag.store import CODECS, Entry, Frame, FrameError, MemoryBackend, TieredStore, Tiers, text_digest

from .hot import HotBackend, with_hot
from .objects import ObjectBackend, Objects
from .place import LAYOUT, SharedPlace, failing_as
from .replica import SharedCatalog
from .table import rows_of

logger = logging.getLogger(__name__)

POLL_S = 10.0
"""Between two looks at what others committed."""
GRACE_S = 3600.0
"""For which a payload without a row stays."""
_FIRST_S = 0.6
"""Longest wait of a first question for the texts."""
_MOST_USED = 1 << 20
STORE_FILE = "store.json"


class SharedStore(TieredStore):
    """Payloads are written once and replaced only if they are damaged, nothing is evicted, and servers delete nothing.

    A thread takes what others committed every ``POLL_S`` seconds, and commits what this process stored by itself after
    answers. :meth:`close` ends it.
    """

    catalog: SharedCatalog

    def __init__(self, place: SharedPlace, *, codec: str | None = None, memory_bytes: int = 0) -> None:
        """
        Args:
            codec: of the engine; of a key's objects, the one that fits it is read.
            memory_bytes: size of a memory tier; 0: none.
        """
        objects = ObjectBackend(place, codec=codec)
        catalog = SharedCatalog(objects)
        memory = [MemoryBackend(memory_bytes)] if memory_bytes else []
        super().__init__(catalog, Tiers([*memory, *with_hot(objects)]))
        self.place, self.objects = place, objects
        catalog.on_forgotten = self._drop_copies
        catalog.tables.on_tenant = self._wake
        catalog.database.on_replaced = self.erasures.doubt  # the next poll makes it anew
        self.codec = codec
        self.encoding = threading.Lock()
        self.commits = True
        """False: what is stored waits for :meth:`take_rows`, because another process commits. What is released does
        not."""
        self._used: set[tuple[str, bytes]] = set()
        """Texts without KV that an answer used."""
        self._woken = threading.Event()
        self._polled = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._committing = defaultdict[str, threading.Lock](threading.Lock)
        """By tenant: who comes second sees whether the first one's commit failed."""

    @classmethod
    def at(cls, place: SharedPlace, *, codec: str | None = None, memory_bytes: int = 0) -> SharedStore:
        """A store that was made (:func:`~cacheclip_shared.care.create`), with its codec unless another one is
        given. If storage does not answer, nothing is found until it does.

        Raises:
            StoreError: there is no store, or it has another layout.
        """
        objects = ObjectBackend(place)
        try:
            codec = codec or read_store_file(objects)["codec"]
        except StoreError as error:
            if not objects.breaker.is_open:
                raise
            logger.warning("answers go without the shared store for now: %s", error)
        store = cls(place, codec=codec, memory_bytes=memory_bytes)
        store.objects.breaker = objects.breaker
        return store

    # -- what others see ------------------------------------------------------------------------------------------

    def poll(self) -> tuple[int, int]:
        """Take what others committed: rows added and removed."""
        found = self.catalog.tables.poll()
        self._polled.set()
        self.erasures.look()
        return found

    def commit(self, namespace: str | None = None) -> int:
        """Let other machines find what was stored and released here, by one tenant or by all; returns the number of new
        rows. Payloads that an earlier run left, and which a cleaning might take, are made young first. Raises
        StoreError, after all the others are committed."""
        count, failed = self._commit_each(namespace)
        if failed:
            said = " ".join(f"Changes of tenant {name!r} wait: {error}" for name, error in failed.items())
            raise StoreError(said) from next(iter(failed.values()))
        return count

    def _commit_each(self, only: str | None = None) -> tuple[int, dict[str, StoreError]]:
        """The number of new rows, and what failed by tenant."""
        count, failed = 0, dict[str, StoreError]()
        # also of those that another thread commits now
        for namespace in {*self.catalog.changes.namespaces(), *list(self._committing)} if only is None else [only]:
            try:
                with self._committing[namespace]:
                    count += self._commit(namespace)
            except StoreError as error:
                failed[namespace] = error
        return count, failed

    def _commit(self, namespace: str) -> int:
        removed = self.catalog.changes.take_removed(namespace)
        texts = self.catalog.changes.take(namespace) if self.commits else []
        if not (removed or texts):
            return 0
        try:
            with failing_as("not committed"):
                self.look_again(namespace, [each.digest for each in texts])
                texts = self.catalog.with_kv(namespace, texts)
                count = self.catalog.tables.table(namespace).commit(rows_of(namespace, texts), removed)
                self.catalog.tables.after_commit(namespace, texts)
        except BaseException:
            self.catalog.changes.put_back(namespace, texts, removed)
            raise
        return count

    def look_again(self, namespace: str, digests: Sequence[str]) -> None:
        """Look for payloads that this machine saw long ago. Those that are gone are forgotten; those that no row names,
        and which a cleaning might take, are made as young as new ones, or forgotten if they are damaged. Raises
        OSError."""
        before = time.time() - GRACE_S / 2
        old = self.catalog.old_payloads(namespace, digests, before)
        found = self.objects.locate(namespace, [*{key for key, *_ in old}]) if old else {}
        for key, codec, is_named in old:
            each = next((each for each in found.get(key, ()) if each.codec == codec), None)
            try:
                if each is None:
                    raise FileNotFoundError
                if not is_named and each.modified.timestamp() < before:
                    data = self.objects.fetch(each.name)
                    Frame.parse(data, key).verify()  # else another machine may have replaced it by now
                    self.objects.replace(each.name, data)
                self.catalog.seen(key, codec)
            except (FileNotFoundError, FrameError):
                self.catalog.remove(namespace, [key])

    def take_rows(self, namespace: str) -> Any:
        """Rows of what was stored since the last call, for another process to commit (a ``pyarrow.Table``)."""
        texts = self.catalog.changes.take(namespace)
        self.look_again(namespace, [each.digest for each in texts])
        return rows_of(namespace, self.catalog.with_kv(namespace, texts))

    def _wake(self) -> None:
        """Start the thread, and give it a moment: a first question should find the texts."""
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._stop, self._woken, self._polled = threading.Event(), threading.Event(), threading.Event()
                self._thread = threading.Thread(
                    target=_follow,
                    args=(weakref.ref(self), self._stop, self._woken),
                    name="cacheclip-shared",
                    daemon=True,
                )
                self._thread.start()
            else:
                self._polled.clear()
                self._woken.set()
        if not self.objects.breaker.is_open:
            self._polled.wait(_FIRST_S)

    def _drop_copies(self, namespace: str, keys: Sequence[str]) -> None:
        self.tiers.drop_copies(keys)
        for each in self.tiers.backends:
            if isinstance(each, HotBackend):
                each.erase(namespace, keys)

    # -- as a store of a folder -----------------------------------------------------------------------------------

    def write(self, namespace: str, key: str, data: bytearray) -> bool:
        try:
            self.tiers.put(key, data)
        except OSError as error:
            raise StoreError(
                f"could not write a chunk cache of {len(data) / 1e6:.1f} MB to {self.place.url}: {error}. Check that "
                "the storage answers, and who may write to it."
            ) from error
        frame = Frame.parse(data, key)
        self.catalog.record(Entry.of(frame, frame.num_bytes))
        return True

    def wants(self, namespace: str, text: str) -> bool:
        """A text that was ingested without KV, or lost it to a quota, pays for it from the second use on."""
        digest = text_digest(text)
        if (namespace, digest) in self._used or not self.catalog.tables.lacks_kv(namespace, digest):
            return True
        if len(self._used) >= _MOST_USED:
            self._used.clear()
        self._used.add((namespace, digest))
        return False

    def drop_tenant(self, namespace: str) -> int:
        """Forget a tenant's entries on this machine."""
        return self.catalog.remove(namespace, self.catalog.keys(namespace))

    def close(self) -> None:
        self._stop.set()
        self._woken.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
        try:
            self.commit()
        except StoreError as error:
            logger.warning("texts that were stored after answers are not committed: %s", error)
        super().close()


def _follow(of: weakref.ref[SharedStore], stop: threading.Event, woken: threading.Event) -> None:
    while not stop.is_set():
        store = of()
        if store is None:
            return
        try:
            store.poll()
            for namespace, error in store._commit_each()[1].items():
                what = "texts stored after answers of tenant %r are not committed: %s"
                store.warn_once(f"commit {namespace}", what, namespace, error)
        except Exception as error:  # the thread must go on
            store.warn_once("follow", "the shared store is not followed: %s", error)
        store._polled.set()
        del store
        woken.wait(POLL_S)
        woken.clear()


def read_store_file(objects: Objects) -> dict[str, Any]:
    """What a store was made with. Raises StoreError."""
    url = objects.place.url
    try:
        found = objects.fetch_json(STORE_FILE)
    except OSError as error:
        raise StoreError(f"the shared store {url} does not answer: {error}.") from error
    except ValueError as error:
        raise StoreError(f"{url}/{STORE_FILE} is not a file of cacheclip-rag: {error}.") from error
    if found is None:
        raise StoreError(f"there is no shared store at {url}. Make one: cacheclip store create {url}")
    if not isinstance(found, dict) or found.get("layout") != LAYOUT or found.get("codec", "") not in (None, *CODECS):
        raise StoreError(
            f"expected a store of layout {LAYOUT} at {url}, got {str(found)[:200]}. Use the version of cacheclip-rag "
            "that made it."
        )
    return found
