"""KV that was stored by a coarser codec than the model computes in never enters the prefix cache, which is exact."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.prompt.segments import Segment
from cacheclip_rag.runtime.prefill import Prefilled
from tests.conftest import rag_prompt
from tests.fusion.cases import EXACT, gap, reference_logits

ONE = SamplingParams(max_tokens=1)
BLOCK = 16
"""Tokens of a block of the prefix cache."""
Case = tuple[CacheClipEngine, list[Segment]]


@pytest.fixture(params=["a stored prefix", "a chunk at the very start"])
def opening(
    request: pytest.FixtureRequest,
    make: Callable[..., CacheClipEngine],
    tiny_models: dict[str, str],
    tmp_path: Path,
    chunks: list[str],
) -> Callable[[str], Case]:
    """An engine by codec, and a prompt that begins with what the store holds of it, and goes on with what it does not:
    with the shared prefix and text of the prompt's own, or (a model without a chat template has no shared prefix) with
    a chunk, which is exact there but for its codec."""

    def build(codec: str) -> Case:
        if request.param == "a stored prefix":
            engine = make(codec=codec, method="direct", system_prompt="Answer from these texts and nothing else.")
            engine.precompute(chunks)
            opening = "Here they are. Read them first, and read them with care, before you answer:\n\n"
            return engine, engine.segment(opening + rag_prompt(chunks))
        folder = tmp_path / codec
        shutil.copytree(tiny_models["llama"], folder)
        (folder / "chat_template.jinja").unlink()
        engine = make(codec=codec, method="direct", primary=str(folder))
        engine.precompute(chunks)
        return engine, engine.segment(rag_prompt(chunks))

    return build


def after_an_answer(case: Case) -> Prefilled:
    """Plain prefill of the prompt behind whatever its first answer, by reuse, left in the prefix cache."""
    engine, prompt = case
    stats = engine.generate(prompt, ONE).stats
    assert stats.hits == 4 and stats.fallback is None and stats.cached_prefix_tokens == 0
    return engine.prefill(prompt, ONE, method=engine.make_method("prefix"))


def away(found: Prefilled, tiny_models: dict[str, str]) -> float:
    """From plain transformers."""
    return gap(found.logits, reference_logits(tiny_models["llama"], found.layout.ids))


def test_nothing_coarse_is_kept(opening: Callable[[str], Case], tiny_models: dict[str, str]) -> None:
    found = after_an_answer(opening("bfloat16"))
    assert found.stats.cached_prefix_tokens == 0
    assert away(found, tiny_models) < EXACT


def test_what_is_lossless_is_kept(opening: Callable[[str], Case], tiny_models: dict[str, str]) -> None:
    found = after_an_answer(opening("float32"))
    assert found.stats.cached_prefix_tokens >= 2 * BLOCK
    assert away(found, tiny_models) < EXACT


def test_twin_kept_it_would_show_in_the_logits(opening: Callable[[str], Case], tiny_models: dict[str, str]) -> None:
    """Coarse KV put where the prefix cache finds it, as if it had been computed."""
    engine, prompt = opening("bfloat16")
    fused = engine.prefill(prompt, ONE, method=engine.make_method("direct"))
    engine.prefixes.insert(fused.layout.ids[: 2 * BLOCK].tolist(), fused.cache)
    found = engine.prefill(prompt, ONE, method=engine.make_method("prefix"))
    assert found.stats.cached_prefix_tokens == 2 * BLOCK and away(found, tiny_models) > 10 * EXACT
