"""The primary model's attention from the question to the reused tokens, over the stale cache.

Source: query-aware selectors such as ProphetKV (arXiv:2602.02579), QCFuse (arXiv:2606.05875), InfoFlow KV
(arXiv:2603.05353) and FusionRAG (arXiv:2601.12904). The question runs once over the stale cache. Its attention weights
are reduced over heads, question tokens and layers, and the most attended tokens are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError
from ..runtime.transformers.attention_plan import Block, Probe
from ..runtime.transformers.cache import FusedCache

if TYPE_CHECKING:
    from ..runtime.transformers.model import ModelRuntime

__all__ = ["attention_to_tokens", "pick_layers"]


def pick_layers(spec: str, num_layers: int) -> list[int]:
    """Layer numbers for a specification.

    Args:
        spec: ``all``, ``last``, ``upper`` (half), ``middle`` (third); a range of depth such as ``0.6-0.7``; a depth and
            a count such as ``0.6+4`` (fewer at the model's end); or layer numbers joined by ``+`` (``14+13+17``). A
            depth is a share of the layers, written with a decimal point.

    Raises:
        ConfigurationError: an invalid specification, or a layer that the model does not have.
    """
    try:
        return _pick_layers(spec, num_layers)
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"layers must be all, last, upper, middle, a range of depth such as 0.6-0.7, a depth and a count such as "
            f"0.6+4, or numbers below {num_layers} joined by +, got {spec!r}."
        ) from None


def _pick_layers(spec: str, num_layers: int) -> list[int]:
    names = {"all": (0.0, 1.0), "upper": (0.5, 1.0), "middle": (1 / 3, 2 / 3)}
    if spec == "last":
        return [num_layers - 1]
    if spec in names or "-" in spec:
        low, high = names[spec] if spec in names else map(float, spec.split("-"))
        if not 0.0 <= low < high <= 1.0:
            raise ValueError("range")
        first = min(int(low * num_layers), num_layers - 1)
        return list(range(first, max(first + 1, round(high * num_layers))))
    depth, _, count = spec.partition("+")
    if "." in depth:
        if not 0.0 <= float(depth) < 1.0 or int(count) < 1:
            raise ValueError("depth and count")
        first = int(float(depth) * num_layers)
        return list(range(first, min(first + int(count), num_layers)))
    layers = [int(part) for part in spec.split("+")]
    if not layers or not all(0 <= layer < num_layers for layer in layers):
        raise ValueError("number")
    return sorted(set(layers))


@torch.inference_mode()
def attention_to_tokens(
    runtime: ModelRuntime,
    cache: FusedCache,
    ids: torch.Tensor,
    rows: torch.Tensor,
    question: torch.Tensor,
    layers: Iterable[int],
    *,
    heads: str = "mean",
    queries: str = "mean",
    among: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    per_layer: bool = False,
) -> torch.Tensor:
    """Run ``rows`` over ``cache`` and reduce the attention of the ``question`` rows to one score per token.

    The rows' KV stays in the cache until the recompute overwrites it.

    Args:
        ids: ``(num_tokens,)`` token ids of the whole prompt.
        rows: ``(num_rows,)`` slots to run, strictly increasing.
        question: ``(num_question_tokens,)`` slots among ``rows`` whose attention counts.
        heads, queries: ``mean`` or ``max`` over them.
        among: ``(num_tokens,)`` bool: keys of the softmax; default all keys that a row sees.
        visible: ``(num_tokens,)`` bool: keys that the rows may see in the model's own attention; default all.

    Returns:
        ``(num_tokens,)`` float32, mean over layers; with ``per_layer`` ``(num_layers, num_tokens)``.
    """
    chosen = sorted(layers)
    num_tokens = len(ids)
    asking = torch.isin(rows, question).nonzero().flatten()
    blocks = (
        [
            Block.of(
                slice(int(row), int(row) + 1), slice(0, num_tokens), rows[row : row + 1], runtime.device, cache.geometry
            )
            for row in asking
        ]
        if not _is_run(asking)
        else [
            Block.of(
                slice(int(asking[0]), int(asking[-1]) + 1),
                slice(0, num_tokens),
                rows[asking],
                runtime.device,
                cache.geometry,
            )
        ]
    )
    weights_seen: list[list[torch.Tensor]] = [[] for _ in chosen]

    def record(layer: int, number: int, weights: torch.Tensor) -> None:
        if among is not None:
            weights = weights.masked_fill(~among.to(weights.device), float("-inf")).softmax(-1).nan_to_num()
        reduced = weights.mean(0) if heads == "mean" else weights.amax(0)
        weights_seen[chosen.index(layer)].append(reduced)  # (num_rows, num_tokens)

    probe = Probe(frozenset(chosen), blocks, record, stop=chosen[-1], logits=among is not None)
    runtime.run_slots(cache, ids[rows], rows, visible=visible, probe=probe, head=False)
    joined = (torch.cat(parts) for parts in weights_seen)
    by_layer = [(part.mean(0) if queries == "mean" else part.amax(0)).to(runtime.device) for part in joined]
    found = torch.stack(by_layer).cpu()  # once: each copy to the CPU waits for the accelerator
    return found if per_layer else found.mean(0)


def _is_run(indices: Sequence[int] | torch.Tensor) -> bool:
    """Whether the indices are consecutive."""
    return int(indices[-1]) - int(indices[0]) + 1 == len(indices)
