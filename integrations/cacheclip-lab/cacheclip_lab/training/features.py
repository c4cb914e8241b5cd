"""What the auxiliary attends to in a sample, and the tokens of its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheclip_rag import ModelError
from cacheclip_rag.measuring import ChunkCaches, Probe, pack_chunks, question_ids
from cacheclip_rag.runtime import TokenizedText

from ..models import transformers_model
from .families import Sample, Span

Offsets = Sequence[tuple[int, int]]
"""Per token of a text the characters that it covers, ``(start, end)``."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleAttention:
    """The auxiliary's attention on one sample, over the concatenated tokens of all chunks."""

    lengths: tuple[int, ...]
    """Tokens of each chunk."""
    scores: torch.Tensor
    """``(num_layers, num_heads, num_tokens)`` float32: per head a softmax over all chunks without sinks, mean
    over question tokens."""
    evidence: torch.Tensor
    """``(num_tokens,)`` bool."""


@torch.inference_mode()
def look(caches: ChunkCaches, sample: Sample, *, sinks: int = 0) -> SampleAttention:
    """Run a sample's question on each of its chunks in the auxiliary model, and record the attention. A long question
    is cut as in an engine. No store is used.

    Args:
        sinks: first tokens of each chunk that get no score.
    """
    runtime = transformers_model(caches.runtime)
    if runtime.without_attention:
        raise ModelError(
            f"the auxiliary {runtime.name!r} has layers without attention, for which no head set can be fitted. Name "
            "one whose layers all attend."
        )
    tokens = [caches.tokenize(chunk) for chunk in sample.chunks]
    kv = [runtime.encode(each.ids, caches.prefix.kv if caches.prefix_ids else None) for each in tokens]
    layers, question = range(runtime.num_layers), question_ids(runtime, sample.question)
    packed = pack_chunks(runtime, caches.prefix.kv, kv, question)
    hidden = packed.sinks(sinks)
    found: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}

    def record(layer: int, number: int, logits: torch.Tensor) -> None:
        found[layer].append(packed.of_tokens(number, logits))

    packed.run(runtime, Probe(frozenset(layers), packed.blocks, record, stop=layers[-1], logits=True))
    joined = (torch.cat(found[layer], dim=-1).cpu().masked_fill(hidden, float("-inf")) for layer in layers)
    scores = torch.stack([logits.softmax(-1).nan_to_num().mean(1) for logits in joined])
    return SampleAttention(tuple(packed.lengths), scores, marked(tokens, sample.evidence))


def marked(tokens: Sequence[TokenizedText], spans: Sequence[Span]) -> torch.Tensor:
    """``(num_tokens,)`` bool over all chunks: tokens that share a character with one of the spans."""
    masks = [torch.zeros(len(each), dtype=torch.bool) for each in tokens]
    for number, start, end in spans:
        for index, (first, stop) in enumerate(tokens[number].offsets):
            masks[number][index] |= first < end and stop > start and stop > first
    return torch.cat(masks)


def spread_over(values: torch.Tensor, source: Offsets, target: Offsets) -> torch.Tensor:
    """Distribute ``values`` of one tokenizer's tokens to another tokenizer's tokens, by characters. The sum stays
    equal, except for characters that no target token covers.

    Args:
        values: ``(num_source_tokens,)``.
        source, target: character offsets of the same text.
    """
    length = max((end for _, end in (*source, *target)), default=0)
    characters = torch.zeros(length + 1, dtype=torch.float64)
    for value, (start, end) in zip(values.tolist(), source, strict=True):
        if end > start:
            characters[start + 1 : end + 1] += value / (end - start)
    sums = characters.cumsum(0)
    return torch.stack([sums[end] - sums[start] for start, end in target]).float()
