"""vLLM engines on tiny models. ``make test-vllm`` runs these tests in an environment of its own.

Engines run in the process of the tests, one at a time. Blocks of 32 tokens, the smallest of vLLM's kernels for CPUs, so
that few borders of chunks are borders of blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.variants import RANDOM
from cacheclip_vllm.offline import FusedLLM, engine_options
from cacheclip_vllm.planner import Planner

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.guards import certificate as certificates
from cacheclip_rag.testing.tiny import SENTENCES, build_auxiliary, build_model, tiny_spec
from tests.conftest import TOOLS_TEMPLATE

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_NO_USAGE_STATS"] = "1"
root = str(Path(__file__).resolve().parents[2])
os.environ["PYTHONPATH"] = os.pathsep.join([root, f"{root}/integrations", os.environ.get("PYTHONPATH", "")])

HEADS = {"num_attention_heads": 4, "head_dim": 32, "hidden_size": 128, "num_hidden_layers": 4}
"""vLLM's kernels for CPUs want heads of 32 numbers or more."""
MODELS = {
    "qwen3": tiny_spec("qwen3", **HEADS, num_key_value_heads=2),
    "llama": tiny_spec("llama", **HEADS, num_key_value_heads=1),
    "tools": tiny_spec("qwen3", **HEADS, num_key_value_heads=2),
}
TEMPLATES = {"tools": TOOLS_TEMPLATE}
"""Chat templates of models, instead of the one of all tiny models."""
CHUNKS = [" ".join(SENTENCES[(start + step) % 8] for step in range(4)) for start in range(6)]
QUESTIONS = ["What is the magic number?", "Who built the lighthouse?", "When does the ferry leave?", "Who went ashore?"]
CORRECTED = replace(RANDOM, correction=0.5, name="corrected")
"""Many runs of single windows, and a correction."""
VLLM = {"max_model_len": 2048, "block_size": 32, "max_num_seqs": 16, "seed": 0}
"""Options of an engine that certifies."""
TOKENS = 16
BLOCK = 32
"""Tokens in a block of vLLM's cache."""


def prompt(number: int) -> str:
    """A prompt with four chunks, another one for each number."""
    chosen = [CHUNKS[(number + step) % 6] for step in range(4)]
    return "Read this.\n\n" + "\n\n".join(chosen) + f"\n\nQuestion: {QUESTIONS[number % 4]} ({number})"


PROMPTS = [prompt(number) for number in range(4)]


@dataclass(frozen=True)
class Setting:
    """A tiny model, a store with its chunks, and an engine of ours to compare with."""

    model: str
    store: str
    options: dict[str, Any]

    @property
    def engine(self) -> CacheClipEngine:
        return CacheClipEngine(**self.options)

    def expected(self, prompts: Sequence[Any], method: Any, **options: Any) -> list[tuple[int, ...]]:
        """Token ids of our engine's answers, and never the end of a turn."""
        engine = self.engine
        return [greedy(engine, each, method, **options) for each in prompts]

    def planner(self, **options: Any) -> Planner:
        return Planner(**{**self.options, **options})


def greedy(engine: CacheClipEngine, asked: Any, method: Any, tokens: int = TOKENS, **options: Any) -> tuple[int, ...]:
    import torch

    found = engine.prefill(asked, SamplingParams(max_tokens=tokens), method=engine.make_method(method), **options)
    ids, logits = [], found.logits
    with torch.inference_mode():
        for _ in range(tokens):
            ids.append(int(logits.argmax()))
            logits = engine.primary.decode_step(found.cache, ids[-1])
    return tuple(ids)


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the setting of a model, once."""
    folder, made = tmp_path_factory.mktemp("vllm"), dict[str, Setting]()

    def setting(name: str = "qwen3") -> Setting:
        if name not in made:
            own = folder / name
            options = {
                "primary": str(build_model(own / "model", MODELS[name])),
                "auxiliary": str(build_auxiliary(own / "auxiliary")),
                "store": str(own / "store"),
                "chunk_context": "passages",
                "method": "cacheclip",
                "prefix_cache_bytes": 0,
            }
            if name in TEMPLATES:
                (own / "model" / "chat_template.jinja").write_text(TEMPLATES[name])
            made[name] = Setting(options["primary"], options["store"], options)
            made[name].engine.precompute(CHUNKS)
            assert all(made[name].engine.is_stored(chunk) for chunk in CHUNKS)
        return made[name]

    return setting


@contextmanager
def started(setting: Setting, **options: Any) -> Iterator[FusedLLM]:
    """A vLLM engine with our connector."""
    from vllm import LLM

    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "block_size": BLOCK,
        "seed": 0,
        "disable_log_stats": True,
    }
    ours = engine_options(setting.store)
    llm = None
    try:
        llm = LLM(setting.model, **{**defaults, **ours, **options})
        yield FusedLLM(llm, setting.planner())
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        clean_up()


@contextmanager
def no_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block, workers cannot read chunks."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr("cacheclip_rag.store.StoreReader.get", fails)
        yield


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where certificates are."""
    monkeypatch.setattr(certificates, "_folder", lambda: tmp_path / "certificates")
    return tmp_path / "certificates"


@pytest.fixture
def alone() -> Iterator[None]:
    """Engines in this process leave vLLM's groups behind."""
    yield
    clean_up()


def clean_up() -> None:
    """Remove what an engine in this process leaves behind."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()  # also of an engine that failed to start
    cleanup_dist_env_and_memory()


def ask(fused: FusedLLM, prompts: Sequence[Any], method: Any, **options: Any) -> list[tuple[int, ...]]:
    """Token ids of vLLM's answers."""
    return [tuple(output.outputs[0].token_ids) for output in outputs(fused, prompts, method, **options)]


def outputs(fused: FusedLLM, prompts: Sequence[Any], method: Any, tokens: int = TOKENS, **options: Any) -> list[Any]:
    from vllm import SamplingParams as Sampling

    params = Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
    return fused.generate(prompts, params, method=method, use_tqdm=False, **options)


def outcomes(found: Sequence[Any]) -> list[str]:
    """What became of each request."""
    return [(each.kv_transfer_params or {}).get("cacheclip", {}).get("outcome", "none") for each in found]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM's own, of which there are many
