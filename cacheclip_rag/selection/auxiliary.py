"""The auxiliary model's attention from the question to each chunk: CacheClip's scores.

Source: CacheClip (arXiv:2510.10129v1), section 3.2. The question reads each chunk separately, after the shared prefix.
The score is the last layer's attention on the chunk's tokens, averaged over the question's tokens. The paper does not
name its head reduction; we take the mean. Our additions: one softmax over all chunks, single heads with weights and
low-rank updates (:mod:`cacheclip_rag.selection.heads`), and no score for sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..runtime.transformers.attention import AttentionPlan, Block, Probe
from ..runtime.transformers.cache import FusedCache
from ..runtime.transformers.rotary import Tables, rotate, unrotate
from ..store import KV
from .heads import HeadSet, LowRank

if TYPE_CHECKING:
    from ..runtime.transformers.model import ModelRuntime

__all__ = ["PackedChunks", "pack_chunks", "score_chunks", "updated", "without_sinks"]

Adjust = Callable[[int, int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@torch.inference_mode()
def score_chunks(
    auxiliary: ModelRuntime,
    prefix: torch.Tensor,
    chunks: Iterable[KV],
    question_ids: Sequence[int],
    lengths: Sequence[int] | None = None,
    *,
    layers: Iterable[int] | None = None,
    heads: str | HeadSet = "mean",
    queries: str = "mean",
    pooled: bool = False,
    sinks: int = 0,
) -> list[torch.Tensor]:
    """Attention mass of the question on every token of every chunk, in one packed forward pass.

    The cache holds ``prefix | chunk | question`` once per chunk, side by side. All copies of the question run together,
    and each sees only its own segment. Only the question's rows are computed; chunks and prefix come from the store.

    Args:
        prefix: KV of the auxiliary's shared prefix, ``(num_layers, 2, num_kv_heads, num_prefix_tokens, head_dim)``.
        chunks: KV of each chunk after that prefix, same layout; taken one at a time.
        question_ids: token ids of the question, at least one.
        lengths: tokens of each chunk, needed only if ``chunks`` is an iterator.
        layers: layers whose scores are averaged; default the last. Ignored for a head set, which names its layers.
        heads: ``mean`` or ``max`` over the heads of a layer, or a head set (which is always ``pooled``).
        queries: ``mean`` or ``max`` over question tokens.
        pooled: True: one softmax over the tokens of all chunks, so that scores are comparable between chunks. False:
            one softmax per chunk, over everything that the question sees there.
        sinks: tokens at the start of each chunk that score 0, because every question attends to them. A head set may
            ask for more. With ``pooled``, a chunk without other tokens is scored without this rule.

    Returns:
        Per chunk ``(num_chunk_tokens,)`` float32, each between 0 and 1.
    """
    if isinstance(heads, HeadSet):
        pooled, chosen, sinks = True, frozenset(heads.layers), max(sinks, heads.sinks)
    else:
        chosen = frozenset(layers) if layers is not None else frozenset([auxiliary.num_layers - 1])
    packed = pack_chunks(auxiliary, prefix, chunks, question_ids, lengths, num_layers=max(chosen) + 1)
    lengths, num_prefix = packed.lengths, packed.num_prefix
    scores = [torch.zeros(length) for length in lengths]
    waiting: list[torch.Tensor] = []

    def add(number: int, layer: int, weights: torch.Tensor) -> None:
        """``weights``: ``(num_heads, num_question_tokens, num_chunk_tokens)``."""
        if isinstance(heads, HeadSet):
            counts = heads.weights_of(layer, len(weights)).to(weights.device)
            reduced = (weights * counts[:, None, None]).sum(0)
        else:
            reduced = (weights.mean(0) if heads == "mean" else weights.amax(0)) / len(chosen)
        scores[number] += (reduced.mean(0) if queries == "mean" else reduced.amax(0)).cpu()

    def record(layer: int, number: int, found: torch.Tensor) -> None:
        found = found[..., num_prefix : num_prefix + lengths[number]]
        if not pooled:
            found[..., :sinks] = 0.0
            add(number, layer, found)
            return
        waiting.append(without_sinks(found, sinks))
        if len(waiting) == len(lengths):
            weights = torch.cat(waiting, dim=-1).softmax(-1).nan_to_num()  # a window may hide every chunk from a row
            for index, part in enumerate(weights.split(list(lengths), dim=-1)):
                add(index, layer, part)
            waiting.clear()

    probe = Probe(chosen, packed.blocks, record, stop=max(chosen), logits=pooled)
    if isinstance(heads, HeadSet) and heads.is_updated:
        probe.adjust = _updating(heads, packed.tables(auxiliary, max(chosen)))
    packed.run(auxiliary, probe)
    return scores


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """A cache with ``prefix | chunk | question`` once per chunk, side by side. The questions have not run yet."""

    cache: FusedCache
    blocks: list[Block]
    """Per chunk the rows of its copy of the question, and the keys that they see."""
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    lengths: list[int]
    """Tokens of each chunk."""
    num_prefix: int
    num_question: int

    def run(self, auxiliary: ModelRuntime, probe: Probe) -> None:
        """Run the questions up to the last layer that the probe needs."""
        plan = AttentionPlan(self.blocks, probe)
        auxiliary.run_rows(self.cache, self.ids, self.positions, plan, slots=self.slots, head=False)

    def tables(self, auxiliary: ModelRuntime, layer: int) -> Tables | None:
        """Rotary tables of a layer for all positions in use, from 0 on."""
        return auxiliary.rotary_tables(0, self.num_prefix + max(self.lengths) + self.num_question)[layer]


def pack_chunks(
    auxiliary: ModelRuntime,
    prefix: torch.Tensor,
    chunks: Iterable[KV],
    question_ids: Sequence[int],
    lengths: Sequence[int] | None = None,
    num_layers: int | None = None,
) -> PackedChunks:
    """Lay out stored KV in one cache, for the first ``num_layers`` layers (default all). Other arguments are as in
    :func:`score_chunks`."""
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
        auxiliary.fill(cache, prefix, slot=start, position=0, num_layers=num_layers)
        auxiliary.fill(cache, chunk, slot=start + num_prefix, position=num_prefix, num_layers=num_layers)
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
    ids = torch.tensor(list(question_ids) * len(lengths))
    return PackedChunks(
        cache, blocks, ids, torch.cat(positions), torch.cat(slots), list(lengths), num_prefix, num_question
    )


def without_sinks(logits: torch.Tensor, sinks: int) -> torch.Tensor:
    """Logits of one chunk's tokens, ``(..., num_tokens)``, with the first ``sinks`` set to minus infinity. A chunk
    without other tokens is returned unchanged."""
    num_tokens = logits.shape[-1]
    if num_tokens <= sinks:
        return logits
    return logits.masked_fill(torch.arange(num_tokens, device=logits.device) < sinks, float("-inf"))


def _updating(heads: HeadSet, tables: Tables | None) -> Adjust:
    """Function that applies the head set's low-rank updates to queries and keys of its last layer. Slot = position in
    every block."""
    last = heads.layers[-1]

    def adjust(layer: int, number: int, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer != last:
            return query, key
        start = key.shape[1] - query.shape[1]  # the question comes last
        return updated(query, heads.queries, tables, start), updated(key, heads.keys, tables, 0)

    return adjust


def updated(heads: torch.Tensor, update: LowRank | None, tables: Tables | None, start: int) -> torch.Tensor:
    """Queries or keys ``(num_heads, num_tokens, head_dim)`` after RoPE, with a low-rank update applied before RoPE.

    Args:
        tables: rotary tables from position 0 on.
        start: position of the first token.
    """
    if update is None:
        return heads
    if tables is not None:
        cos, sin = (table[start : start + heads.shape[1]] for table in tables)
        tables = (cos, sin)
    return rotate(update(unrotate(heads, tables)), tables)
