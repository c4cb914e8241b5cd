"""Compares two ways of prefilling by their logits: cheaper and more sensitive than comparing answers.

``KL`` is the Kullback-Leibler divergence from the reference, ``sum p_ref * (log p_ref - log p)``, in nats. Along an
answer means teacher-forced: both ways read the reference's answer, and are compared at each of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..runtime.base import Runtime, State


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


def kl_divergence(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL from ``reference`` to ``logits``, both ``(..., vocab_size)``: ``(...)`` float32, never below 0."""
    p, q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    # a token with -inf on both sides adds nothing; without this it would add nan
    terms = torch.where(p == float("-inf"), 0.0, p.exp() * (p - q))
    return terms.sum(-1).clamp(min=0.0)


def compare(reference: torch.Tensor, logits: torch.Tensor) -> Fidelity:
    """Compare ``(num_answer_tokens, vocab_size)`` logits with the reference's logits at the same tokens."""
    kl = kl_divergence(reference, logits)
    equal = reference.argmax(-1) == logits.argmax(-1)
    return Fidelity(float(kl[0]), float(kl.mean()), float(equal.float().mean()), bool(equal[0]))


def greedy(
    runtime: Runtime, cache: State, logits: torch.Tensor, count: int, *, stop: bool = True
) -> tuple[list[int], torch.Tensor]:
    """Decode up to ``count`` tokens greedily, including the end of turn. Returns the tokens and each token's logits.

    ``cache`` is modified. With ``stop`` False, decoding continues after an end of turn.
    """
    ids, rows = [int(logits.argmax())], [logits]
    while len(ids) < count and not (stop and ids[-1] in runtime.eos_ids):
        rows.append(runtime.decode_step(cache, ids[-1]))
        ids.append(int(rows[-1].argmax()))
    return ids, torch.stack(rows)


@torch.inference_mode()
def read_along(runtime: Runtime, cache: State, logits: torch.Tensor, answer_ids: Sequence[int]) -> torch.Tensor:
    """Logits at each token of a given answer, ``(num_answer_tokens, vocab_size)``, in one pass.

    ``logits`` are the logits of the prompt's last token. ``cache`` is modified. Needs a runtime with ``can_extend``.
    """
    follow = torch.tensor(answer_ids[:-1], dtype=torch.int64)
    if not len(follow):
        return logits[None]
    rest = runtime.extend(cache, follow, cache.get_seq_length(), logits_to_keep=len(follow))
    assert rest is not None
    return torch.cat((logits[None], rest.reshape(len(follow), -1)))


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
