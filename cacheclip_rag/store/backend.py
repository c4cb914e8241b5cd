"""The interface of storage backends: bytes by key. A backend knows neither tensors nor the store's limits.

To add a backend (a server, an object store): a class with the five abstract methods, and a test class that inherits
:class:`cacheclip_testing.backends.BackendConformance`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from ..base.closing import Closing

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Sink:
    """Where a backend may put one payload: the reader's memory, checked while it arrives. This one takes new memory and
    checks nothing."""

    def allocate(self, num_bytes: int) -> memoryview:
        """Memory for the whole payload. May raise ValueError if the payload cannot have this size."""
        return memoryview(bytearray(num_bytes))

    def received(self, num_bytes: int) -> None:
        """Called when the first ``num_bytes`` bytes are in that memory. May raise ValueError if they are damaged."""


class Backend(Closing, ABC):
    """Payloads by key. Safe to share between threads. A ``with`` block closes it at its end.

    A key is 64 hexadecimal digits (see :func:`~cacheclip_rag.base.keys.chunk_key`). Writes are atomic. All methods
    raise OSError if the medium fails; payloads may still be intact then.
    """

    name: ClassVar[str] = "backend"
    """Name of the tier in metrics."""
    in_memory: ClassVar[bool] = False
    """True: payloads stay in this process, so that their checksums need no second check."""

    has_parts: ClassVar[bool] = False
    """True: :meth:`read_part` costs only what it reads, so that a model can run its first layers while others are
    read."""

    reads_at_once: int = 1
    """Reads that are faster under way together than one after the other."""
    least_read: int = 1 << 18
    """Bytes that are worth a read: smaller ones cost more calls than they hide."""

    @abstractmethod
    def get_many(self, keys: Iterable[str]) -> dict[str, Buffer]:
        """The payloads of the keys that exist; missing keys are left out.

        A returned payload stays valid if its key is deleted or overwritten. Readers must not write to it.
        """

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Store a copy of ``data`` in place of the key's payload. A backend with its own limit may drop it."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> int:
        """Remove payloads; returns how many existed."""

    @abstractmethod
    def list(self) -> Iterator[str]:
        """Every key once, in any order. Changes during the iteration may or may not be included."""

    @abstractmethod
    def close(self) -> None:
        """Release handles; the backend may be used again afterwards."""

    def _read_each(self, keys: Iterable[str]) -> dict[str, Buffer]:
        """:meth:`get_many` of a backend that has its own :meth:`read`."""
        payloads = ((key, self.read(key, Sink())) for key in keys)
        return {key: data for key, data in payloads if data is not None}

    # -- what a backend may do better than these ------------------------------------------------------------------

    def read(self, key: str, sink: Sink) -> Buffer | None:
        """One payload, or None. The backend may read it into memory of ``sink``, which checks it piece by piece."""
        return self.get_many([key]).get(key)

    def offer(self, key: str, data: Buffer) -> None:
        """Store a copy of a payload that a slower backend holds: perhaps later, or not at all."""
        self.put(key, data)

    def read_part(self, key: str, start: int, target: memoryview) -> int:
        """Fill ``target`` from a payload's bytes, from number ``start`` on. Returns how many there were, 0 if the
        payload is missing. Asked only of a backend with :attr:`has_parts`, which should override it. The payload may be
        replaced between two parts."""
        data = self.get_many([key]).get(key, b"")
        part = memoryview(data)[start : start + target.nbytes]
        target[: part.nbytes] = part
        return part.nbytes

    def head(self, key: str, num_bytes: int) -> tuple[Buffer, int] | None:
        """The first ``num_bytes`` bytes of a payload (or all of it), and the payload's size; None if it is missing."""
        data = self.get_many([key]).get(key)
        return None if data is None else (data, memoryview(data).nbytes)

    def occupied(self, key: str) -> int:
        """Bytes that a payload takes on the medium; 0 if it is missing."""
        head = self.head(key, 0)
        return self.round_up(head[1]) if head is not None else 0

    def round_up(self, num_bytes: int) -> int:
        """Bytes that a payload of ``num_bytes`` bytes will take on the medium."""
        return num_bytes

    def medium(self, key: str) -> str:
        """What a payload would be read from now. Reading is measured once for each name, in any store, so that media of
        different speed need different names. Reads nothing, and never fails."""
        return self.name

    def drop_cached(self, keys: Iterable[str]) -> None:  # noqa: B027 (may do nothing)
        """Make the next read of these payloads come from the medium itself, as far as the system allows it."""
