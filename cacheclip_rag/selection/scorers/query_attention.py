"""Query attention: the primary's own attention from the question, over the stale cache.

Source: query-aware selectors such as ProphetKV (arXiv:2602.02579), QCFuse (arXiv:2606.05875), InfoFlow KV
(arXiv:2603.05353) and FusionRAG (arXiv:2601.12904). The question's few rows run once over the stale cache, and compute
no chunk tokens. Their attention weights are reduced over heads, question tokens and layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...runtime.transformers.attention_pattern import Block, Probe
from ...runtime.transformers.cache import FusedCache
from ...runtime.transformers.model import ModelRuntime
from ..views import CacheView, split_by_span
from .base import CacheScorer, pick_layers


@dataclass(frozen=True, slots=True)
class QueryAttention(CacheScorer):
    """Attention of the question's tokens, in the primary model, on each chunk token: mean over heads, question tokens
    and layers."""

    layers: str = "last"
    """Layers whose attention scores: ``all``, ``last``, ``upper`` (half), ``middle`` (third), or layer numbers joined
    by ``+``."""

    def __post_init__(self) -> None:
        pick_layers(self.layers, 1024)

    def score(self, view: CacheView) -> list[torch.Tensor]:
        layers = pick_layers(self.layers, view.runtime.num_layers, view.runtime.without_attention)
        found = attention_to_tokens(view.runtime, view.cache, view.layout.ids, view.fresh, view.question, layers)
        return split_by_span(found, view.spans)


@torch.inference_mode()
def attention_to_tokens(
    runtime: ModelRuntime,
    cache: FusedCache,
    ids: torch.Tensor,
    rows: torch.Tensor,
    question: torch.Tensor,
    layers: Iterable[int],
    *,
    per_layer: bool = False,
) -> torch.Tensor:
    """Run ``rows`` over ``cache`` and reduce the attention of the ``question`` rows to one score per token.

    The rows' KV stays in the cache until the recompute overwrites it.

    Args:
        ids: ``(num_tokens,)`` token ids of the whole prompt.
        rows: ``(num_rows,)`` slots to run, strictly increasing.
        question: ``(num_question_tokens,)`` slots among ``rows`` whose attention counts.

    Returns:
        ``(num_tokens,)`` float32, mean over heads, question rows and layers; with ``per_layer``
        ``(num_layers, num_tokens)``, mean over heads and question rows.
    """
    chosen = sorted(layers)
    num_tokens = len(ids)
    asking = torch.isin(rows, question).nonzero().flatten()
    is_run = int(asking[-1]) - int(asking[0]) + 1 == len(asking)
    blocks = [
        Block.of(slice(int(part[0]), int(part[-1]) + 1), slice(0, num_tokens), rows[part], runtime.device)
        for part in ([asking] if is_run else asking.split(1))
    ]
    weights_seen: list[list[torch.Tensor]] = [[] for _ in chosen]

    def record(layer: int, number: int, weights: torch.Tensor) -> None:
        weights_seen[chosen.index(layer)].append(weights.mean(0))  # (num_rows, num_tokens)

    probe = Probe(frozenset(chosen), blocks, record, stop=chosen[-1])
    runtime.run_slots(cache, ids[rows], rows, probe=probe, head=False)
    by_layer = [torch.cat(parts).mean(0).to(runtime.device) for parts in weights_seen]
    found = torch.stack(by_layer).cpu()  # once: each copy to the CPU waits for the accelerator
    return found if per_layer else found.mean(0)
