"""Writes a tiny transformers model as a GGUF file, so that llama.cpp's numbers can be compared with transformers'; and
what several tests ask of engines on such files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from cacheclip_testing import TINY_MODELS, build_model, tiny_spec
from cacheclip_testing.plugin import CHUNKS
from transformers import AutoModelForCausalLM

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.methods import Method

__all__ = ["ARCHITECTURES", "PROMPT", "QUESTION", "TOLERANCE", "MakeEngine", "logits", "write_gguf", "write_header"]

MakeEngine = Callable[..., CacheClipEngine]
QUESTION = "Please say: the magic number of the harbour master?"
"""The tiny models of seed 0 answer it without near ties, so that rounding changes no answer (a test checks it)."""
PROMPT = "\n\n".join([*CHUNKS, QUESTION])
TOLERANCE = 0.1
"""Of logits between -20 and 20: keys and values are float16, and each size of a batch rounds in its own way."""

WINDOW = 24
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": TINY_MODELS["llama"],
    "qwen2": TINY_MODELS["qwen2"],
    "gemma3": tiny_spec(
        "gemma3_text",
        sliding_window=WINDOW,
        num_hidden_layers=6,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        query_pre_attn_scalar=16,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
"""Of the two kinds of rotation, and with a sliding window that is shorter than chunks."""

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def logits(engine: CacheClipEngine, prompt: str, method: Method, **options: Any) -> torch.Tensor:
    return engine.prefill(prompt, method=method, **options).logits


def write_gguf(
    folder: Path, architecture: str, source: Path | None = None, *, context: int | None = None, **options: Any
) -> Path:
    """Write the model of a folder (default: build a tiny one in ``folder/model``) to ``folder/model.gguf`` in float32,
    and return that file; with ``split_max_tensors``, the first of several. ``context``: positions that the file states
    instead of the model's."""
    source = source or build_model(folder / "model", ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config, file = model.config, folder / "model.gguf"
    writer = gguf.GGUFWriter(file, architecture, **options)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings if context is None else context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    _add_tokenizer(writer, source)
    for name, tensor in model.state_dict().items():
        _add_tensor(writer, architecture, config, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(folder.glob("model*.gguf"))


def write_header(folder: Path, architecture: str, source: Path, **fields: float) -> Path:
    """Write a file of any architecture that has a vocabulary, and no weights."""
    writer = gguf.GGUFWriter(folder / f"{architecture}.gguf", architecture)
    for name, value in fields.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_float32
        add(f"{architecture}.{name.replace('__', '.')}", value)
    _add_tokenizer(writer, source)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return folder / f"{architecture}.gguf"


def _add_tokenizer(writer: Any, source: Path) -> None:
    written = json.loads((source / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = written["model"]["vocab"]
    special = {token["content"]: token["id"] for token in written["added_tokens"]}
    tokens = {number: text for text, number in {**vocabulary, **special}.items()}
    size = max(tokens) + 1
    kinds = [gguf.TokenType.CONTROL if tokens[n] in special else gguf.TokenType.NORMAL for n in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens[n] for n in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in written["model"]["merges"]])
    writer.add_eos_token_id(special["<|im_end|>"])
    writer.add_pad_token_id(special["<|endoftext|>"])
    writer.add_add_bos_token(False)
    from transformers import AutoTokenizer

    writer.add_chat_template(AutoTokenizer.from_pretrained(source).chat_template)


def _add_tensor(writer: Any, architecture: str, config: Any, name: str, tensor: torch.Tensor) -> None:
    if "rotary" in name:
        return
    names = {**_NAMES, **_OF_GEMMA} if architecture == "gemma3" else _NAMES
    stem, _, kind = name.rpartition(".")
    block = ""
    if stem.startswith("model.layers."):
        number, _, stem = stem.removeprefix("model.layers.").partition(".")
        block = f"blk.{number}."
    data: np.ndarray[Any, Any] = tensor.float().numpy()
    if architecture == "gemma3" and "norm" in stem:
        data = data + 1  # llama.cpp multiplies by the weight itself
    if architecture == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
        rows = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
        data = rows.swapaxes(1, 2).reshape(data.shape)  # neighbours are rotated, not halves
    writer.add_tensor(f"{block}{names[stem]}.{kind}", np.ascontiguousarray(data, dtype=np.float32))
