"""Greedy answers of an unmodified vLLM are those of our engine, in float32; plain requests notice nothing of ours."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_lab.variants import RANDOM
from cacheclip_vllm.offline import FusedLLM
from vllm_engines import (
    BLOCK,
    CHUNKS,
    CORRECTED,
    PROMPTS,
    Setting,
    ask,
    gone,
    no_disk,
    outcomes,
    outputs,
    prompt,
    sampling,
    started,
)

from cacheclip_rag.fusion.wire import StoredPiece, runs_of
from cacheclip_rag.methods import preset

METHODS = ["cacheclip", "epic", "direct", RANDOM, CORRECTED]


@pytest.fixture(scope="module")
def setting(settings: Any) -> Setting:
    return settings()


@pytest.fixture(scope="module")
def engine(setting: Setting) -> Iterator[FusedLLM]:
    with started(setting) as found:
        yield found


@pytest.fixture
def fused(engine: FusedLLM) -> FusedLLM:
    """vLLM's prefix cache knows nothing of earlier tests."""
    assert engine.llm.reset_prefix_cache()
    engine.plain.clear()
    return engine


@pytest.fixture(scope="module")
def plain(setting: Setting) -> list[tuple[int, ...]]:
    """Answers by plain prefill."""
    return setting.expected(PROMPTS, "full")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens of each load, in order."""
    from cacheclip_vllm.loading import Loader
    from cacheclip_vllm.scheduling import Load

    load, found = Loader.load, list[int]()

    def noting(self: Any, each: Load) -> None:
        found.append(each.stop - each.start)
        load(self, each)

    monkeypatch.setattr(Loader, "load", noting)
    return found


def cached(found: list[Any]) -> list[int]:
    return [each.num_cached_tokens for each in found]


class TestEqualAnswers:
    @pytest.mark.parametrize("method", METHODS, ids=lambda method: getattr(method, "name", method))
    def test_recompute_in_workers(self, fused: FusedLLM, setting: Setting, plain: Any, method: Any) -> None:
        found = outputs(fused, PROMPTS, method)
        assert outcomes(found) == ["fused"] * 4 and not fused.plain
        expected = setting.expected(PROMPTS, method)
        assert [tuple(each.outputs[0].token_ids) for each in found] == expected
        assert expected != plain, "the twin: plain prefill gives other answers"
        assert all(1 < len(each.prompt_token_ids) - each.num_cached_tokens < 60 for each in found)

    @pytest.mark.parametrize("ratio", [0.0, 0.05, 1.0])
    def test_any_ratio(self, fused: FusedLLM, setting: Setting, plain: Any, ratio: float) -> None:
        method = CORRECTED.at(ratio)
        found = ask(fused, PROMPTS, method)
        assert found == setting.expected(PROMPTS, method)
        assert (found == plain) == (ratio == 1.0)

    def test_chat_messages(self, fused: FusedLLM, setting: Setting) -> None:
        chats = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": each}] for each in PROMPTS]
        found = outputs(fused, chats, "cacheclip")
        assert outcomes(found) == ["fused"] * 4
        assert [tuple(each.outputs[0].token_ids) for each in found] == setting.expected(chats, "cacheclip")

    def test_a_chunk_that_is_not_stored_is_computed(self, fused: FusedLLM, setting: Setting) -> None:
        asked = PROMPTS[0].replace("Question:", "Nobody has stored this sentence about whales and lamps. Question:")
        asked = asked.replace("Read this.", "Read this. " + "It was never stored. " * 20)
        assert ask(fused, [asked], "cacheclip") == setting.expected([asked], "cacheclip")

    @pytest.mark.parametrize("method", ["epic", CORRECTED.at(0.03)], ids=["epic", "corrected"])
    def test_several_prompts_in_one_pass(
        self, fused: FusedLLM, setting: Setting, method: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from cacheclip_vllm.loading import Loader
        from cacheclip_vllm.rows import RowRunner

        work, run, together = Loader.work, RowRunner.run, list[int]()

        def all_at_once(loader: Loader, room: int, *, waits: bool) -> Any:
            if len(loader._queue) == 4 or together:
                wait([future for each in loader._queue for future in (each.entries or {}).values()])
                yield from work(loader, room, waits=waits)

        def counting(rows: RowRunner, requests: Any) -> Any:
            together.append(len(requests))
            return run(rows, requests)

        monkeypatch.setattr(Loader, "work", all_at_once)
        monkeypatch.setattr(RowRunner, "run", counting)
        assert ask(fused, PROMPTS, method) == setting.expected(PROMPTS, method)
        assert max(together) > 1

    def test_rows_of_several_prompts_are_those_of_each(self, fused: FusedLLM) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        rows = get_kv_transfer_group()._loader._row_runner()
        runs = [[(0, 9), (20, 24)], [(0, 70)], [(0, 1), (3, 5), (33, 34)]]
        requests = [(torch.arange(100) + 7 * n, of, range(5 * n + 1, 5 * n + 5)) for n, of in enumerate(runs)]
        for ids, _, blocks in requests:
            rows.run([(ids, [(0, 100)], blocks)])
        alone = torch.cat([rows.run([each]) for each in requests])
        found = rows.run(requests)
        assert found.shape == alone.shape and len(found) == 13 + 70 + 4
        assert (found - alone).abs().max() < 2e-5 * alone.abs().max(), "matrix products of other sizes round otherwise"
        assert (rows.run(requests[::-1])[:4] - found[:4]).abs().max() > 0.1, "the twin"

    def test_beside_plain_requests(self, fused: FusedLLM, setting: Setting, plain: Any) -> None:
        """Fused and plain requests in one batch."""
        planned = [fused.planner.plan(each, method="cacheclip") for each in PROMPTS]
        inputs = [{"prompt_token_ids": list(each.token_ids)} for each in planned]
        params = [sampling(each.fusion if number % 2 else None) for number, each in enumerate(planned)]
        found = fused.llm.generate(inputs, params, use_tqdm=False)
        expected = setting.expected(PROMPTS, "cacheclip")
        for number, each in enumerate(found):
            assert tuple(each.outputs[0].token_ids) == (expected if number % 2 else plain)[number]


class TestPrefixCache:
    def test_plain_requests_find_nothing_of_ours(self, fused: FusedLLM, plain: Any) -> None:
        first = outputs(fused, PROMPTS, "full")
        assert [tuple(each.outputs[0].token_ids) for each in first] == plain
        fused.llm.reset_prefix_cache()
        planned = [fused.planner.plan(each, method="cacheclip").fusion for each in PROMPTS]
        outputs(fused, PROMPTS, "cacheclip")
        after = outputs(fused, PROMPTS, "full")
        assert cached(after)[1:] == cached(first)[1:], "the same as on a server that has never seen a fused request"
        assert cached(after)[0] == planned[0].num_exact // BLOCK * BLOCK == BLOCK, "what comes before the chunks"
        assert [tuple(each.outputs[0].token_ids) for each in after] == plain

    def test_twin_without_a_salt_poisons(self, fused: FusedLLM, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        connector = fused.llm.llm_engine.engine_core.engine_core.scheduler.connector
        decide = connector._decide

        def unsalted(request: Any, reading: Any) -> None:
            decide(request, reading)
            request.block_hashes.clear()
            request.update_block_hashes()

        monkeypatch.setattr(connector, "_decide", unsalted)
        ask(fused, PROMPTS, "cacheclip")
        assert ask(fused, PROMPTS, "full") != plain
        monkeypatch.undo()
        fused.llm.reset_prefix_cache()

    @pytest.mark.parametrize("method", METHODS, ids=lambda method: getattr(method, "name", method))
    def test_repeats_hit_their_own(self, fused: FusedLLM, setting: Setting, method: Any, loads: list[int]) -> None:
        """The hit of the last prompt ends in the middle of a chunk, of which only the rest is made again."""
        expected = setting.expected(PROMPTS, method)
        assert ask(fused, PROMPTS, method) == expected
        assert len(loads) == 4 and min(loads) > 500
        loads.clear()
        again = outputs(fused, PROMPTS, method)
        assert [tuple(each.outputs[0].token_ids) for each in again] == expected
        assert outcomes(again) == ["cached", "cached", "cached", "fused"] and len(loads) == 1 and loads[0] < BLOCK
        loads.clear()
        assert ask(fused, PROMPTS, "direct" if method != "direct" else "epic") != expected
        assert len(loads) == 4 and min(loads) > 500, "another method's is its own"

    def test_the_same_prompt_twice_at_once(self, fused: FusedLLM, setting: Setting) -> None:
        expected = setting.expected(PROMPTS[:1], "cacheclip")
        assert ask(fused, PROMPTS[:1] * 3, "cacheclip") == expected * 3


class TestFailures:
    """Whatever fails, the answer is plain prefill's, and says so."""

    def give(self, fused: FusedLLM, planned: Any, params: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
        found = fused.llm.generate([{"prompt_token_ids": list(planned.token_ids)}], [params], use_tqdm=False)[0]
        return tuple(found.outputs[0].token_ids), (found.kv_transfer_params or {}).get("cacheclip", {})

    def test_an_entry_is_gone(self, fused: FusedLLM, setting: Setting, plain: Any) -> None:
        planned = fused.planner.plan(PROMPTS[0], method="cacheclip")
        with gone(setting, planned.fusion.pieces[2].key):
            tokens, outcome = self.give(fused, planned, sampling(planned.fusion))
        assert tokens == plain[0] and outcome["outcome"] == "plain" and "log" in outcome["reason"]
        assert fused.llm.reset_prefix_cache()
        assert ask(fused, PROMPTS[:1], "cacheclip") == setting.expected(PROMPTS[:1], "cacheclip")

    def test_a_damaged_entry_is_missing_afterwards(self, fused: FusedLLM, setting: Setting, plain: Any) -> None:
        """One prompt pays for it: the planner, which reads no payloads of the primary, is told."""
        key = fused.planner.plan(PROMPTS[1], method="cacheclip").fusion.pieces[-1].key
        payload = Path(setting.store) / "kv" / key[:2] / f"{key}.kv"
        kept = payload.read_bytes()
        payload.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        try:
            first = outputs(fused, PROMPTS[1:2], "cacheclip")
            fused.llm.reset_prefix_cache()  # which has the exact KV of all of it now
            second = outputs(fused, PROMPTS[1:2], "cacheclip")
            assert outcomes(first) == ["plain"] and tuple(first[0].outputs[0].token_ids) == plain[1]
            assert outcomes(second) == ["fused"] and not payload.exists()
            stats = fused.planner.plan(PROMPTS[1], method="cacheclip").stats
            assert (stats.hits, stats.misses) == (3, 1)
            assert [tuple(second[0].outputs[0].token_ids)] == setting.expected(PROMPTS[1:2], "cacheclip")
        finally:
            setting.engine.precompute(CHUNKS)
        assert payload.exists()

    def test_the_pass_fails_halfway(self, fused: FusedLLM, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from cacheclip_vllm.rows import RowRunner

        def fails(*args: Any) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(RowRunner, "run", fails)
        found = outputs(fused, PROMPTS, "cacheclip")
        assert [tuple(each.outputs[0].token_ids) for each in found] == plain
        assert outcomes(found) == ["plain"] * 4 and sum(fused.plain.values()) == 4
        monkeypatch.undo()
        fused.llm.reset_prefix_cache()
        assert ask(fused, PROMPTS, "full") == plain, "the layers write as before"

    def test_a_layer_bypasses_the_writer(self, fused: FusedLLM, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """As backends do that write the cache within another operation."""
        from cacheclip_vllm import loading

        wrapping = loading._Writing.wrapping

        def bypassed(writer: Any, number: int, write: Any) -> Any:
            return write if number == 2 else wrapping(writer, number, write)

        monkeypatch.setattr(loading._Writing, "wrapping", bypassed)
        found = outputs(fused, PROMPTS, "cacheclip")
        assert outcomes(found) == ["plain"] * 4
        assert [tuple(each.outputs[0].token_ids) for each in found] == plain

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"model": "other"}, "other weights"),
            ({"namespace": "somebody"}, "another tenant"),
            ({"rope_pin": "other"}, "rotary"),
            ({"version": 0}, "version"),
            ({"codec": 7}, "codec"),
        ],
    )
    def test_a_wrong_plan(self, fused: FusedLLM, plain: Any, change: dict[str, Any], why: str) -> None:
        planned = fused.planner.plan(PROMPTS[0], method="cacheclip")
        params = sampling(planned.fusion)
        params.extra_args["kv_transfer_params"]["cacheclip"]["plan"].update(change)
        tokens, outcome = self.give(fused, planned, params)
        assert tokens == plain[0] and outcome["outcome"] == "plain" and why in outcome["reason"]

    def test_an_entry_of_another_length(self, fused: FusedLLM, plain: Any) -> None:
        planned = fused.planner.plan(PROMPTS[0], method="direct")
        *first, last = planned.fusion.pieces
        wrong = replace(planned.fusion, pieces=(*first, StoredPiece(last.start, last.key, 99, last.num_tokens)))
        assert self.give(fused, planned, sampling(wrong))[0] == plain[0]


class TestBlocksOfFailedLoads:
    """Nobody finds them in vLLM's prefix cache before they have KV."""

    @pytest.fixture
    def began(self, fused: FusedLLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Two requests with the same plan, whose load failed, and nothing is computed so far."""
        planned = fused.planner.plan(PROMPTS[0], method="cacheclip")
        ids = {"prompt_token_ids": list(planned.token_ids)}
        names = ["first", "second"]
        for name in names:
            fused.llm.llm_engine.add_request(name, ids, sampling(planned.fusion))
        connector = fused.llm.llm_engine.engine_core.engine_core.scheduler.connector
        with no_disk(monkeypatch):
            wait(connector._reading.values())
            while connector._reading or connector._requests._ready:
                fused.llm.llm_engine.step()
        assert fused.llm.llm_engine.has_unfinished_requests()
        return names

    def rest(self, fused: FusedLLM) -> list[Any]:
        found = []
        while fused.llm.llm_engine.has_unfinished_requests():
            found += [each for each in fused.llm.llm_engine.step() if each.finished]
        return [each for each in found if each.outputs[0].finish_reason != "abort"]

    def test_the_client_leaves(self, fused: FusedLLM, setting: Setting, began: list[str]) -> None:
        fused.llm.llm_engine.abort_request(began)
        assert self.rest(fused) == []
        found = outputs(fused, PROMPTS[:1], "cacheclip")
        assert outcomes(found) == ["fused"]
        assert [tuple(each.outputs[0].token_ids) for each in found] == setting.expected(PROMPTS[:1], "cacheclip")

    def test_one_of_two_clients_leaves(self, fused: FusedLLM, plain: Any, began: list[str]) -> None:
        """The one of whom vLLM expects that it computes the blocks of both."""
        fused.llm.llm_engine.abort_request(began[:1])
        (found,) = self.rest(fused)
        assert tuple(found.outputs[0].token_ids) == plain[0] and outcomes([found]) == ["plain"]
        assert cached([found]) == [0]

    def test_both_are_answered(self, fused: FusedLLM, setting: Setting, plain: Any, began: list[str]) -> None:
        found = self.rest(fused)
        assert [tuple(each.outputs[0].token_ids) for each in found] == [plain[0]] * 2
        assert outcomes(found) == ["plain"] * 2
        again = outputs(fused, PROMPTS[:1], "cacheclip")
        assert outcomes(again) == ["exact"], "what vLLM computed is everybody's"
        assert tuple(again[0].outputs[0].token_ids) == plain[0]


class TestMethodsThatCannot:
    def test_a_gated_one_is_refused(self, fused: FusedLLM, plain: Any) -> None:
        found = outputs(fused, PROMPTS[:2], replace(preset("epic"), min_confidence=0.5))
        assert [tuple(each.outputs[0].token_ids) for each in found] == plain[:2]
        assert outcomes(found) == ["none"] * 2 and fused.plain.total() == 2
        assert "min_confidence" in next(iter(fused.plain))

    def test_nothing_stored(self, fused: FusedLLM, setting: Setting) -> None:
        asked = ["Nothing of this is stored. What is it?"]
        assert ask(fused, asked, "cacheclip") == setting.expected(asked, "full") and fused.plain.total() == 1

    def test_more_runs_in_a_chunk_than_a_pass_holds(self, fused: FusedLLM, plain: Any) -> None:
        planned = fused.planner.plan(PROMPTS[0], method=CORRECTED)
        start, stop = planned.fusion.chunks[1]
        rows = {row for run in planned.fusion.computed for row in range(*run)}
        kept = {row for row in rows if not start <= row < stop}
        many = replace(planned.fusion, computed=runs_of(sorted(kept | {*range(start, stop, 2)})))
        assert stop - start > 32
        tokens, outcome = TestFailures().give(fused, planned, sampling(many))
        assert tokens == plain[0] and "max_num_seqs" in outcome["reason"]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_aborted_requests_leave_nothing(fused: FusedLLM, setting: Setting, steps: int) -> None:
    """Before their KV is made, and while they are answered."""
    core = fused.llm.llm_engine.engine_core.engine_core
    connector = core.scheduler.connector
    loads = connector._requests
    kept = (connector._reading, loads._ready, loads._outcomes, loads._loading)
    asked = {f"aborted-{steps}-{number}": fused.planner.plan(each) for number, each in enumerate(PROMPTS)}
    for name, planned in asked.items():
        fused.llm.llm_engine.add_request(name, {"prompt_token_ids": list(planned.token_ids)}, sampling(planned.fusion))
    for _ in range(steps):
        fused.llm.llm_engine.step()
    assert len(connector._reading) + len(loads._ready) == 4
    fused.llm.llm_engine.abort_request(list(asked))
    while fused.llm.llm_engine.has_unfinished_requests():
        fused.llm.llm_engine.step()
    assert kept == ({}, {}, {}, {})
    assert ask(fused, PROMPTS, "cacheclip") == setting.expected(PROMPTS, "cacheclip") and kept == ({}, {}, {}, {})
    assert not core.scheduler.requests and core.scheduler.kv_cache_manager.usage == 0, "their blocks are free again"


def test_counters(fused: FusedLLM) -> None:
    connector = fused.llm.llm_engine.engine_core.engine_core.scheduler.connector
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()
    worker.get_kv_connector_stats(), connector.get_kv_connector_stats()
    counted = {}
    keep = type(worker).get_kv_connector_stats

    def taking(self: Any) -> Any:
        found = keep(self)
        for name, number in (found.data if found is not None else {}).items():
            counted[name] = counted.get(name, 0) + number
        return found

    type(worker).get_kv_connector_stats = taking
    try:
        ask(fused, [prompt(5), "Nothing stored?"], "cacheclip")
    finally:
        type(worker).get_kv_connector_stats = keep
    assert counted["fused_requests"] == 1 and counted["loaded_tokens"] > 400 and counted["computed_rows"] > 50
    assert counted["load_s"] > 0 and "failed_loads" not in counted and len(CHUNKS) == 6
