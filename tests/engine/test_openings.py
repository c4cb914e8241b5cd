"""How prompts begin: shared prefix, system prompt, templates with a date, no template at all."""

import os
import shutil
import time
from pathlib import Path

import pytest

from cacheclip_rag import CacheClipEngine, Chunk, Fresh
from cacheclip_rag.methods import preset
from cacheclip_rag.methods.full import Full
from tests.conftest import Make, Models, add_bos
from tests.engine.asking import SHORT, check_sums, logits, rag

OPENING = "<|im_start|>system\nYou answer questions.<|im_end|>\n<|im_start|>user\n"


class TestPrefix:
    def test_is_reused_when_the_prompt_opens_with_it(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        """And not behind a system message that is given."""
        engine.precompute(chunks)
        stats = engine.generate(rag(chunks), SHORT).stats
        assert stats.prefix_tokens == len(engine.primary.tokenize(OPENING, control=True))
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": rag(chunks)}]
        answer, prefix = engine.generate(messages, SHORT), engine.parts.models.caches_after_prefix.prefix_ids
        check_sums(answer)
        common = os.path.commonprefix([list(prefix), list(engine.plan(messages).layout.token_ids)])
        assert answer.stats.prefix_tokens == len(common) < len(prefix)
        assert answer.stats.hits == 4 and answer.stats.exact_tokens == 0
        exact = engine.generate(messages, SHORT, recompute_ratio=1.0)
        assert exact.token_ids == engine.generate(messages, SHORT, method="full").token_ids

    @pytest.mark.parametrize("method", ["direct", "cacheclip"])
    def test_last_segment_is_an_exact_chunk(self, engine: CacheClipEngine, chunks: list[str], method: str) -> None:
        """Nothing needs computing but the last token, whose logits are the answer's first: as by full prefill."""
        engine.precompute(chunks[:1])
        segments = [Fresh(OPENING, control=True), Chunk(chunks[0])]
        answer = engine.generate(segments, SHORT, method=method)
        check_sums(answer)
        assert (answer.stats.fresh_tokens, answer.stats.recomputed_tokens, answer.stats.hits) == (0, 1, 1)
        assert answer.token_ids == engine.generate(segments, SHORT, method="full").token_ids

    def test_prompts_that_are_one_chunk_or_the_prefix_and_nothing_else(
        self, engine: CacheClipEngine, chunks: list[str]
    ) -> None:
        engine.precompute(chunks)
        segments = [Chunk(chunks[0])]
        exact = engine.generate(segments, SHORT, recompute_ratio=1.0)
        assert exact.token_ids == engine.generate(segments, SHORT, method="full").token_ids
        for prompt in (segments, [Fresh(OPENING, control=True)]):
            check_sums(engine.generate(prompt, SHORT))


class TestSystemPrompt:
    def test_a_stored_text_inside_it_does_not_change_the_prefix(
        self, make: Make, chunks: list[str], tmp_path: Path
    ) -> None:
        options = {"store": str(tmp_path), "system_prompt": f"You are a guide. {chunks[3]} Be brief."}
        first = make(stored=chunks, **options)
        again = make(**options)  # as after a restart: the store holds the text by now
        assert again.parts.models.caches_after_prefix.prefix_ids == first.parts.models.caches_after_prefix.prefix_ids
        stats = again.generate(rag(chunks[:2]), SHORT).stats
        assert (stats.hits, stats.misses) == (2, 0) and stats.prefix_tokens > 0

    def test_comes_before_messages_that_hold_none(self, make: Make, chunks: list[str]) -> None:
        engine = make(stored=chunks, system_prompt="Talk like a pirate.")
        messages = [{"role": "user", "content": rag(chunks)}]
        assert engine.segment(messages) == engine.segment(rag(chunks))
        assert engine.generate(messages, SHORT).stats.prefix_tokens > 0
        own = [{"role": "system", "content": "Be brief."}, *messages]
        assert "pirate" not in "".join(segment.text for segment in engine.segment(own))


def test_chunks_outlive_the_day_of_a_template_with_a_date(
    make: Make, tiny_models: Models, chunks: list[str], tmp_path: Path
) -> None:
    """The prefix states a fixed date, so its chunks are found tomorrow; the prompt states today's."""
    folder = shutil.copytree(tiny_models["llama"], tmp_path / "dated")
    dated = (folder / "chat_template.jinja").read_text().replace("You answer questions.", "It is {{ DATE }}.")
    (folder / "chat_template.jinja").write_text(dated.replace("DATE", "strftime_now('%d %b %Y')"))
    engine = make(stored=chunks, primary=str(folder))
    caches = engine.parts.models.caches_after_prefix
    assert "01 Jan 2025" in engine.primary.decode_ids(caches.prefix_ids)
    fused = logits(engine, rag(chunks), preset("cacheclip").at(1.0))
    assert time.strftime("%Y") in engine.primary.decode_ids(fused.layout.ids.tolist())
    assert 0 < fused.stats.prefix_tokens < len(caches.prefix_ids), "up to the date"
    assert (fused.stats.hits, fused.stats.exact_tokens) == (4, 0)
    assert (fused.logits - logits(engine, rag(chunks), Full()).logits).abs().max() < 1e-4


@pytest.mark.parametrize("with_bos", [True, False])
def test_models_without_a_template(
    make: Make, tmp_path: Path, tiny_models: Models, chunks: list[str], with_bos: bool
) -> None:
    """Base models: the prompt opens with what their tokenizer puts before any text, and the first chunk is exact there
    and costs nothing."""
    folder = shutil.copytree(tiny_models["llama"], tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    if with_bos:
        add_bos(folder)
    engine = make(stored=chunks, primary=str(folder))
    fused = logits(engine, rag(chunks), preset("cacheclip").at(1.0))
    if with_bos:
        assert fused.layout.ids[0] == 0 and engine.primary.tokenizer("x")["input_ids"][0] == 0
    assert fused.stats.prefix_tokens == with_bos and fused.stats.hits == 4
    assert (fused.logits - logits(engine, rag(chunks), Full()).logits).abs().max() < 1e-4
    full = logits(engine, rag(chunks[:1]), Full()).logits
    for ratio in (0.0, 0.5, 1.0):
        one = logits(engine, rag(chunks[:1]), preset("cacheclip").at(ratio))
        assert one.stats.recomputed_tokens == 0 and one.stats.exact_tokens == one.stats.chunk_tokens > 0
        assert (one.logits - full).abs().max() < 1e-4
