"""Erasures that other engines and processes made: KV in this process's memory goes within :data:`LOOK_S` seconds.

Every erasure changes a number of its tenant in the catalog, which all processes of a store read. A thread of the
process looks at it, also while nobody asks anything, and has those who hold KV drop it. Copies in a memory tier are
compared with the entries themselves, so that a copy that a slow read left there goes with the next look.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ..base.database import OutageWarning, waiting_at_most

if TYPE_CHECKING:
    from .tiers import Tiers
    from .view import ErasuresView

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""Between two looks at what others erased."""
_WAIT_S = 1.0
"""Longest wait for a catalog that another process uses."""
_UNKNOWN = object()
"""In place of a number: whatever the catalog says now, something may have been erased."""


class KVHolder(Protocol):
    """Holds KV of a tenant's texts in memory."""

    def drop_kv(self) -> None:
        """Drop all that may be of a text that was erased."""


class Erasures:
    """What is erased from one store, for those in this process who hold KV of it. Safe to share between threads."""

    def __init__(self, catalog: ErasuresView, tiers: Tiers) -> None:
        self._catalog, self._tiers = catalog, tiers
        self._seen: weakref.WeakKeyDictionary[KVHolder, tuple[str, object]] = weakref.WeakKeyDictionary()
        """By holder, its tenant and the number that it has followed."""
        self._lock = threading.Lock()
        self._outage = OutageWarning(logger, "what others erase from the store is not seen for now: %s")

    @property
    def is_watched(self) -> bool:
        return bool(self._seen)

    def watch(self, namespace: str, holder: KVHolder) -> None:
        """From now on ``holder``, which is not kept alive, drops what is erased. Call it before KV is taken: what was
        erased before is not looked for. A second call does nothing."""
        if holder not in self._seen:
            number = self._number(namespace)
            with self._lock:
                self._seen.setdefault(holder, (namespace, number))
        _look_from_now_on(self)

    def unwatch(self, holder: KVHolder) -> None:
        with self._lock:
            self._seen.pop(holder, None)

    def drop_own(self, holder: KVHolder) -> None:
        """Have ``holder``, which erased something itself, drop its KV now. The next look does not drop again what it
        holds by then, unless others erased more."""
        with self._lock:
            seen = self._seen.get(holder)
        number = self._number(seen[0]) if seen else _UNKNOWN
        holder.drop_kv()
        with self._lock:
            if seen and self._seen.get(holder) == seen:
                self._seen[holder] = seen[0], number

    def doubt(self) -> None:
        """The catalog is another one: the next look drops everything."""
        with self._lock:
            for holder, (namespace, _) in [*self._seen.items()]:
                self._seen[holder] = namespace, _UNKNOWN

    def look(self) -> None:
        """Drop what was erased since the last look. If the catalog cannot be asked, the next look does."""
        with self._lock:
            seen = [*self._seen.items()]
        failed = [each for each in (self._tried(partial(self._follow, *one)) for one in seen) if each is not None]
        failed += filter(None, [self._tried(lambda: self._tiers.drop_old_copies(self._catalog.unknown_of))])
        if not failed:
            self._outage.worked()

    def _follow(self, holder: KVHolder, seen: tuple[str, object]) -> None:
        number = self._catalog.erasures(seen[0])
        was_made = seen[1] is None and number == 0  # an empty store, since the last look
        if not was_made and (number != seen[1] or self._seen.get(holder) != seen):  # asking may have raised doubt
            holder.drop_kv()
        with self._lock:  # last, so that it is tried again after an error
            if holder in self._seen:
                self._seen[holder] = seen[0], number

    def _tried(self, step: Callable[[], object]) -> Exception | None:
        """An error of the catalog, or of one who holds KV: the others are looked at all the same."""
        try:
            with waiting_at_most(_WAIT_S):
                step()
        except Exception as error:
            self._outage.failed(error)
            return error
        return None

    def _number(self, namespace: str) -> object:
        try:
            return self._catalog.erasures(namespace)
        except Exception as error:  # the answer that asks goes on
            self._outage.failed(error)
            return _UNKNOWN


# -- the thread ------------------------------------------------------------------------------------------------------

_watched: weakref.WeakSet[Erasures] = weakref.WeakSet()
_registering = threading.Lock()
_passes = threading.RLock()
"""Held while the thread looks. A fork waits for it, so that no child inherits a lock that the thread holds."""
_thread: threading.Thread | None = None


def look_at_all() -> None:
    """One look at every store that somebody holds KV of."""
    with _passes:
        with _registering:
            watched = [*_watched]
        for each in watched:
            if each.is_watched:
                each.look()


def _look_from_now_on(erasures: Erasures) -> None:
    if erasures not in _watched or _thread is None:
        with _registering:
            _watched.add(erasures)
            _start()


def _start() -> None:
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_follow, name="cacheclip-erasures", daemon=True)
        _thread.start()


def _follow() -> None:
    while True:
        time.sleep(LOOK_S)
        look_at_all()


def _in_child() -> None:
    """The child of a fork has the parent's KV, but none of its threads."""
    global _thread
    _release()
    if _thread is not None:
        _thread = None
        _start()


def _acquire() -> None:
    _passes.acquire()
    _registering.acquire()


def _release() -> None:
    _registering.release()
    _passes.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_acquire, after_in_parent=_release, after_in_child=_in_child)
