"""The primary model's attention from the question to the reused tokens, over the stale cache.

Source: query-aware selectors such as ProphetKV (arXiv:2602.02579), QCFuse (arXiv:2606.05875), InfoFlow KV
(arXiv:2603.05353) and FusionRAG (arXiv:2601.12904). The question runs once over the stale cache. Its attention weights
are reduced over heads, question tokens and layers, and the most attended tokens are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..base.errors import ConfigurationError
from ..runtime.transformers.attention_pattern import Block, Probe
from ..runtime.transformers.cache import FusedCache
from ..runtime.transformers.model import ModelRuntime


def pick_layers(spec: str, num_layers: int) -> list[int]:
    """Layer numbers for a specification.

    Args:
        spec: ``all``, ``last``, ``upper`` (half), ``middle`` (third), or layer numbers joined by ``+`` (``14+13+17``).

    Raises:
        ConfigurationError: an invalid specification, or a layer that the model does not have.
    """
    try:
        first, stop = {
            "all": (0, num_layers),
            "upper": (num_layers // 2, num_layers),
            "middle": (num_layers // 3, max(num_layers // 3 + 1, round(2 / 3 * num_layers))),
            "last": (num_layers - 1, num_layers),
        }.get(spec, (0, 0))
        if stop:
            return list(range(first, stop))
        layers = sorted({int(part) for part in spec.split("+")})
    except (AttributeError, TypeError, ValueError):  # not a string, or not numbers
        layers = []
    if not layers or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ConfigurationError(
            f"layers must be all, last, upper, middle, or numbers below {num_layers} joined by +, got {spec!r}."
        )
    return layers


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
        Block.of(
            slice(int(part[0]), int(part[-1]) + 1), slice(0, num_tokens), rows[part], runtime.device, cache.geometry
        )
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
