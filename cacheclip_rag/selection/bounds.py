"""What the question could attend to at most, page by page, from the smallest and largest keys of each.

Source: Quest (arXiv:2406.10774), section 3.3: of a page of keys the minimum and maximum of each dimension are kept; for
a query ``q`` no key of the page has a product above ``sum_d max(q_d * min_d, q_d * max_d)``. Quest takes the pages of
the highest bounds, head by head, for each decoded token to attend to, and leaves the first two layers as they are.

Departures: here pages say what to recompute, so that one number a page is needed. Bounds are scaled and capped as the
layer does with products, and go through a softmax over the pages of all chunks, so that heads, layers and question
tokens compare before they are averaged. Pages end where their chunk ends. Keys are bounded after RoPE, as in Quest, and
so only where their chunk is assembled: rotation changes what is smallest, so that bounds cannot be stored with a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..runtime.transformers.attention import AttentionPlan, Block, Geometry, Probe, causal_plan
from ..runtime.transformers.cache import FusedCache

if TYPE_CHECKING:
    from ..runtime.transformers.model import ModelRuntime

__all__ = ["bounds_to_tokens"]


@torch.inference_mode()
def bounds_to_tokens(
    runtime: ModelRuntime,
    cache: FusedCache,
    ids: torch.Tensor,
    question: torch.Tensor,
    stretches: Sequence[slice],
    layers: Iterable[int],
    *,
    page: int,
) -> torch.Tensor:
    """Read the question by itself, at its place, and give every token of the ``stretches`` the score of its page.

    The question sees nothing before it on its way. The KV of its rows is left in the cache; the recompute that follows
    overwrites it. In a layer with a sliding window a page is seen as long as its last token is.

    Args:
        ids: ``(num_tokens,)`` of the whole prompt.
        question: ``(num_question_tokens,)`` slots of the tokens that ask, increasing, behind all stretches; whatever
            stands between them is read with them.
        stretches: slots of each chunk, one or more.
        page: tokens of a page.

    Returns:
        ``(num_tokens,)`` float32: mean over layers, heads and question tokens; 0 outside the stretches. Of the pages,
        a token each, the sum is 1 (less where a window hides all).
    """
    assert cache.geometry is None, "tokens that are scored stay in their places"
    chosen = sorted(layers)
    first, num_rows = int(question[0]), int(question[-1]) + 1 - int(question[0])
    rows = torch.arange(first, first + num_rows)
    pages = torch.cat([_pages(stretch, page) for stretch in stretches])  # (num_pages, page)
    found = torch.zeros(len(pages))

    def bounded(layer: int, number: int, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors of twice the length, whose products are the bounds."""
        keys = cache.layers[layer].keys[0]
        lowest, highest = keys[:, pages.to(keys.device)].aminmax(dim=2)  # (num_kv_heads, num_pages, head_dim)
        return torch.cat((query.clamp(max=0), query.clamp(min=0)), -1), torch.cat((lowest, highest), -1)

    def record(layer: int, number: int, logits: torch.Tensor) -> None:
        shares = logits[:, question.to(logits.device) - first].softmax(-1).nan_to_num()
        found.add_(shares.mean((0, 1)).cpu() / len(chosen))

    block = _block_of_pages(rows, pages, runtime.device)
    probe = Probe(frozenset(chosen), [block], record, stop=chosen[-1], logits=True, adjust=bounded)
    runtime.run_rows(cache, ids[rows], rows, _by_itself(rows, probe, runtime.device), head=False)
    scores = torch.zeros(len(ids))
    scores[pages] = found[:, None].expand_as(pages)
    return scores


def _pages(stretch: slice, page: int) -> torch.Tensor:
    """``(num_pages, page)`` int64 slots; a last page that is short repeats its last one, which changes no bound."""
    num_pages = -(-(stretch.stop - stretch.start) // page)
    slots = torch.arange(stretch.start, stretch.start + num_pages * page).clamp(max=stretch.stop - 1)
    return slots.view(num_pages, page)


def _block_of_pages(rows: torch.Tensor, pages: torch.Tensor, device: torch.device) -> Block:
    """All rows, behind pages that stand for keys: each at the position of its last token, for windows to measure."""
    num_pages = len(pages)
    geometry = Geometry(torch.cat((pages[:, -1], rows)))
    slots = torch.arange(num_pages, num_pages + len(rows))
    return Block.of(slice(0, len(rows)), slice(0, num_pages), slots, device, geometry)


def _by_itself(rows: torch.Tensor, probe: Probe, device: torch.device) -> AttentionPlan:
    """Rows that follow each other, each seeing those before it among them and nothing else."""
    first = int(rows[0])
    blocks = causal_plan(rows - first, device).blocks
    shifted = [replace(b, keys=slice(b.keys.start + first, b.keys.stop + first)) for b in blocks]
    return AttentionPlan(shifted, probe)
