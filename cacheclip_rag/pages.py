"""Large memory in huge pages, where the system has them (Linux).

The first write to new memory costs a fault for every page. With pages of 4 kB that takes several times as long as
writing the bytes, and an answer fills memory of many megabytes. Pages of 2 MB must be asked for.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

__all__ = ["empty", "give_back", "new_memory"]

_HUGE = 1 << 21
"""Bytes of a huge page on the usual processors. Where it is another number, nothing goes wrong."""
_CAN_RETURN = hasattr(mmap, "MADV_DONTNEED") and hasattr(mmap, "MAP_ANONYMOUS")
_HAS_HUGE = _CAN_RETURN and hasattr(mmap, "MADV_HUGEPAGE")


def new_memory(num_bytes: int) -> memoryview:
    """Memory of which parts can be given back (:func:`give_back`), where the system has that."""
    if not _CAN_RETURN or not num_bytes:
        return memoryview(torch.empty(num_bytes, dtype=torch.uint8).numpy())  # type: ignore[arg-type]
    huge = _huge_bytes(num_bytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if not huge:
        return memoryview(mmap.mmap(-1, num_bytes, flags=flags))
    mapped = mmap.mmap(-1, max(num_bytes, huge) + _HUGE, flags=flags)
    start = _start(mapped)
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return memoryview(mapped)[start : start + num_bytes]


def give_back(memory: memoryview, start: int, stop: int) -> None:
    """Return the pages of bytes ``start`` to ``stop - 1`` to the system. What is in them is lost, and so may be the
    bytes before ``start`` in the first page. The last page stays unless it ends there."""
    mapped = memory.obj
    if not isinstance(mapped, mmap.mmap):
        return
    huge = _huge_bytes(memory.nbytes)
    page, offset = (_HUGE, _start(mapped)) if huge else (mmap.PAGESIZE, 0)
    start, stop = start - start % page, stop - stop % page
    if start < stop:
        mapped.madvise(mmap.MADV_DONTNEED, offset + start, stop - start)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As ``torch.empty``, in huge pages if it is large and on the CPU."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not _HAS_HUGE or not _huge_bytes(num_bytes):
        return torch.empty(*shape, dtype=dtype, device=device)
    return torch.frombuffer(new_memory(num_bytes), dtype=dtype).view(*shape)


def _huge_bytes(num_bytes: int) -> int:
    """Bytes that are put into huge pages; at most half of the last page is wasted."""
    return (num_bytes + _HUGE // 2) // _HUGE * _HUGE if _HAS_HUGE else 0


def _start(mapped: mmap.mmap) -> int:
    """The first byte at which a huge page can begin."""
    return -int(np.frombuffer(mapped, np.uint8).ctypes.data) % _HUGE
