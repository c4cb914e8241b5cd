"""Plans: what is reused, what is exact, why nothing is. No model is needed: a fake runtime answers."""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing.fake import FakeRuntime

from cacheclip_rag import CacheClipEngine, Chunk, Plan
from cacheclip_rag.base.errors import ConfigurationError, PromptTooLongError
from cacheclip_rag.guards.base import ObservedAnswer, Observer
from cacheclip_rag.models.load import register_runtime
from cacheclip_rag.prompt.layout import Span
from cacheclip_rag.runtime.base import TokenizedText

CHUNKS = [
    "The lighthouse of Brindle Point was built in 1847 by the engineer Ada Thornbury.",
    "Its lamp burned whale oil until 1871, when it was changed to paraffin.",
    "A keeper and two assistants lived on the rock for eight weeks at a time.",
]


def rag(chunks: list[str]) -> str:
    return "\n\n".join(chunks) + "\n\nQuestion: when was it built?"


@pytest.fixture
def make() -> Callable[..., CacheClipEngine]:
    register_runtime("fake", FakeRuntime)

    def make(**options: Any) -> CacheClipEngine:
        return CacheClipEngine(**{"primary": "fake:planned", "auxiliary": "fake:small", "method": "epic", **options})

    return make


@pytest.fixture
def engine(make: Callable[..., CacheClipEngine]) -> CacheClipEngine:
    return make()


class TestPlan:
    def test_hits_and_budget(self, engine: CacheClipEngine) -> None:
        engine.precompute(CHUNKS[:2])
        plan = engine.plan(rag(CHUNKS), documents=CHUNKS, recompute_ratio=0.25)
        assert [span.whole for span in plan.reused] == CHUNKS[:2]
        assert [span.whole for span in plan.missing] == CHUNKS[2:]
        tokens = sum(len(engine.primary.tokenize(text)) for text in CHUNKS[:2])
        assert plan.chunk_tokens == tokens and plan.budget_tokens == round(0.25 * tokens)
        assert plan.fallback is None and plan.method.name == "epic"

    def test_it_is_what_an_answer_then_does(self, engine: CacheClipEngine) -> None:
        engine.precompute(CHUNKS)
        plan, stats = engine.plan(rag(CHUNKS)), engine.generate(rag(CHUNKS)).stats
        assert (stats.hits, stats.chunk_tokens, stats.recomputed_tokens) == (3, plan.chunk_tokens, plan.budget_tokens)
        assert stats.exact_tokens == 0 and plan.exact == ()

    def test_a_chunk_right_behind_its_prefix_is_exact(self, make: Callable[..., CacheClipEngine]) -> None:
        engine = make(chunk_context="prefix")
        engine.precompute(CHUNKS)
        plan = engine.plan(rag(CHUNKS))
        assert [span.whole for span in plan.exact] == CHUNKS[:1]
        assert engine.plan("First:\n\n" + rag(CHUNKS)).exact == ()

    @pytest.mark.parametrize("left", [(0,), (2,), (0, 2), (1, 2), (2, 0)])
    def test_what_is_left_of_it_keeps_its_keys(self, engine: CacheClipEngine, left: tuple[int, ...]) -> None:
        engine.precompute(CHUNKS)
        plan = engine.plan(rag(CHUNKS))
        own, caches = dict(zip(plan.reused, plan.keys, strict=True)), engine.chunk_caches()[0]
        assert [*own.values()] == [caches.key(text) for text in CHUNKS]
        fewer = plan.reusing([plan.reused[number] for number in left])
        others = plan.computing({text for number, text in enumerate(CHUNKS) if number not in left})
        for some in (fewer, others):
            assert some.keys == tuple(own[span] for span in some.reused) and len(some.keys) == len(left)
            pieces = {piece["start"]: piece["key"] for piece in some.to_dict()["pieces"]}
            assert pieces == {span.start: own[span] if span in some.reused else None for span in plan.layout.spans}

    @pytest.mark.parametrize(("parts", "stored"), [([5], True), ([4], False), ([2, 3], True), ([3, 1], False)])
    def test_half_of_a_missing_text_is_stored_and_less_is_not(
        self, engine: CacheClipEngine, parts: list[int], stored: bool
    ) -> None:
        """Of a text of ten tokens, all its parts together."""
        engine.precompute(CHUNKS)
        plan = engine.plan(rag(CHUNKS))
        tokens = [TokenizedText(tuple(range(count)), ((0, 1),) * count) for count in parts]
        part = Chunk("part", "a whole text")
        spans = tuple(Span(part, each, 50 * n, whole_tokens=10) for n, each in enumerate(tokens))
        missing = replace(plan.reusing(()), layout=replace(plan.layout, spans=spans))
        assert missing.missing_texts == (("a whole text",) if stored else ())

    def test_planning_computes_nothing(self, engine: CacheClipEngine) -> None:
        engine.precompute(CHUNKS)
        runtime = engine.primary
        assert isinstance(runtime, FakeRuntime)
        encoded, entries = len(runtime.encoded), engine.store.stats().entries
        engine.plan(rag(CHUNKS), documents=[*CHUNKS, "A text that nobody stored so far."])
        assert len(runtime.encoded) == encoded and engine.store.stats().entries == entries

    def test_it_travels_also_in_plain_values(self, engine: CacheClipEngine) -> None:
        engine.precompute(CHUNKS)
        plan = engine.plan(rag(CHUNKS))
        again: Plan = pickle.loads(pickle.dumps(plan))
        assert again == plan and again.to_dict() == plan.to_dict()
        written = json.loads(json.dumps(plan.to_dict()))
        chunks = [piece for piece in written["pieces"] if piece["kind"] == "chunk"]
        assert [piece["reused"] for piece in chunks] == [True] * 3 and len({piece["key"] for piece in chunks}) == 3
        starts = [piece["start"] for piece in written["pieces"]]
        assert starts == sorted(starts) and written["pieces"][-1]["stop"] == written["prompt_tokens"]
        assert len(written["token_ids"]) == written["prompt_tokens"]


class TestWhyNothingIsReused:
    def test_nothing_to_reuse(self, engine: CacheClipEngine) -> None:
        assert engine.plan("Hello there, who is it?").fallback == "no stored chunk found in the prompt"
        plan = engine.plan(rag(CHUNKS), documents=CHUNKS)
        assert plan.fallback == "none of the prompt's 3 chunks is in the store" and not plan.reused
        engine.precompute(CHUNKS)
        plan = engine.plan(rag(CHUNKS), method="full")
        assert not plan.reused and plan.fallback is None, "it asks nobody"
        with pytest.raises(PromptTooLongError):
            engine.plan("word " * 5000)

    def test_a_missing_auxiliary_chunk_is_a_miss_for_methods_that_need_it(self, make: Any) -> None:
        make(auxiliary=None).precompute(CHUNKS)
        alone = make(auxiliary=None)
        alone.precompute(CHUNKS)
        assert len(alone.plan(rag(CHUNKS)).reused) == 3
        with pytest.raises(ConfigurationError, match="needs an auxiliary model"):
            alone.plan(rag(CHUNKS), method="cacheclip")

    def test_each_reason_has_its_own_number(self, tiny_models: dict[str, str], tmp_path: Path) -> None:
        """One chunk lacks the auxiliary's KV, two stand behind another context, and one is not stored at all."""

        def made(**options: Any) -> CacheClipEngine:
            given = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"], "method": "cacheclip"}
            return CacheClipEngine(**{**given, "store": str(tmp_path), "chunk_context": "passages", **options})

        texts = [*CHUNKS, "The fog signal was a bell until the steam horn came in 1888."]
        made(auxiliary=None, method="epic").precompute(texts[:1])
        made(chunk_context="prefix").precompute(texts[1:3])
        plan = made().plan(rag(texts), documents=texts)
        assert plan.fallback == (
            "none of the prompt's 4 chunks is in the store for these settings; 1 are stored for the primary model, but "
            f"not for the auxiliary model '{tiny_models['auxiliary']}', 2 are for another model, dtype, system prompt "
            "or chunk context"
        )

    def test_beyond_the_reuse_limit(self, make: Callable[..., CacheClipEngine]) -> None:
        engine = make()
        engine.precompute(CHUNKS)
        runtime, tokens = engine.primary, engine.plan(rag(CHUNKS)).layout.num_tokens
        runtime.reuse_tokens = tokens
        assert len(engine.plan(rag(CHUNKS)).reused) == 3, "as many tokens as the limit are reused"
        runtime.reuse_tokens = tokens - 1
        plan = engine.plan(rag(CHUNKS))
        runtime.reuse_tokens = runtime.context_tokens
        assert plan.obstructed and not plan.reused and f"above {tokens - 1}" in str(plan.fallback)


class TestObservers:
    class Seen(Observer):
        def __init__(self) -> None:
            self.plans: list[Plan] = []
            self.answers: list[ObservedAnswer] = []

        def on_plan(self, plan: Plan, sources: Any) -> None:
            self.plans.append(plan)

        def on_answer(self, answered: ObservedAnswer) -> None:
            self.answers.append(answered)

    def test_they_see_plans_and_answers(self, engine: CacheClipEngine) -> None:
        seen = self.Seen()
        engine.observers.append(seen)
        engine.precompute(CHUNKS)
        answer = engine.generate(rag(CHUNKS))
        assert [plan.reused for plan in seen.plans] == [engine.plan(rag(CHUNKS)).reused]
        [answered] = seen.answers
        assert answered.answer == answer and answered.plan is seen.plans[0]
        engine.prefill(rag(CHUNKS), method=engine.make_method())
        assert len(seen.plans) == 1 and len(seen.answers) == 1, "who evaluates does not ask them"

    class Refusing(Observer):
        def on_plan(self, plan: Plan, sources: Any) -> None:
            if plan.reused:
                raise ConfigurationError("not today")

    def test_one_may_refuse(self, engine: CacheClipEngine) -> None:
        engine.observers.append(self.Refusing())
        engine.precompute(CHUNKS)
        with pytest.raises(ConfigurationError, match="not today"):
            engine.generate(rag(CHUNKS))
        assert engine.generate(rag(CHUNKS), method="full").stats.method == "full"
