"""The auxiliary model's attention from the question to each chunk: CacheClip's scores.

Source: CacheClip (arXiv:2510.10129v1), section 3.2: each chunk, behind the shared prefix, is read by the question on
its own; the last layer's attention on the chunk's tokens, averaged over the question's tokens, is the score.
The paper does not name its head reduction; we take the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..models.attention import AttentionPlan, Block, Probe
from ..models.runtime import ModelRuntime

__all__ = ["score_chunks"]


@torch.inference_mode()
def score_chunks(
    auxiliary: ModelRuntime,
    prefix: torch.Tensor,
    chunks: Iterable[torch.Tensor],
    question_ids: Sequence[int],
    lengths: Sequence[int] | None = None,
    *,
    layers: Iterable[int] | None = None,
    heads: str = "mean",
    queries: str = "mean",
    pooled: bool = False,
) -> list[torch.Tensor]:
    """Attention mass of the question on every token of every chunk, by one packed forward.

    The cache is laid out as ``prefix | chunk | question`` once per chunk, side by side; all copies of the question run
    together, each seeing only its own stretch. Only the question's rows are computed: chunks and prefix come from the
    store. Attention weights are formed for these rows alone.

    Args:
        prefix: KV of the auxiliary's shared prefix, ``(num_layers, 2, num_kv_heads, num_prefix_tokens, head_dim)``.
        chunks: KV of each chunk behind that prefix, same layout; taken one at a time.
        question_ids: token ids of the question, at least one.
        lengths: tokens of each chunk, needed only if ``chunks`` is an iterator.
        layers: layers to look at, their scores averaged; default the last.
        heads, queries: ``mean`` or ``max`` over heads and question tokens.
        pooled: one softmax over the tokens of all chunks, so that scores compare between chunks; else each chunk has
            its own, over all that the question sees there.

    Returns:
        Per chunk ``(num_chunk_tokens,)`` float32, each between 0 and 1.
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
    chosen = frozenset(layers) if layers is not None else frozenset([auxiliary.num_layers - 1])
    scores = [torch.zeros(length) for length in lengths]
    waiting: list[torch.Tensor] = []

    def add(number: int, weights: torch.Tensor) -> None:
        """``weights``: ``(num_heads, num_question_tokens, num_chunk_tokens)``."""
        reduced = weights.mean(0) if heads == "mean" else weights.amax(0)
        scores[number] += (reduced.mean(0) if queries == "mean" else reduced.amax(0)).cpu() / len(chosen)

    def record(layer: int, number: int, found: torch.Tensor) -> None:
        found = found[..., num_prefix : num_prefix + lengths[number]]
        if not pooled:
            add(number, found)
            return
        waiting.append(found)
        if len(waiting) == len(lengths):
            for index, part in enumerate(torch.cat(waiting, dim=-1).softmax(-1).split(list(lengths), dim=-1)):
                add(index, part)
            waiting.clear()

    probe = Probe(chosen, blocks, record, stop=max(chosen), logits=pooled)
    auxiliary.run_rows(
        cache,
        torch.tensor(list(question_ids) * len(lengths)),
        torch.cat(positions),
        AttentionPlan(blocks, probe),
        slots=torch.cat(slots),
        head=False,
    )
    return scores
