"""Methods with chunk caches of their own: checkpoints that read chunks apart, and caches captured from prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, Chunk, SamplingParams
from cacheclip_rag.chunks.context import ChunkContext
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.fusion.recompute import choose_rows
from cacheclip_rag.methods import preset
from cacheclip_rag.methods.direct import Direct
from tests.conftest import CHUNKS, TINY_MODELS, build_model, make_tokenizer
from tests.fusion.cases import BROKEN, EXACT, gap, make_engine, reference_logits, reference_model, scatter
from tests.methods.spying import made

models = pytest.mark.parametrize("name", ["llama", "qwen3", "smollm3", "mixtral", "gemma2", "gemma3", "gpt-oss"])
"""The last three with sliding windows; soft caps and sinks among them."""
BLOCK = made("block", tuned=True)
PROMPT = "\n\n".join(CHUNKS[:3]) + "\n\nQuestion: What is the magic number?"


@pytest.fixture
def engine(name: str, tiny_models: dict[str, str]) -> CacheClipEngine:
    return make_engine(tiny_models[name], tiny_models["auxiliary"])


@torch.inference_mode()
def masked_reference(folder: str, layout: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
    """One forward pass in which a chunk's token sees its own chunk alone, and any other token everything before it."""
    num_tokens = layout.num_tokens
    block = torch.zeros(num_tokens, dtype=torch.int64)
    for number, span in enumerate(layout.chunks, 1):
        block[span.start : span.stop] = number
    slots = torch.arange(num_tokens)
    seen = slots[None, :] <= slots[:, None]
    seen &= (block[:, None] == 0) | (block[:, None] == block[None, :])
    positions = slots if positions is None else positions
    model = reference_model(folder)
    masks = {"full_attention": _additive(seen)}
    if window := getattr(model.config, "sliding_window", None):
        masks["sliding_attention"] = _additive(seen & (positions[None, :] > positions[:, None] - window))
    output = model(
        input_ids=layout.ids[None],
        position_ids=positions[None],
        attention_mask=masks if window else masks["full_attention"],
        use_cache=False,
    )
    return output.logits[0, -1]


def _additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


class TestBlockAttention:
    @models
    def test_equals_a_forward_pass_under_the_block_mask(self, engine: CacheClipEngine) -> None:
        method = BLOCK
        engine.precompute(CHUNKS[:3], method=method)
        result = engine.prefill(PROMPT, method=method)
        assert result.stats.hits == 3 and result.stats.exact_tokens == 0
        expected = masked_reference(engine.config.primary, result.layout)
        assert gap(result.logits, expected) < EXACT
        assert gap(engine.prefill(PROMPT, method=preset("full")).logits, expected) > BROKEN

    @models
    def test_reordered_is_direct_reuse_of_isolated_chunks(self, engine: CacheClipEngine) -> None:
        class Isolated(Direct):
            """Direct reuse as it is, of the chunk caches that ``block`` uses."""

            context = ChunkContext(isolated=True)

        method = BLOCK
        engine.precompute(CHUNKS[:3], method=method)
        result, direct = engine.prefill(PROMPT, method=method), engine.prefill(PROMPT, method=Isolated())
        assert (direct.stats.hits, direct.stats.misses) == (3, 0)
        assert gap(result.logits, direct.logits) == 0.0
        runtime, layout = engine.parts.prefix_caches.runtime, result.layout
        cache = runtime.new_cache(layout.num_tokens)
        runtime.fill(cache, engine.parts.prefix_caches.prefix, slot=0, position=0)
        for span in layout.chunks:
            runtime.fill(cache, runtime.encode(span.tokens.ids), slot=span.start, position=span.start)
        _, logits = scatter(engine.config.primary, cache, layout.ids, choose_rows(layout, layout.chunks, []))
        assert gap(result.logits, logits) < EXACT
        engine.precompute(CHUNKS[:3])
        behind_prefix = engine.prefill(PROMPT, method=preset("direct"))
        assert gap(result.logits, behind_prefix.logits) > BROKEN, "what chunks are encoded behind must show"

    @models
    def test_composite_positions(self, engine: CacheClipEngine) -> None:
        method = made("block", tuned=True, chunk_positions="composite")
        engine.precompute(CHUNKS[:3], method=method)
        result = engine.prefill(PROMPT, method=method)
        positions = torch.arange(result.layout.num_tokens)
        for span in result.layout.chunks:
            positions[span.start : span.stop] = torch.arange(len(span.tokens))
        assert gap(result.logits, masked_reference(engine.config.primary, result.layout, positions)) < EXACT

    @pytest.mark.parametrize("name", ["llama"])
    def test_its_chunk_caches_are_its_own(self, engine: CacheClipEngine) -> None:
        method = BLOCK
        engine.precompute(CHUNKS[:3])
        assert engine.prefill(PROMPT, method=method).stats.misses == 3
        answer = engine.generate(PROMPT, SamplingParams(max_tokens=2), method=method)
        assert answer.stats.fallback is not None
        again = engine.generate(PROMPT, SamplingParams(max_tokens=2), method=method)
        assert again.stats.hits == 3, "what was missing was stored as the method needs it"
        assert engine.generate(PROMPT, SamplingParams(max_tokens=2), method="direct").stats.hits == 3
        assert engine.release(CHUNKS[:3]) == 3
        for each in (BLOCK, preset("direct")):
            stats = engine.prefill(PROMPT, documents=CHUNKS[:3], method=each).stats
            assert (stats.hits, stats.misses) == (0, 3)

    @pytest.mark.parametrize("name", ["llama"])
    def test_wrapped_chunks(self, engine: CacheClipEngine) -> None:
        method = made("turborag", tuned=True, before="<|im_start|>", after="<|im_end|>")
        engine.precompute(CHUNKS[:3], method=method)
        result = engine.prefill(PROMPT, method=method)
        start, end = (engine.primary.tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>"))
        for span in result.layout.chunks:
            assert (span.tokens.ids[0], span.tokens.ids[-1]) == (start, end)
            assert len(span.tokens.ids) == len(span.tokens.offsets)
        assert gap(result.logits, masked_reference(engine.config.primary, result.layout)) < EXACT

    @pytest.mark.parametrize("name", ["llama"])
    def test_other_checkpoints_are_warned_of(self, engine: CacheClipEngine, caplog: pytest.LogCaptureFixture) -> None:
        from cacheclip_rag.methods.trained import warn_untuned

        warn_untuned.cache_clear()
        engine.precompute(CHUNKS[:3], method="block")
        for _ in range(2):
            engine.prefill(PROMPT, method=preset("block"))
        assert caplog.text.count("needs a checkpoint trained to read chunks separately") == 1

    @pytest.mark.parametrize("name", ["llama"])
    def test_as_the_engines_method(self, engine: CacheClipEngine, tiny_models: dict[str, str]) -> None:
        own = make_engine(tiny_models["llama"], tiny_models["auxiliary"], method=BLOCK)
        own.precompute(CHUNKS[:3])
        assert all(own.is_stored(text) for text in CHUNKS[:3])
        assert own.generate(PROMPT, SamplingParams(max_tokens=1)).stats.hits == 3


class TestKVLink:
    METHOD = made("link", tuned=True, n_link=1, first_id=0, start_id=-1, end_id=2, max_chunks=2)

    @models
    def test_equals_a_forward_pass_under_its_mask(self, engine: CacheClipEngine) -> None:
        texts = CHUNKS[:2]
        prompt = "\n\n".join(texts) + "\n\nQuestion: What is the magic number?"
        method = self.METHOD
        engine.precompute(texts, method=method)
        result = engine.prefill(prompt, method=method)
        first, second = result.layout.chunks
        assert int(result.layout.ids[first.stop]) == 0 and int(result.layout.ids[second.stop]) == 1
        assert int(result.layout.ids[second.stop + 1]) == 2, "the token behind the last chunk"
        assert gap(result.logits, masked_reference(engine.config.primary, result.layout)) < EXACT

    @pytest.mark.parametrize("n_link", [1, 3])
    @models
    def test_a_token_before_the_chunks_and_several_behind_each(
        self, name: str, n_link: int, tiny_models: dict[str, str], tmp_path: Path
    ) -> None:
        names = [f"<|link_{number}|>" for number in range(3 * n_link + 2)]
        folder = build_model(tmp_path / "model", TINY_MODELS[name], vocab_size=400 + len(names))
        tokenizer = make_tokenizer(400)
        tokenizer.add_special_tokens({"additional_special_tokens": names})
        tokenizer.save_pretrained(folder)
        start, end, *links = tokenizer.convert_tokens_to_ids(names)
        engine = make_engine(str(folder), tiny_models["auxiliary"])
        ids_of = {"first_id": links[0], "start_id": start, "end_id": end}
        method = made("link", tuned=True, n_link=n_link, max_chunks=3, **ids_of)
        engine.precompute(CHUNKS[:3], method=method)
        result = engine.prefill(PROMPT, method=method)
        ids, spans = result.layout.ids.tolist(), result.layout.chunks
        assert result.stats.hits == 3 and ids[spans[0].start - 1] == start and ids.count(start) == 1
        for number, span in enumerate(spans):
            assert ids[span.stop : span.stop + n_link] == links[n_link * number : n_link * (number + 1)]
        assert ids[spans[-1].stop + n_link] == end and ids.count(end) == 1
        expected = masked_reference(str(folder), result.layout)
        assert gap(result.logits, expected) < EXACT
        assert gap(reference_logits(str(folder), result.layout.ids), expected) > BROKEN, "the mask must show"

    @pytest.mark.parametrize("name", ["llama"])
    def test_without_link_tokens_it_is_block(self, engine: CacheClipEngine) -> None:
        link = made("link", tuned=True, n_link=0, start_id=-1, end_id=-1)
        engine.precompute(CHUNKS[:3], method=link)
        block = engine.prefill(PROMPT, method=BLOCK)
        assert gap(engine.prefill(PROMPT, method=link).logits, block.logits) == 0.0

    @pytest.mark.parametrize("name", ["llama"])
    def test_a_model_without_its_tokens(self, engine: CacheClipEngine) -> None:
        engine.precompute(CHUNKS[:3], method="link")
        with pytest.raises(ConfigurationError, match="not special tokens of model"):
            engine.prefill(PROMPT, method=made("link", tuned=True))
        with pytest.raises(ConfigurationError, match="not special tokens of model"):
            engine.prefill(PROMPT, method=made("link", tuned=True, first_id=40, start_id=-1, end_id=-1))

    def test_every_place_has_ids_of_its_own(self) -> None:
        """The released ids: ``128011 + n_link * j + o`` for up to 40 chunks, never those before and behind them."""
        from types import SimpleNamespace

        def tokenize(text: str, control: bool) -> Any:
            return SimpleNamespace(ids=tuple(int(part) for part in text.strip("<>").split("><")))

        def names(ids: list[int]) -> list[str]:
            return [f"<{number}>" for number in ids]

        tokenizer = SimpleNamespace(added_tokens_decoder=range(128000, 128256), convert_ids_to_tokens=names)
        runtime: Any = SimpleNamespace(tokenizer=tokenizer, tokenize=tokenize, name="stub")
        method = made("link", tuned=True)
        arranged = method.arrange([Chunk(str(n)) for n in range(40)], runtime)
        texts = [s.text for s in arranged if not isinstance(s, Chunk)]
        assert (texts[0], texts[-1]) == ("<128254>", "<128255>")
        assert texts[40] == "".join(f"<{128011 + 5 * 39 + o}>" for o in range(5))
        assert len(set(texts)) == 42
        with pytest.raises(ConfigurationError, match="tokens for 40 chunks, and the prompt has 41"):
            method.arrange([Chunk(str(n)) for n in range(41)], runtime)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"max_chunks": 49}, r"128011 to 128255, must not hold start_id=128254"),
            ({"n_link": 10}, r"must not hold .* or end_id=128255"),
            ({"max_chunks": 0}, "1 or more"),
            ({"first_id": True}, "first_id"),
        ],
    )
    def test_ids_that_would_collide(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            made("link", **changes)
        assert made("link", n_link=0, max_chunks=1000, first_id=128254), "no link tokens, nothing to collide"


class TestCacheCraft:
    @models
    def test_same_chunks_in_the_same_order_are_exact(self, engine: CacheClipEngine) -> None:
        engine.library.index.add(CHUNKS)
        method = preset("cachecraft")
        first = engine.prefill(PROMPT, method=method)
        expected = reference_logits(engine.config.primary, first.layout.ids)
        assert first.stats.method == "full" and "captured" in str(first.stats.fallback)
        assert gap(first.logits, expected) < EXACT
        again = engine.prefill(PROMPT, method=method)
        assert (again.stats.method, again.stats.hits, again.stats.recomputed_tokens) == ("cachecraft", 3, 0)
        assert gap(again.logits, expected) < EXACT

    @models
    def test_elsewhere_it_recomputes_what_it_owed(self, engine: CacheClipEngine) -> None:
        engine.library.index.add(CHUNKS)
        engine.prefill(PROMPT, method=preset("cachecraft"))
        other = "\n\n".join(CHUNKS[n] for n in (2, 0, 1)) + "\n\nQuestion: What is the magic number?"
        result = engine.prefill(other, method=preset("cachecraft"))
        assert 0 < result.stats.recomputed_tokens < result.stats.chunk_tokens
        assert result.stats.exact_tokens == 0, "a captured chunk is not exact by its place"
        assert result.stats.charged_ratio == result.stats.effective_ratio
        everything = engine.prefill(other, method=made("cachecraft", alpha=100))
        assert everything.stats.recomputed_tokens > result.stats.recomputed_tokens
        nothing = engine.prefill(other, method=made("cachecraft", alpha=0))
        assert nothing.stats.recomputed_tokens == 0
        expected = reference_logits(engine.config.primary, result.layout.ids)
        assert gap(nothing.logits, expected) > BROKEN
        if result.layout.chunks[0].start == result.layout.num_prefix:
            assert gap(everything.logits, expected) < gap(nothing.logits, expected)

    @pytest.mark.parametrize("name", ["llama"])
    def test_a_chunk_never_seen_makes_a_plain_prefill(self, engine: CacheClipEngine) -> None:
        engine.library.index.add(CHUNKS)
        engine.prefill(PROMPT, method=preset("cachecraft"))
        longer = "\n\n".join(CHUNKS) + "\n\nQuestion: What is the magic number?"
        first = engine.generate(longer, SamplingParams(max_tokens=2), method="cachecraft")
        assert first.stats.method == "full" and first.stats.charged_ratio == 1.0
        assert engine.generate(longer, SamplingParams(max_tokens=2), method="cachecraft").stats.hits == 4
        engine.release([CHUNKS[3]])
        engine.library.index.add([CHUNKS[3]])
        assert engine.generate(longer, SamplingParams(max_tokens=2), method="cachecraft").stats.method == "full"

    @pytest.mark.parametrize("name", ["llama"])
    def test_other_text_before_the_chunks_is_no_exact_repetition(self, engine: CacheClipEngine) -> None:
        engine.library.index.add(CHUNKS)
        opened = "Read with care.\n\n" + PROMPT
        for prompt in (PROMPT, opened):
            engine.prefill(prompt, method=preset("cachecraft"))
        again = engine.prefill(opened, method=preset("cachecraft"))
        expected = reference_logits(engine.config.primary, again.layout.ids)
        assert again.stats.recomputed_tokens == 0
        assert gap(again.logits, expected) > BROKEN, "captured behind other text"

    @models
    def test_a_chunk_twice_in_a_prompt_is_two_captures(self, engine: CacheClipEngine) -> None:
        engine.library.index.add(CHUNKS)
        prompt = "\n\n".join(CHUNKS[n] for n in (0, 1, 0)) + "\n\nQuestion: What is the magic number?"
        first = engine.prefill(prompt, method=preset("cachecraft"))
        again = engine.prefill(prompt, method=preset("cachecraft"))
        assert again.stats.hits == 3 and again.stats.recomputed_tokens == 0
        assert gap(again.logits, reference_logits(engine.config.primary, first.layout.ids)) < EXACT

    def test_alpha(self) -> None:
        with pytest.raises(ConfigurationError, match="alpha must be a number"):
            made("cachecraft", alpha=-1)


@pytest.mark.parametrize("name", ["llama"])
def test_segments_given_by_hand(engine: CacheClipEngine) -> None:
    """A prompt of segments is arranged like any other."""
    from cacheclip_rag import Fresh

    method = TestKVLink.METHOD
    engine.precompute(CHUNKS[:1], method=method)
    result = engine.prefill([Fresh("Read. "), Chunk(CHUNKS[0]), Fresh(" What?")], method=method)
    assert result.stats.hits == 1 and int(result.layout.ids[result.layout.chunks[0].stop]) == 0
