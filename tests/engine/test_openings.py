"""How prompts begin: shared prefix, system prompt, templates with a date, no template at all."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheclip_rag import CacheClipEngine, Chunk, Fresh
from cacheclip_rag.methods import preset
from cacheclip_rag.methods.full import Full
from tests.conftest import add_bos
from tests.engine.asking import SHORT, check_sums, logits, rag


class TestPrefix:
    def test_is_reused_when_the_prompt_opens_with_it(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        stats = engine.generate(rag(chunks), SHORT).stats
        opening = "<|im_start|>system\nYou answer questions.<|im_end|>\n<|im_start|>user\n"
        assert stats.prefix_tokens == len(engine.primary.tokenize(opening, control=True))

    def test_is_not_when_a_system_message_is_given(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": rag(chunks)}]
        answer = engine.generate(messages, SHORT)
        check_sums(answer)
        common = os.path.commonprefix(
            [list(engine.parts.models.caches_after_prefix.prefix_ids), list(engine.plan(messages).layout.token_ids)]
        )
        assert answer.stats.prefix_tokens == len(common) < len(engine.parts.models.caches_after_prefix.prefix_ids)
        assert answer.stats.hits == 4 and answer.stats.exact_tokens == 0
        exact = engine.generate(messages, SHORT, recompute_ratio=1.0)
        assert exact.token_ids == engine.generate(messages, SHORT, method="full").token_ids

    @pytest.mark.parametrize("method", ["direct", "cacheclip"])
    def test_last_segment_is_an_exact_chunk(self, engine: CacheClipEngine, chunks: list[str], method: str) -> None:
        """Nothing needs computing but the last token, whose logits are the answer's first: as by full prefill."""
        engine.precompute(chunks[:1])
        opening = "<|im_start|>system\nYou answer questions.<|im_end|>\n<|im_start|>user\n"
        segments = [Fresh(opening, control=True), Chunk(chunks[0])]
        answer = engine.generate(segments, SHORT, method=method)
        check_sums(answer)
        assert (answer.stats.fresh_tokens, answer.stats.recomputed_tokens, answer.stats.hits) == (0, 1, 1)
        assert answer.token_ids == engine.generate(segments, SHORT, method="full").token_ids

    def test_prompt_that_is_one_chunk_and_nothing_else(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        segments = [Chunk(chunks[0])]
        exact = engine.generate(segments, SHORT, recompute_ratio=1.0)
        assert exact.token_ids == engine.generate(segments, SHORT, method="full").token_ids
        check_sums(engine.generate(segments, SHORT))

    def test_prompt_that_is_the_prefix_and_nothing_else(self, engine: CacheClipEngine) -> None:
        opening = "<|im_start|>system\nYou answer questions.<|im_end|>\n<|im_start|>user\n"
        check_sums(engine.generate([Fresh(opening, control=True)], SHORT))


class TestSystemPrompt:
    def test_a_stored_text_inside_it_does_not_change_the_prefix(
        self, make: Callable[..., CacheClipEngine], chunks: list[str], tmp_path: Path
    ) -> None:
        options = {"store": str(tmp_path), "system_prompt": f"You are a guide. {chunks[3]} Be brief."}
        first = make(**options)
        first.precompute(chunks)
        again = make(**options)  # as after a restart: the store holds the text by now
        assert again.parts.models.caches_after_prefix.prefix_ids == first.parts.models.caches_after_prefix.prefix_ids
        stats = again.generate(rag(chunks[:2]), SHORT).stats
        assert (stats.hits, stats.misses) == (2, 0) and stats.prefix_tokens > 0

    def test_comes_before_messages_that_hold_none(
        self, make: Callable[..., CacheClipEngine], chunks: list[str]
    ) -> None:
        engine = make(system_prompt="Talk like a pirate.")
        engine.precompute(chunks)
        messages = [{"role": "user", "content": rag(chunks)}]
        assert engine.segment(messages) == engine.segment(rag(chunks))
        assert engine.generate(messages, SHORT).stats.prefix_tokens > 0
        own = [{"role": "system", "content": "Be brief."}, *messages]
        assert "pirate" not in "".join(segment.text for segment in engine.segment(own))


class TestTemplateWithADate:
    def test_chunks_outlive_the_day(
        self, make: Callable[..., CacheClipEngine], tiny_models: dict[str, str], chunks: list[str], tmp_path: Path
    ) -> None:
        """The prefix states a fixed date, so its chunks are found tomorrow; the prompt states today's."""
        folder = tmp_path / "dated"
        shutil.copytree(tiny_models["llama"], folder)
        dated = (folder / "chat_template.jinja").read_text().replace("You answer questions.", "It is {{ DATE }}.")
        (folder / "chat_template.jinja").write_text(dated.replace("DATE", "strftime_now('%d %b %Y')"))
        engine = make(primary=str(folder))
        engine.precompute(chunks)
        caches = engine.parts.models.caches_after_prefix
        assert "01 Jan 2025" in engine.primary.decode_ids(caches.prefix_ids)
        fused = logits(engine, rag(chunks), preset("cacheclip").at(1.0))
        assert time.strftime("%Y") in engine.primary.decode_ids(fused.layout.ids.tolist())
        assert 0 < fused.stats.prefix_tokens < len(caches.prefix_ids), "up to the date"
        assert (fused.stats.hits, fused.stats.exact_tokens) == (4, 0)
        assert (fused.logits - logits(engine, rag(chunks), Full()).logits).abs().max() < 1e-4


class TestModelsWithoutATemplate:
    """Base models: the prompt opens with what their tokenizer puts before any text."""

    @pytest.fixture
    def build(self, tmp_path: Path, tiny_models: dict[str, str]) -> Callable[[bool], str]:
        def build(with_bos: bool) -> str:
            folder = tmp_path / f"base-{with_bos}"
            shutil.copytree(tiny_models["llama"], folder)
            (folder / "chat_template.jinja").unlink()
            if with_bos:
                add_bos(folder)
            return str(folder)

        return build

    def test_bos_comes_first_and_is_the_shared_prefix(
        self, make: Callable[..., CacheClipEngine], build: Callable[[bool], str], chunks: list[str]
    ) -> None:
        engine = make(primary=build(True))
        engine.precompute(chunks)
        fused = logits(engine, rag(chunks), preset("cacheclip").at(1.0))
        tokenizer = engine.primary.tokenizer
        assert fused.layout.ids[0] == 0 and tokenizer("x")["input_ids"][0] == 0
        assert fused.stats.prefix_tokens == 1 and fused.stats.hits == 4
        assert (fused.logits - logits(engine, rag(chunks), Full()).logits).abs().max() < 1e-4

    @pytest.mark.parametrize("with_bos", [True, False])
    def test_first_chunk_is_exact_and_costs_nothing(
        self, make: Callable[..., CacheClipEngine], build: Callable[[bool], str], chunks: list[str], with_bos: bool
    ) -> None:
        engine = make(primary=build(with_bos))
        engine.precompute(chunks)
        for ratio in (0.0, 0.5, 1.0):
            one = logits(engine, rag(chunks[:1]), preset("cacheclip").at(ratio))
            assert one.stats.recomputed_tokens == 0 and one.stats.exact_tokens == one.stats.chunk_tokens > 0
            assert (one.logits - logits(engine, rag(chunks[:1]), Full()).logits).abs().max() < 1e-4
