"""Verified finishing: answers from approximate KV, verified or corrected by the exact KV completed beside them."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch

from cacheclip_rag import Answer, CacheClipEngine, ConfigurationError, Event, ModelError, SamplingParams
from cacheclip_rag.answering import verification
from cacheclip_rag.answering.text import TextStream
from cacheclip_rag.measuring import ModelRuntime
from cacheclip_rag.methods import preset
from cacheclip_rag.methods.direct import Direct
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.base import Message
from tests.conftest import CACHECLIP, CHUNKS, QUESTION, Logs, Make, Models, Patch, rag_prompt, raising, spied
from tests.engine.asking import SHORT, check_sums

AT_THE_END, IN_THE_MIDDLE, AT_ONCE = 16, 96, 4096
"""Rows of a block: when the exact KV of :data:`PROMPT` is complete."""
PROMPT = rag_prompt(CHUNKS)
WAYS = [("direct", None), ("cacheclip", 0.1), ("cacheclip", 0.72), ("epic", None)]


class WithoutPrefixes(Direct):
    reuses_prefixes = False


@pytest.fixture(scope="module")
def engines() -> dict[str, CacheClipEngine]:
    """Engines without options of their own, by their model: all tests share them."""
    return {}


@pytest.fixture
def finishing(tiny_models: Models, engines: dict[str, CacheClipEngine], monkeypatch: Patch) -> Make:
    """Engines on any tiny model that never ends its turn, with the chunks stored; ``rows`` of a block."""

    def build(name: str = "llama", *, rows: int = AT_THE_END, **options: Any) -> CacheClipEngine:
        monkeypatch.setattr(verification, "_BLOCK_ROWS", {"cpu": rows})
        monkeypatch.setattr(load_model(tiny_models[name]), "eos_ids", frozenset())
        models = {"primary": tiny_models[name], "auxiliary": tiny_models["auxiliary"]}
        engine = None if options else engines.get(name)
        if engine is None:
            engine = CacheClipEngine(**{**models, **CACHECLIP, **options})
            engine.precompute(CHUNKS)
        if not options:
            engines[name] = engine
            engine.prefixes.clear()
        return engine

    return build


def apply(events: Iterable[Event]) -> tuple[str, Answer]:
    """The text as a client shows it at last; what is final must never be withdrawn, and one revision is enough."""
    shown, certain, answer, revisions = "", "", None, 0
    for event in events:
        assert answer is None, "an event after the answer"
        assert event.revised_from is None or 0 <= event.revised_from <= len(shown)
        revisions += event.revised_from is not None
        shown = shown[: event.revised_from] + event.text
        assert shown.startswith(certain)
        certain = shown if event.is_final else certain
        answer = event.answer
    assert answer is not None and shown == certain and revisions <= 1
    return shown, answer


def fresh(engine: CacheClipEngine, *args: Any, **options: Any) -> Answer:
    """An answer that finds nothing in the prefix cache."""
    engine.prefixes.clear()
    return engine.generate(*args, **options)


def choices(engine: CacheClipEngine, prompt: Any, answer_ids: Iterable[int]) -> list[int]:
    """Full prefill's choices along an answer the slow way: one forward pass a token."""
    engine.prefixes.clear()
    full: Any = engine.prefill(prompt, method=preset("full"))
    found, logits = [], full.logits
    for token in answer_ids:
        found.append(int(logits.argmax()))
        logits = engine.primary.decode_step(full.cache, token)
    return found


def first_difference(one: Iterable[int], other: Iterable[int]) -> int | None:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def divergent(engine: CacheClipEngine, **options: Any) -> tuple[Answer, Answer, int]:
    """Approximate answer, full prefill's answer, and where they part: behind the first token and not at the end."""
    params = SamplingParams(max_tokens=12)
    given = fresh(engine, PROMPT, params, method="direct", **options)
    full = fresh(engine, PROMPT, params, method="full")
    at = first_difference(given.token_ids, full.token_ids)
    assert at is not None and 0 < at < 10, "choose another prompt: this one shows nothing"
    return given, full, at


class TestRevise:
    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        ("name", "rows", "way"),
        [
            *(("llama", AT_THE_END, way) for way in range(4)),
            *(("gemma2", AT_THE_END, 1), ("llama", IN_THE_MIDDLE, 0), ("gpt-oss", IN_THE_MIDDLE, 2)),
            *(("smollm3", IN_THE_MIDDLE, 3), ("llama", AT_ONCE, 2), ("mixtral", AT_ONCE, 1)),
            ("qwen2-sliding", AT_ONCE, 0),
        ],
    )
    def test_equals_full(self, finishing: Make, name: str, rows: int, way: int) -> None:
        method, ratio = WAYS[way]
        engine = finishing(name, rows=rows)
        full = fresh(engine, PROMPT, SHORT, method="full")
        given = fresh(engine, PROMPT, SHORT, method=method, recompute_ratio=ratio)
        revised = fresh(engine, PROMPT, SHORT, method=method, recompute_ratio=ratio, finish="revise")
        assert (revised.token_ids, revised.text) == (full.token_ids, full.text)
        assert revised.stats.verified_tokens == len(full.token_ids)
        assert revised.stats.method == method and revised.stats.hits == len(CHUNKS)
        check_sums(revised)
        if rows == AT_THE_END:
            assert revised.stats.diverged_at == first_difference(given.token_ids, full.token_ids)

    @pytest.mark.long
    def test_the_models_above_do_diverge(self, finishing: Make) -> None:
        """Twin: without a revision the answers differ, early and late."""
        for name in ("llama", "qwen2-sliding", "gemma2", "gpt-oss", "smollm3", "mixtral"):
            engine = finishing(name)
            full = fresh(engine, PROMPT, SHORT, method="full")
            given = (fresh(engine, PROMPT, SHORT, method=method, recompute_ratio=ratio) for method, ratio in WAYS)
            assert any(answer.token_ids != full.token_ids for answer in given), name

    @pytest.mark.parametrize("method", ["cacheclip", "prefix"])
    def test_methods_of_each_kind(self, finishing: Make, method: str) -> None:
        """That reads the assembled cache, and that reuses no chunks."""
        engine = finishing()
        full = fresh(engine, PROMPT, SHORT, method="full")
        revised = fresh(engine, PROMPT, SHORT, method=method, finish="revise")
        assert (revised.token_ids, revised.text) == (full.token_ids, full.text)
        assert (revised.stats.verified_tokens is None) == (method == "prefix"), "it was reused"

    @pytest.mark.some(3)
    @pytest.mark.parametrize("max_tokens", [1, 2, 3, 12])
    def test_max_tokens(self, finishing: Make, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        for name in ("llama", "mixtral", "gemma2") if max_tokens == 2 else ("llama",):
            for rows in (AT_THE_END, AT_ONCE):
                engine = finishing(name, rows=rows)
                full = fresh(engine, PROMPT, params, method="full")
                revised = fresh(engine, PROMPT, params, method="direct", finish="revise")
                assert revised.token_ids == full.token_ids and revised.finish_reason == "length"
                assert len(revised.token_ids) == max_tokens

    @pytest.mark.parametrize("rows", [AT_THE_END, IN_THE_MIDDLE, AT_ONCE])
    @pytest.mark.parametrize("is_chosen", [False, True])
    def test_an_end_that_full_prefill_chooses_or_not(
        self, finishing: Make, monkeypatch: Patch, rows: int, is_chosen: bool
    ) -> None:
        """The first exact token may be the end: the answer ends there, and what came after is withdrawn."""
        engine = finishing(rows=rows)
        given, full, at = divergent(engine)
        (end, others), runtime = ((full, given) if is_chosen else (given, full)), engine.primary
        assert end.token_ids[at] not in (others.token_ids if is_chosen else others.token_ids[: at + 1])
        monkeypatch.setattr(runtime, "eos_ids", frozenset([end.token_ids[at]]))
        ended, expected = (fresh(engine, PROMPT, SHORT, method=method) for method in ("direct", "full"))
        engine.prefixes.clear()
        text, answer = apply(engine.stream(PROMPT, SHORT, method="direct", finish="revise"))
        assert (answer.token_ids, answer.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert text == answer.text == expected.text
        short = expected if is_chosen else ended
        assert short.finish_reason == "stop" and short.token_ids == end.token_ids[: at + 1]
        assert short.text == runtime.decode_ids(end.token_ids[:at])

    @pytest.mark.long
    @pytest.mark.parametrize("rows", [AT_THE_END, IN_THE_MIDDLE, AT_ONCE])
    def test_stop_strings(self, finishing: Make, rows: int) -> None:
        """Every stop string of either text, also such that lie across the revision, and beginnings of stop strings."""
        engine = finishing(rows=rows)
        given, full, _ = divergent(engine)
        kept = next(n for n, (a, b) in enumerate(zip(given.text, full.text, strict=False)) if a != b)
        found = 0
        for text in (given.text, full.text):
            for start in range(max(0, kept - 3), min(kept + 4, len(text) - 3), 3):
                for stop in ((text[start : start + 3],), (text[start : start + 2] + "§",)):
                    params = SamplingParams(max_tokens=12, stop=stop)
                    expected = fresh(engine, PROMPT, params, method="full") if stop[0] in full.text else full
                    engine.prefixes.clear()
                    shown, answer = apply(engine.stream(PROMPT, params, method="direct", finish="revise"))
                    assert answer.token_ids == expected.token_ids, stop
                    assert shown == answer.text == expected.text and answer.finish_reason == expected.finish_reason
                    found += expected.finish_reason == "stop"
        assert found > 0

    @pytest.mark.parametrize("rows", [AT_THE_END, IN_THE_MIDDLE, AT_ONCE])
    def test_events(self, finishing: Make, rows: int) -> None:
        engine = finishing(rows=rows)
        given, full, at = divergent(engine)
        engine.prefixes.clear()
        events = list(engine.stream(PROMPT, SHORT, method="direct", finish="revise"))
        text, answer = apply(events)
        assert text == answer.text == full.text
        revisions = [number for number, event in enumerate(events) if event.revised_from is not None]
        if rows == AT_ONCE:  # the first token was verified alone
            assert revisions == [] and answer.stats.diverged_at is None
            return
        [number] = revisions
        assert not any(event.is_final for event in events[:number]) and all(e.is_final for e in events[number:])
        withdrawn = "".join(event.text for event in events[:number])
        assert withdrawn == given.text if rows == AT_THE_END else given.text.startswith(withdrawn)
        kept = withdrawn[: events[number].revised_from]
        assert full.text.startswith(kept) and engine.primary.decode_ids(full.token_ids[:at]).startswith(kept)
        stream = TextStream(engine.primary.decode_ids, ())
        assert [stream.push(token) for token in full.token_ids[: at + 1]][-1] == events[number].text, "it came at once"


class TestVerify:
    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        ("name", "way"),
        [("llama", 0), ("llama", 1), ("llama", 2), ("llama", 3), ("qwen2-sliding", 3), ("gemma2", 2), ("gpt-oss", 1)],
    )
    def test_says_what_a_slow_comparison_finds(self, finishing: Make, name: str, way: int) -> None:
        method, ratio = WAYS[way]
        engine = finishing(name)
        given = fresh(engine, PROMPT, SHORT, method=method, recompute_ratio=ratio)
        at = first_difference(given.token_ids, choices(engine, PROMPT, given.token_ids))
        verified = fresh(engine, PROMPT, SHORT, method=method, recompute_ratio=ratio, finish="verify")
        assert (verified.token_ids, verified.text) == (given.token_ids, given.text)
        assert verified.stats.diverged_at == at
        assert verified.stats.verified_tokens == (len(given.token_ids) if at is None else at)
        assert 0 < verified.stats.verify_s < verified.stats.decode_s
        assert given.stats.verified_tokens is given.stats.diverged_at is None and given.stats.verify_s == 0

    def test_an_answer_that_agrees_goes_on_exactly(self, finishing: Make) -> None:
        """Its first tokens are full prefill's; without the exact KV, a later one would not be."""
        engine = finishing(rows=AT_ONCE)
        given, full, _ = divergent(engine)
        verified = fresh(engine, PROMPT, SHORT, method="direct", finish="verify")
        assert verified.token_ids == full.token_ids != given.token_ids
        assert (verified.stats.verified_tokens, verified.stats.diverged_at) == (len(full.token_ids), None)

    def test_a_block_after_each_token(self, finishing: Make, monkeypatch: Patch) -> None:
        """Nothing before the first token, no more than a block between two tokens, the rest after the last one."""
        engine = finishing()
        engine.prefixes.clear()
        stream = engine.stream(PROMPT, SHORT, method="direct", finish="verify")
        calls = spied(monkeypatch, type(engine.primary), "extend")
        first = next(stream)
        assert first.text and calls == []
        answer: Any = [first, *stream][-1].answer
        read = [(start, len(ids)) for _, _, ids, start in calls]
        blocks, rest = read[: len(answer.token_ids) - 1], read[len(answer.token_ids) - 1 :]
        assert all(rows == AT_THE_END for _, rows in blocks)
        assert all(start + rows == after for (start, rows), (after, _) in pairwise(read)), "in prompt order"
        assert rest[0][0] + rest[0][1] == answer.stats.prompt_tokens
        assert rest[1:] == [(answer.stats.prompt_tokens, len(answer.token_ids) - 1)]

    def test_long_answers_are_read_in_blocks(self, finishing: Make, monkeypatch: Patch) -> None:
        monkeypatch.setattr(verification, "_ANSWER_BLOCK_ROWS", 3)
        monkeypatch.setattr(verification, "_LARGE_BLOCK_ROWS", 50)
        engine = finishing()
        given, full, at = divergent(engine)
        assert fresh(engine, PROMPT, SHORT, method="direct", finish="verify").stats.diverged_at == at
        assert fresh(engine, PROMPT, SHORT, method="direct", finish="revise").token_ids == full.token_ids
        assert given.token_ids != full.token_ids

    def test_the_engines_setting_and_a_calls(self, finishing: Make) -> None:
        engine = finishing(finish="verify", method="direct")
        assert fresh(engine, PROMPT, SHORT).stats.verified_tokens is not None
        assert fresh(engine, PROMPT, SHORT, finish="none").stats.verified_tokens is None
        full = fresh(engine, PROMPT, SHORT, method="full")
        assert fresh(engine, PROMPT, SHORT, finish="revise").token_ids == full.token_ids
        assert finishing().config.finish == "none"

    @pytest.mark.parametrize("finish", ["always", "", True, 1])
    def test_senseless_settings(self, finishing: Make, finish: Any) -> None:
        with pytest.raises(ConfigurationError, match="finish must be one of none, idle, verify, revise"):
            CacheClipEngine(finish=finish)
        with pytest.raises(ConfigurationError, match="finish must be one of none, idle, verify, revise"):
            finishing().generate(PROMPT, finish=finish)

    def test_exact_answers_are_not_verified(self, finishing: Make) -> None:
        """Neither plain prefill nor a chunk right behind its prefix, unless it is stored by a coarse codec."""
        engine, alone = finishing(finish="revise"), rag_prompt(CHUNKS[:1])
        for method in ("full", "prefix"):
            assert fresh(engine, PROMPT, SHORT, method=method).stats.verified_tokens is None, method
        stats = fresh(engine, alone, SHORT, method="direct").stats
        assert stats.exact_tokens == stats.chunk_tokens > 0 and stats.verified_tokens is None and stats.verify_s == 0
        nothing = fresh(engine, "No chunk here.", SHORT).stats
        assert nothing.fallback is not None and nothing.verified_tokens is None
        coarse = finishing(codec="int8")
        full = fresh(coarse, alone, SHORT, method="full").token_ids
        revised = fresh(coarse, alone, SHORT, method="direct", finish="revise")
        assert (revised.stats.verified_tokens, revised.token_ids) == (len(full), full)

    @pytest.mark.parametrize(
        ("finish", "error"), [("verify", RuntimeError), ("revise", MemoryError), ("revise", ModelError)]
    )
    def test_an_answer_survives_when_the_exact_kv_has_no_room(
        self, finishing: Make, monkeypatch: Patch, caplog: Logs, finish: str, error: type[Exception]
    ) -> None:
        """llama.cpp refuses a larger context with an error of ours."""
        engine = finishing(method="direct")
        plain = fresh(engine, PROMPT, SHORT, finish="none")
        monkeypatch.setattr(ModelRuntime, "begin", raising(error("out of memory")))
        engine.prefixes.clear()
        text, answer = apply(engine.stream(PROMPT, SHORT, finish=finish))
        assert text == answer.text == plain.text and answer.stats.verified_tokens is None
        assert "could not be verified: out of memory" in caplog.text


class TestSampled:
    """From the token at which the exact KV is complete, tokens are drawn as full prefill would draw them; none is
    revised, and an answer that is over stays."""

    @pytest.mark.parametrize(("rows", "finish"), [(AT_ONCE, "verify"), (AT_ONCE, "revise"), (AT_THE_END, "revise")])
    def test_goes_on_exactly_and_is_never_revised(self, finishing: Make, rows: int, finish: str) -> None:
        engine, params = finishing(rows=rows, method="direct"), SamplingParams(max_tokens=12, temperature=0.8, seed=11)
        given, full = (fresh(engine, PROMPT, params, method=method) for method in ("direct", "full"))
        assert given.token_ids[0] == full.token_ids[0] and given.token_ids != full.token_ids
        engine.prefixes.clear()
        events = list(engine.stream(PROMPT, params, finish=finish))
        text, answer = apply(events)
        expected = full if rows == AT_ONCE else given
        assert answer.token_ids == expected.token_ids and text == expected.text
        assert all(event.is_final and event.revised_from is None for event in events)
        assert answer.stats.verified_tokens is answer.stats.diverged_at is None and answer.stats.verify_s > 0


@pytest.mark.long
class TestRotaryFrequenciesThatChange:
    @staticmethod
    def prompt(engine: CacheClipEngine) -> str:
        """Four tokens shorter than the limit."""
        tokens = engine.generate(PROMPT, SamplingParams(max_tokens=1)).stats.prompt_tokens
        return PROMPT + "\x00" * (engine.primary.reuse_tokens - tokens - 4)

    @pytest.mark.parametrize("rows", [AT_THE_END, IN_THE_MIDDLE, AT_ONCE])
    def test_revised_equals_full_across_the_limit(self, finishing: Make, rows: int) -> None:
        """The answer crosses the limit before the exact KV would be complete: it is completed there."""
        engine = finishing("phi3-longrope", rows=rows)
        prompt, runtime = self.prompt(engine), engine.primary
        params = SamplingParams(max_tokens=16)
        full = fresh(engine, prompt, params, method="full")
        assert runtime.pinned_rope and full.stats.prompt_tokens + 4 == runtime.reuse_tokens
        given = fresh(engine, prompt, params, method="direct")
        assert given.token_ids != full.token_ids and given.stats.hits == len(CHUNKS)
        revised = fresh(engine, prompt, params, method="direct", finish="revise")
        assert revised.token_ids == full.token_ids
        held = engine.prefixes.stats.blocks
        assert held == full.stats.prompt_tokens // 16, "what crosses the limit is not kept"

    def test_verified_up_to_the_limit(self, finishing: Make) -> None:
        engine = finishing("phi3-longrope", finish="none")  # figures of its own
        prompt = self.prompt(engine)
        given = fresh(engine, prompt, SamplingParams(max_tokens=16), method="direct")
        verified = fresh(engine, prompt, SamplingParams(max_tokens=16), method="direct", finish="verify")
        at = first_difference(given.token_ids[:5], choices(engine, prompt, given.token_ids[:5]))
        assert at is not None and verified.stats.diverged_at == at and verified.token_ids == given.token_ids
        same = [a == b for a, b in zip(given.token_ids, choices(engine, prompt, given.token_ids[:5]), strict=False)]
        assert engine.metrics.snapshot()["shadow_agreement_sum"] == pytest.approx(sum(same) / 5)


class TestPrefixCache:
    CONTEXT = "\n\n".join(CHUNKS)

    def turns(self, engine: CacheClipEngine, finish: str) -> tuple[Answer, Answer, Any]:
        """Two turns of a conversation: both answers, and the prompt of the second."""
        engine.prefixes.clear()
        messages: list[Message] = [{"role": "user", "content": f"{self.CONTEXT}\n\n{QUESTION}"}]
        first = engine.generate(messages, SHORT, method="direct", finish=finish)
        asked = [
            *messages,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And who lives there now?"},
        ]
        return first, engine.generate(asked, SHORT, method="direct", finish=finish), asked

    @pytest.mark.some(2)
    @pytest.mark.parametrize("rows", [AT_THE_END, IN_THE_MIDDLE, AT_ONCE])
    @pytest.mark.parametrize("finish", ["verify", "revise"])
    def test_the_next_turn_is_an_exact_hit(self, finishing: Make, finish: str, rows: int) -> None:
        engine = finishing(rows=rows)
        first, second, asked = self.turns(engine, finish)
        assert first.stats.verified_tokens is not None and first.stats.cached_prefix_tokens == 0
        whole = (first.stats.prompt_tokens) // 16 * 16
        assert second.stats.cached_prefix_tokens >= whole
        assert second.stats.exact_tokens == second.stats.chunk_tokens > 0, "the chunks came from the prefix cache"
        held = engine.prefill(asked, method=preset("prefix"))
        engine.prefixes.clear()
        full = engine.prefill(asked, method=preset("full"))
        assert held.stats.cached_prefix_tokens >= whole, "and what was kept is exact"
        assert float((held.logits - full.logits).abs().max()) < 1e-4
        first, second, _ = self.turns(engine, "none")
        exact = first.stats.prefix_tokens + first.stats.exact_tokens
        assert second.stats.cached_prefix_tokens <= exact < first.stats.prompt_tokens // 2, (
            "approximate KV never goes in"
        )

    def test_the_answer_is_kept_too(self, finishing: Make) -> None:
        """Also tokens that full prefill would not choose: the next prompt repeats them, and their KV is exact."""
        engine = finishing()
        for finish in ("verify", "revise"):
            engine.prefixes.clear()
            params = SamplingParams(max_tokens=40)
            answer = engine.generate(PROMPT, params, method="direct", finish=finish)
            assert answer.stats.diverged_at is not None
            blocks = (answer.stats.prompt_tokens + len(answer.token_ids) - 1) // 16
            layout = engine.plan(PROMPT).layout
            with engine.prefixes.match([*layout.token_ids, *answer.token_ids]) as match:
                assert match.num_tokens == blocks * 16 > answer.stats.prompt_tokens

    def test_the_exact_kv_starts_from_it(self, finishing: Make, monkeypatch: Patch) -> None:
        engine = finishing()
        engine.prefixes.clear()
        expected, plain = (engine.generate(PROMPT, SHORT, method=method) for method in ("full", "prefix"))
        calls = spied(monkeypatch, type(engine.primary), "extend")
        answer = engine.generate(PROMPT, SHORT, method=WithoutPrefixes(), finish="revise")
        assert answer.stats.cached_prefix_tokens == 0, "the method itself uses no prefixes"
        assert calls[0][3] == (plain.stats.prompt_tokens - 1) // 16 * 16 and answer.token_ids == expected.token_ids


class TestClosing:
    @pytest.mark.long
    @pytest.mark.parametrize("rows", [AT_THE_END, IN_THE_MIDDLE, AT_ONCE])
    def test_a_stream_closed_anywhere_leaves_the_engine_usable(self, finishing: Make, rows: int) -> None:
        engine = finishing(rows=rows)
        _, full, _ = divergent(engine)
        engine.prefixes.clear()
        count = len(list(engine.stream(PROMPT, SHORT, method="direct", finish="revise")))
        assert count > 8
        for events in range(1, count, 2 if rows == IN_THE_MIDDLE else 5):
            engine.prefixes.clear()
            stream = engine.stream(PROMPT, SHORT, method="direct", finish="revise")
            for _ in range(events):
                next(stream)
            stream.close()
            assert not torch.is_inference_mode_enabled()
            engine.prefixes.clear()
            assert engine.prefixes.stats.bytes == 0, "a block is still held"
        assert fresh(engine, PROMPT, SHORT, method="direct", finish="revise").token_ids == full.token_ids

    def test_two_streams_in_turns(self, finishing: Make) -> None:
        engine = finishing(rows=IN_THE_MIDDLE)
        prompts = [PROMPT, rag_prompt(CHUNKS[::-1], "When?")]
        expected = [fresh(engine, prompt, SHORT, method="full").text for prompt in prompts]
        streams = [engine.stream(prompt, SHORT, method="direct", finish="revise") for prompt in prompts]
        shown = ["", ""]
        running = {0, 1}
        while running:
            for number in sorted(running):
                event = next(streams[number], None)
                if event is None:
                    running.discard(number)
                else:
                    shown[number] = shown[number][: event.revised_from] + event.text
        assert shown == expected
