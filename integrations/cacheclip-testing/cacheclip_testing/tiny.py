"""Tiny models built from configs, with real tokenizers and chat templates, saved as ordinary model folders.

They need no network and run in milliseconds. ``initializer_range`` is far above the default of 0.02: with the default,
attention is nearly uniform, and a wrong position changes the logits so little that a broken RoPE passes every test.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou answer questions.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SENTENCES = [
    "The lighthouse of Brindle Point was built in 1847 by the engineer Ada Thornbury.",
    "Its lamp burned whale oil until 1871, when it was changed to paraffin.",
    "A keeper and two assistants lived on the rock for eight weeks at a time.",
    "The foghorn could be heard at a distance of eleven nautical miles in calm air.",
    "In 1962 the station was automated, and the last keeper, Tom Garrow, went ashore.",
    "The magic number of the harbour master is 7316042, and nobody knows why.",
    "Seabirds nest on the eastern cliffs from March until the end of August.",
    "Visitors reach the island by a small ferry that leaves the pier at nine and at two.",
]

_LLAMA = {
    "architecture": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_QWEN2 = {
    "architecture": "qwen2",
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}

_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 512,
}
_WINDOW = {"sliding_window": 24}
"""Sliding window, shorter than every test prompt and than most chunks."""
_WIDE_WINDOW = {"sliding_window": 96, "num_hidden_layers": 4}
"""Window for models with a sliding window in every layer: text before a chunk must still affect the prompt's end."""
_ALTERNATING = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}


def tiny_spec(architecture: str, **settings: Any) -> dict[str, Any]:
    """Settings of a model with three layers and four heads; ``settings`` override them."""
    return {"architecture": architecture, **_HEADS, "num_hidden_layers": 3, **settings}


TINY_MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-rope-llama3": {**_LLAMA, "rope_parameters": _LLAMA3},
    "llama-rope-linear": {**_LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "llama-rope-dynamic": {**_LLAMA, "rope_parameters": _DYNAMIC},
    "qwen2": _QWEN2,
    "qwen2-rope-yarn": {**_QWEN2, "rope_parameters": _YARN},
    "qwen2-sliding": {**_QWEN2, **_ALTERNATING, "use_sliding_window": True, "max_window_layers": 0},
    "qwen3": tiny_spec("qwen3"),
    "smollm3": tiny_spec("smollm3", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]),
    "mistral-sliding": tiny_spec("mistral", **_WIDE_WINDOW),
    "phi3-partial": tiny_spec("phi3", rope_parameters={**_DEFAULT_ROPE, "partial_rotary_factor": 0.75}),
    "phi3-sliding": tiny_spec("phi3", **_WIDE_WINDOW),
    "phi3-longrope": tiny_spec("phi3", rope_parameters=_LONGROPE, original_max_position_embeddings=512),
    "gemma2": tiny_spec(
        "gemma2", **_ALTERNATING, query_pre_attn_scalar=16, attn_logit_softcapping=5.0, final_logit_softcapping=30.0
    ),
    "gemma3": tiny_spec(
        "gemma3_text",
        **_ALTERNATING,
        query_pre_attn_scalar=16,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": _DEFAULT_ROPE,
        },
    ),
    "olmo2": tiny_spec("olmo2"),
    "granite": tiny_spec("granite", embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.6),
    "gpt-oss": tiny_spec("gpt_oss", **_ALTERNATING, num_local_experts=4, num_experts_per_tok=2, rope_parameters=_YARN),
    "mixtral": tiny_spec("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": tiny_spec(
        "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True
    ),
}
"""One row per supported architecture and rotary scaling."""

AUXILIARY: dict[str, Any] = {**_LLAMA, "hidden_size": 32, "num_hidden_layers": 2}
"""Smaller than any primary, with its own tokenizer (:func:`build_auxiliary`)."""


def make_tokenizer(vocab_size: int, texts: Iterable[str] = SENTENCES) -> Any:
    """A byte-level BPE tokenizer trained on :data:`SENTENCES`, or on other texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(
    folder: Path, spec: dict[str, Any], *, vocab_size: int = 400, seed: int = 0, context: int = 2048
) -> Path:
    """Save a random tiny model under ``folder`` and return it.

    Args:
        spec: an entry of :data:`TINY_MODELS`, or settings of a transformers config and its ``architecture``.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    spec = dict(spec)
    config = CONFIG_MAPPING[spec.pop("architecture")](
        **{
            "vocab_size": vocab_size,
            "intermediate_size": 96,
            "max_position_embeddings": context,
            "initializer_range": 0.25,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
            "bos_token_id": None,
            "pad_token_id": 0,
            **spec,
        }
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    make_tokenizer(vocab_size).save_pretrained(folder)
    return folder


def build_auxiliary(folder: Path) -> Path:
    """Save the tiny auxiliary model under ``folder`` and return it."""
    return build_model(folder, AUXILIARY, vocab_size=300, seed=1)


def add_bos(folder: Path) -> None:
    """Change a saved tokenizer so that it puts ``<|endoftext|>``, id 0, before every text."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    file.write_text(json.dumps(tokenizer))
