"""Prompts that begin like earlier ones, in vLLM: exact KV first, then continued KV, and never the one in the other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest
from cacheclip_vllm.offline import FusedLLM
from cacheclip_vllm.parameters import EXACT, UNREADABLE
from cacheclip_vllm.prefix_blocks import PrefixBlocks
from vllm_engines import (
    BLOCK,
    CHUNKS,
    CORRECTED,
    PROMPTS,
    QUESTIONS,
    TOKENS,
    Setting,
    ask,
    no_disk,
    outputs,
    sampling,
    started,
)

METHODS = ["cacheclip", "epic", "direct", CORRECTED]


@pytest.fixture(scope="module")
def setting(settings: Any) -> Setting:
    return settings()


@pytest.fixture(scope="module")
def engine(setting: Setting) -> Iterator[FusedLLM]:
    with started(setting) as found:
        yield found


@pytest.fixture
def fused(engine: FusedLLM) -> FusedLLM:
    assert engine.llm.reset_prefix_cache()
    engine.plain.clear()
    return engine


def rag(question: str, chunks: list[str] = CHUNKS[:4]) -> str:
    return "Read this.\n\n" + "\n\n".join(chunks) + f"\n\nQuestion: {question}"


def told(output: Any) -> dict[str, Any]:
    return (output.kv_transfer_params or {})["cacheclip"]


def ids(output: Any) -> tuple[int, ...]:
    return tuple(output.outputs[0].token_ids)


class Rows:
    """Counts the rows that are computed of each prompt, and what plain prefill would compute at that moment."""

    def __init__(self, fused: FusedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        from cacheclip_vllm.connector import CacheClipConnector
        from cacheclip_vllm.loading import Loader

        known, arrive, run = PrefixBlocks.known, CacheClipConnector.on_new_request, Loader._run
        self.loaded, self.plain, self.over = 0, 0, 0

        def arriving(connector: Any, request: Any) -> None:
            self.plain = request.num_prompt_tokens - known(connector._blocks, request)
            arrive(connector, request)

        def running(loader: Any, writers: Any, requests: Any) -> None:
            run(loader, writers, requests)
            self.loaded += sum(len(writer.rows) for writer in writers)

        monkeypatch.setattr(CacheClipConnector, "on_new_request", arriving)
        monkeypatch.setattr(Loader, "_run", running)
        self._fused = fused

    def ask(self, prompt: Any, method: Any, tokens: int = 4) -> Any:
        self.loaded = 0
        (found,) = outputs(self._fused, [prompt], method, tokens=tokens)
        self.rows = len(found.prompt_token_ids) - found.num_cached_tokens + self.loaded
        self.over += self.rows > self.plain
        return found


class TestExactFirst:
    @pytest.mark.parametrize("planted", [False, True])
    @pytest.mark.parametrize("method", ["cacheclip", CORRECTED.at(0.9)], ids=["cacheclip", "corrected"])
    def test_random_histories(
        self, fused: FusedLLM, monkeypatch: pytest.MonkeyPatch, method: Any, planted: bool
    ) -> None:
        """Each prompt computes at most the rows that plain prefill would compute at that moment. Planted: exact KV is
        not looked at."""
        rows, generator = Rows(fused, monkeypatch), random.Random(7)
        if planted:
            monkeypatch.setattr(PrefixBlocks, "known", lambda *_: 0)
        for _ in range(8):
            chosen = generator.sample(CHUNKS, generator.randint(1, 4))
            for question in generator.sample(QUESTIONS, 3):
                rows.ask(rag(question, chosen), generator.choice(["full", method]))
        assert (rows.over > 0) is planted

    def test_after_plain_prefill(self, fused: FusedLLM, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = Rows(fused, monkeypatch)
        rows.ask(rag("Who?"), "full")
        found = rows.ask(rag("Where was it?"), "cacheclip", TOKENS)
        assert told(found) == {"outcome": "exact", "reason": EXACT} and not fused.plain
        assert [ids(found)] == setting.expected([rag("Where was it?")], "full") and rows.loaded == 0
        assert len(found.prompt_token_ids) - found.num_cached_tokens == rows.plain < 2 * BLOCK

    def test_exact_kv_of_the_first_chunks(
        self, fused: FusedLLM, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The plan goes on from there, and its follow-up from the plan's KV."""
        rows = Rows(fused, monkeypatch)
        rows.ask(rag("Who?", CHUNKS[:1]), "full")
        found = rows.ask(rag("Who?"), "direct")
        assert told(found)["outcome"] == "fused" and "continued_tokens" not in told(found)
        exact = found.num_cached_tokens - sum(len(setting.engine.primary.tokenize(chunk)) for chunk in CHUNKS[1:4])
        assert exact > BLOCK
        again = rows.ask(rag("Where?"), "direct")
        assert told(again)["continued_tokens"] > 0 and rows.rows < 2 * BLOCK

    def test_exact_kv_that_comes_while_a_request_waits(self, fused: FusedLLM, setting: Setting) -> None:
        """Both arrive over an empty cache. The plain one is scheduled first."""
        planned = fused.planner.plan(PROMPTS[0], method="cacheclip")
        prompt = {"prompt_token_ids": list(planned.token_ids)}
        first, second = fused.llm.generate([prompt] * 2, [sampling(), sampling(planned.fusion)], use_tqdm=False)
        assert told(second) == {"outcome": "exact", "reason": EXACT}
        assert [ids(first), ids(second)] == setting.expected(PROMPTS[:1], "full") * 2
        assert second.num_cached_tokens == len(planned.token_ids) // BLOCK * BLOCK

    def test_kv_that_the_same_step_computes(self, fused: FusedLLM, setting: Setting) -> None:
        """A load comes before it: the fused request waits for the next step."""
        planned = [fused.planner.plan(each, method="cacheclip") for each in PROMPTS]
        inputs = [{"prompt_token_ids": list(each.token_ids)} for each in planned]
        found = fused.llm.generate(inputs, [sampling(), *(sampling(each.fusion) for each in planned[1:])])
        assert [ids(each) for each in found[1:]] == setting.expected(PROMPTS[1:], "cacheclip")


class TestContinued:
    @pytest.mark.parametrize("method", ["epic", "direct"])
    def test_the_next_question(
        self, fused: FusedLLM, setting: Setting, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        rows = Rows(fused, monkeypatch)
        first, second, third = (rag(question) for question in QUESTIONS[:3])
        rows.ask(first, method)
        found = rows.ask(second, method, TOKENS)
        assert told(found)["continued_turns"] == 1 and told(found)["continued_tokens"] > 400
        assert told(found)["continued_tokens"] % BLOCK == 0 and rows.rows < 3 * BLOCK
        last = rows.ask(third, method, TOKENS)
        assert told(last)["continued_tokens"] == told(found)["continued_tokens"]
        plan = fused.planner.plan(first, method=method).fusion
        assert told(last)["stale_from"] == plan.first_stale()
        assert [ids(found), ids(last)] == setting.expected([second, third], method), "as from fresh fusion"
        assert ids(found) != setting.expected([second], "full")[0]

    def test_another_method_or_ratio_does_not(self, fused: FusedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = Rows(fused, monkeypatch)
        rows.ask(rag("Who?"), "cacheclip")
        for other in ("direct", "epic", CORRECTED):
            assert "continued_tokens" not in told(rows.ask(rag("Where?"), other))
        (found,) = outputs(fused, [rag("Where?")], "cacheclip", recompute_ratio=0.4)
        assert "continued_tokens" not in told(found)

    def test_at_the_same_time(self, fused: FusedLLM, setting: Setting) -> None:
        """Each waits for the KV that it goes on from."""
        asked = [rag("Who?"), rag("Who?", CHUNKS[:5]), rag("Where?", CHUNKS[:5])]
        assert ask(fused, asked, "direct") == setting.expected(asked, "direct")

    def test_after_a_failed_load_it_is_exact(
        self, fused: FusedLLM, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with no_disk(monkeypatch):
            (found,) = outputs(fused, [rag("Who?")], "direct")
        assert told(found) == {"outcome": "plain", "reason": UNREADABLE}
        assert [ids(found)] == setting.expected([rag("Who?")], "full")


class TestNeverInAnExactCache:
    @pytest.mark.parametrize("planted", [False, True])
    @pytest.mark.parametrize("method", METHODS, ids=lambda method: getattr(method, "name", method))
    def test_plain_prefill_after_conversations(
        self, fused: FusedLLM, setting: Setting, monkeypatch: pytest.MonkeyPatch, method: Any, planted: bool
    ) -> None:
        """Planted: hashes are a request's own from the block after the first approximate one on."""
        if planted:
            monkeypatch.setattr("cacheclip_rag.fusion.wire.FusionPlan.num_exact", property(lambda plan: plan.end - 1))
        asked = [rag(question) for question in QUESTIONS]
        for each in asked:
            outputs(fused, [each], method)
        monkeypatch.undo()
        assert (ask(fused, asked, "full") == setting.expected(asked, "full")) is not planted

    def test_what_comes_before_the_chunks_is_everybodys(self, fused: FusedLLM) -> None:
        system = {"role": "system", "content": "Be brief and kind. " * 20}
        outputs(fused, [[system, {"role": "user", "content": rag("Who?")}]], "cacheclip")
        (plain,) = outputs(fused, [[system, {"role": "user", "content": "Something else?"}]], "full")
        assert plain.num_cached_tokens >= 2 * BLOCK
        (other,) = outputs(fused, [[system, {"role": "user", "content": rag("Who?", CHUNKS[2:5])}]], "epic")
        assert told(other)["outcome"] == "fused" and "continued_tokens" not in told(other)

    def test_a_client_cannot_name_our_hashes(self, fused: FusedLLM, setting: Setting) -> None:
        """As it could when they were made of the plan's digest alone."""
        (found,) = outputs(fused, [rag("Who?")], "direct")
        plan = fused.planner.plan(rag("Who?"), method="direct").fusion
        for name in (plan.digest, plan.lineage):
            asked = {"prompt_token_ids": list(found.prompt_token_ids), "cache_salt": f"|cacheclip:{name}"}
            (plain,) = fused.llm.generate([asked], [sampling()], use_tqdm=False)
            assert plain.num_cached_tokens in (0, len(found.prompt_token_ids) // BLOCK * BLOCK)
            assert [ids(plain)] == setting.expected([rag("Who?")], "full")

    @pytest.mark.parametrize("is_preempted", [False, True])
    def test_exact_kv_that_is_gone_before_it_is_used(
        self, fused: FusedLLM, setting: Setting, is_preempted: bool
    ) -> None:
        """The plan makes the KV of its blocks then, under hashes of the request's own. Gone while the request waits, or
        after a preemption."""
        asked = rag("Where?")
        outputs(fused, [rag("Who?", CHUNKS[:1])], "full")
        planned = fused.planner.plan(asked, method="direct")
        llm = fused.llm.llm_engine
        scheduler = llm.engine_core.engine_core.scheduler
        llm.add_request("fused", {"prompt_token_ids": list(planned.token_ids)}, sampling(planned.fusion))
        while is_preempted and not scheduler.running:
            llm.step()
        assert fused.llm.reset_prefix_cache(reset_running_requests=is_preempted)
        found = []
        while llm.has_unfinished_requests():
            found += [each for each in llm.step() if each.finished]
        assert told(found[0])["outcome"] == "fused"
        if not is_preempted:  # its first token comes from exact KV of the first chunk
            assert [ids(each) for each in found] == setting.expected([asked], "direct")
        assert ask(fused, [asked], "full") == setting.expected([asked], "full")

    def test_a_plain_request_beside_a_failed_load(
        self, fused: FusedLLM, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It shares the exact blocks before the chunks, which the fused one, who leaves, would have computed."""
        planned = fused.planner.plan(PROMPTS[0], method="cacheclip")
        prompt = {"prompt_token_ids": list(planned.token_ids)}
        llm = fused.llm.llm_engine
        llm.add_request("fused", prompt, sampling(planned.fusion))
        llm.add_request("plain", prompt, sampling())
        connector = llm.engine_core.engine_core.scheduler.connector
        with no_disk(monkeypatch):
            wait(connector._reading.values())
            while connector._reading or connector._requests._ready:
                llm.step()
        llm.abort_request(["fused"])
        found = []
        while llm.has_unfinished_requests():
            found += [each for each in llm.step() if each.finished]
        assert [ids(each) for each in found if each.request_id == "plain"] == setting.expected(PROMPTS[:1], "full")
