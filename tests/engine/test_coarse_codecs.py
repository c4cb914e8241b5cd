"""KV that was stored by a coarser codec than the model computes in never enters the prefix cache, which is exact."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cacheclip_rag import CacheClipEngine, SamplingParams, Segment
from cacheclip_rag.measuring import Prefilled
from cacheclip_rag.store import decode_frame, encode_frame
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
            engine = make(
                stored=chunks, codec=codec, method="direct", system_prompt="Answer from these texts and nothing else."
            )
            opening = "Here they are. Read them first, and read them with care, before you answer:\n\n"
            return engine, engine.segment(opening + rag_prompt(chunks))
        folder = tmp_path / codec
        shutil.copytree(tiny_models["llama"], folder)
        (folder / "chat_template.jinja").unlink()
        engine = make(stored=chunks, codec=codec, method="direct", primary=str(folder))
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


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_nothing_coarse_is_kept(opening: Callable[[str], Case], tiny_models: dict[str, str], codec: str) -> None:
    found = after_an_answer(opening(codec))
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


class TestInt8:
    def test_what_the_engine_knows_of_it(self, make: Callable[..., CacheClipEngine], chunks: list[str]) -> None:
        """Lossy and smaller; the shared prefix, which every prompt reads, is not quantised."""
        engine, exact = (make(codec=codec, method="direct", system_prompt="Be brief.") for codec in ("int8", "float32"))
        for each in (engine, exact):
            each.precompute(chunks[:1])
        caches, plain = engine.parts.models.caches_after_prefix, exact.parts.models.caches_after_prefix
        assert caches.is_lossy and not plain.is_lossy
        assert torch.equal(caches.prefix.kv, plain.prefix.kv) and caches.prefix.kv.shape[3] > 0
        stored, whole = caches.read(chunks[0]), plain.read(chunks[0])
        assert stored is not None and whole is not None and (stored.codec, whole.codec) == ("int8", "float32")
        key = caches.key(chunks[0])
        expected = decode_frame(encode_frame(whole.tensor(), "int8", key, namespace="default"), key).tensor()
        assert torch.equal(stored.tensor(), expected) and gap(expected, whole.tensor()) > 0
        assert caches.stored_bytes(500) < 0.5 * plain.stored_bytes(500)

    def test_is_not_good_enough_for_an_engine_with_a_finer_codec(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], tmp_path: Path
    ) -> None:
        """It computes the chunk again, and stores it finer; the coarser engine is content with that."""
        coarse, fine, clean = (
            make(codec=codec, method="direct", store=store, auxiliary=None, prefix_cache_bytes=0)
            for codec, store in (("int8", str(tmp_path)), ("float32", str(tmp_path)), ("float32", None))
        )
        assert coarse.precompute(chunks) == 4
        assert not fine.is_stored(chunks[0]) and fine.parts.models.caches_after_prefix.read(chunks[0]) is None
        answer = fine.generate(rag_prompt(chunks), ONE, documents=chunks)
        assert (answer.stats.hits, answer.stats.misses) == (0, 4)
        assert fine.is_stored(chunks[0]) and fine.precompute(chunks) == 0
        assert clean.precompute(chunks) == 4
        one, other = (
            engine.prefill(rag_prompt(chunks), ONE, method=engine.make_method("direct")) for engine in (fine, clean)
        )
        assert one.stats.hits == 4 and torch.equal(one.logits, other.logits)
        assert coarse.is_stored(chunks[0]) and coarse.precompute(chunks) == 0
