"""What a fused prefill returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..runtime.base import State

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Fused:
    """Result of :meth:`Runtime.fuse`."""

    state: State
    """The prompt's KV, for :meth:`Runtime.decode_step`."""
    logits: torch.Tensor
    """Logits of the prompt's last token, ``(vocab_size,)``."""
    plan: Plan
    """The plan that was carried out. ``reused`` no longer lists chunks whose stored KV was missing or damaged."""
    recomputed: Sequence[int]
    """Positions of tokens of reused chunks that were computed again."""
    charged_tokens: float
    """Chunk tokens that got fresh KV. A token that only some layers computed counts as that share of a token."""
    first_computed: int | None
    """Position of the first token that was computed; None if other prompts must not reuse this KV."""
    stale: np.ndarray[Any, Any] | None = None
    """``(num_tokens,)`` bool: tokens whose KV is a chunk's as it was stored, but for a correction; None if no prompt
    may continue this KV."""
