"""Models that another library loads, such as embedding models, with the care that ours are loaded with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cacheclip_rag import ModelError
from cacheclip_rag.models import DEVICE_MAPS, check_device, choose_device, resolve, tensor_dtypes
from cacheclip_rag.runtime import copy_mapped, quiet_transformers

if TYPE_CHECKING:
    from torch import nn

_Module = TypeVar("_Module", bound="nn.Module")


def load_module(name: str, device: str, load: Callable[[Path, str], _Module], *, kind: str = "model") -> _Module:
    """A model that ``load`` makes of a folder and a device, with weights that do not change with their files.

    Args:
        name: folder, hub id, or the name of a packaged model; it is fetched if it is not on this machine.
        device: as of the settings of an engine. A model that ``device`` would spread over several is not spread.
        kind: of the model, for errors.

    Raises:
        ConfigurationError: there is no such device.
        ModelError: tensors are missing in the checkpoint: transformers would fill them with random numbers, other ones
            in each process.
        The errors of :func:`~cacheclip_rag.models.resolve`, and those of ``load``.
    """
    check_device(device := choose_device(device))
    if device in DEVICE_MAPS:
        device = choose_device("auto")
    folder = resolve(name)
    with quiet_transformers():
        module = load(folder, device)
        _check_tensors(module, f"{kind} {name!r}")
    copy_mapped(module)
    return module


def _check_tensors(module: nn.Module, what: str) -> None:
    """Raise ModelError if the checkpoint of the transformers model in a module lacks tensors."""
    from transformers import AutoModel, PreTrainedModel

    inner = next((each for each in module.modules() if isinstance(each, PreTrainedModel)), None)
    known = tensor_dtypes(Path(inner.name_or_path)) if inner is not None else {}
    if inner is None or {name for name, _ in inner.named_parameters()} <= {*known, *map(_without_prefix, known)}:
        return
    # names that transformers knows by others, and a last layer that embeddings do not use, are none that are missing
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
    _, found = AutoModel.from_pretrained(inner.name_or_path, **options)
    if missing := sorted(tensor for tensor in found["missing_keys"] if not tensor.startswith("pooler.")):
        raise ModelError(
            f"expected all tensors of {what}, which lacks {', '.join(missing[:3])}. Fetch the model again."
        )


def _without_prefix(tensor: str) -> str:
    return tensor.partition(".")[2]
