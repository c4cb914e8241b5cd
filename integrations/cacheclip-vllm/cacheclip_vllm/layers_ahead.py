"""Stored KV of a pass, one layer ahead of vLLM's computation."""

from __future__ import annotations

from typing import Any

import torch

from cacheclip_rag.planning import StoredInterval
from cacheclip_rag.store import COPIES_BESIDE


class LayersAhead:
    """Layers of stored KV, in order. While a device computes with one, the next one is copied, dequantised and rotated
    on a stream of its own. Its memory is that stream's: a layer is kept until the stream waits for what reads it."""

    def __init__(self, stored: StoredInterval, heads: slice, num_layers: int, stream: Any | None) -> None:
        """``stream``: of :func:`copy_stream`; None makes each layer when it is asked for."""
        self._stored, self._heads, self._num_layers, self._stream = stored, heads, num_layers, stream
        self._made: dict[int, tuple[tuple[torch.Tensor, torch.Tensor], Any]] = {}
        """The layer that was taken last, and the next one, each with the event of its end."""

    def take(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``StoredInterval.layer``, of one layer after the other."""
        if self._stream is None:
            return self._stored.layer(number, self._heads)
        if number not in self._made:
            self._make(number)
        layer, is_made = self._made[number]
        self._current.wait_event(is_made)
        if number + 1 < self._num_layers:
            self._make(number + 1)
        return layer

    def close(self) -> None:
        """Let the device's current stream wait for what is being copied, also after a failure."""
        if self._stream is not None:
            self._current.wait_stream(self._stream)
            self._stream.wait_stream(self._current)
            self._made.clear()

    def _make(self, number: int) -> None:
        assert self._stream is not None, "layers are made ahead"
        self._stream.wait_stream(self._current)
        self._made.pop(number - 2, None)
        with torch.get_device_module(self._stored.device).stream(self._stream):
            layer = self._stored.layer(number, self._heads)
        self._made[number] = layer, self._stream.record_event()

    @property
    def _current(self) -> Any:
        return torch.get_device_module(self._stored.device).current_stream()


def copy_stream(device: torch.device) -> Any | None:
    """A stream of the device on which stored KV is copied beside forward passes; None: it is a CPU."""
    return torch.get_device_module(device).Stream() if device.type in COPIES_BESIDE else None
