"""Compares two ways of prefilling by their logits: cheaper and more sensitive than comparing answers.

``KL`` is the Kullback-Leibler divergence from the reference, ``sum p_ref * (log p_ref - log p)``, in nats. Along an
answer means teacher-forced: both ways read the reference's answer, and are compared at each of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..runtime.base import Runtime, State


def kl_divergence(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL from ``reference`` to ``logits``, both ``(..., vocab_size)``: ``(...)`` float32, never below 0."""
    p, q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    # a token with -inf on both sides adds nothing; without this it would add nan
    terms = torch.where(p == float("-inf"), 0.0, p.exp() * (p - q))
    return terms.sum(-1).clamp(min=0.0)


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
