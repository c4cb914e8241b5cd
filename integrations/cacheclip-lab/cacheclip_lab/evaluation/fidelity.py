"""How far a way of prefilling is from a reference, by the logits along the reference's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheclip_rag.measuring import greedy, kl_divergence
from cacheclip_rag.runtime import Runtime, State


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Distance to the reference for one prompt."""

    first_token_kl: float
    """KL at the first token of the answer, nats."""
    answer_kl: float
    """Mean KL over the tokens of the reference's answer, nats."""
    agreement: float
    """Share of the reference's greedy tokens that are also the compared way's greedy choice, 0 to 1."""
    first_agrees: bool
    """Whether both ways choose the same first token."""


def compare(reference: torch.Tensor, logits: torch.Tensor) -> Fidelity:
    """Compare ``(num_answer_tokens, vocab_size)`` logits with the reference's logits at the same tokens."""
    kl = kl_divergence(reference, logits)
    equal = reference.argmax(-1) == logits.argmax(-1)
    return Fidelity(float(kl[0]), float(kl.mean()), float(equal.float().mean()), bool(equal[0]))


def own_answer(
    runtime: Runtime,
    cache: State,
    end: int,
    along: torch.Tensor,
    reference_ids: Sequence[int],
    count: int,
) -> tuple[list[int], torch.Tensor]:
    """The greedy answer, up to ``count`` tokens, and each token's logits. Tokens that equal the reference's are not
    decoded again.

    Args:
        end: length of the prompt.
        along: logits of :func:`read_along` at the reference's tokens.

    ``cache`` is modified.
    """
    chosen = along.argmax(-1).tolist()
    same = next((n for n, pair in enumerate(zip(chosen, reference_ids, strict=True)) if pair[0] != pair[1]), None)
    if same is None:
        return list(reference_ids), along
    runtime.cut(cache, end + same)
    rest, logits = greedy(runtime, cache, along[same], count - same)
    return [*reference_ids[:same], *rest], torch.cat((along[:same], logits))
