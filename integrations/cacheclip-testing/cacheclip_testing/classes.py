"""Tiny random models of every class of transformers that writes text, made from its own config class."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from cacheclip_rag.measuring import fill_weights, shrunk_config, tiny_model

from .tiny import make_tokenizer

VERDICTS = Path(__file__).parent / "classes.json"
"""What ``benchmarks/prove_models.py`` wrote: ``exact`` classes, ``recurrent`` ones, exact by state maps,
and those that are ``refused``, with the reason."""

_VOCABULARY, _CONTEXT = 400, 2048
_VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_heads": 2},
    **{"depth": 1, "embed_dim": 32, "image_size": 28, "patch_size": 14, "out_hidden_size": 64, "num_channels": 3},
    **{"head_dim": 16, "num_key_value_heads": 2, "vision_output_dim": 64, "projector_input_dim": 64},
    **{"projector_output_dim": 64, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]},
    **{"num_position_embeddings": 16, "spatial_merge_size": 2, "num_global_layers": 1, "default_output_length": 4},
    **{"position_embedding_size": 16, "conf_hidden_size": 32, "conf_num_hidden_layers": 1},
    **{"conf_num_attention_heads": 2, "output_proj_dims": 64, "subsample_conv_channels": [8, 8]},
    **{"sscp_conv_channel_size": [8, 8], "conf_positional_bias_size": 256, "vision_feature_layer": [0, 0]},
    **{"encoder_layers": 1, "d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64},
    **{"num_blocks": 1, "ext_pw_out_channel": 32, "downsample_hidden_size": 8, "mlp_dim": 32},
    **{"vocab_size": 64, "base_channels": 32, "num_res_blocks": 1, "num_embeddings": 64},
}
"""Sizes of what reads images or sound, which is dropped."""
_SECTIONS = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm4v_moe_text", "glm_ocr_text"), [16, 24, 24]),
    **dict.fromkeys(("paddleocr_vl_text", "qwen2_5_omni_text", "qwen3_omni_moe_text"), [16, 24, 24]),
    "ernie4_5_vl_moe_text": [22, 22, 20],
}
"""Text models whose tokens have three positions: their default config has no sections for them."""
_MISSING: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"), {"head_dim": 16}),
    "nemotron": {"head_dim": 16, "num_key_value_heads": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "step3p5": {"sliding_window": 512},
    **dict.fromkeys(("chameleon", "emu3"), {"vocabulary_map": {"<image>": 5}}),
    "ovis2": {"vocab_size": _VOCABULARY, "hidden_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
}
"""Numbers that a class wants and its default config lacks."""


@cache
def verdicts() -> dict[str, Any]:
    """The content of :data:`VERDICTS`."""
    return dict(json.loads(VERDICTS.read_text(encoding="utf-8")))


def class_names() -> list[str]:
    """``model_type`` of every class that writes text after text, or after text and images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    autos: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return sorted({config.model_type for auto in autos for config in auto._model_mapping})


def build_class(folder: Path, name: str, **settings: Any) -> Path:
    """Save a tiny random model of the class with this ``model_type`` under ``folder`` and return it.

    Args:
        settings: other values of its config, or of that of its text model.

    Raises:
        Exception: of any kind; its config cannot be made small.
    """
    model = tiny_of_class(name, **settings)
    model.save_pretrained(folder)
    make_tokenizer(_VOCABULARY).save_pretrained(folder)
    return folder


def tiny_of_class(name: str, **settings: Any) -> Any:
    """The same model, not saved."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    kind: Any = CONFIG_MAPPING[name]
    config = kind()
    text = config.get_text_config(decoder=True)
    is_whole = text is not config and kind in AutoModelForImageTextToText._model_mapping
    has_text = kind in AutoModelForCausalLM._model_mapping and not is_whole
    auto: Any = AutoModelForCausalLM if has_text else AutoModelForImageTextToText
    small = _tiny(text, settings)
    if text is not config:
        parts = {key: part for key, part in _parts(config) if part is not text}
        towers = {key: _tiny_tower(part) for key, part in parts.items()}
        small = kind(text_config=small, **towers, **_MISSING.get(name, {}))
        for key in [each for each in vars(small) if each.endswith(("token_id", "token_index"))]:
            if isinstance(getattr(small, key), int):
                setattr(small, key, 5)
    small.tie_word_embeddings = False
    classes = auto._model_mapping[kind]
    model = tiny_model(classes[0] if isinstance(classes, tuple) else classes, small)
    fill_weights(model)
    return model


def _tiny(config: Any, settings: dict[str, Any]) -> Any:
    config.max_position_embeddings = _CONTEXT
    for key, part in _parts(config):
        setattr(config, key, _tiny_tower(part))
    for key, value in _MISSING.get(config.model_type, {}).items():
        setattr(config, key, value)
    if config.model_type in _SECTIONS:
        config.rope_parameters = {**config.rope_parameters, "mrope_section": _SECTIONS[config.model_type]}
    fields = {**shrunk_config(config).to_dict(), **settings, "eos_token_id": 2, "pad_token_id": 0}
    return type(config).from_dict(fields)


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    for key in config.sub_configs or ():
        if getattr(config, key, None) is not None:
            yield key, getattr(config, key)


def _tiny_tower(config: Any) -> Any:
    fields = config.to_dict()
    fitting = {key: value for key, value in _VISION.items() if isinstance(fields.get(key), type(value))}
    return type(config)(**fitting)
