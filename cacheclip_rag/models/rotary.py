"""Rotary position embedding as a reversible map on keys: position-free in the store, rotated when assembled.

Source: RoFormer (arXiv:2104.09864), in the half-split layout that transformers uses for every supported architecture.
Everything is computed in float32 and cast once.
"""

from __future__ import annotations

import torch

__all__ = ["rotate", "unrotate"]


def _rotate_half(keys: torch.Tensor) -> torch.Tensor:
    half = keys.shape[-1] // 2
    return torch.cat((-keys[..., half:], keys[..., :half]), dim=-1)


def rotate(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate position-free keys to the positions of the tables.

    Args:
        keys: ``(..., num_tokens, head_dim)``, before RoPE, any float dtype.
        cos, sin: ``(num_tokens, head_dim)`` float32, as the model's own rotary module gives them (so they already
            carry the attention scaling of YaRN).

    Returns:
        float32 keys after RoPE, same shape.
    """
    keys = keys.float()
    return keys * cos + _rotate_half(keys) * sin


def unrotate(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention_scaling: float = 1.0) -> torch.Tensor:
    """Inverse of :func:`rotate`: float32 keys before RoPE. ``attention_scaling`` is the factor inside cos and sin."""
    keys = keys.float()
    return (keys * cos - _rotate_half(keys) * sin) / attention_scaling**2
