"""Calibration finds the head that looks at evidence: one is planted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cacheclip_rag import CacheClipEngine, EngineConfig
from cacheclip_rag.errors import ConfigurationError, ModelError
from cacheclip_rag.selection.auxiliary import score_chunks
from cacheclip_rag.selection.heads import HeadSet, weights_digest
from cacheclip_rag.training.calibrate import Candidate, best_of, calibrate, combined, downstream, recall_of
from cacheclip_rag.training.families import synthetic_samples
from cacheclip_rag.training.features import look
from cacheclip_rag.training.report import calibration_table
from tests.conftest import build_model, make_tokenizer, of

PLANTED = (1, 2)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An auxiliary model one of whose heads attends to tokens that are the same as the asking one.

    What enters its layers is the embeddings alone (the lower layer writes nothing), and in this head query and key are
    the same random projection, in dimensions that hardly turn. Its tokens are mostly words.
    """
    layer, head = PLANTED
    vocab_size, dim, hidden = 3000, 32, 64
    spec = of("llama", num_hidden_layers=2, head_dim=dim, rope_parameters={"rope_type": "default", "rope_theta": 1e9})
    folder = build_model(tmp_path_factory.mktemp("planted"), spec, vocab_size=vocab_size)
    texts = [text for each in synthetic_samples("train", 60) for text in (*each.chunks, each.question)]
    make_tokenizer(vocab_size, texts).save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for below in model.model.layers[:layer]:
            below.self_attn.o_proj.weight.zero_()
            below.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.normal_(generator=generator)
        slow = torch.zeros(dim, 1)
        slow[dim // 4 : dim // 2] = slow[3 * dim // 4 :] = 1.0
        projection = slow * torch.randn(dim, hidden, generator=generator) / 4
        attention = model.model.layers[layer].self_attn
        attention.q_proj.weight[head * dim : (head + 1) * dim] = projection
        attention.k_proj.weight[head // 2 * dim : (head // 2 + 1) * dim] = projection  # two heads share a key head
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def config(planted: str, tiny_models: dict[str, str]) -> EngineConfig:
    return EngineConfig(primary=tiny_models["llama"], auxiliary=planted)


class TestCalibrate:
    def test_a_planted_head_is_found(self, config: EngineConfig) -> None:
        found = calibrate(config, num_samples=21, num_prompts=2)
        best, second = found.ranking[:2]
        assert (best.layer, best.head) == PLANTED and best.recall > second.recall + 0.1
        candidates = {each.name: each for each in found.candidates}
        assert PLANTED in candidates["best 4"].heads.heads and all(each.heads.sinks == 4 for each in found.candidates)
        assert found.heads.digest() == candidates[found.chosen].heads.digest()
        assert found.chosen == best_of(found.candidates).name
        assert candidates[found.chosen].kl <= 1.1 * min(each.kl for each in found.candidates)
        assert all(len(each.answer_kl) == 2 and each.kl >= 0 for each in found.candidates)

    def test_the_same_seed_gives_the_same(self, config: EngineConfig) -> None:
        one, other, another = (calibrate(config, num_samples=9, num_prompts=1, seed=seed) for seed in (0, 0, 1))
        assert one.ranking == other.ranking != another.ranking
        assert one.heads.digest() == other.heads.digest()

    def test_without_the_primary_evidence_decides(self, config: EngineConfig) -> None:
        found = calibrate(config, num_samples=9, num_prompts=0)
        assert found.chosen == max(found.candidates, key=lambda each: each.recall).name
        assert all(each.answer_kl == () for each in found.candidates)
        assert calibration_table(found)[1][0][-1] == ""

    def test_the_best_of_the_nearest(self) -> None:
        heads = HeadSet("a" * 64, ((0, 0),), torch.ones(1))
        some = [
            Candidate("far", heads, 0.9, 0.9, (0.1,), (0.2,)),
            Candidate("near", heads, 0.6, 0.6, (0.1,), (0.105,)),
            Candidate("nearest", heads, 0.5, 0.5, (0.1,), (0.1,)),
        ]
        assert best_of(some).name == "near"

    def test_bad_wishes_are_refused(self, config: EngineConfig) -> None:
        with pytest.raises(ConfigurationError, match="at least 6 samples, and prompts from 0 on; got 5 and 10"):
            calibrate(config, num_samples=5)
        with pytest.raises(ConfigurationError, match="no auxiliary model to calibrate"):
            calibrate(replace(config, auxiliary=None))

    def test_a_tokenizer_without_offsets_is_refused(
        self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        auxiliary = CacheClipEngine(config).auxiliary
        monkeypatch.setattr(auxiliary, "has_offsets", False)
        with pytest.raises(ModelError, match="gives no character offsets"):
            calibrate(config, num_samples=9)


class TestLook:
    def test_it_scores_as_the_engine_does(self, config: EngineConfig) -> None:
        """Every head alone, by the calibration's look and by the scorer of the engine."""
        engine = CacheClipEngine(config, heads="none")
        caches, runtime = engine.auxiliary_caches, engine.auxiliary_caches.kv_runtime
        [sample] = synthetic_samples("train", 1, chunk_words=20)
        seen = look(caches, sample, range(runtime.num_layers), sinks=2)
        kv = [runtime.encode(caches.tokenize(chunk).ids, caches.prefix) for chunk in sample.chunks]
        question = runtime.tokenize(sample.question).ids
        for layer in range(seen.scores.shape[0]):
            for head in range(seen.scores.shape[1]):
                heads = HeadSet("x", ((layer, head),), torch.ones(1), sinks=2)
                engines = score_chunks(runtime, caches.prefix, kv, question, heads=heads, sinks=2)
                torch.testing.assert_close(torch.cat(engines), combined(seen, heads), atol=1e-6, rtol=1e-4)
        evidence, values = recall_of(torch.cat(engines), seen, ratio=1.0)
        assert evidence == values == 1.0

    def test_evidence_is_marked_in_tokens(self, config: EngineConfig) -> None:
        caches = CacheClipEngine(config).auxiliary_caches
        for sample in synthetic_samples("train", 7, chunk_words=20):
            seen = look(caches, sample, [0])
            start = 0
            for number, chunk in enumerate(sample.chunks):
                tokens = caches.tokenize(chunk)
                wanted = {c for n, a, b in sample.evidence if n == number for c in range(a, b)}
                for index, (a, b) in enumerate(tokens.offsets):
                    assert bool(seen.evidence[start + index]) == bool(wanted & set(range(a, b)))
                start += len(tokens)
            assert bool((seen.evidence | ~seen.values).all()), "values lie within evidence"


class TestDownstream:
    def test_it_is_the_engines_own_prefill_and_leaves_the_engine_as_it_was(self, config: EngineConfig) -> None:
        engine = CacheClipEngine(config, heads="none")
        samples = synthetic_samples("test", 2, chunk_words=20)
        runtime: Any = engine.auxiliary
        last = HeadSet.of_layers(weights_digest(runtime.fingerprint), "last", runtime.num_layers, 4)
        planted = replace(last, heads=(PLANTED,), weights=torch.ones(1))
        found = downstream(
            engine, samples, [last, planted, "direct", "anchored:first=cacheclip/pooled=true/layers=last"]
        )
        assert engine.head_set is None and not any(engine.is_stored(chunk) for chunk in samples[0].chunks)
        assert found[0] == found[3], "every head of the last layer is the last layer"
        assert found[0] != found[1] != found[2] and all(first > 0 for each in found for first, _ in each)
        [exact] = downstream(engine, samples, ["epic"], ratio=1.0)
        assert all(first < 1e-5 and along < 1e-5 for first, along in exact)

    def test_an_engine_in_use_is_not_touched(self, config: EngineConfig, tmp_path: Path) -> None:
        engine = CacheClipEngine(config, store=tmp_path / "store", heads="none")
        with pytest.raises(AssertionError, match="not a user's own"):
            downstream(engine, synthetic_samples("test", 1), ["direct"])
