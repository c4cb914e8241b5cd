"""Which kinds of models have KV that cannot be reused exactly, and errors that explain why.

Every other model is looked at when it is loaded (:mod:`.structure`), and proven on its own weights (:mod:`.proof`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...base.errors import UnsupportedModelError

_EXACT_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""Rotary types whose frequencies do not depend on the total length: a key can be rotated to any position exactly."""

_PINNED_ROPE_TYPES = ("dynamic", "longrope")
"""Rotary types whose frequencies change above a certain length. Reuse is exact up to that length."""

_ENCODER_DECODERS = ("t5", "umt5", "mt5", "bart", "mbart", "pegasus", "marian", "longt5", "led", "blenderbot", "fsmt")
_RECURRENT = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
"""Without layers that attend."""
_STATE_SIZES = ("mamba_d_state",)
"""Config fields of recurrent layers, which the oldest supported transformers does not list as layer types."""
_SPARSE = ("indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse")
"""Layer types of DeepSeek-V3.2 and later, MiniMax-M3, and models built like them."""
_WITHOUT_STATE = ("full_attention", "sliding_attention", "chunked_attention", "attention", "conv", "moe", "mlp")
_WORKS = (
    "Choose another model, such as Llama, Qwen3 or Gemma 3, or run this one with transformers itself, without reuse."
)


def check_supported(config: Any, name: str, *, planned: bool = False) -> None:
    """Raise UnsupportedModelError, with one reason and an alternative, if KV of a model with this transformers
    ``config`` cannot be reused exactly, whatever its weights are. ``planned``: another process runs the weights."""
    model_type = getattr(config, "model_type", "unknown")
    if getattr(config, "is_encoder_decoder", False) or model_type in _ENCODER_DECODERS:
        _refuse(
            name,
            f"is an encoder-decoder ({model_type!r}): it reads the prompt in both directions, so no part of it "
            "can be computed ahead",
        )
    text = config.get_text_config(decoder=True)
    if model_type in _RECURRENT:
        _refuse(name, f"({model_type!r}) has recurrent layers and none that attend, which is not supported here")
    if planned and is_recurrent(config):
        _refuse(name, f"({model_type!r}) has recurrent layers, whose states are moved in the model's own process")
    if planned and text is not config:
        _refuse(name, f"({model_type!r}) reads images, too: its prompts are planned with its weights alone")
    if _layer_types(text) & {*_SPARSE}:
        _refuse(name, f"({model_type!r}) has sparse attention: an indexer chooses which earlier tokens are read")
    if getattr(text, "use_bidirectional_attention", False):
        _refuse(name, "attends in both directions, so no part of a prompt can be computed ahead")
    for rope in _ropes(text):
        rope_type = rope.get("rope_type", "default")
        if rope_type not in (*_EXACT_ROPE_TYPES, *_PINNED_ROPE_TYPES):
            known = ", ".join((*_EXACT_ROPE_TYPES, *_PINNED_ROPE_TYPES))
            _refuse(name, f"uses rotary scaling {rope_type!r}, which is not one of {known}")


def is_recurrent(config: Any) -> bool:
    """Whether some layers of a model keep a state instead of the KV of each token."""
    text = config.get_text_config(decoder=True)
    has_size = any(getattr(text, field, None) for field in _STATE_SIZES)
    return has_size or bool(_layer_types(text) - {*_WITHOUT_STATE, *_SPARSE})


def reuse_tokens(config: Any) -> int:
    """Longest prompt, in tokens, for which stored keys can be rotated exactly.

    It is the model's context, with three exceptions: longrope changes its frequencies above
    ``original_max_position_embeddings`` tokens, dynamic NTK above ``max_position_embeddings``; and Llama 4 scales
    queries by the number of their row in a pass, from position ``floor_scale - 1`` on.
    """
    context = config.max_position_embeddings
    limits = [
        r.get("original_max_position_embeddings", context) for r in _ropes(config) if r.get("rope_type") == "longrope"
    ]
    if scales_by_row(config):
        limits.append(config.floor_scale - 1)
    return int(min((context, *limits)))


def scales_by_row(config: Any) -> bool:
    """Whether long prompts' queries are scaled by the number of their row in a pass."""
    return bool(getattr(config, "attn_temperature_tuning", False))


def rope_pin(config: Any) -> str:
    """The rotary parameters as a stable string, for the chunk key.

    If the frequencies depend on length, the string also names the length up to which they are valid.
    """
    parameters = sorted(dict(getattr(config, "rope_parameters", None) or {}).items())
    return repr(parameters) + (f" up to {reuse_tokens(config)}" if has_pinned_rope(config) else "")


def has_pinned_rope(config: Any) -> bool:
    """Whether the rotary frequencies of a pass depend on its largest position."""
    return any(map(is_pinned, _ropes(config)))


def is_pinned(rope: dict[str, Any]) -> bool:
    """The same of one set of rotary parameters."""
    return rope.get("rope_type") in _PINNED_ROPE_TYPES


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """The rotary parameters of a config: one set, or one set per layer type."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def _refuse(name: str, reason: str) -> None:
    raise UnsupportedModelError(f"model {name!r} {reason}. {_WORKS}")
