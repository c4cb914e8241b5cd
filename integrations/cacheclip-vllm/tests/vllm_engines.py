"""vLLM engines on tiny models. ``make test-vllm`` runs these tests in an environment of its own.

Engines run in the process of the tests, one at a time. Blocks of 32 tokens, the smallest of vLLM's kernels for CPUs, so
that few borders of chunks are borders of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.variants import RANDOM
from cacheclip_testing import SENTENCES, TINY_MODELS, build_auxiliary, build_model, tiny_spec
from cacheclip_vllm.encoding import encoding_options, encoding_primary
from cacheclip_vllm.offline import FusedLLM, engine_options
from cacheclip_vllm.parameters import request_parameters
from cacheclip_vllm.planner import Planner
from tool_templates import TOOLS_TEMPLATE

from cacheclip_rag import CacheClipEngine, SamplingParams

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


@contextmanager
def started(setting: Setting, **options: Any) -> Iterator[FusedLLM]:
    """A vLLM engine with our connector."""
    from vllm import LLM

    own = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "disable_log_stats": True}
    llm = None
    try:
        llm = LLM(setting.model, **{**VLLM, **own, **engine_options(setting.store), **options})
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


@contextmanager
def gone(setting: Setting, key: str) -> Iterator[None]:
    """An entry of the store cannot be read within the block."""
    payload = Path(setting.store) / "kv" / key[:2] / f"{key}.kv"
    payload.rename(payload.with_suffix(".gone"))
    try:
        yield
    finally:
        payload.with_suffix(".gone").rename(payload)
        setting.engine.precompute(CHUNKS)  # the planner has noticed


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


_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "head_dim": 32}
_CHANGED: dict[str, dict[str, Any]] = {
    # what the tiny models leave out and vLLM wants
    "gemma2": {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma3": {"query_pre_attn_scalar": 32},
    "gpt-oss": {"rope_parameters": {**TINY_MODELS["gpt-oss"]["rope_parameters"], "beta_fast": 32.0, "beta_slow": 1.0}},
}


def architecture(name: str, folder: Path) -> Setting:
    spec = {**TINY_MODELS[name], **_HEADS, **_CHANGED.get(name, {})}
    options = {"primary": str(build_model(folder / "model", spec)), "store": str(folder / "store")}
    options |= {"auxiliary": str(build_auxiliary(folder / "auxiliary")), "chunk_context": "passages"}
    options |= {"prefix_cache_bytes": 0}
    CacheClipEngine(**options).precompute(CHUNKS)
    return Setting(options["primary"], options["store"], options)


class Encoding:
    """A vLLM engine that computes chunks."""

    def __init__(self, fused: FusedLLM, setting: Setting, folder: Path) -> None:
        self.fused, self.setting, self.folder = fused, setting, folder
        self.encoders: list[Any] = []

    def engine(self, store: Path | None, **options: Any) -> CacheClipEngine:
        load = encoding_primary(self.fused.llm, self.folder, keep=self.encoders.append)
        given = {**self.setting.options, **options, "store": None if store is None else str(store)}
        return CacheClipEngine(**given, load_primary=load)


@contextmanager
def encoding(setting: Setting, folder: Path, **options: Any) -> Iterator[Encoding]:
    exchange = folder / "exchange"
    exchange.mkdir()
    transfer = encoding_options(exchange, folder / "store")["kv_transfer_config"]
    with started(setting, kv_transfer_config=transfer, **options) as fused:
        made = Encoding(fused, setting, exchange)
        yield made
        for encoder in made.encoders:
            encoder.close()
        assert list(exchange.iterdir()) == [], "nothing is left between vLLM and us"


def near_ties(full: Any, found: Any, most: float) -> bool:
    """Whether the first tokens that differ, if there are any, are at most ``most`` apart in log-probability."""
    for token, other, logprobs in zip(full.token_ids, found.token_ids, full.logprobs, strict=True):
        if token != other:
            return other in logprobs and logprobs[token].logprob - logprobs[other].logprob <= most
    return True


def check_against_full(fused: Any, most: float = 0.0) -> None:
    """Ratio 1.0 gives the tokens of this vLLM's own full prefill, or ties (:func:`near_ties`); ratio 0.2 does not."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=20)
    full = fused.generate(PROMPTS, params, method="full", use_tqdm=False)
    for ratio in (1.0, 0.2):
        fused.llm.reset_prefix_cache()  # exact KV would come first
        found = fused.generate(PROMPTS, params, method="cacheclip", recompute_ratio=ratio, use_tqdm=False)
        assert outcomes(found) == ["fused"] * 4 and not fused.plain
        pairs = ((each.outputs[0], other.outputs[0]) for each, other in zip(full, found, strict=True))
        assert all(near_ties(*pair, most) for pair in pairs) == (ratio == 1.0)


def sampling(fusion: Any = None, **options: Any) -> Any:
    from vllm import SamplingParams

    given = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **options}
    if fusion is None:
        return SamplingParams(**given)
    carried = request_parameters(fusion)
    return SamplingParams(**given, extra_args={"kv_transfer_params": carried})
