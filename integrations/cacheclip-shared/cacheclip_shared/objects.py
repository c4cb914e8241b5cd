"""Payloads as objects that never change, of any number of writers.

An object's name holds the codec, so that an engine with another codec writes an object of its own beside it. A name is
written once (``If-None-Match: *``): who comes second finds that the payload is there, and replaces it (``If-Match``) if
it is damaged. Which of a key's objects is read
is decided by whoever knows the codec that is wanted (:meth:`ObjectBackend.use`).
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from cacheclip_rag.store import CODECS, Backend, Frame, FrameError, Sink, each_in_pool

from .place import SharedPlace, key_and_codec, key_folder, need, object_name, said, tenant_folder

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

_PAUSE_S = 10.0
"""For which nothing is asked after storage failed."""
_MOST_NAMES = 1 << 18
_PIECE_BYTES = 1 << 20
_NO_OUTAGE = ("PermissionDeniedError", "UnauthenticatedError", "InvalidPathError", "NotSupportedError")
_OF_ONE_OBJECT = re.compile(
    r"status code: 4(?!08|29)\d\d|Requested range was invalid|\(os error (?:6|13|20|21|36|40)\)"
)
"""What storage says of an object: ENXIO, EACCES, ENOTDIR, EISDIR, ENAMETOOLONG and ELOOP in a folder."""
_OF_CREDENTIALS = re.compile(r"//169\.254\.|//metadata\.|//sts\.|/oauth2/")
"""What is said where credentials come from, of no object."""


class ObjectFound(NamedTuple):
    """One object of a key."""

    name: str
    codec: str
    num_bytes: int
    modified: datetime


class Breaker:
    """After storage failed a request, all others fail at once for a while: an answer waits for an outage once. What
    storage says of one object is no outage."""

    def __init__(self) -> None:
        self._until = 0.0
        self.is_open = False
        self._lock = threading.Lock()

    def call(self, request: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Raises FileNotFoundError, FileExistsError, or OSError for all else that fails."""
        if time.monotonic() < self._until:
            raise OSError("object storage did not answer a moment ago, and is not asked again yet")
        try:
            found = request(*arguments, **options)
        except FileNotFoundError as error:
            raise FileNotFoundError(said(error)) from error
        except (OSError, need("obstore.exceptions").BaseError) as error:
            kind, text = type(error).__name__, said(error)
            if kind == "NotFoundError":
                raise FileNotFoundError(text) from error
            if kind in ("AlreadyExistsError", "PreconditionError"):
                raise FileExistsError(text) from error
            is_of_one = _OF_ONE_OBJECT.search(str(error)) and not _OF_CREDENTIALS.search(str(error))
            if kind not in _NO_OUTAGE and not is_of_one:
                with self._lock:
                    self._until, self.is_open = time.monotonic() + _PAUSE_S, True
            raise OSError(text) from error
        self.is_open = False
        return found


class Objects:
    """A shared store's objects, by name."""

    is_patient = False
    """Whether to wait long for storage, where no answer waits."""

    def __init__(self, place: SharedPlace) -> None:
        self.place, self.breaker = place, Breaker()
        self._client = need("obstore")

    def _ask(self, request: str, *arguments: Any, whole: bool = False, **options: Any) -> Any:
        call = getattr(self._client, request)
        client = self.place.patient if request == "put" or self.is_patient else self.place.objects

        def run() -> Any:
            if request.startswith("get"):
                self.place.check_files(arguments[0])
            found = call(client, *arguments, **options)
            return [each for page in found for each in page] if whole else found

        return self.breaker.call(run)

    def locate(self, namespace: str, keys: Sequence[str]) -> dict[str, list[ObjectFound]]:
        """The objects of keys in a tenant's folder: a request for each key, many at once."""

        def look(key: str) -> list[ObjectFound]:
            pages = self._ask("list", key_folder(namespace, key), whole=True)
            found = ((each, key_and_codec(each["path"])) for each in pages)
            return [
                ObjectFound(each["path"], name[1], each["size"], each["last_modified"]) for each, name in found if name
            ]

        return {key: found for key, found in zip(keys, each_in_pool(look, keys), strict=True) if found}

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one of this name, as which it returns False."""
        try:
            self._ask("put", name, data, mode="create", use_multipart=False)
        except FileExistsError:
            return False
        return True

    def replace(self, name: str, data: bytes) -> None:
        self._ask("put", name, data, use_multipart=False)

    def _rewrite(self, name: str, data: bytes, seen: dict[str, Any]) -> bool:
        """Write an object again, unless it changed since :meth:`take` saw it, as which it returns False. A folder
        cannot say whether it did."""
        known = {each: seen[each] for each in ("e_tag", "version") if seen.get(each)}
        try:
            self._ask("put", name, data, use_multipart=False, mode=known or "overwrite")
        except NotImplementedError:
            self.replace(name, data)
        except FileExistsError:  # as storage also says if it is gone
            return self.create(name, data)
        return True

    def mend(self, name: str, key: str, payload: bytes) -> None:
        """Write a payload over one that is damaged or foreign."""
        try:
            data, seen = self.take(name)
            damage = _damage(data, key, payload)
            if damage is not None and self._rewrite(name, payload, seen):
                logger.warning("%s was damaged (%s), and is written again", name, damage)
        except FileNotFoundError:  # removed meanwhile
            self.create(name, payload)

    def take(self, name: str) -> tuple[bytes, dict[str, Any]]:
        """An object that no answer waits for, and what tells whether it changes. Raises FileNotFoundError."""
        found = self.breaker.call(self._client.get, self.place.patient, name)
        return bytes(self.breaker.call(found.bytes)), found.meta

    def fetch(self, name: str) -> bytes:
        """An object. Raises FileNotFoundError."""
        return bytes(self._ask("get", name).bytes())

    def fetch_json(self, name: str) -> Any:
        """What a file of JSON holds; None if there is none. Raises ValueError if it is no JSON."""
        try:
            return json.loads(self.fetch(name))
        except FileNotFoundError:
            return None
        except RecursionError as error:
            raise ValueError(str(error)) from error

    def beginning(self, name: str, num_bytes: int) -> tuple[Buffer, int]:
        """The first bytes of an object, and its size. Raises FileNotFoundError."""
        if num_bytes:
            try:
                found = self._ask("get", name, options={"range": (0, num_bytes)})
                return memoryview(found.bytes()), found.meta["size"]
            except FileNotFoundError:
                raise
            except OSError:  # it is empty, or storage fails, which this says then
                pass
        return b"", self._ask("head", name)["size"]

    def remove(self, names: Sequence[str]) -> None:
        """Delete objects. Servers never do."""
        for start in range(0, len(names), 1000):
            self._ask("delete", [*names[start : start + 1000]])

    def objects_of(self, folder: str) -> Iterator[dict[str, Any]]:
        """Every object in a folder, with its size and when it was written."""
        pages = iter(self._ask("list", folder))
        while (page := self.breaker.call(next, pages, None)) is not None:
            yield from page

    def object_at(self, name: str) -> Sequence[dict[str, Any]]:
        """As :meth:`objects_of`, of an object itself."""
        try:
            return [self._ask("head", name)] if name else []
        except FileNotFoundError:
            return []

    def close(self) -> None:
        """Nothing to release: the client keeps its connections."""


class ObjectBackend(Objects, Backend):
    """A shared store's payloads by key: which object a key is read from, and written to."""

    name = "object store"
    has_parts = True
    reads_at_once = 16
    least_read = 1 << 20

    def __init__(self, place: SharedPlace, namespace: str = "default", codec: str | None = None) -> None:
        """
        Args:
            namespace: tenant whose folder is searched for keys that nobody told the name of.
            codec: of a key's objects, the coarsest that keeps this one's precision is read; default the most precise.
        """
        super().__init__(place)
        self.namespace, self._codec = namespace, codec
        self._names: dict[str, str] = {}

    def use(self, key: str, name: str) -> None:
        """Read a key from this object from now on."""
        if len(self._names) > _MOST_NAMES:
            self._names.clear()
        self._names[key] = name

    def choose(self, codecs: Iterable[str]) -> str:
        """Which of these codecs of a key is read."""
        by_bits = sorted(codecs, key=lambda codec: CODECS[codec].bits if codec in CODECS else 0)
        wanted = CODECS[self._codec].bits if self._codec in CODECS else 1 << 30
        return next((codec for codec in by_bits if codec in CODECS and CODECS[codec].bits >= wanted), by_bits[-1])

    def likely_name(self, key: str) -> str:
        """The object that a key is read from, as far as it is known without a request."""
        return self._names.get(key) or object_name(self.namespace, key, self._codec or "raw")

    def _name(self, key: str) -> str | None:
        if key not in self._names:
            found = self.locate(self.namespace, [key]).get(key)
            if not found:
                return None
            codec = self.choose(each.codec for each in found)
            self.use(key, next(each.name for each in found if each.codec == codec))
        return self._names[key]

    def _found(self, key: str, request: Callable[[str], Any]) -> Any:
        """What a request says of a key's object; None if there is none. One that is gone is looked for once more: there
        may be another one."""
        for _ in range(2):
            name = self._name(key)
            if name is None:
                return None
            try:
                return request(name)
            except FileNotFoundError:
                self._names.pop(key, None)
        return None

    # -- as every backend -----------------------------------------------------------------------------------------

    def get_many(self, keys: Iterable[str]) -> dict[str, Buffer]:
        wanted = [*dict.fromkeys(keys)]
        found = zip(wanted, each_in_pool(lambda key: self.read(key, Sink()), wanted), strict=True)
        return {key: data for key, data in found if data is not None}

    def read(self, key: str, sink: Sink) -> Buffer | None:
        def take(name: str) -> Buffer:
            found = self._ask("get", name)
            target = sink.allocate(found.meta["size"])
            done = 0

            def fill() -> None:
                nonlocal done
                for piece in found.stream(min_chunk_size=_PIECE_BYTES):
                    target[done : done + len(piece)] = memoryview(piece)
                    done += len(piece)
                    sink.received(done)

            self.breaker.call(fill)
            return target[:done]

        found: Buffer | None = self._found(key, take)
        return found

    def read_part(self, key: str, start: int, target: memoryview) -> int:
        def take(name: str) -> int:
            try:
                found = memoryview(self._ask("get_range", name, start=start, length=target.nbytes))
            except FileNotFoundError:
                raise
            except OSError as error:
                if any(word in str(error.__cause__).lower() for word in (" 416 ", "range")):
                    return 0  # it starts after the end
                raise
            target[: found.nbytes] = found
            return found.nbytes

        return self._found(key, take) or 0 if target.nbytes else 0

    def head(self, key: str, num_bytes: int) -> tuple[Buffer, int] | None:
        found: tuple[Buffer, int] | None = self._found(key, lambda name: self.beginning(name, num_bytes))
        return found

    def put(self, key: str, data: Buffer) -> None:
        """Write a payload unless there is a whole one of this key and codec."""
        name, payload = name_for(key, data, self.namespace), bytes(data)
        if not self.create(name, payload):
            self.mend(name, key, payload)
        self.use(key, name)

    def delete(self, keys: Iterable[str]) -> int:
        wanted = [*dict.fromkeys(keys)]
        found = [self._ask("list", self.likely_name(key).rpartition("/")[0], whole=True) for key in wanted]
        self.remove([each["path"] for objects in found for each in objects])
        for key in wanted:
            self._names.pop(key, None)
        return sum(map(bool, found))

    def list(self) -> Iterator[str]:
        seen = set()
        for each in self.objects_of(f"{tenant_folder(self.namespace)}/kv/"):
            found = key_and_codec(each["path"])
            if found is not None and found[0] not in seen:
                seen.add(found[0])
                yield found[0]

    def occupied(self, key: str) -> int:
        found = self.head(key, 0)
        return found[1] if found is not None else 0

    def medium(self, key: str) -> str:
        scheme, _, rest = self.place.url.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}"


def name_for(key: str, data: Buffer, namespace: str) -> str:
    """The object that a payload belongs into; of one that is no frame, in the folder of this tenant."""
    try:
        frame = Frame.parse(data, key)
        return object_name(frame.namespace, key, frame.codec)
    except FrameError:
        return object_name(namespace, key, "raw")


def _damage(found: bytes, key: str, payload: bytes) -> str | None:
    """What is wrong with a payload that should be this one, computed by this machine or another; None if nothing is, or
    if it is no frame."""
    try:
        wanted = Frame.parse(payload, key)
    except FrameError:
        return None
    try:
        frame = Frame.parse(found, key)
        frame.verify()
    except FrameError as error:
        return str(error)
    is_alike = (frame.namespace, frame.codec, frame.shape) == (wanted.namespace, wanted.codec, wanted.shape)
    return None if is_alike else "it holds other KV"
