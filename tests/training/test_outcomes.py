"""What the auxiliary attends to, and how near to full prefill the primary's answers come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, EngineConfig
from cacheclip_rag.lab.evaluation.reference import Reference
from cacheclip_rag.lab.evaluation.scores import token_f1
from cacheclip_rag.lab.training.families import Sample, synthetic_samples
from cacheclip_rag.lab.training.features import look
from cacheclip_rag.lab.training.finetune import finetune
from cacheclip_rag.lab.training.outcomes import answered_rightly, downstream, may_replace, segments_of
from cacheclip_rag.methods import preset
from cacheclip_rag.methods.settings import vary
from cacheclip_rag.runtime.base import weights_digest
from cacheclip_rag.selection.auxiliary_pass import MAX_QUESTION_TOKENS
from cacheclip_rag.selection.heads import HeadSet
from cacheclip_rag.selection.packed_chunks import score_chunks
from tests.training.conftest import made
from tests.training.planted import PLANTED, build_planted

pytestmark = pytest.mark.usefixtures("with_short_samples")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_planted(tmp_path_factory.mktemp("planted") / "model")


@pytest.fixture(scope="module")
def config(planted: str, tiny_models: dict[str, str]) -> EngineConfig:
    return EngineConfig(primary=tiny_models["llama"], auxiliary=planted)


def full_answer(engine: CacheClipEngine, sample: Sample) -> str:
    """Full prefill's greedy answer, 16 tokens."""
    prefilled = engine.prefill(segments_of(engine, sample), method=preset("full"), question=sample.question)
    return Reference.of(engine, prefilled, 16).answer


def test_a_planted_head_counts_most(config: EngineConfig) -> None:
    found = finetune(config, num_samples=12, num_targets=12, num_prompts=0).heads
    assert found.heads[int(found.weights.argmax())] == PLANTED
    assert float(found.weights.max()) > 1.3 * float(found.weights.sort().values[-2])


class TestLook:
    def test_it_scores_as_the_engine_does(self, config: EngineConfig) -> None:
        """Every head alone, by the look of the training and by the scorer of the engine."""
        engine = CacheClipEngine(config)
        caches, runtime = engine.parts.auxiliary_caches, engine.parts.auxiliary_caches.runtime
        [sample] = synthetic_samples("train", 1, chunk_words=20)
        seen = look(caches, sample, sinks=2)
        kv = [runtime.encode(caches.tokenize(chunk).ids, caches.prefix_kv) for chunk in sample.chunks]
        question = runtime.tokenize(sample.question).ids
        for layer in range(seen.scores.shape[0]):
            for head in range(seen.scores.shape[1]):
                heads = HeadSet("x", ((layer, head),), torch.ones(1), sinks=2)
                engines = score_chunks(runtime, caches.prefix_kv, kv, question, heads=heads, sinks=2)
                torch.testing.assert_close(torch.cat(engines), seen.scores[layer, head], atol=1e-6, rtol=1e-4)

    def test_of_a_long_question_it_sees_what_an_engine_asks_with(self, config: EngineConfig) -> None:
        engine = CacheClipEngine(config)
        caches, runtime = engine.parts.auxiliary_caches, engine.parts.auxiliary_caches.runtime
        [sample] = synthetic_samples("train", 1, chunk_words=20)
        tail = f"{sample.question} " * 20
        ids = runtime.tokenize(tail).ids
        assert len(ids) > MAX_QUESTION_TOKENS
        long = replace(sample, question=tail)
        seen = look(caches, long)
        kv = [runtime.encode(caches.tokenize(chunk).ids, caches.prefix_kv) for chunk in sample.chunks]
        engines = score_chunks(runtime, caches.prefix_kv, kv, ids[-MAX_QUESTION_TOKENS:], pooled=True)
        torch.testing.assert_close(torch.cat(engines), seen.scores[-1].mean(0), atol=1e-6, rtol=1e-4)

    def test_evidence_is_marked_in_tokens(self, config: EngineConfig) -> None:
        caches = CacheClipEngine(config).parts.auxiliary_caches
        for sample in synthetic_samples("train", 7, chunk_words=20):
            seen = look(caches, sample)
            start = 0
            for number, chunk in enumerate(sample.chunks):
                tokens = caches.tokenize(chunk)
                wanted = {c for n, a, b in sample.evidence if n == number for c in range(a, b)}
                for index, (a, b) in enumerate(tokens.offsets):
                    assert bool(seen.evidence[start + index]) == bool(wanted & set(range(a, b)))
                start += len(tokens)


class TestAnsweredRightly:
    def test_those_that_are_come_first(self, config: EngineConfig) -> None:
        engine = CacheClipEngine(config)
        [wrong, other] = synthetic_samples("test", 2, chunk_words=20)
        prefilled = engine.prefill(segments_of(engine, other), method=preset("full"))
        said = Reference.of(engine, prefilled, 40).answer.split()
        right = replace(other, parts=(said[-1], said[0].upper()))
        half = replace(other, parts=(said[-1], "said by nobody"))
        assert answered_rightly(engine, [wrong, right, other], 1) == ([right], 1)
        assert answered_rightly(engine, [wrong, half, right], 1).samples == [right], "every part"
        assert answered_rightly(engine, [wrong, right], 2) == ([right, wrong], 1), "others fill up"
        assert answered_rightly(engine, [right], 0) == ([], 0)


def test_what_may_replace_what() -> None:
    old = made(0.2, first=5, answers=5)
    assert may_replace(old, old) and may_replace(made(0.1, first=6, answers=0), old), "answers refuse nothing"
    assert not may_replace(made(0.1, first=4, answers=9), old) and not may_replace(made(0.21, 9, 9), old)
    assert may_replace((replace(old[0], answer_kl=9.0),), (replace(old[0], answer_kl=5.0),)), "a nat at most"


class TestDownstream:
    def test_it_is_the_engines_own_prefill_and_leaves_the_engine_as_it_was(self, config: EngineConfig) -> None:
        engine = CacheClipEngine(config)
        samples = synthetic_samples("test", 2, chunk_words=20)
        runtime: Any = engine.auxiliary
        last = HeadSet.of_layers(weights_digest(runtime.fingerprint), "last", runtime.num_layers, 4)
        planted = replace(last, heads=(PLANTED,), weights=torch.ones(1))
        found = downstream(
            engine,
            samples,
            [
                last,
                planted,
                preset("direct"),
                vary(preset("cacheclip"), {"scorer": {"pooled": True, "layers": "last"}}),
            ],
        )
        assert engine.head_set is None and not any(engine.is_stored(chunk) for chunk in samples[0].chunks)
        assert found[0] == found[3], "every head of the last layer is the last layer"
        assert found[0] != found[1] != found[2] and all(one.first_token_kl > 0 for each in found for one in each)
        [exact] = downstream(engine, samples, [preset("epic")], ratio=1.0)
        assert all(one.first_token_kl < 1e-5 and one.answer_kl < 1e-5 for one in exact)
        assert all(one.first_agrees and one.equal_answer and one.f1 == one.full_f1 for one in exact)

    def test_equal_tokens_are_those_of_the_greedy_answers(self, config: EngineConfig) -> None:
        """Against answers that are decoded, not followed; some begin like full prefill's and go on otherwise."""
        engine = CacheClipEngine(config)
        samples = synthetic_samples("test", 4, chunk_words=20)
        method = preset("epic").at(0.9)
        samples[0] = replace(samples[0], answer=full_answer(engine, samples[0]))
        [found] = downstream(engine, samples, [method], ratio=0.9)
        assert found[0].full_f1 == 1.0 and 0.0 < found[0].f1 < 1.0, "its answer begins like full prefill's"
        kinds = []
        for sample, outcome in zip(samples, found, strict=True):
            answers = []
            texts = []
            for each in (preset("full"), method):
                engine.precompute(sample.chunks, method=each)
                engine.prefixes.clear()
                prefilled = engine.prefill(segments_of(engine, sample), method=each, question=sample.question)
                reference = Reference.of(engine, prefilled, 16)
                answers.append(reference.ids)
                texts.append(reference.answer)
            full, fused = answers
            kinds.append((full[0] == fused[0], full == fused))
            assert (outcome.first_agrees, outcome.equal_answer) == kinds[-1]
            assert [outcome.full_f1, outcome.f1] == [token_f1(text, [sample.answer]) for text in texts]
        assert set(kinds) == {(True, False), (False, False)}

    def test_an_engine_in_use_is_not_touched(self, config: EngineConfig, tmp_path: Path) -> None:
        engine = CacheClipEngine(config, store=tmp_path / "store")
        with pytest.raises(AssertionError, match="not a user's store"):
            downstream(engine, synthetic_samples("test", 1), [preset("direct")])
