"""Chunk KV that vLLM computes is what our runtime computes, in float32; and so are the answers from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cacheclip_ingest.embedding import Embedder, Vectors
from cacheclip_ingest.splitting import Splitter
from cacheclip_testing import SENTENCES
from cacheclip_vllm.offline import FusedLLM
from vllm_engines import (
    CHUNKS,
    CORRECTED,
    PROMPTS,
    Encoding,
    Setting,
    architecture,
    ask,
    encoding,
    outcomes,
    outputs,
    started,
)

from cacheclip_rag import CacheClipEngine, EncodingError

LONG = " ".join(SENTENCES[number % 8] for number in range(20))
TEXTS = [*CHUNKS, LONG, CHUNKS[0] + " It begins as another one does.", "One."]
NAMES = ("llama-rope-llama3", "qwen2", "qwen2-rope-yarn", "qwen3-moe", "phi3-partial", "gemma2", "gemma3", "gpt-oss")
"""Biases of keys, norms of keys, partial and scaled rotary embedding, windows in some layers, several tables."""


def check(made: Encoding, texts: Sequence[str] = TEXTS, **options: Any) -> None:
    """Compare with KV of our runtime."""
    ours = CacheClipEngine(**{**made.setting.options, **options, "store": None})
    theirs = made.engine(None, **options)
    assert theirs.precompute(texts) == ours.precompute(texts) == len(texts)
    assert {*theirs.store.catalog.keys("default")} == {*ours.store.catalog.keys("default")}
    (left, *_), (right, *_) = theirs.chunk_caches(), ours.chunk_caches()
    for text in texts:
        found, expected = (each.read(text).tensor() for each in (left, right))
        assert found.shape == expected.shape
        for number, (layer, other) in enumerate(zip(found, expected, strict=True)):
            # rounding grows with the layers of random weights, from 1e-7 in the first one
            most = 1e-5 if number < 2 else 1e-4
            assert (layer - other).abs().max() <= most * max(1.0, float(other.abs().max()))


@pytest.fixture(scope="module")
def setting(settings: Any) -> Setting:
    return settings()


@pytest.fixture(scope="class")
def made(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encoding]:
    with encoding(setting, tmp_path_factory.mktemp("encoding")) as found:
        yield found


class TestKV:
    @pytest.mark.parametrize("context", ["prefix", "passages"])
    def test_contexts(self, made: Encoding, context: str) -> None:
        check(made, chunk_context=context)

    def test_twin_the_context_matters(self, made: Encoding) -> None:
        kv = []
        for context in ("prefix", "passages"):
            engine = made.engine(None, chunk_context=context)
            engine.precompute([LONG])
            kv.append(engine.chunk_caches()[0].read(LONG).tensor())
        assert (kv[0] - kv[1]).abs().max() > 0.01

    def test_a_chunk_that_begins_as_another(self, made: Encoding) -> None:
        """vLLM's prefix cache, which is on here, hides no token."""
        engine = made.engine(None)
        engine.precompute([LONG])
        engine.precompute([LONG + " And more.", LONG + " And other."])
        check(made, [LONG, LONG + " And more.", LONG + " And other."])

    def test_plain_requests_find_nothing_of_it(self, made: Encoding) -> None:
        made.fused.llm.reset_prefix_cache()
        made.engine(None, chunk_context="prefix").precompute(CHUNKS)
        assert ask(made.fused, PROMPTS, "full") == made.setting.expected(PROMPTS, "full")

    def test_by_our_engine(self, made: Encoding, tmp_path: Path) -> None:
        made.engine(tmp_path / "store").precompute(CHUNKS)
        other = replace(made.setting, options={**made.setting.options, "store": str(tmp_path / "store")})
        assert other.expected(PROMPTS, "cacheclip") == made.setting.expected(PROMPTS, "cacheclip")


@pytest.mark.parametrize("name", NAMES)
def test_architectures(name: str, tmp_path: Path) -> None:
    with encoding(architecture(name, tmp_path), tmp_path) as made:
        check(made)


class TestEngines:
    def test_chunked_scheduling(self, setting: Setting, tmp_path: Path) -> None:
        room = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_chunked_prefill": True}
        with encoding(setting, tmp_path, **room, enable_prefix_caching=False) as made:
            check(made)

    def test_compiled(self, setting: Setting, tmp_path: Path) -> None:
        with encoding(setting, tmp_path, enforce_eager=False) as made:
            check(made)

    @pytest.mark.parametrize("model", ["qwen3", "llama"], ids=["a-head-each", "replicated-heads"])
    def test_tensor_parallel(self, settings: Any, tmp_path: Path, model: str) -> None:
        parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        with encoding(settings(model), tmp_path, **parallel) as made:
            check(made)

    def test_in_a_process_of_its_own(self, setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        with encoding(setting, tmp_path, distributed_executor_backend="uni") as made:
            check(made)


def test_from_a_store_that_vllm_filled(setting: Setting, tmp_path: Path) -> None:
    with encoding(setting, tmp_path) as made:
        made.engine(tmp_path / "store").precompute(CHUNKS)
        fused = FusedLLM(made.fused.llm, setting.planner(store=str(tmp_path / "store")))
        for method in ("cacheclip", "direct", CORRECTED):
            found = outputs(fused, PROMPTS, method)
            assert outcomes(found) == ["fused"] * 4 and not fused.plain
            expected = setting.expected(PROMPTS, method)
            assert [tuple(each.outputs[0].token_ids) for each in found] == expected


class LetterEmbedder(Embedder):
    """Counts letters."""

    def embed(self, texts: Sequence[str]) -> Vectors:
        counts = np.array([[text.count(chr(97 + n)) for n in range(26)] for text in texts], dtype=np.float32)
        return counts / np.maximum(1e-6, np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are cut at blank lines; the extra that cuts them otherwise is not in this environment."""
    monkeypatch.setattr(Splitter, "split", lambda self, text, **_: text.split("\n\n"))


class TestFailures:
    def test_a_context_that_is_gone(self, made: Encoding) -> None:
        """vLLM would compute the chunk after other KV: nothing is stored."""
        engine = made.engine(None)
        engine.precompute(CHUNKS[:1])
        for path in made.folder.glob("*.safetensors"):
            path.unlink()
        with pytest.raises(EncodingError, match="the KV before the chunks"):
            engine.precompute(CHUNKS[1:3])
        assert not engine.is_stored(CHUNKS[1])
        made.encoders[-1].close()
        assert engine.precompute(CHUNKS[1:3]) == 2

    def test_a_context_that_cannot_be_loaded(self, made: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
        from cacheclip_vllm.loading import Loader

        engine = made.engine(None)
        engine.precompute(CHUNKS[:1])

        def fails(*_: Any) -> int:
            raise OSError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(Loader, "_carry_out", fails)
            with pytest.raises(EncodingError, match="could not be read or computed"):
                engine.precompute(CHUNKS[1:3])
        assert not engine.is_stored(CHUNKS[1])
        assert engine.precompute(CHUNKS[1:3]) == 2


class TestRefused:
    def test_an_engine_without_our_connector_of_chunks(self, setting: Setting, tmp_path: Path) -> None:
        with started(setting) as fused:
            made = Encoding(fused, setting, tmp_path)
            with pytest.raises(EncodingError, match="connector"):
                made.engine(None).precompute(CHUNKS)

    def test_a_rounded_cache(self, setting: Setting, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="rounded cache"), encoding(setting, tmp_path, kv_cache_dtype="fp8_e5m2"):
            pass


@pytest.mark.usefixtures("paragraphs")
def test_ingest(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    from cacheclip_rag.plugins import main

    monkeypatch.setattr("cacheclip_ingest.embedding.Embedder", LetterEmbedder)
    (tmp_path / "a.txt").write_text("\n\n".join(CHUNKS))
    given = ["ingest", str(tmp_path / "a.txt"), "--store", str(tmp_path / "store")]
    given += ["--primary", setting.model, "--auxiliary", setting.options["auxiliary"], "--json"]
    (tmp_path / "vllm.toml").write_text("[vllm]\nmax_model_len = 1024\nblock_size = 32\nmax_num_seqs = 16")
    given += ["--backend", "vllm", "--settings", str(tmp_path / "vllm.toml")]
    monkeypatch.setattr("sys.argv", ["cacheclip", *given])
    try:
        with pytest.raises(SystemExit) as stopped:
            main()
    finally:
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
    out = capsys.readouterr().out
    assert not stopped.value.code, out
    found = json.loads(out.splitlines()[-1])
    assert found["computed"] == found["chunks"] > 0 and found["failed"] == []
