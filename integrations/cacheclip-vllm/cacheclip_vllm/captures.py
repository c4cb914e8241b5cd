"""KV of chunks that vLLM computes, on its way out of vLLM's workers: which tokens, what is there of them, and files.

A request names a capture: a file name, the first position whose KV is wanted, and perhaps the file with the KV of all
positions before, its context. Each worker writes keys after RoPE and values of its heads, once all layers have all
tokens::

    NAME.HEAD.safetensors    kv        (num_layers, 2, num_kv_heads, num_tokens, head_dim), heads from HEAD on
    header                   format, first_head

    NAME.safetensors         kv        a context: the same shape, keys after RoPE, all heads
    header                   format, model (fingerprint)

This module does not import vLLM.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cacheclip_rag import ConfigurationError
from cacheclip_rag.plugins import is_whole_number
from cacheclip_rag.store import READ_ERRORS, read_tensors, write_tensors

FORMAT_VERSION = 1
CAPTURE = "cacheclip_capture"
"""Name in ``kv_transfer_params``."""
_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Capture:
    """What one request wants captured: its prompt's KV from a position on."""

    name: str
    """32 hexadecimal digits, unique to the request."""
    start: int = 0
    """First position whose KV is wanted; -1: the first that vLLM computes."""
    context: str | None = None
    """Name of the file with the KV of the ``start`` positions before; None: vLLM computes them."""

    @classmethod
    def of(cls, given: object, num_tokens: int) -> Capture:
        """Read what a request of ``num_tokens`` tokens carries. Raises ConfigurationError: it is no capture."""
        if not isinstance(given, Mapping) or not {"name"} <= set(given) <= {"name", "start", "context"}:
            raise ConfigurationError(f"{CAPTURE} must have a name, and may have start and context")
        found = cls(given["name"], given.get("start", 0), given.get("context"))
        for name in filter(None, (found.name, found.context)):
            if not _is_name(name):
                raise ConfigurationError(f"a name in {CAPTURE} must be 32 hexadecimal digits, got {name!r:.60}")
        if not is_whole_number(found.start) or not 0 <= found.start < num_tokens:
            raise ConfigurationError(f"start in {CAPTURE} must be a position of the prompt, got {found.start!r}")
        if found.context is not None and not found.start:
            raise ConfigurationError(f"{CAPTURE} has a context, and no positions for it")
        return found

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "start": self.start, "context": self.context}


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Positions of one capture that are computed in one step."""

    request_id: str
    name: str
    block_ids: tuple[int, ...]
    """Blocks of the request."""
    start: int
    """First position whose KV is wanted."""
    stop: int
    """Length of the prompt."""
    begin: int
    """First position that this step computes."""
    end: int
    """Position after the last one."""
    keys: tuple[str, ...] | None = None
    """With the last rows of a prompt that is kept, the names of its whole blocks from ``start`` on."""

    @property
    def is_last(self) -> bool:
        return self.end >= self.stop


class CaptureSchedule:
    """Which rows of captures each step computes; kept by the scheduler's connector."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Capture, int, list[int]]] = {}
        """By request: the capture, the prompt's length, the request's blocks."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def add(self, request_id: str, capture: Capture, num_tokens: int) -> None:
        self._known[request_id] = capture, num_tokens, []

    def remove(self, request_id: str) -> None:
        """Forget a request; no error if it is not known."""
        self._known.pop(request_id, None)

    def step(self, scheduler_output: Any) -> list[CapturedRows]:
        """The rows of captures among what vLLM's scheduler chose. A capture is over with its last rows."""
        for new in scheduler_output.scheduled_new_reqs if self._known else ():
            if new.req_id in self._known:
                capture, stop, blocks = self._known[new.req_id]
                blocks[:] = new.block_ids[0]
                if capture.start < 0:
                    self._known[new.req_id] = replace(capture, start=new.num_computed_tokens), stop, blocks
        cached = scheduler_output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        for number, request_id in enumerate(cached.req_ids):
            if request_id not in self._known:
                continue
            computed[request_id] = cached.num_computed_tokens[number]
            blocks, more = self._known[request_id][2], cached.new_block_ids[number]
            if request_id in cached.resumed_req_ids:  # after a preemption, which took its blocks
                blocks.clear()
            if more is not None:
                blocks.extend(more[0])
        found = []
        for request_id, (capture, stop, blocks) in self._known.items():
            if request_id not in computed:
                continue
            begin = max(computed[request_id], capture.start)
            end = min(computed[request_id] + scheduler_output.num_scheduled_tokens[request_id], stop)
            if begin < end:
                found.append(CapturedRows(request_id, capture.name, tuple(blocks), capture.start, stop, begin, end))
        for rows in found:
            if rows.is_last:
                del self._known[rows.request_id]
        return found


@dataclass(slots=True)
class _Buffer:
    """What is there of one capture."""

    kv: torch.Tensor
    seen: torch.Tensor
    """``(num_layers, num_tokens)`` bool."""


@dataclass(slots=True)
class Captor:
    """Gathers captures on one worker, from the keys and values that its layers write into their caches."""

    num_layers: int
    take_over: Callable[[CapturedRows, torch.Tensor], None]
    """Called with the last rows of a capture and all of its KV, ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``
    with keys after RoPE."""
    _buffers: dict[str, _Buffer] = field(default_factory=dict)
    _rows: list[CapturedRows] = field(default_factory=list)
    """Of the step under way."""
    _slots: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    _places: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of the step under way: rows of the forward pass, and which of ``_slots`` each is."""

    def begin(self, rows: Sequence[CapturedRows], slots: Sequence[torch.Tensor]) -> None:
        """A step begins. ``slots``: per element of ``rows`` the slots of its positions in vLLM's paged cache."""
        self._rows, self._places = list(rows), None
        self._slots = torch.cat([torch.zeros(0, dtype=torch.int64), *slots])

    def take(self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Take what a layer writes: ``(num_rows, num_kv_heads, head_dim)`` each, and a slot for each row. Rows may
        follow that have no slot."""
        if not self._rows:
            return
        if self._places is None:
            self._places = self._find(slot_mapping)
        places, which = self._places
        at = places.to(key.device)
        both = torch.stack([part.index_select(0, at) for part in (key, value)]).to("cpu")
        begin = 0
        for rows in self._rows:
            count = rows.end - rows.begin
            own = (which >= begin) & (which < begin + count)
            positions = which[own] - begin + rows.begin - rows.start
            buffer = self._buffer(rows, both)
            buffer.kv[layer][:, :, positions] = both[:, own].transpose(1, 2)
            buffer.seen[layer, positions] = True
            begin += count

    def end(self) -> list[tuple[str, str]]:
        """A step has ended: hand on what is complete. Returns captures that failed, each with the reason."""
        failed = []
        for rows in self._rows:
            if not rows.is_last:
                continue
            buffer = self._buffers.pop(rows.request_id, None)
            if buffer is None or not bool(buffer.seen.all()):
                failed.append((rows.name, "some tokens passed the writers of vLLM's layers unseen"))
            else:
                try:
                    self.take_over(rows, buffer.kv)
                except (OSError, SafetensorError) as error:
                    failed.append((rows.name, f"it could not be written: {error}"))
        self._rows, self._places = [], None
        return failed

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is there of requests that are finished."""
        for request_id in request_ids:
            self._buffers.pop(request_id, None)

    def _find(self, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        there, order = slot_mapping.to("cpu", torch.int64).sort()
        at = torch.searchsorted(there, self._slots).clamp(max=max(len(there) - 1, 0))
        found = there[at] == self._slots if len(there) else torch.zeros(len(self._slots), dtype=torch.bool)
        return order[at[found]], found.nonzero().flatten()

    def _buffer(self, rows: CapturedRows, like: torch.Tensor) -> _Buffer:
        if rows.request_id not in self._buffers:
            num_tokens = rows.stop - rows.start
            kv = like.new_empty(self.num_layers, 2, like.shape[2], num_tokens, like.shape[3])
            self._buffers[rows.request_id] = _Buffer(kv, torch.zeros(self.num_layers, num_tokens, dtype=torch.bool))
        return self._buffers[rows.request_id]


def write_capture(folder: Path, name: str, kv: torch.Tensor, first_head: int) -> None:
    """Write the KV of a worker's heads, of which ``first_head`` is the first."""
    header = {"format": str(FORMAT_VERSION), "first_head": str(first_head)}
    write_tensors(folder / f"{name}.{first_head}.safetensors", {"kv": kv}, header)


def read_capture(folder: Path, name: str, num_heads: int) -> torch.Tensor:
    """KV that the workers wrote: ``(num_layers, 2, num_heads, num_tokens, head_dim)``, keys after RoPE. Raises
    ValueError: parts are missing or damaged."""
    parts = []
    for path in folder.glob(f"{name}.*.safetensors"):
        try:
            tensors, header = read_tensors(path, version=FORMAT_VERSION)
            parts.append((int(header["first_head"]), tensors["kv"]))
        except READ_ERRORS as error:
            raise ValueError(f"what vLLM computed cannot be read: {error}") from error
    parts.sort(key=lambda part: part[0])
    edges = [first for first, _ in parts] + [num_heads]
    widths = [kv.shape[2] for _, kv in parts]
    if not parts or edges[0] != 0 or [b - a for a, b in zip(edges, edges[1:], strict=False)] != widths:
        raise ValueError("vLLM's workers have not written all of it; vLLM's log says why")
    return torch.cat([kv for _, kv in parts], dim=2)


def remove_capture(folder: Path, name: str) -> None:
    """Delete a capture's files; no error without any."""
    for path in folder.glob(f"{name}.*.safetensors"):
        path.unlink(missing_ok=True)


def _is_name(name: object) -> bool:
    """Names come from requests and become parts of paths."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class ContextFile:
    """The KV before chunks, open for reading."""

    model: str
    """Fingerprint of the model, dtype included."""
    num_layers: int
    num_tokens: int
    _kv: Any

    def layer(self, number: int, first: int, stop: int, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens ``[first, stop)`` and some heads, each ``(num_tokens, num_kv_heads, head_dim)``."""
        keys, values = self._kv[number : number + 1, :, heads, first:stop][0].transpose(1, 2)
        return keys, values


def write_context(folder: Path, kv: torch.Tensor, model: str) -> str:
    """Write the KV before chunks, ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)`` with keys after RoPE,
    atomically; returns its name. ``model`` is the model's fingerprint."""
    name = secrets.token_hex(16)
    header = {"format": str(FORMAT_VERSION), "model": model}
    write_tensors(folder / f"{name}.safetensors", {"kv": kv.cpu().contiguous()}, header)
    return name


def remove_context(folder: Path, name: str) -> None:
    """Delete a context; no error without it."""
    (folder / f"{name}.safetensors").unlink(missing_ok=True)


@contextmanager
def open_context(folder: Path, name: str) -> Iterator[ContextFile]:
    """Open the KV before chunks. Layers are read when they are asked for. Raises ValueError: the file is damaged or of
    another version. FileNotFoundError: there is none."""
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"the KV before the chunks, {name}, is not in {folder}")
    with ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            header, kv = dict(file.metadata() or {}), file.get_slice("kv")
            if header.get("format") != str(FORMAT_VERSION):
                raise ValueError(f"its format is {header.get('format')}, this version reads {FORMAT_VERSION}")
            num_layers, _, _, num_tokens, _ = kv.get_shape()
            found = ContextFile(header["model"], num_layers, num_tokens, kv)
        except READ_ERRORS as error:
            raise ValueError(f"the KV before the chunks, {name}, cannot be read: {error}") from error
        yield found
