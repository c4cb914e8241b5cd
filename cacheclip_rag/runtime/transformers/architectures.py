"""Which models' KV can be reused exactly, and the error that explains the rest.

To add an architecture: one line in ``SUPPORTED`` and one row in ``tests/conftest.py`` (``TINY_MODELS``); the
exactness tests then run on it. Sliding windows, soft-capping, attention sinks and partial rotary need no entry: the
attention function and the tables see them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedModelError

__all__ = [
    "SUPPORTED",
    "Architecture",
    "check_architecture",
    "check_supported",
    "has_pinned_rope",
    "reuse_tokens",
    "rope_pin",
]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture rotates its keys, where that is not one table for all layers."""

    rotary_per_layer_type: bool = False
    """The rotary module takes the layer's type beside the positions (Gemma 3)."""
    half_tables: bool = False
    """The rotary module gives one column for each pair of dimensions instead of two (GPT-OSS)."""
    rotated_layers: str | None = None
    """Config field that holds, per layer, whether it rotates at all (SmolLM3)."""


SUPPORTED: dict[str, Architecture] = {
    "gemma2": Architecture(),
    "gemma3_text": Architecture(rotary_per_layer_type=True),
    "gpt_oss": Architecture(half_tables=True),
    "granite": Architecture(),
    "llama": Architecture(),
    "mistral": Architecture(),
    "mixtral": Architecture(),
    "olmo2": Architecture(),
    "phi3": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "qwen3_moe": Architecture(),
    "smollm3": Architecture(rotated_layers="no_rope_layers"),
}
"""By ``model_type`` of a transformers config."""

_EXACT_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose frequencies do not depend on the total length, so that a key can be moved exactly."""

_PINNED_ROPE_TYPES = ("dynamic", "longrope")
"""Rotary types with one set of frequencies up to a length and others above it: exact up to that length."""

_ENCODER_DECODERS = ("t5", "umt5", "mt5", "bart", "mbart", "pegasus", "marian", "longt5", "led", "blenderbot", "fsmt")
_RECURRENT = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
_WORKS = (
    f"Supported architectures: {', '.join(SUPPORTED)}. Choose such a model, or set fallback='full' to have this one "
    "answer by ordinary prefill, without reuse."
)


def check_architecture(model_type: str, name: str) -> None:
    """Raise UnsupportedModelError unless KV of this ``model_type`` can be reused exactly."""
    if model_type not in SUPPORTED:
        _refuse(name, f"has architecture {model_type!r}, which is not among those proven exact")


def check_supported(config: Any, name: str) -> None:
    """Check a transformers ``config``.

    Raises:
        UnsupportedModelError: with the one reason that matters most to the user, and what works instead.
    """
    model_type = getattr(config, "model_type", "unknown")
    if getattr(config, "is_encoder_decoder", False) or model_type in _ENCODER_DECODERS:
        _refuse(
            name,
            f"is an encoder-decoder ({model_type!r}): it reads the prompt in both directions, so no part of it "
            "can be computed ahead",
        )
    if model_type not in SUPPORTED:
        if model_type in _RECURRENT or _linear_layers(config):
            _refuse(
                name, f"({model_type!r}) has recurrent layers, whose state after a chunk depends on all text before"
            )
        if any("mrope_section" in rope for rope in _ropes(getattr(config, "text_config", config))):
            _refuse(name, f"({model_type!r}) uses multimodal rotary embedding, whose positions depend on images")
        if getattr(config, "text_config", None) is not None:
            _refuse(name, f"({model_type!r}) is a multimodal model; only text-only checkpoints are reused")
        check_architecture(model_type, name)
    if getattr(config, "quantization_config", None):
        _refuse(
            name, "has quantised weights, whose results depend on what else is in the pass; use the dense checkpoint"
        )
    if getattr(config, "use_bidirectional_attention", False):
        _refuse(name, "attends in both directions, so no part of a prompt can be computed ahead")
    for rope in _ropes(config):
        rope_type = rope.get("rope_type", "default")
        if rope_type not in (*_EXACT_ROPE_TYPES, *_PINNED_ROPE_TYPES):
            known = ", ".join((*_EXACT_ROPE_TYPES, *_PINNED_ROPE_TYPES))
            _refuse(name, f"uses rotary scaling {rope_type!r}, which is not one of {known}")


def reuse_tokens(config: Any) -> int:
    """Longest prompt for which stored keys can be moved exactly.

    The model's context, except for longrope, which changes its frequencies above
    ``original_max_position_embeddings`` tokens, and dynamic NTK, which does so above ``max_position_embeddings``.
    """
    context = config.max_position_embeddings
    limits = (
        r.get("original_max_position_embeddings", context) for r in _ropes(config) if r.get("rope_type") == "longrope"
    )
    return int(min((context, *limits)))


def rope_pin(config: Any) -> str:
    """The rotary parameters as a stable string: part of the chunk key, since another rope means other states.

    For frequencies that depend on length it names the length up to which the ones used hold.
    """
    parameters = sorted(dict(getattr(config, "rope_parameters", None) or {}).items())
    return repr(parameters) + (f" up to {reuse_tokens(config)}" if has_pinned_rope(config) else "")


def has_pinned_rope(config: Any) -> bool:
    """Whether the rotary frequencies of a pass depend on its longest position."""
    return any(rope.get("rope_type") in _PINNED_ROPE_TYPES for rope in _ropes(config))


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """The rotary parameters of a config: one set, or one for each type of layer."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]


def _linear_layers(config: Any) -> bool:
    config = getattr(config, "text_config", config)
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    return bool(kinds - {"full_attention", "sliding_attention", "chunked_attention", "attention"})


def _refuse(name: str, reason: str) -> None:
    raise UnsupportedModelError(f"model {name!r} {reason}. {_WORKS}")
