"""What goes on beside an answer while it is decoded: nothing, verified finishing, or a confidence gate.

:func:`~cacheclip_rag.answering.decoding.decode` asks it before and after a token and at the end, and knows none by
name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.base import State
from .prefill import Keep


@dataclass(frozen=True, slots=True)
class Continuation:
    """Exact KV from which an answer goes on."""

    state: State
    """The exact KV of the prompt and of all ``ids`` but the last."""
    ids: list[int]
    """The answer so far: as it was given, or up to the first token that differs, with full prefill's token there."""
    keeping: Keep | None
    """What takes the exact KV into the prefix cache; None: nothing is kept."""


class Beside:
    """Nothing goes on beside the answer. Base class of what does."""

    asks_before = False
    """Whether :meth:`before` is still to be called."""
    asks_after = False
    """Whether :meth:`after` is still to be called."""
    may_withdraw = False
    """Whether text given so far may still be withdrawn."""

    def before(self, answer: Sequence[int], allowed: torch.Tensor) -> tuple[Continuation, torch.Tensor] | None:
        """Called before a token is chosen, but for the first one. ``allowed``: ``(vocab_size,)`` logits of the tokens
        that may come next. Returns how to go on, and the logits to choose from instead; None: go on as before."""
        return None

    def after(self, answer: Sequence[int], *, completely: bool) -> Continuation | None:
        """Called after every token, the last one included. ``completely``: finish now, because no token waits for it.
        Returns how to go on; None: as before."""
        return None

    def end(self, answer: Sequence[int]) -> dict[str, Any]:
        """Called once, with all tokens of the answer. Returns fields of
        :class:`~cacheclip_rag.fusion.answer.FusionStats`."""
        return {}
