"""What this process added and removed, until a commit takes it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from cacheclip_rag.store import Database, Sources, TextIndex, text_digest

from .table import Removal, SharedText


class Changes:
    """Texts by tenant, and what was removed of it; in memory. Safe to share between threads."""

    def __init__(self) -> None:
        self._added: dict[str, dict[tuple[str, str, str], SharedText]] = {}
        self._removed: dict[str, Removal] = {}
        self._lock = threading.Lock()

    def add(self, namespace: str, text: str, source: str = "", document: str = "") -> None:
        """A text that was added here."""
        each = SharedText(text, source, document)
        with self._lock:
            self._added.setdefault(namespace, {})[each.digest, source, document] = each

    def remove(self, namespace: str, texts: Iterable[str] = (), names: Iterable[str] = ()) -> None:
        """Texts, sources and documents that were removed here."""
        removal = Removal({text_digest(text).hex() for text in texts}, set(names))
        with self._lock:
            waiting = self._added.get(namespace, {})
            for key, each in [*waiting.items()]:
                if removal.covers(each):
                    del waiting[key]
            known = self._removed.setdefault(namespace, Removal())
            known.digests |= removal.digests
            known.names |= removal.names

    def forget(self, namespace: str, digests: Collection[bytes]) -> None:
        """Another machine removed these texts; those that have a source here stay."""
        with self._lock:
            waiting = self._added.get(namespace, {})
            for digest in digests:
                waiting.pop((digest.hex(), "", ""), None)

    def take(self, namespace: str) -> list[SharedText]:
        """Take the texts that wait for a commit. A text with a source needs no row without one."""
        with self._lock:
            texts = [*self._added.pop(namespace, {}).values()]
        with_source = {each.digest for each in texts if each.source or each.document}
        return [each for each in texts if each.source or each.document or each.digest not in with_source]

    def take_removed(self, namespace: str) -> Removal:
        """Take what waits to be removed."""
        with self._lock:
            return self._removed.pop(namespace, Removal())

    def put_back(self, namespace: str, texts: Iterable[SharedText], removed: Removal) -> None:
        """What could not be committed waits again, but for what was removed here meanwhile."""
        with self._lock:
            since = self._removed.setdefault(namespace, Removal())
            waiting = self._added.setdefault(namespace, {})
            for each in texts:
                if not since.covers(each):
                    waiting.setdefault((each.digest, each.source, each.document), each)
            since.digests |= removed.digests
            since.names |= removed.names

    def namespaces(self) -> list[str]:
        """Tenants of which something waits."""
        with self._lock:
            return [name for name in {*self._added, *self._removed} if self._added.get(name) or self._removed.get(name)]


class SharedIndex(TextIndex):
    """A tenant's texts; what is added and removed on this machine waits for a commit."""

    def __init__(self, database: Database, namespace: str, changes: Changes) -> None:
        super().__init__(database, namespace)
        self._changes = changes

    def add(self, texts: Iterable[str]) -> None:
        texts = [*texts]
        super().add(texts)
        for text in texts:
            self._changes.add(self._namespace, text)

    def remove(self, texts: Iterable[str]) -> None:
        texts = [*texts]
        super().remove(texts)
        self._changes.remove(self._namespace, texts)


class SharedSources(Sources):
    """Sources; what is added and removed on this machine waits for a commit."""

    def __init__(self, database: Database, changes: Changes) -> None:
        super().__init__(database)
        self._changes = changes

    def add(self, namespace: str, source: str, text: str, document: str = "") -> None:
        super().add(namespace, source, text, document)
        self._changes.add(namespace, text, source, document)

    def remove(self, namespace: str, gone: Iterable[str], *, texts: Iterable[str] | None = None) -> None:
        names = [*gone]
        super().remove(namespace, names, texts=texts)
        if texts is None:
            self._changes.remove(namespace, names=names)
