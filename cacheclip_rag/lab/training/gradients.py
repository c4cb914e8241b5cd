"""Forward passes of an unmodified model with gradients: chunks after a context, and prompts over chunk KV.

The engine's fused cache is overwritten in place, which gradients cannot pass. Here each layer joins given KV and new
rows out of place. Attention, masks and rotation are the engine's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ...runtime.transformers.attention_plan import ROWS_PER_BLOCK, AttentionPlan, Block, causal_plan
from ...runtime.transformers.cache import cache_argument
from ...runtime.transformers.model import ModelRuntime
from ...runtime.transformers.rotary import Tables, rotate, unrotate

__all__ = ["LayerKV", "Part", "Rows", "encode_chunks", "read_prompt"]

LayerKV = tuple[torch.Tensor, torch.Tensor]
"""Keys before RoPE and values of one layer, each ``(num_kv_heads, num_tokens, head_dim)``."""


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk of which some tokens are computed again. The others get a share of the mean change."""

    chosen: torch.Tensor
    """``(num_chosen,)`` slots that are computed again."""
    rows: torch.Tensor
    """``(num_chosen,)`` rows of the pass."""
    stale: torch.Tensor
    """``(num_stale,)`` slots that keep their stored KV."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What a pass over a prompt with several endings computes."""

    context: torch.Tensor
    """``(num_context_rows,)`` slots of the common part that are computed, increasing."""
    endings: Sequence[torch.Tensor]
    """Token ids after the common part, one tensor per ending. An ending does not see another one."""
    answers: torch.Tensor
    """Rows of which logits are wanted, counted over context rows and all endings."""


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Given KV of one layer, joined with the pass's rows. Given keys are before RoPE, joined keys after it."""

    def __init__(
        self,
        base: LayerKV,
        tables: Tables | None,
        index: torch.Tensor,
        parts: Sequence[Part] = (),
        weight: float = 0.0,
        of_rows: Tables | None = None,
    ) -> None:
        """
        Args:
            tables: rotary tables of the given tokens; None for a layer without RoPE.
            index: ``(num_keys,)``: which of given and new tokens each key is.
            parts, weight: as in :func:`read_prompt`.
            of_rows: rotary tables of the rows.
        """
        super().__init__()
        self.dtype, self.device, self.is_initialized = base[0].dtype, base[0].device, True
        self._base, self._tables, self._index = base, tables, index.to(self.device)
        self._parts, self._weight, self._of_rows = parts, weight, of_rows
        self.new: LayerKV | None = None
        """KV of the rows once they were computed, keys after RoPE."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.new = key_states[0], value_states[0]
        keys, values = self._corrected(key_states[0], value_states[0])
        keys = rotate(keys, self._tables).to(key_states.dtype)
        joined = (
            torch.cat((kv, rows), dim=1).index_select(1, self._index)[None]
            for kv, rows in ((keys, key_states[0]), (values.to(value_states.dtype), value_states[0]))
        )
        return tuple(joined)

    def _corrected(self, new_keys: torch.Tensor, new_values: torch.Tensor) -> LayerKV:
        keys, values = self._base
        for part in self._parts:
            tables = None if self._of_rows is None else (self._of_rows[0][part.rows], self._of_rows[1][part.rows])
            for kv, rows in ((keys, unrotate(new_keys[:, part.rows], tables)), (values, new_values[:, part.rows])):
                change = self._weight * (rows.float() - kv[:, part.chosen].float()).mean(1, keepdim=True)
                stale = part.stale.to(kv.device)
                corrected = kv.index_add(1, stale, change.expand(-1, len(stale), -1).to(kv.dtype))
                if kv is keys:
                    keys = corrected
                else:
                    values = corrected
        return keys, values

    # what transformers asks a cache layer for

    def get_seq_length(self) -> int:
        return len(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return len(self._index), 0


def _run(
    runtime: ModelRuntime,
    layers: list[_Layer],
    ids: torch.Tensor,
    positions: torch.Tensor,
    plan: AttentionPlan,
    answers: torch.Tensor | None,
    hidden: bool = False,
) -> Any:
    """One pass of the model; without ``answers``, only its layers' KV is of interest."""
    model = runtime.model if answers is not None else runtime.model.base_model
    arguments: dict[str, Any] = {} if answers is None else {"logits_to_keep": answers.to(runtime.device)}
    return model(
        input_ids=ids[None].to(runtime.device),
        position_ids=positions[None].to(runtime.device),
        use_cache=True,
        cacheclip_plan=plan,
        output_hidden_states=hidden,
        **cache_argument(model, Cache(layers=layers)),
        **arguments,
    )


def encode_chunks(runtime: ModelRuntime, chunks: Sequence[torch.Tensor], before: Sequence[LayerKV]) -> list[LayerKV]:
    """KV of all chunks, one after the other, each computed right after ``before``; keys before RoPE.

    Args:
        chunks: token ids of each chunk.
        before: per layer the KV that every chunk sees, at least one token.

    Returns:
        Per layer the KV of all chunks' tokens, in the model's dtype.
    """
    start = before[0][0].shape[1]
    index, blocks, row, slot = [], [], 0, 0
    for chunk in chunks:
        count = len(chunk)
        index += [torch.arange(start), start + torch.arange(row, row + count)]
        for begin in range(0, count, ROWS_PER_BLOCK):
            size = min(ROWS_PER_BLOCK, count - begin)
            rows = slice(row + begin, row + begin + size)
            slots = start + torch.arange(begin, begin + size)
            blocks.append(Block.of(rows, slice(slot, slot + start + begin + size), slots, runtime.device))
        row, slot = row + count, slot + start + count
    positions = torch.cat([start + torch.arange(len(chunk)) for chunk in chunks])
    of_before = runtime.rotary_tables(0, start)
    joined = torch.cat(index)
    layers = [_Layer(base, tables, joined) for base, tables in zip(before, of_before, strict=True)]
    _run(runtime, layers, torch.cat(list(chunks)), positions, AttentionPlan(blocks), None)
    longest = runtime.rotary_tables(0, int(positions.max()) + 1)
    found = []
    for layer, tables in zip(layers, longest, strict=True):
        assert layer.new is not None
        at = None if tables is None else (tables[0][positions], tables[1][positions])
        found.append((unrotate(layer.new[0], at).to(runtime.dtype), layer.new[1]))
    return found


def read_prompt(
    runtime: ModelRuntime,
    ids: torch.Tensor,
    base: Sequence[LayerKV],
    rows: Rows,
    parts: Sequence[Part] = (),
    weight: float = 0.0,
    *,
    hidden: bool = True,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the endings of a prompt over KV of its common part.

    Args:
        ids: ``(num_tokens,)``, the common part.
        base: per layer its KV; slots in ``rows.context`` are overwritten.
        parts, weight: chunks to correct, and the share of the mean change that their stale tokens get.
        hidden: whether hidden states are wanted.

    Returns:
        Logits ``(num_answers, vocab_size)``, and per layer the hidden states of the endings' rows, ``(num_rows,
        hidden_size)``; an empty list if they are not wanted.
    """
    end, own = len(ids), len(rows.context)
    of_slots = torch.arange(end)
    of_slots[rows.context] = end + torch.arange(own)
    index, row, slot = [of_slots], own, end
    plan = causal_plan(rows.context, runtime.device) if own else AttentionPlan([])
    blocks = list(plan.blocks)
    for ending in rows.endings:
        count = len(ending)
        index += [of_slots, end + torch.arange(row, row + count)]
        keys = slice(slot, slot + end + count)
        blocks.append(Block.of(slice(row, row + count), keys, end + torch.arange(count), runtime.device))
        row, slot = row + count, slot + end + count
    positions = torch.cat((rows.context, *(end + torch.arange(len(ending)) for ending in rows.endings)))
    joined = torch.cat(index)
    everywhere = runtime.rotary_tables(0, int(positions.max()) + 1)
    layers = []
    for kv, tables in zip(base, everywhere, strict=True):
        of_base = None if tables is None else (tables[0][:end], tables[1][:end])
        of_rows = None if tables is None else (tables[0][positions], tables[1][positions])
        layers.append(_Layer(kv, of_base, joined, parts, weight, of_rows))
    inputs = torch.cat((ids[rows.context], *rows.endings))
    output = _run(runtime, layers, inputs, positions, AttentionPlan(blocks), rows.answers, hidden)
    seen = [state[0, own:] for state in output.hidden_states[1:]] if hidden else []
    return output.logits[0], seen
