"""A CUDA device that is pretended: tensors say ``cuda`` and compute on the CPU, with real numbers.

PyTorch's rules for two devices are checked at every operation. What would stop the queue of a real device is counted:
numbers that are read, copies to the CPU, and results whose shape depends on numbers. So are copies to the device, those
among them for which the CPU waits, and kernels: operations that are neither views nor new memory. Attention is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cacheclip_rag.runtime.transformers import attention, attention_pattern
from cacheclip_rag.runtime.transformers.model import ModelRuntime, may_gather
from cacheclip_rag.store import ahead, arena, codecs, memory

__all__ = ["CUDA", "Pretended", "Queue", "move", "pretended"]

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
_READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.bincount.default}
_READS |= {aten.equal.default, aten._unique2.default, aten.unique_dim.default, aten.repeat_interleave.Tensor}
"""Operations that wait for the device, because their result is a number, or its shape depends on numbers."""
_MOVES = {"aten::_to_copy", "aten::to"}
_PLACES = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
_COPIES = {aten._to_copy.default, aten.copy_.default, *_PLACES}
"""Operations that may have tensors of two devices."""
_MEMORY = {f"aten::{name}" for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")}
"""Operations that start no kernel."""
_READING = {getattr(torch.Tensor, f"__{name}__") for name in ("bool", "int", "float", "index")}
_READING |= {torch.Tensor.item, torch.Tensor.tolist}
_SIMPLE = {torch.Tensor.contiguous, torch.Tensor.__invert__, torch.Tensor.nonzero}
_GUARDED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.copy_, *_SIMPLE, *_READING}
"""Methods that choose the device before they begin, which PyTorch without CUDA cannot."""


class Pretended(torch.Tensor):
    """Says that it is on the device, and holds a tensor of the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretended:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "layout": inner.layout}
        made: Pretended = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, device=CUDA, **layout
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _GUARDED:
            with Queue.current() as mode:
                return mode.without_guard(function, *args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with Queue.current() as mode:
            return mode.compute(function, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self.inner!r})"


class Queue(TorchDispatchMode):
    """Makes tensors on the device, checks devices and counts."""

    _active: list[Queue] = []

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.stops: Counter[str] = Counter()
        """How often each operation would have stopped the device's queue."""
        self.copies: Counter[str] = Counter()
        """Copies from the CPU to the device, by operation."""
        self.blocking: Counter[str] = Counter()
        """Those among them for which the CPU waits: from memory that is not page-locked, or because nothing else was
        asked for."""
        self.page_locked: list[torch.Tensor] = []

    def counts(self) -> dict[str, Counter[str]]:
        """Copies of the counters, by name."""
        return {name: Counter(getattr(self, name)) for name in ("kernels", "copies", "blocking", "stops")}

    def lock(self, memory: torch.Tensor) -> torch.Tensor:
        """``memory``, page-locked until the device is gone."""
        self.page_locked.append(memory)
        return memory

    @classmethod
    @contextmanager
    def current(cls) -> Iterator[Queue]:
        yield cls._active[-1] if cls._active else cls()

    def __enter__(self) -> Queue:
        self._active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._active.remove(self)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(function, args, kwargs or {})

    def compute(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do on the CPU what the device would do."""
        leaves = [*_leaves(args), *_leaves(kwargs)]
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        mine = [each for each in tensors if isinstance(each, Pretended)]
        devices = [each for each in leaves if isinstance(each, torch.device)]
        on_device = any(each.type == CUDA.type for each in devices) if devices else bool(mine)
        if mine:
            self._check(function, args, tensors)
            self._count(function, args, on_device)
        if on_device:
            self._count_copies(function, args, kwargs)
        if function is aten._local_scalar_dense.default or function is aten.equal.default:
            on_device = False
        found = function(*_mapped(_inner, args), **_mapped(_inner, kwargs))
        if on_device:
            self._count_kernels(function, args, mine, found)
        if function._schema.is_mutable:
            return kwargs.get("out", args[0]) if function._schema.returns else None
        return _mapped(_wrapped, found) if on_device else found

    def without_guard(self, function: Any, target: Any, *args: Any, non_blocking: bool = False) -> Any:
        """Do one of :data:`_GUARDED`. What it calls on the CPU is not counted again."""
        if function in _READING:
            self.stops["a number is read"] += 1
            return function(_inner(target), *args)
        if function in _SIMPLE:
            if function is torch.Tensor.nonzero:
                self.stops["nonzero"] += 1
            self.kernels[function.__name__] += function is not torch.Tensor.contiguous or not target.is_contiguous()
            return _wrapped(function(_inner(target), *args))
        if function is torch.Tensor.copy_:
            if not isinstance(target, Pretended):
                self.stops["copy to the CPU"] += 1
            elif not isinstance(args[0], Pretended):
                self._copied("copy_", args[0], non_blocking or True in args[1:], target)
            else:
                self.kernels["copy_"] += 1
            _inner(target).copy_(_inner(args[0]))
            return target
        for each in _leaves(args):
            if isinstance(each, Pretended) is isinstance(target, Pretended) or not isinstance(each, torch.Tensor):
                continue
            if isinstance(each, Pretended) or (
                function is torch.Tensor.__setitem__ and each is args[-1] and each.dim()
            ):
                raise RuntimeError(f"{function}: tensors on two devices: {each.device} and {target.device}")
        for each in _leaves(args[0]):
            if isinstance(each, Pretended) and (each.dtype is torch.bool or not each.dim()):
                self.stops["index by bools or a number"] += 1
        if isinstance(target, Pretended):
            for each in self._of_cpu(args[0]):
                self._copied("index", each)
            indexed = any(isinstance(each, torch.Tensor) for each in _leaves(args[0]))
            self.kernels["index"] += indexed or function is torch.Tensor.__setitem__
        found = function(_inner(target), *_mapped(_inner, args))
        return _wrapped(found) if isinstance(target, Pretended) else found

    @staticmethod
    def _of_cpu(args: Any) -> list[torch.Tensor]:
        """The tensors of the CPU in ``args``."""
        return [e for e in _leaves(args) if isinstance(e, torch.Tensor) and not isinstance(e, Pretended)]

    def _copied(
        self, name: str, source: torch.Tensor, non_blocking: bool = False, target: torch.Tensor | None = None
    ) -> None:
        """Count a copy to the device: into a strided place it goes by way of new memory there."""
        self.copies[name] += 1
        at = source.data_ptr()
        is_locked = any(0 <= at - each.data_ptr() < each.nbytes for each in self.page_locked)
        self.blocking[name] += not (non_blocking and is_locked and source.is_contiguous())
        self.kernels["copy into place"] += target is not None and not target.is_contiguous()

    def _count_copies(self, function: Any, args: Any, kwargs: Any) -> None:
        """Operations that bring tensors of the CPU to the device: moves, ``copy_``, and indices of the CPU."""
        if function is aten.copy_.default and isinstance(args[0], Pretended):
            for each in self._of_cpu(args[1:2]):
                self._copied("copy_", each, kwargs.get("non_blocking", True in args[2:]), args[0])
        elif function._schema.name in _MOVES or (function in _COPIES and isinstance(args[0], Pretended)):
            for each in self._of_cpu(args):
                self._copied(function._schema.name, each, bool(kwargs.get("non_blocking", False)))

    def _count_kernels(self, function: Any, args: Any, mine: list[Pretended], result: Any) -> None:
        returns, name = function._schema.returns, function._schema.name
        if name in _MEMORY or (self._of_cpu(args) and (name in _MOVES or function is aten.copy_.default)):
            return
        is_view = bool(returns) and all(each.alias_info and not each.alias_info.is_write for each in returns)
        if is_view and isinstance(result, torch.Tensor):  # reshape, to and others copy if they must
            of_result = result.untyped_storage().data_ptr()
            is_view = any(each.inner.untyped_storage().data_ptr() == of_result for each in mine)
        self.kernels[name] += not is_view

    def at_once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is one kernel on a device, and computes as it does on the CPU."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(each, Pretended) for each in _leaves([args, kwargs])):
                return function(*args, **kwargs)
            result = function(*_mapped(_inner, args), **_mapped(_inner, kwargs))
            self.kernels["attention"] += 1
            return _mapped(_wrapped, result)

        return call

    @staticmethod
    def _check(function: Any, args: Any, tensors: list[torch.Tensor]) -> None:
        others = [each for each in tensors if not isinstance(each, Pretended) and each.dim()]
        if not others or function._schema.name in _MOVES or function is aten.copy_.default:
            return
        if function in _PLACES or function is aten._index_put_impl_.default:
            values = [args[0], *args[2:3]]
            if all(isinstance(each, Pretended) or not each.dim() for each in values):
                return  # numbers of rows may be on the CPU
        raise RuntimeError(f"{function}: tensors on two devices: {[(each.device, each.shape) for each in tensors]}")

    def _count(self, function: Any, args: Any, on_device: bool) -> None:
        if function._schema.name in _MOVES:
            self.stops["copy to the CPU"] += not on_device
        elif function is aten.copy_.default:
            self.stops["copy to the CPU"] += not isinstance(args[0], Pretended)
        elif function in _READS:
            self.stops[str(function)] += 1
        elif function in _COPIES and any(
            index is not None and index.dtype is torch.bool and isinstance(index, Pretended) for index in args[1]
        ):
            self.stops[f"{function} by bools"] += 1


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, list | tuple | dict):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(each)
    else:
        yield tree


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Quicker than PyTorch's own, and called for every operation."""
    if isinstance(tree, dict):
        return {name: _mapped(change, each) for name, each in tree.items()}
    if isinstance(tree, list | tuple):
        return (list if isinstance(tree, list) else tuple)(_mapped(change, each) for each in tree)
    return change(tree)


def _inner(value: Any) -> Any:
    """What the CPU computes with."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.inner if isinstance(value, Pretended) else value


def _wrapped(value: Any) -> Any:
    return Pretended(value) if isinstance(value, torch.Tensor) and not isinstance(value, Pretended) else value


def move(runtime: Any) -> None:
    """Put a loaded model on the device that is pretended."""
    assert isinstance(runtime, ModelRuntime)
    for module in runtime.model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(Pretended(parameter.detach()), requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = Pretended(buffer)
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                setattr(module, name, Pretended(value))
    runtime.device = CUDA
    runtime.layer_devices[:] = [CUDA] * runtime.num_layers
    runtime.gathers = may_gather(runtime.widths, [CUDA])


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch, *, as_on_cpu: bool = True) -> Iterator[Queue]:
    """Pretend that there is a device; yields what counts its work. ``as_on_cpu``: rows are multiplied in the
    processor's blocks, for the same bits."""
    queue = Queue()
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    if as_on_cpu:
        monkeypatch.setattr(attention_pattern, "_ON_GPU", attention_pattern.ROWS_PER_BLOCK)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    make, generator, empty = torch.tensor, torch.Generator, torch.empty

    def tensor(*args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        is_there = device is not None and torch.device(device).type == CUDA.type
        made = make(*args, device="cpu" if is_there else device, **options)
        if is_there:
            queue._copied("tensor", made)
        return Pretended(made) if is_there else made

    def new_memory(num_bytes: int) -> memoryview:
        return memoryview(queue.lock(empty(num_bytes, dtype=torch.uint8)).numpy())  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: queue.lock(self.clone()))
    for module in (codecs, ahead, memory):
        monkeypatch.setattr(module, "pins_memory", lambda: True)
        monkeypatch.setattr(module, "new_memory", new_memory)
    monkeypatch.setattr(arena, "free_bytes", lambda device: 1 << 30)
    for name in ("scaled_dot_product_attention", "sdpa_attention_forward"):
        monkeypatch.setattr(attention, name, queue.at_once(getattr(attention, name)))
    monkeypatch.setattr(attention, "_with_mass", queue.at_once(attention._with_mass))
    with queue:
        yield queue
