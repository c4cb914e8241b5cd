"""The interface of a place that keeps payloads: bytes by key. A backend knows neither tensors nor limits of the store.

To add one (a server, an object store): a class with these five methods, and a test class that inherits
:class:`cacheclip_rag.testing.backends.BackendConformance`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Backend"]


class Backend(ABC):
    """Payloads by key. Safe to share between threads.

    A key is 64 hexadecimal digits (see :func:`~cacheclip_rag.store.keys.chunk_key`); a payload is written whole or not
    at all. All methods raise OSError if the medium is in trouble: that says nothing about what it holds.
    """

    in_memory: ClassVar[bool] = False
    """True: payloads stay in this process as they were put, so that their checksums need not be verified again."""

    @abstractmethod
    def get_many(self, keys: Iterable[str]) -> dict[str, Buffer]:
        """The payloads that are there; a missing key is left out.

        A payload stays as it is when its key is deleted or overwritten meanwhile. Its reader must not write to it.
        """

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Keep a copy of ``data`` in place of what the key had. A backend with a limit of its own may not keep it."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> int:
        """Remove payloads; returns how many were there."""

    @abstractmethod
    def list(self) -> Iterator[str]:
        """Every key once, in any order. Changes during the iteration may or may not be seen."""

    @abstractmethod
    def close(self) -> None:
        """Release handles; the backend may be used again afterwards."""
