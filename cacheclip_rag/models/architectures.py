"""Which models' KV can be reused exactly, and the error that explains the rest.

To add an architecture: one line in ``SUPPORTED`` and one row in ``tests/conftest.py`` (``TINY_MODELS``); the
exactness tests then run on it.
"""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedModelError

__all__ = ["SUPPORTED", "check_architecture", "check_supported", "rope_pin"]

_EXACT_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose frequencies do not depend on the total length, so that a key can be moved exactly."""


SUPPORTED = ("llama", "qwen2")
"""Values of ``model_type`` in a transformers config."""


def check_architecture(model_type: str, name: str) -> None:
    """Raise UnsupportedModelError unless KV of this ``model_type`` can be reused exactly."""
    if model_type not in SUPPORTED:
        raise UnsupportedModelError(
            f"model {name!r} has architecture {model_type!r}, whose KV this version cannot reuse exactly. "
            f"Supported: {', '.join(SUPPORTED)}. Choose such a model, or add the architecture (CONTRIBUTING.md)."
        )


def check_supported(config: Any, name: str) -> None:
    """Check a transformers ``config``.

    Raises:
        UnsupportedModelError: unknown architecture, rotary frequencies that depend on length, or active sliding window.
    """
    check_architecture(getattr(config, "model_type", "unknown"), name)
    rope_type = _rope_parameters(config).get("rope_type", "default")
    if rope_type not in _EXACT_ROPE_TYPES:
        raise UnsupportedModelError(
            f"model {name!r} uses rotary scaling {rope_type!r}, whose frequencies depend on the prompt's length, so "
            f"stored keys cannot be moved exactly. Supported: {', '.join(_EXACT_ROPE_TYPES)}."
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UnsupportedModelError(
            f"model {name!r} uses sliding-window attention, which this version does not reuse. "
            "Choose a model with full attention in every layer."
        )


def rope_pin(config: Any) -> str:
    """The rotary parameters as a stable string: part of the chunk key, since another rope means other states."""
    return repr(sorted(_rope_parameters(config).items()))


def _rope_parameters(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})
