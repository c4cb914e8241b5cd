"""Copies of payloads in Valkey or Redis, which servers share: asked before object storage, and never waited for.

A copy is named as its object, so that it never changes, and a tenant's copies have a prefix of their own. It lives an
hour at most. How many there are is the server's ``maxmemory``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cacheclip_rag import ConfigurationError
from cacheclip_rag.plugins import shown_url
from cacheclip_rag.store import CODECS, Backend, OutageWarning, Sink, later

from .objects import ObjectBackend, name_for
from .place import key_and_codec, key_folder, need, object_name, tenant_folder

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

TTL_S = 3600
"""Life of a copy, not prolonged by reads: a text that is erased is here no longer than this."""
_CONNECT_S, _SILENT_S = 0.1, 0.2
_PAUSE_S = 10.0
"""For which nothing is asked after a request failed."""
_MOST_BYTES = 1 << 29
"""Of a value."""
_MOST_WAITING = 1 << 28
"""Bytes of copies that wait to be written; more are not written."""


class HotBackend(Backend):
    """Copies of the objects of a shared store. No method raises OSError: what the server does not give is missing."""

    name = "hot"
    has_parts = True
    reads_at_once = 8

    def __init__(self, objects: ObjectBackend) -> None:
        """``objects``: of a place with a hot tier."""
        redis, url = need("redis", "hot"), objects.place.hot
        self._objects, self._errors = objects, redis.exceptions
        try:
            self._client = redis.Redis.from_url(
                url.replace("valkey", "redis", 1),
                socket_connect_timeout=_CONNECT_S,
                socket_timeout=_SILENT_S,
                retry=need("redis.retry", "hot").Retry(need("redis.backoff", "hot").NoBackoff(), 0),
            )
        except ValueError:  # which may show a password
            raise ConfigurationError(
                f"a hot tier must be a URL such as valkey://host:6379, got {shown_url(url)!r}."
            ) from None
        self._medium = f"valkey://{urlsplit(url).hostname}:{urlsplit(url).port or 6379}"
        self._prefix = f"cacheclip:{objects.place.replica.name}:"
        self._reads_again = self._writes_again = 0.0
        self._waiting = 0
        self._lock = threading.Lock()
        self._outage = OutageWarning(logger, f"the hot tier {self._medium} is not used for now: %s")

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _ask(self, *commands: tuple[Any, ...], writes: bool = False) -> list[Any] | None:
        """Answers to commands that are sent together; None if the server does not give them now."""
        if time.monotonic() < (self._writes_again if writes else self._reads_again):
            return None
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                found: list[Any] = pipeline.execute()
        except (self._errors.RedisError, OSError) as error:
            if "WRONGTYPE" in str(error):  # something else has this name: no outage, and the next copy replaces it
                return None
            with self._lock:
                self._outage.failed(error)
                self._writes_again = time.monotonic() + _PAUSE_S
                if not (writes and isinstance(error, self._errors.ResponseError)):  # a full server can still be read
                    self._reads_again = self._writes_again
            return None
        if time.monotonic() >= self._writes_again:  # else it was asked before another request failed
            self._outage.worked()
        return found

    def get_many(self, keys: Iterable[str]) -> dict[str, Buffer]:
        return self._read_each(dict.fromkeys(keys))

    def read(self, key: str, sink: Sink) -> Buffer | None:
        found = self._ask(("GET", self._key(self._objects.likely_name(key))))
        return found[0] if found else None

    def read_part(self, key: str, start: int, target: memoryview) -> int:
        name = self._key(self._objects.likely_name(key))
        found = self._ask(("GETRANGE", name, start, start + target.nbytes - 1)) if target.nbytes else None
        if not found:
            return 0
        target[: len(found[0])] = found[0]
        return len(found[0])

    def head(self, key: str, num_bytes: int) -> tuple[Buffer, int] | None:
        name = self._key(self._objects.likely_name(key))
        found = self._ask(("EXISTS", name), ("STRLEN", name), ("GETRANGE", name, 0, max(0, num_bytes - 1)))
        return (found[2] if num_bytes else b"", found[1]) if found and found[0] else None

    def put(self, key: str, data: Buffer) -> None:
        view = memoryview(data)
        if view.nbytes <= _MOST_BYTES:
            self._ask(("SET", self._key(name_for(key, data, self._objects.namespace)), view, "EX", TTL_S), writes=True)

    def offer(self, key: str, data: Buffer) -> None:
        """Write a copy on another thread, unless too many wait."""
        size = memoryview(data).nbytes
        with self._lock:
            if self._waiting + size > _MOST_WAITING or time.monotonic() < self._writes_again:
                return
            self._waiting += size
        copy = bytes(data)  # the reader's memory may hold another payload soon

        def write() -> None:
            try:
                self.put(key, copy)
            finally:
                with self._lock:
                    self._waiting -= size

        later(write)

    def delete(self, keys: Iterable[str]) -> int:
        return self._delete([self._objects.likely_name(key).rpartition("/")[0] for key in dict.fromkeys(keys)])

    def erase(self, namespace: str, keys: Iterable[str]) -> int:
        """Delete a tenant's copies of keys, whoever wrote them."""
        return self._delete([key_folder(namespace, key) for key in keys])

    def _delete(self, folders: Sequence[str]) -> int:
        """Copies in all codecs; returns how many folders had any."""
        endings = [object_name("", "", codec).rpartition("/")[2] for codec in (*CODECS, "raw")]
        commands = [("UNLINK", *(self._key(f"{folder}/{ending}") for ending in endings)) for folder in folders]
        return sum(count > 0 for count in (commands and self._ask(*commands, writes=True)) or ())

    def list(self) -> Iterator[str]:
        seen, cursor = set(), "0"
        while True:
            pattern = self._key(f"{tenant_folder(self._objects.namespace)}/kv/*")
            found = self._ask(("SCAN", cursor, "MATCH", pattern, "COUNT", 1000))
            if not found:
                return
            cursor, names = found[0]
            for key, _ in filter(None, (key_and_codec(name.decode()) for name in names)):
                if key not in seen:
                    seen.add(key)
                    yield key
            if not int(cursor):
                return

    def close(self) -> None:
        self._client.close()

    def medium(self, key: str) -> str:
        return self._medium


def with_hot(objects: ObjectBackend) -> list[Backend]:
    """The tiers of a place: its hot tier, if it has one, and its objects."""
    return [HotBackend(objects), objects] if objects.place.hot else [objects]
