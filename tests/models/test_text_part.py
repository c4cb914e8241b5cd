"""The text part of multimodal checkpoints: exact, compared with the whole model, and hungry for parts if need be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_testing.tiny import SENTENCES, make_tokenizer
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheclip_rag import CacheClipEngine, ModelError, UnsupportedModelError
from cacheclip_rag.models.load import load_model, unload_models
from cacheclip_rag.runtime.transformers import text_part
from tests.conftest import CHUNKS, some_of
from tests.fusion.cases import EXACT, gap, make_case, prefilled

_TEXT = {
    **{"vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "initializer_range": 0.25},
    **{"eos_token_id": 2, "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False},
}
_VISION = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
    **{"patch_size": 14, "head_dim": 16},
}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "patch_size": 14}
_KINDS = ["sliding_attention", "full_attention"]
_WINDOWS = {"sliding_window": 24, "layer_types": _KINDS * 2}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
WHOLE: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {**_TEXT, **_WINDOWS, "query_pre_attn_scalar": 16}, "vision_config": _VISION},
    "gemma4": {
        "text_config": {
            **{**_TEXT, **_WINDOWS, "num_hidden_layers": 6, "layer_types": _KINDS * 3},
            **{"global_head_dim": 32, "num_global_key_value_heads": 1, "num_kv_shared_layers": 2},
            **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 400},
        },
        "vision_config": {**_VISION, "num_key_value_heads": 2, "global_head_dim": 16},
        "audio_config": None,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**_VISION, "model_type": "pixtral"},
    },
    "mistral4": {
        "text_config": {
            **{**_TEXT, "model_type": "mistral4", "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8},
            **{"qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 24, "n_group": 1},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "topk_group": 1},
        },
        "vision_config": {**_VISION, "model_type": "pixtral"},
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {**_TOWER, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    },
    "cohere2_vision": {
        "text_config": {**_TEXT, **_WINDOWS, "model_type": "cohere2", "logit_scale": 0.3},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
    },
}
"""Windows; layers of other widths, and layers that read others; a Pixtral; latents; three positions a token; a scale of
logits that the whole model does not apply."""


def build(folder: Path, architecture: str) -> str:
    if architecture not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {architecture}")
    whole = {"mistral4": "mistral3"}.get(architecture, architecture)
    config = CONFIG_MAPPING[whole](tie_word_embeddings=False, **WHOLE[architecture])
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    make_tokenizer(400).save_pretrained(folder)
    return str(folder)


def reference(folder: str, ids: torch.Tensor) -> torch.Tensor:
    """Of the whole model, unmodified."""
    whole: Any = AutoModelForImageTextToText
    model = whole.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0, -1]
    return logits


@pytest.mark.some(3)
@some_of(2, architecture=WHOLE)
def test_equals_the_whole_model(architecture: str, tiny_models: dict[str, str], tmp_path: Path) -> None:
    folder = build(tmp_path, architecture)
    case = make_case(folder, tiny_models["auxiliary"], CHUNKS[:3])
    segments = [span.segment for span in case.layout.spans]
    fused, direct = prefilled(case.engine, segments, "cacheclip", 1.0), prefilled(case.engine, segments, "direct")
    assert fused.stats.fallback is None and fused.stats.hits == 3
    expected = reference(folder, case.layout.ids)
    scale = float(expected.abs().max())
    assert gap(fused.logits, expected) < EXACT * scale < gap(direct.logits, expected)
    token = int(expected.argmax())
    following = case.runtime.decode_step(fused.cache, token)
    assert gap(following, reference(folder, torch.cat((case.layout.ids, torch.tensor([token]))))) < EXACT * scale
    assert not any("vision" in name or "visual" in name for name, _ in case.runtime.model.named_parameters())


def test_one_with_other_logits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(tmp_path, "gemma3")
    forward = text_part.TextPart.forward

    def doubled(self: Any, **arguments: Any) -> Any:
        output = forward(self, **arguments)
        output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(text_part.TextPart, "forward", doubled)
    with pytest.raises(UnsupportedModelError, match="other logits than the whole model"):
        load_model(folder)


_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)


class TestTemplates:
    def test_that_read_parts(self, tmp_path: Path) -> None:
        folder = build(tmp_path, "mistral3")
        unload_models()
        (tmp_path / "chat_template.jinja").write_text(_PARTS)
        runtime = load_model(folder)
        assert runtime.wants_parts
        assert SENTENCES[0] in runtime.render_chat([{"role": "user", "content": SENTENCES[0]}])
        engine = CacheClipEngine(primary=folder, auxiliary=None, method="direct")
        engine.precompute(CHUNKS[:1])
        assert engine.generate(f"{CHUNKS[0]}\n\nHow old is it?", max_tokens=2).stats.hits == 1

    def test_that_read_text(self, tiny_models: dict[str, str]) -> None:
        assert not load_model(tiny_models["llama"]).wants_parts

    def test_that_leave_out_the_question(self, tmp_path: Path) -> None:
        folder = build(tmp_path, "mistral3")
        (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}{{ message['role'] }}{% endfor %}")
        with pytest.raises(ModelError, match="leaves out what a user's message says"):
            load_model(folder)
