"""Checkpoints with quantised weights: which are loaded, and how.

KV can be stored only if a row of a pass does not depend on the others. That holds where weights alone are quantised,
and where each token's activations have a scale of their own; not where one scale is made for all of a pass. Weights
that transformers can make dense are loaded dense. Of others, every part is tried (:func:`check_rows`).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from typing import Any, NoReturn

import torch
import transformers
from torch import nn

from ...base.errors import ModelError, UnsupportedModelError

_DENSE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MOST_REPEATS = 4
"""In a pattern that names modules, none of them of a group: to compare others may take hours."""
_NUM_ROWS = 16
_OUTLIER = 100.0
"""Times the largest number of the row that is looked at."""
_AMONG_OTHERS = 1e-6
"""Largest change of a row when the other rows change, as a share of its length: the same kernel computes it."""
_ALONE = {torch.float32: 1e-5, torch.float16: 2e-3}
_ALONE_BFLOAT16 = 1e-2
"""Largest change of a row that is alone: another kernel may compute it, which rounds otherwise."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights of a ``quant_method`` are loaded."""

    packages: tuple[str, ...] = ()
    """What transformers needs for it."""
    is_dense: bool = False
    """Whether they become dense weights while they are loaded."""


SCHEMES: dict[str, Scheme] = {
    "awq": Scheme(("accelerate", "gptqmodel")),
    "bitsandbytes": Scheme(("accelerate", "bitsandbytes")),
    "compressed-tensors": Scheme(("compressed_tensors",), is_dense=True),
    "fp8": Scheme(("accelerate",), is_dense=True),
    "gptq": Scheme(("accelerate", "gptqmodel", "optimum")),
    "mxfp4": Scheme(is_dense=True),
    "torchao": Scheme(("accelerate", "torchao")),
}
"""By ``quant_method``. Transformers is given no other one: it reads weights of an unknown method as if they were
dense."""


def scheme_of(config: Any, name: str) -> Scheme | None:
    """How weights of a model with this transformers ``config`` are loaded; None: they are dense. Raises
    UnsupportedModelError: by none of :data:`SCHEMES`; ModelError: a package is missing, or names of modules are
    patterns that take long to compare."""
    settings = _settings(config)
    if settings is None:
        return None
    is_bitsandbytes = settings.get("load_in_8bit") or settings.get("load_in_4bit")  # older ones name no method
    method = "bitsandbytes" if is_bitsandbytes else settings.get("quant_method")
    if method not in SCHEMES:
        raise UnsupportedModelError(
            f"model {name!r} has weights that were quantised by {method!r}. Expected one of {', '.join(SCHEMES)}: of "
            "others it is not known whether a token's result depends on the other tokens of a pass. Use a checkpoint "
            "in full precision, or serve this one with vLLM (cacheclip serve --backend vllm)."
        )
    for text in _texts(settings):
        if re.search(r"\)[*+?{]", text) or len(re.findall(r"[*+{]", text)) > _MOST_REPEATS:
            raise ModelError(
                f"expected names of modules, or short patterns of them, in the quantization_config of model {name!r}, "
                f"got {text[:80]!r}. Fetch the model again."
            )
    if not _reads_all():
        raise ModelError(
            f"model {name!r} has weights that were quantised by {method!r}. Expected a transformers that reads files "
            f"without mapping them, got {transformers.__version__}: pip install -U transformers. Or use a checkpoint "
            "in full precision."
        )
    missing = [each.replace("_", "-") for each in SCHEMES[method].packages if importlib.util.find_spec(each) is None]
    if missing:
        raise ModelError(
            f"model {name!r} has weights that were quantised by {method!r}, for which {' and '.join(missing)} must be "
            f"installed: pip install {' '.join(missing)}. Or use a checkpoint in full precision."
        )
    return SCHEMES[method]


def _reads_all() -> bool:
    """Whether this transformers can read a checkpoint without leaving parts of it mapped."""
    return "disable_mmap" in signature(transformers.PreTrainedModel.from_pretrained).parameters


def loading_options(scheme: Scheme, config: Any, device: str) -> dict[str, Any]:
    """Options of ``from_pretrained``, beside those of dense weights."""
    if scheme.is_dense:
        owner = config if getattr(config, "quantization_config", None) else config.get_text_config(decoder=True)
        owner.quantization_config = {**owner.quantization_config, "dequantize": True}
        return {"config": config}
    # the numbers beside the weights, such as their scales, lie where no parameter shows them: none may stay mapped
    return {"config": config, "device_map": {"": device}, "disable_mmap": True}


def num_dense_weights(auto: Any, config: Any) -> int:
    """How many weights a model of this config has, made without memory by ``auto``, such as AutoModelForCausalLM."""
    with torch.device("meta"):
        return sum(each.numel() for each in auto.from_config(config, trust_remote_code=False).parameters())


def check_loaded(model: Any, scheme: Scheme, dtype: torch.dtype, name: str) -> None:
    """Give dense weights ``dtype``, which some versions of transformers leave as they were in the file, but for those
    that the class has in float32. Raises ModelError: weights that should have become dense did not."""
    for path, module in model.named_modules():
        if scheme.is_dense and is_quantised(module):
            raise ModelError(
                f"expected the quantised weights of model {name!r} to become dense, got {path} as "
                f"{type(module).__name__}. Update transformers, or use a checkpoint in full precision."
            )
    planned = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else model.dtype_plan  # of 5.0
    plan = {re.compile(each.replace("*", ".*")): other for each, other in planned.items()}
    for path, weight in model.named_parameters():
        if type(weight) is nn.Parameter and weight.dtype in _DENSE:
            weight.data = weight.data.to(next((plan[each] for each in plan if each.search(path)), dtype))


def _settings(config: Any) -> dict[str, Any] | None:
    """What a config, or that of its text part, says of quantisation."""
    of_text = config.get_text_config(decoder=True)
    return getattr(config, "quantization_config", None) or getattr(of_text, "quantization_config", None) or None


def _texts(settings: Any) -> Iterator[str]:
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, dict | list | tuple):
        for each in settings.values() if isinstance(settings, dict) else settings:
            yield from _texts(each)


def is_quantised(module: nn.Module) -> bool:
    """Whether a module itself holds weights that are no ordinary floats."""
    weights = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(
        each.ndim > 1 and (each.dtype not in _DENSE or type(each) not in (nn.Parameter, torch.Tensor))
        for each in weights
    )


@torch.inference_mode()
def check_rows(model: Any, name: str) -> None:
    """Raise UnsupportedModelError if what quantised weights make of a row depends on the other rows of its pass, as
    where one scale, or one choice of outliers, is made for all. Every part with such weights computes a row among
    ordinary others, among others with outliers, and alone."""
    limit = _ALONE.get(model.dtype, _ALONE_BFLOAT16)
    for path, module in model.named_modules():
        if not is_quantised(module) or isinstance(module, nn.Embedding):
            continue
        width = getattr(module, "in_features", None)
        if width is None:
            _refuse(name, f"quantised weights in {path}, a {type(module).__name__}, which cannot be tried alone")
        make = torch.Generator().manual_seed(0)
        rows = torch.randn(_NUM_ROWS, width, generator=make)
        others = rows.clone()
        others[1::3, ::4] *= _OUTLIER
        device = next(chain(module.parameters(), module.buffers())).device
        ordinary, wild, alone = (
            module(each[None].to(device, model.dtype))[0, 0].float() for each in (rows, others, rows[:1])
        )
        length = ordinary.norm().clamp(min=1e-9)
        among, single = float((wild - ordinary).norm() / length), float((alone - ordinary).norm() / length)
        if not (among <= _AMONG_OTHERS and single <= limit):
            _refuse(
                name,
                f"quantised weights whose results depend on the other tokens of a pass: in {path}, a token's changes "
                f"by {among:.2g} beside others with outliers, and by {single:.2g} alone",
            )


def _refuse(name: str, reason: str) -> NoReturn:
    raise UnsupportedModelError(
        f"model {name!r} has {reason}. Use a checkpoint that quantises weights only, or scales activations token by "
        "token, or one in full precision."
    )
