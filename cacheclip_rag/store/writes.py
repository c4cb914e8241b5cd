"""Writes to a store folder: each is announced in the catalog, so that its bytes count before its payload is there, and
ends there. What killed processes left is completed or removed.

A lock around whole writes was rejected: readers and other writers would wait for the disk.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace

from ..base.database import is_busy
from ..base.errors import StoreError
from ..base.sqlite_file import FormatError
from .catalog import Catalog
from .codecs import Frame, FrameError, OtherVersionError
from .disk import DiskBackend
from .entries import Entry
from .process import Writer
from .tiers import Tiers

logger = logging.getLogger(__name__)

_WAIT_S = 30.0
"""Longest wait for other writers to complete, when their announced bytes fill the store."""


class Writes:
    """This process's writes to a store, and those that killed ones left."""

    def __init__(
        self, catalog: Catalog, tiers: Tiers, measure: Callable[[str], Entry | None], writer: Writer | None
    ) -> None:
        """
        Args:
            measure: as :meth:`.tiered.TieredStore.measure`, of these tiers.
            writer: this process; None: a store that no other process has.
        """
        self._catalog, self._tiers, self._measure, self.writer = catalog, tiers, measure, writer
        self._late: dict[int, Frame | None] = {}
        """Writes that have ended, but not in the catalog yet, by number; None: they left no payload."""

    def on(self, tiers: Tiers, measure: Callable[[str], Entry | None]) -> Writes:
        """The same of other tiers."""
        others = copy(self)
        others._tiers, others._measure = tiers, measure
        return others

    def begin(self, namespace: str, key: str, size: int, *, of_prompt: bool = False) -> int | None:
        """Number of the announced write, or None if the payload can never fit. Evicts what must go for it. With
        ``of_prompt``, only KV of prompts is evicted: None if that is too little."""
        self._end_late()
        name = self.writer.name if self.writer is not None else ""
        limits = [self._catalog.limits.of_store, self._catalog.limits.quota(namespace)]
        if any(limit is not None and size > limit for limit in limits):
            return None
        until = time.monotonic() + _WAIT_S
        while True:
            number, evicted = self._catalog.announcements.reserve(
                namespace, key, size, name, self.evict, of_prompt=of_prompt
            )
            self._tiers.count_evictions(evicted)
            if number is not None or of_prompt:
                return number
            if time.monotonic() > until:
                raise StoreError(
                    "no room for a chunk cache: other writers have announced all bytes up to the store's limit. Raise "
                    "the limit, or write with fewer processes."
                )
            self.sweep()  # they may be dead
            time.sleep(0.01)

    def end(self, number: int, frame: Frame | None) -> None:
        """Record a payload that was written, or give back the bytes of one that was not (None). What the catalog does
        not take now, the next write tells it again."""
        announcements = self._catalog.announcements
        try:
            if frame is None:
                announcements.abandon(number)
            else:
                key = frame.key
                announcements.finish(number, lambda: self._measure_written(frame), lambda: self.evict([key]))
        except StoreError as error:
            self._late[number] = frame and replace(frame, data=frame.data[: frame.start])
            if frame is not None and not is_busy(error):
                raise
        else:
            self._late.pop(number, None)

    def _end_late(self) -> None:
        for number, frame in [*self._late.items()]:
            self.end(number, frame)

    def _measure_written(self, frame: Frame) -> Entry | None:
        """The entry of a payload that was written just now."""
        try:
            return self._measure(frame.key)
        except FrameError:
            return None
        except (OSError, MemoryError):  # it cannot be read now
            return Entry.of(frame, self._tiers.round_up(frame.num_bytes))

    def evict(self, keys: list[str]) -> None:
        """Delete payloads whose room is needed."""
        try:
            self._tiers.delete(keys)
        except OSError as error:
            raise StoreError(f"could not evict a chunk cache: {error}. Check who may write to the store.") from error

    def living(self) -> set[str]:
        """Processes that may be writing now, and those whose end nobody has noticed yet."""
        return self.writer.names() if self.writer is not None else set()

    def sweep(self, most_s: float = math.inf) -> int:
        """Complete or remove what killed processes left, for ``most_s`` seconds at most; returns how many writes there
        were. Raises StoreError if the catalog is of another version; other errors are only logged."""
        count, swept, until = 0, set[str](), time.monotonic() + most_s
        if self.writer is None:
            return 0
        try:
            for writer in self.writer.dead():
                count += self._settle({writer}, until)
                swept.add(writer)
                if time.monotonic() > until:
                    break
            last = self._tiers.last
            temporaries = {last.writer_of(name) for name in last.temporaries()} if isinstance(last, DiskBackend) else ()
            writing = {*self._catalog.announcements.writers(), *temporaries}
            unknown = writing - self.living()  # after ``writing``: a writer registers before it writes
            unknown = {writer for writer in unknown if Writer.is_name(str(writer))}
            if unknown and time.monotonic() < until:
                count += self._settle(unknown, until)
            swept |= unknown
            if isinstance(last, DiskBackend):
                last.sweep(swept)
        except FormatError:
            raise
        except (OSError, MemoryError, StoreError) as error:
            logger.debug("what killed processes left could not be removed: %s", error)
        return count

    def _settle(self, writers: set[str], until: float) -> int:
        return self._catalog.announcements.settle(writers, self._measure_left, self.evict, until)

    def _measure_left(self, key: str) -> Entry | None:
        """The entry of a payload whose writer was killed. A damaged payload is removed. Raises OtherVersionError,
        OSError or MemoryError for what others may still read."""
        try:
            return self._measure(key)
        except OtherVersionError:
            raise
        except FrameError:
            self._tiers.delete([key])
            return None
