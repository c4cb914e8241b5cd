"""The auxiliary model's attention from the question to each chunk: CacheClip's scores.

Source: CacheClip (arXiv:2510.10129v1), section 3.2: each chunk, behind the shared prefix, is read by the question on
its own; the last layer's attention on the chunk's tokens, averaged over the question's tokens, is the score.
The paper does not name its head reduction; we take the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..models.attention import AttentionPlan, Block
from ..models.runtime import ModelRuntime

__all__ = ["score_chunks"]


@torch.inference_mode()
def score_chunks(
    auxiliary: ModelRuntime,
    prefix: torch.Tensor,
    chunks: Iterable[torch.Tensor],
    question_ids: Sequence[int],
    lengths: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Attention mass of the question on every token of every chunk, by one packed forward.

    The cache is laid out as ``prefix | chunk | question`` once per chunk, side by side; all copies of the question run
    together, each seeing only its own stretch. Only the question's rows are computed: chunks and prefix come from the
    store. The last layer's attention weights are formed for these rows alone.

    Args:
        prefix: KV of the auxiliary's shared prefix, ``(num_layers, 2, num_kv_heads, num_prefix_tokens, head_dim)``.
        chunks: KV of each chunk behind that prefix, same layout; taken one at a time.
        question_ids: token ids of the question, at least one.
        lengths: tokens of each chunk, needed only if ``chunks`` is an iterator.

    Returns:
        Per chunk ``(num_chunk_tokens,)`` float32, mean over heads and question tokens, each between 0 and 1.
    """
    assert question_ids, "scoring needs at least one question token"
    num_prefix, num_question = prefix.shape[3], len(question_ids)
    if lengths is None:
        chunks = list(chunks)
        lengths = [chunk.shape[3] for chunk in chunks]
    cache = auxiliary.new_cache(sum(num_prefix + n + num_question for n in lengths))
    blocks, positions, slots = [], [], []
    start = 0
    for number, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
        context = num_prefix + length
        auxiliary.fill(cache, prefix, slot=start, position=0)
        auxiliary.fill(cache, chunk, slot=start + num_prefix, position=num_prefix)
        rows = torch.arange(context, context + num_question)
        blocks.append(
            Block.of(
                slice(number * num_question, (number + 1) * num_question),
                slice(start, start + context + num_question),
                rows,
                auxiliary.device,
            )
        )
        positions.append(rows)
        slots.append(rows + start)
        start += context + num_question
    plan = AttentionPlan(blocks, probe_layer=auxiliary.num_layers - 1)
    auxiliary.run_rows(
        cache,
        torch.tensor(list(question_ids) * len(lengths)),
        torch.cat(positions),
        plan,
        slots=torch.cat(slots),
        head=False,
    )
    return [mass[num_prefix : num_prefix + length].cpu() for mass, length in zip(plan.masses, lengths, strict=True)]
