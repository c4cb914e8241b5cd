"""A tiny model of the same class as a checkpoint's, with random weights in float32.

It is made from the checkpoint's own config: sizes are small, and windows, chunks and limits of scaling so short that
they matter within 100 tokens. What the code does is exact, or not, whatever the weights are, and float32 shows mistakes
that the rounding of 16 bits hides (:mod:`.proof`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from ...base.errors import first_line
from .architectures import is_pinned
from .text_part import TextPart

_HEAD, _PAIRS = 16, 8
_SHORT = 24
"""Tokens of a window or a chunk."""
_LIMIT = 32
"""Position from which on frequencies or queries are scaled."""
_LAYERS = 4
_MOST_NUMBERS = 1 << 23
"""Of a twin's weights: a config has sizes that are not known here if there are more."""
_SPREAD = 0.2
"""Standard deviation of the weights. With that of untrained models attention is nearly uniform, and mistakes show
little; with a large one each row sees one key."""
_LONG_MEMORY = 4
"""Of recurrent layers: their state keeps e times as much as often. Those of untrained models forget all in ten tokens.
"""

_SIZES: dict[str, float] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 400),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "hidden_dim", "dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("query_pre_attn_scalar", "hidden_size_per_layer_input", "qk_nope_head_dim", "v_head_dim"), _HEAD),
    **dict.fromkeys(("head_dim", "swa_head_dim", "swa_v_head_dim", "rotary_emb_base_dim"), _HEAD),
    **{"rotary_dim": 8, "global_head_dim": 2 * _HEAD, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8},
    **{"qk_head_dim": _HEAD + 8, "laurel_rank": 8, "attention_multiplier": 0.25, "attn_logit_softcapping": 4.0},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        (
            "n_group",
            "num_expert_group",
            "topk_group",
            "n_shared_experts",
            "num_shared_experts",
            "moe_num_shared_experts",
        ),
        1,
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), _HEAD),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), _HEAD),
    **{"mamba_d_head": 32, "mamba_head_dim": 32, "mamba_d_ssm": 128, "mamba_expand": 2, "expand": 2},
    **{"linear_num_key_heads": 2, "n_groups": 1, "mamba_n_groups": 1, "mamba_dt_rank": 8, "attn_layer_offset": 1},
    **{"zero_expert_num": 2, "conv_dim": 64, "block_ff_dim": 96, "initializer_range": _SPREAD},
}
_OTHERS = {"head_dim": 2 * _HEAD, "num_key_value_heads": 1}
"""Of single layers that differ from the others."""
_STEPS = (
    *("sliding_window_pattern", "no_rope_layer_interval", "decoder_sparse_step", "interleave_moe_layer_step"),
    *("attn_layer_period", "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"),
)
"""Of how many layers each one is of another kind; and how many experts a token has."""
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""How many of the first layers are of another kind."""
_OF_WEIGHTS = ("quantization_config", "_name_or_path", "dtype", "transformers_version")
_BY_NUMBER = ("moe_layers", "mlp_only_layers", "full_attn_idxs", "attn_layer_indices")
"""Numbers of the layers of another kind."""


def make_twin(model: Any, *, is_deep: bool = False) -> Any:
    """The twin of a model, on the processor; with all its layers if ``is_deep``. Raises ValueError: its config cannot
    be made small."""
    is_part = isinstance(model, TextPart)
    decoder = model.base_model if is_part else model
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # a config that is made small has numbers that it would warn of
    try:
        made = tiny_model(type(decoder), shrunk_config(decoder.config, is_deep=is_deep))
        twin = model.with_decoder(made) if is_part else made
        fill_weights(twin)
        twin(input_ids=torch.arange(2, 8)[None], use_cache=False)
    except MemoryError:
        raise
    except Exception as error:  # a class of any form
        raise ValueError(f"{type(error).__name__}: {first_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    return twin


def tiny_model(kind: Any, config: Any) -> Any:
    """A model of a class and its own, tiny config in float32. Raises ValueError: it is not tiny."""
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind._from_config(deepcopy(config)).parameters())
    if count > _MOST_NUMBERS:
        raise ValueError(f"its tiny model has {count} weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def fill_weights(model: nn.Module) -> None:
    """Random weights, also those that classes make 0 or 1, which would hide mistakes."""
    make = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=make)
        weight.copy_(noise * _SPREAD if weight.dim() > 1 else weight.nan_to_num() + noise / 10)
        if name.endswith("A_log"):
            weight.sub_(_LONG_MEMORY)


def shrunk_config(config: Any, *, is_deep: bool = False) -> Any:
    """A config of the same class, with each kind of layer, or all layers if ``is_deep``, and small. Raises any error:
    it cannot be made."""
    names = {**getattr(config, "attribute_map", {})}
    fields = _described(config)
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    depth = config.num_hidden_layers
    layers = [*range(depth)] if is_deep else _layers(fields, depth)
    fields = {key: _fitted(key, value, depth, layers) for key, value in fields.items()}
    fields[names.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    if isinstance(kv_heads, int):
        few = 1 if kv_heads == 1 else 2
        fields["num_key_value_heads"] = 4 if kv_heads == heads or fields.get("kv_lora_rank") else few
    if fields.get("kv_lora_rank") and fields.get("head_dim"):
        is_rotary = config.head_dim == config.qk_rope_head_dim
        fields["head_dim"] = fields["qk_rope_head_dim"] if is_rotary else fields["qk_head_dim"]
    for rope in _ropes(fields):
        _shrink_rope(rope, fields)
    return type(config).from_dict(fields)


def _described(config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = deepcopy(config.to_dict())
    return {key: value for key, value in fields.items() if key not in _OF_WEIGHTS}


def _layers(fields: Mapping[str, Any], depth: int) -> list[int]:
    """Numbers of the layers that stay: two of each kind, the last one among them, which rows leave in a way of its
    own, and some more if those are few."""
    lists = [
        value
        for key, value in fields.items()
        if isinstance(value, list) and len(value) == depth and key not in _BY_NUMBER
    ]
    by_layer = {int(layer): value for layer, value in (fields.get("per_layer_config") or {}).items()}
    lists.append([by_layer.get(layer) for layer in range(depth)])
    numbered = [fields[key] for key in _BY_NUMBER if isinstance(fields.get(key), list)]
    borders = [fields[key] for key in _FIRST if fields.get(key)]
    borders.append(depth - (fields.get("num_kv_shared_layers") or 0))
    counts: dict[str, int] = {}
    chosen = []
    for layer in (depth - 1, *range(depth - 1)):
        kind = repr(
            ([each[layer] for each in lists], [layer in each for each in numbered], [layer < each for each in borders])
        )
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= 2:
            chosen.append(layer)
    others = (layer for layer in range(depth) if layer not in {*chosen})
    more = [layer for layer, _ in zip(others, range(_LAYERS - len(chosen)), strict=False)]
    return sorted(chosen + more)


def _fitted(key: str, value: Any, depth: int, layers: list[int]) -> Any:
    """The value of a field for a tiny model with these layers."""
    if isinstance(value, list) and key in _BY_NUMBER:
        return [number for number, layer in enumerate(layers) if layer in value]
    if isinstance(value, list) and len(value) == depth:
        value = [value[layer] for layer in layers]
    if isinstance(value, list) and (key in _SIZES or key.endswith("token_id")):
        return [_fitted(key, each, depth, layers) for each in value]
    if key == "per_layer_config" and isinstance(value, dict):
        own = {int(layer): fields for layer, fields in value.items()}
        return {
            number: {name: _OTHERS.get(name) or _fitted(name, each, depth, layers) for name, each in own[layer].items()}
            for number, layer in enumerate(layers)
            if layer in own
        }
    if not value or isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if key in _SIZES:
        return type(value)(_SIZES[key])
    if key in _STEPS:
        return min(value, 2)
    if key in _FIRST:
        return sum(layer < value for layer in layers)
    if key == "num_kv_shared_layers":
        return sum(layer >= depth - value for layer in layers)
    if key != "max_window_layers" and ("window" in key or key == "attention_chunk_size"):
        return min(value, _SHORT)
    if key.endswith(("token_id", "token_index")):
        return value if value < _SIZES["vocab_size"] else 2
    return value


def _ropes(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    rope = fields.get("rope_parameters") or {}
    yield from (each for each in (rope, *rope.values()) if isinstance(each, dict) and each)


def _shrink_rope(rope: dict[str, Any], fields: Mapping[str, Any]) -> None:
    share = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    num_pairs = math.floor(_HEAD * share) // 2
    if "mrope_section" in rope:
        sections = rope["mrope_section"]
        others = [round(num_pairs * each / sum(sections)) for each in sections[1:]]
        rope["mrope_section"] = [num_pairs - sum(others), *others]
    if "partial_rotary_factor" in rope and fields.get("kv_lora_rank"):
        rope["partial_rotary_factor"] = fields["qk_rope_head_dim"] / fields["qk_head_dim"]
    for key in ("short_factor", "long_factor"):
        if key in rope:
            rope[key] = rope[key][:num_pairs]
    if "original_max_position_embeddings" in rope and not is_pinned(rope):
        rope["original_max_position_embeddings"] = min(_LIMIT, rope["original_max_position_embeddings"])


def described(model: Any) -> str:
    """Everything that a twin depends on beside versions: its class and its config."""
    kind = type(model.base_model if isinstance(model, TextPart) else model)
    config = json.dumps(_described(model.config), sort_keys=True, default=str)
    return f"{kind.__module__}.{kind.__qualname__} {config}"
