"""Models that cannot be reused exactly: one error with the reason and what works."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    ByT5Tokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2VLConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheclip_rag import CacheClipEngine, Chunk, Fresh, MissingExtraError, SamplingParams, UnsupportedModelError
from cacheclip_rag.base.errors import PromptTooLongError
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers.architectures import check_supported, reuse_tokens, rope_pin
from tests.conftest import CHUNKS, DYNAMIC, TINY_MODELS, Models, Patch, build_model, make_tokenizer, rag_prompt
from tests.fusion.cases import EXACT, gap, reference_logits

_SIZES = {"vocab_size": 400, "pad_token_id": 0, "eos_token_id": 2}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({"n_positions": 1024, "n_embd": 32, "n_layer": 2, "n_head": 2}, "cannot be reused exactly: "),
    "mamba": ({"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, "recurrent"),
    "t5": (_T5, "encoder-decoder"),
}
"""Architectures that transformers runs and this library does not reuse: config, and a word of the reason."""


FAMILIES = {
    **dict.fromkeys(("mamba2", "falcon_mamba", "rwkv", "xlstm"), "recurrent layers and none that attend"),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "deepseek_v4"), "an indexer chooses"),
    **dict.fromkeys(("t5gemma", "t5gemma2"), "encoder-decoder"),
}
"""Families of today, with their defaults, and a part of the reason."""
MOVED_STATES = ("qwen3_next", "qwen3_5", "bamba", "falcon_h1", "nemotron_h", "jamba")
"""Those whose recurrent layers' states are moved, which are not planned without weights."""


def build(folder: Path, architecture: str) -> str:
    config = CONFIG_MAPPING[architecture](**{**_SIZES, **REFUSED[architecture][0]})
    torch.manual_seed(0)
    classes = (AutoModelForCausalLM, AutoModelForSeq2SeqLM)
    cls = next(cls for cls in classes if type(config) in cls._model_mapping)
    cls.from_config(config).save_pretrained(folder)
    make_tokenizer(400).save_pretrained(folder)
    return str(folder)


class TestRefusal:
    @pytest.mark.parametrize("architecture", list(REFUSED))
    def test_says_why_and_what_works_before_any_weights_are_read(self, architecture: str, tmp_path: Path) -> None:
        folder = build(tmp_path, architecture)
        for file in tmp_path.glob("*.safetensors") if architecture != "gpt2" else ():  # whose config says nothing
            file.unlink()
        with pytest.raises(UnsupportedModelError) as error:
            load_model(folder)
        assert all(word in str(error.value) for word in (REFUSED[architecture][1], "Llama", "transformers itself"))

    @pytest.mark.parametrize("architecture", [*FAMILIES, *MOVED_STATES])
    def test_current_families_and_why(self, architecture: str) -> None:
        if architecture not in CONFIG_MAPPING:
            pytest.skip(f"this transformers has no {architecture}")
        config, reason = CONFIG_MAPPING[architecture](), f"{FAMILIES.get(architecture)}.*such as Llama"
        if is_moved := architecture in MOVED_STATES:
            check_supported(config, "m")
            reason = "recurrent layers, whose states are moved in the model's own"
        with pytest.raises(UnsupportedModelError, match=reason):
            check_supported(config, "m", planned=is_moved)

    def test_multimodal_models_are_not_planned_without_weights(self) -> None:
        with pytest.raises(UnsupportedModelError, match="'qwen2_vl'. reads images, too"):
            check_supported(Qwen2VLConfig(), "m", planned=True)

    def test_attention_in_both_directions(self) -> None:
        with pytest.raises(UnsupportedModelError, match="both directions"):
            check_supported(Gemma3TextConfig(use_bidirectional_attention=True), "m")

    def test_unknown_rotary_scaling(self) -> None:
        config = LlamaConfig()
        config.rope_parameters = {"rope_type": "of-next-year", "rope_theta": 1e4}
        with pytest.raises(UnsupportedModelError, match=r"'of-next-year'.*default, linear, llama3, yarn"):
            check_supported(config, "m")

    def test_tokenizer_without_offsets(self, tmp_path: Path) -> None:
        """It is written in Python, byte by byte, as ByT5 has it."""
        build_model(tmp_path, TINY_MODELS["llama"], vocab_size=259)
        for file in tmp_path.glob("tokenizer*"):
            file.unlink()
        ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModelError, match=r"offsets.*Save one"):
            load_model(str(tmp_path))

    @pytest.mark.parametrize("name", ["model.gguf", "a/gone.Q4_K_M.GGUF", "packaged:smollm2-135m"])
    def test_names_of_distributions_that_are_not_installed(self, name: str, tmp_path: Path, monkeypatch: Patch) -> None:
        """What to install is said, whether the file is there or not."""
        for module in ("checkpoints", "loaders"):
            monkeypatch.setattr(f"cacheclip_rag.models.{module}.guests", lambda group: {})
        monkeypatch.chdir(tmp_path)
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        what, folder = ("fetches", "cacheclip-lab") if name.startswith("packaged:") else ("runs", "cacheclip-llamacpp")
        with pytest.raises(MissingExtraError, match=rf"what {what} '.*{re.escape(name)}' is not .*/{folder}"):
            CacheClipEngine(primary=name, auxiliary=None).precompute(["The lamp burned whale oil."])


def test_an_auxiliary_model_is_refused_too(tiny_models: Models, tmp_path: Path, chunks: list[str]) -> None:
    engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=build(tmp_path, "gpt2"), method="direct")
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        engine.precompute(chunks)
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        engine.generate(rag_prompt(chunks), SamplingParams(max_tokens=2), method="cacheclip")


def longrope(limit: int) -> Any:
    spec = {**TINY_MODELS["phi3-longrope"], "original_max_position_embeddings": limit}
    del spec["architecture"]
    return CONFIG_MAPPING["phi3"](max_position_embeddings=2048, pad_token_id=0, **spec)


class TestRopesThatDependOnLength:
    """Reused up to the length at which their frequencies change, and plain above."""

    def test_limit(self) -> None:
        assert reuse_tokens(longrope(512)) == 512
        assert reuse_tokens(LlamaConfig(max_position_embeddings=700, rope_parameters=DYNAMIC)) == 700
        assert reuse_tokens(LlamaConfig(max_position_embeddings=700)) == 700
        pins = {rope_pin(longrope(limit)) for limit in (256, 512)}
        assert len(pins) == 2 and all("up to" in pin for pin in pins), "it is a part of the key"
        assert "up to" not in rope_pin(LlamaConfig())

    def test_the_last_token_that_is_reused_and_the_first_that_is_not(
        self, tiny_models: Models, chunks: list[str]
    ) -> None:
        """A prompt of as many tokens as the frequencies stay the same for, and one of one more: both are exact."""
        folder = tiny_models["phi3-longrope"]
        engine = CacheClipEngine(
            primary=folder, auxiliary=None, method="epic", recompute_ratio=1.0, chunk_context="prefix"
        )
        limit = engine.primary.reuse_tokens
        assert limit == 512 < engine.primary.context_tokens
        engine.precompute(chunks)

        def ask(filler: int) -> Any:
            # "~" stands in no text that the tokenizer learned from: each is a token
            prompt = [*map(Chunk, chunks), Fresh("~" * filler)]
            return engine.prefill(prompt, SamplingParams(max_tokens=1), method=engine.make_method())

        room = limit - ask(1).layout.num_tokens + 1
        last, first = ask(room), ask(room + 1)
        assert (last.layout.num_tokens, first.layout.num_tokens) == (limit, limit + 1)
        assert last.stats.fallback is None and last.stats.hits == len(chunks)
        assert "change above 512" in str(first.stats.fallback) and first.stats.hits == 0
        for found in (last, first):
            assert gap(found.logits, reference_logits(folder, found.layout.ids)) < 10 * EXACT

    def test_short_prompts_are_exact_after_a_long_one(self, tiny_models: Models, chunks: list[str]) -> None:
        """The model's rotary module remembers the last length; an answer must not."""
        engine = CacheClipEngine(primary=tiny_models["phi3-longrope"], auxiliary=tiny_models["auxiliary"])
        engine.precompute(chunks)
        params = SamplingParams(max_tokens=16)
        before = engine.generate(rag_prompt(chunks[:2]), params)
        engine.generate(rag_prompt(chunks * 4), params)
        assert engine.generate(rag_prompt(chunks[:2]), params).token_ids == before.token_ids

    @pytest.mark.long
    @pytest.mark.parametrize("method", ["full", "cacheclip"])
    def test_an_answer_that_crosses_the_limit(self, tiny_models: Models, monkeypatch: Patch, method: str) -> None:
        """Read anew there, since the KV below is of other frequencies: the tokens of plain decoding without a cache."""
        from transformers import AutoModelForCausalLM

        folder = tiny_models["phi3-longrope"]
        engine = CacheClipEngine(primary=folder, auxiliary=tiny_models["auxiliary"], method=method, recompute_ratio=1.0)
        runtime = engine.primary
        monkeypatch.setattr(runtime, "eos_ids", frozenset())
        chunk = CHUNKS[0]
        engine.precompute([chunk])
        filler = " ".join(CHUNKS)
        words = filler.split()
        while True:
            prompt = f"{chunk} {' '.join(words)}"
            ids = [t for s in engine.segment(prompt) for t in runtime.tokenize(s.text, control=s.control).ids]
            if len(ids) <= 500:
                break
            words.pop()
        answer = engine.generate(prompt, SamplingParams(max_tokens=40))
        assert len(ids) + 40 > 512 and answer.stats.method == method
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        expected = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=40,
            do_sample=False,
            use_cache=False,  # with one, transformers 5.0 mixes both frequencies
            pad_token_id=0,
        )
        assert list(answer.token_ids) == expected[0, len(ids) :].tolist()

    def test_chunk_beyond_the_limit(self, tiny_models: Models, chunks: list[str]) -> None:
        engine = CacheClipEngine(primary=tiny_models["phi3-longrope"], auxiliary=None, method="direct")
        with pytest.raises(PromptTooLongError, match="Split"):
            engine.precompute([" ".join(chunks * 4)])


def test_every_row_is_what_it_says(tiny_models: Models) -> None:
    """The saved configs keep what the rows are there for: windows, soft caps, layers without positions."""
    configs: dict[str, PreTrainedConfig] = {n: AutoConfig.from_pretrained(tiny_models[n]) for n in TINY_MODELS}
    for name in ("gemma2", "gemma3", "gpt-oss", "qwen2-sliding"):
        assert set(configs[name].layer_types) == {"full_attention", "sliding_attention"}
        assert configs[name].sliding_window == 24
    assert configs["mistral-sliding"].sliding_window == configs["phi3-sliding"].sliding_window == 96
    assert configs["gemma2"].attn_logit_softcapping == 5.0
    assert configs["smollm3"].no_rope_layers == [1, 0, 1, 0]
    for name, kind in (("phi3-longrope", "longrope"), ("llama-rope-dynamic", "dynamic"), ("gpt-oss", "yarn")):
        assert configs[name].rope_parameters["rope_type"] == kind
    assert configs["phi3-partial"].rope_parameters["partial_rotary_factor"] == 0.75
