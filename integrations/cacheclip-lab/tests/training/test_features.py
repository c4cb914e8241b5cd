"""What the auxiliary attends to in a sample."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cacheclip_lab.training.families import synthetic_samples
from cacheclip_lab.training.features import look
from cacheclip_lab.training.finetune import finetune
from training.planted import PLANTED, build_planted

from cacheclip_rag import CacheClipEngine, EngineConfig, ModelError
from cacheclip_rag.selection import HeadSet
from cacheclip_rag.selection.auxiliary_pass import MAX_QUESTION_TOKENS, score_chunks

pytestmark = pytest.mark.usefixtures("with_short_samples")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_planted(tmp_path_factory.mktemp("planted") / "model")


@pytest.fixture(scope="module")
def config(planted: str, tiny_models: dict[str, str]) -> EngineConfig:
    return EngineConfig(primary=tiny_models["llama"], auxiliary=planted)


@pytest.mark.long
def test_a_planted_head_counts_most(config: EngineConfig) -> None:
    found = finetune(config, num_samples=12, num_targets=12)
    assert found.heads[int(found.weights.argmax())] == PLANTED
    assert float(found.weights.max()) > 1.3 * float(found.weights.sort().values[-2])


class TestLook:
    def test_it_scores_as_the_engine_does(self, config: EngineConfig) -> None:
        """Every head alone, by the look of the training and by the scorer of the engine."""
        engine = CacheClipEngine(config)
        caches, runtime = engine.parts.models.auxiliary_caches, engine.parts.models.auxiliary_caches.runtime
        [sample] = synthetic_samples(1, chunk_words=20)
        seen = look(caches, sample, sinks=2)
        kv = [runtime.encode(caches.tokenize(chunk).ids, caches.prefix.kv) for chunk in sample.chunks]
        question = runtime.tokenize(sample.question).ids
        for layer in range(seen.scores.shape[0]):
            for head in range(seen.scores.shape[1]):
                heads = HeadSet("x", ((layer, head),), torch.ones(1), sinks=2)
                engines = score_chunks(runtime, caches.prefix.kv, kv, question, heads=heads)
                torch.testing.assert_close(torch.cat(engines), seen.scores[layer, head], atol=1e-6, rtol=1e-4)

    def test_of_a_long_question_it_sees_what_an_engine_asks_with(self, config: EngineConfig) -> None:
        engine = CacheClipEngine(config)
        caches, runtime = engine.parts.models.auxiliary_caches, engine.parts.models.auxiliary_caches.runtime
        [sample] = synthetic_samples(1, chunk_words=20)
        tail = f"{sample.question} " * 20
        ids = runtime.tokenize(tail).ids
        assert len(ids) > MAX_QUESTION_TOKENS
        long = replace(sample, question=tail)
        seen = look(caches, long)
        kv = [runtime.encode(caches.tokenize(chunk).ids, caches.prefix.kv) for chunk in sample.chunks]
        heads = HeadSet("x", tuple((1, head) for head in range(4)), torch.full((4,), 0.25))
        engines = score_chunks(runtime, caches.prefix.kv, kv, ids[-MAX_QUESTION_TOKENS:], heads=heads)
        torch.testing.assert_close(torch.cat(engines), seen.scores[-1].mean(0), atol=1e-6, rtol=1e-4)

    def test_evidence_is_marked_in_tokens(self, config: EngineConfig) -> None:
        caches = CacheClipEngine(config).parts.models.auxiliary_caches
        for sample in synthetic_samples(7, chunk_words=20):
            seen = look(caches, sample)
            start = 0
            for number, chunk in enumerate(sample.chunks):
                tokens = caches.tokenize(chunk)
                wanted = {c for n, a, b in sample.evidence if n == number for c in range(a, b)}
                for index, (a, b) in enumerate(tokens.offsets):
                    assert bool(seen.evidence[start + index]) == bool(wanted & set(range(a, b)))
                start += len(tokens)

    def test_layers_that_do_not_attend(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        caches = CacheClipEngine(config).parts.models.auxiliary_caches
        monkeypatch.setattr(caches.runtime, "without_attention", frozenset({0}))
        with pytest.raises(ModelError, match="has layers without attention"):
            look(caches, synthetic_samples(1, chunk_words=20)[0])
