"""What the engine answers, at once and streamed, and what it says about it."""

import pytest
import torch

from cacheclip_rag import CacheClipEngine, PromptTooLongError, SamplingParams
from cacheclip_rag.methods import PRESET_NAMES, preset
from tests.conftest import SENTENCES, Make, Patch, spied
from tests.engine.asking import SHORT, check_sums, logits, rag


class TestStats:
    @pytest.mark.parametrize("ratio", [0.0, 0.1, 0.2, 0.37, 0.5, 1.0])
    def test_effective_ratio_is_the_nominal_to_a_token(self, make: Make, chunks: list[str], ratio: float) -> None:
        engine = make(stored=chunks)
        answer = engine.generate(rag(chunks), SHORT, recompute_ratio=ratio)
        check_sums(answer)
        stats = answer.stats
        assert stats.nominal_ratio == ratio and stats.charged_ratio == stats.effective_ratio
        assert (stats.method, stats.fallback, stats.hits, stats.misses) == ("cacheclip", None, len(chunks), 0)
        assert stats.exact_tokens == len(engine.primary.tokenize(chunks[0]))
        if ratio == 1.0:
            assert stats.recomputed_tokens == stats.chunk_tokens - stats.exact_tokens
            assert stats.effective_ratio < 1.0 == stats.effective_ratio_of_stale
        else:
            assert abs(stats.recomputed_tokens - ratio * stats.chunk_tokens) <= 1
            assert abs(stats.effective_ratio - ratio) <= 1 / stats.chunk_tokens


class TestStreaming:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("method", ["full", "direct", "cacheclip"])
    def test_joined_it_is_the_whole_text(self, engine: CacheClipEngine, chunks: list[str], method: str) -> None:
        engine.precompute(chunks)
        params = SamplingParams(max_tokens=30)
        whole = engine.generate(rag(chunks), params, method=method)
        events = list(engine.stream(rag(chunks), params, method=method))
        assert "".join(e.text for e in events) == whole.text
        assert [e.answer is not None for e in events] == [False] * (len(events) - 1) + [True]
        last = events[-1].answer
        assert last is not None and (last.text, last.token_ids) == (whole.text, whole.token_ids)
        assert len(events) > 2

    def test_end_of_turn(self, engine: CacheClipEngine, monkeypatch: Patch) -> None:
        """The ending token is counted, and not a part of the text."""
        whole = engine.generate("Hello", SamplingParams(max_tokens=30))
        assert whole.finish_reason == "length"
        last = whole.token_ids[7]
        monkeypatch.setattr(engine.primary, "eos_ids", frozenset([last]))
        answer = engine.generate("Hello", SamplingParams(max_tokens=30))
        assert answer.finish_reason == "stop"
        assert answer.token_ids == whole.token_ids[: whole.token_ids.index(last) + 1]
        assert answer.text == engine.primary.decode_ids(answer.token_ids[:-1])

    def test_ends_with_the_context(self, engine: CacheClipEngine) -> None:
        prompt, params = "word " * 600, SamplingParams(max_tokens=50)
        tokens = engine.generate(prompt, SamplingParams(max_tokens=1)).stats.prompt_tokens
        prompt += "\x00" * (engine.primary.context_tokens - tokens - 5)  # one token each
        answer = engine.generate(prompt, params)
        assert answer.stats.prompt_tokens == engine.primary.context_tokens - 5
        assert len(answer.token_ids) == 5 and answer.finish_reason == "length"
        with pytest.raises(PromptTooLongError, match=", 1 more than the 2047"):
            engine.generate(prompt + "\x00" * 5, params)
        assert len(engine.generate(prompt + "\x00" * 4, params).token_ids) == 1


class TestQuestion:
    def selected(self, engine: CacheClipEngine, prompt: str, question: str | None) -> list[int]:
        engine.prefixes.clear()
        with pytest.MonkeyPatch.context() as patch:
            calls = spied(patch, engine.primary, "run_rows")
            engine.generate(prompt, SamplingParams(max_tokens=1), question=question, recompute_ratio=0.2)
        positions: torch.Tensor = calls[-1][2]
        return positions.tolist()

    def test_it_decides_what_is_recomputed(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        default = self.selected(engine, rag(chunks), None)
        assert default == self.selected(engine, rag(chunks), None)
        others = [self.selected(engine, rag(chunks), q) for q in ("7316042", "Seabirds nest on the eastern cliffs")]
        assert any(other != default for other in others) and others[0] != others[1]
        assert all(len(other) == len(default) for other in others)

    def test_default_is_the_text_behind_or_before_the_chunks(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks)
        behind, before = rag(chunks, "Who went ashore in 1962?"), "Who went ashore?\n\n" + "\n\n".join(chunks)
        for prompt, question in ((behind, "Question: Who went ashore in 1962?"), (before, "Who went ashore?")):
            assert self.selected(engine, prompt, None) == self.selected(engine, prompt, question)


class TestSeeds:
    """What is said of ``SamplingParams.seed``: the same tokens over a fixed store without a prefix cache; with one, KV
    of earlier prompts is rounded in another order."""

    @pytest.mark.some(6)
    @pytest.mark.parametrize("method", PRESET_NAMES)
    def test_a_seed_gives_the_same_tokens(self, make: Make, chunks: list[str], method: str) -> None:
        engine = make(stored=chunks, method=method, prefix_cache_bytes=0)

        def ask(seed: int, question: str = "Who?") -> tuple[int, ...]:
            params = SamplingParams(max_tokens=6, temperature=1.0, seed=seed)
            return engine.generate(rag(chunks, question), params).token_ids

        first, bits = ask(7), logits(engine, rag(chunks, "Who?"), preset(method)).logits
        for between in ("Who? And where?", "Another?"):
            ask(7, between)
            assert ask(7) == first != ask(8)
        again = logits(engine, rag(chunks, "Who?"), preset(method))
        assert torch.equal(again.logits, bits) and not again.stats.cached_prefix_tokens + again.stats.continued_tokens
        params = SamplingParams(max_tokens=6, temperature=1.0, seed=7)
        assert [*engine.stream(rag(chunks, "Who?"), params)][-1].answer.token_ids == first


def test_a_question_goes_through_no_tenants_rows(engine: CacheClipEngine) -> None:
    """Each statement finds what it reads by a key, as many chunks as there are: a store may hold a million."""
    engine.precompute(SENTENCES)
    connection = engine.store.catalog.database._open()
    asked: list[str] = []
    connection.set_trace_callback(asked.append)
    prompt = "\n\n".join(SENTENCES) + "\n\nWhat is the magic number?"
    for each in (prompt, prompt[40:-60], f"Other words before. {prompt}"):
        assert engine.generate(each, SamplingParams(max_tokens=1)).stats.hits >= len(SENTENCES) - 2
        engine.store.flush()
    connection.set_trace_callback(None)
    statements = [sql for sql in asked if sql.split(None, 1)[0] in ("SELECT", "UPDATE", "DELETE")]
    plans = {row[3] for sql in statements for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}")}
    assert any("key=?" in plan for plan in plans)
    tables = ("entries", "texts", "contents", "anchors", "sources", "writes")
    slow = [p for p in plans if p.startswith("SCAN") and p.split()[1] in tables or p.endswith("(namespace=?)")]
    assert not [plan for plan in slow if "quotas" not in plan], slow
