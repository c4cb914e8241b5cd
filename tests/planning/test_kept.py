"""KV of earlier prompts that another process keeps: what is planned of it gives the KV that an engine moves."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.planning import PlanningEngine, kept_keys
from cacheclip_rag.planning.kept import BLOCK_TOKENS
from cacheclip_rag.prompt.known_kv import LEAST_END, MOST_BORDER
from tests.conftest import SENTENCES
from tests.planning.test_planning import carry_out

STORED = "Alden quarry closed in 1931, as slate from Wales cost less."


@pytest.fixture(scope="module")
def made(tiny_models: dict[str, str], tmp_path_factory: Any) -> Any:
    """An engine, and a planner for a process that keeps KV."""
    options = {"primary": tiny_models["llama"], "auxiliary": None, "store": str(tmp_path_factory.mktemp("store"))}
    options |= {"method": "direct", "on_miss": "ignore"}
    engine, planner = CacheClipEngine(**options), PlanningEngine(**options)
    engine.precompute([STORED])
    planner.keep_prompts()
    return engine, planner


@pytest.fixture
def both(made: Any) -> Any:
    for each in made:
        each.parts.drop_kv()
    return made


def chat(header: str, passages: list[str]) -> str:
    return header + "\n\n" + "\n\n".join(passages) + "\n\nQuestion: What is the magic number?"


GENERATOR = random.Random(5)
PASSAGES = [" ".join(GENERATOR.sample(SENTENCES, 3)) for _ in range(12)]
OLD = chat("Checksum a91f3.", PASSAGES)
EDITS: dict[str, Callable[[], str]] = {
    "header": lambda: chat("Checksum 07c2e, longer.", PASSAGES),
    "deleted": lambda: chat("Checksum a91f3.", [PASSAGES[0], *PASSAGES[2:]]),
    "beside a stored chunk": lambda: chat("Checksum a91f3.", [STORED, *PASSAGES]),
}


@torch.inference_mode()
def keep(
    engine: CacheClipEngine, planner: PlanningEngine, prompt: str, start: int = 0, *, wrong_by: int = 0
) -> dict[str, torch.Tensor]:
    """KV of a prompt by key, as the other process keeps it, which both know of."""
    planned = planner.plan(prompt)
    assert planned.fusion is None and planned.kept_about is not None
    ids, runtime = planned.token_ids, engine.primary
    state, _ = runtime.prefill(torch.tensor(ids), len(ids))
    engine.prefixes.insert(ids, state)
    planner.kept.add(planned, start)
    layers = [torch.stack([layer.keys[0, :, : len(ids)], layer.values[0, :, : len(ids)]]) for layer in state.layers]
    kv = planner.primary.position_free(torch.stack(layers), wrong_by)
    keys = kept_keys(planned.kept_about, ids)
    blocks = dict(zip(keys, kv.split(BLOCK_TOKENS, dim=3), strict=False))
    return {key: block for number, (key, block) in enumerate(blocks.items()) if number * BLOCK_TOKENS >= start}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("wrong_by", [0, 3])
def test_the_same_kv_as_the_engine_moves(both: Any, edit: str, wrong_by: int) -> None:
    """Planted: keys turned by three positions too many."""
    engine, planner = both
    kept = keep(engine, planner, OLD, wrong_by=wrong_by)
    planned, found = planner.plan(EDITS[edit]()), engine.prefill(EDITS[edit]())
    fusion, stats = planned.fusion, planned.stats
    assert fusion is not None and fusion.moved and planned.reason is None and stats.fallback is None
    assert (stats.moved_tokens, stats.hits) == (found.stats.moved_tokens, found.stats.hits)
    assert stats.moved_past == found.stats.moved_past and stats.moved_tokens > stats.prompt_tokens / 2
    difference = (carry_out(fusion, engine, kept) - found.logits).abs().max()
    assert (difference < 1e-4) == (not wrong_by)


def test_tokens_and_borders(both: Any) -> None:
    engine, planner = both
    old = planner.plan(OLD)
    keys = kept_keys(old.kept_about, old.token_ids)
    keep(engine, planner, OLD)
    fusion = planner.plan(EDITS["deleted"]()).fusion
    computed = {row for a, b in fusion.computed for row in range(a, b)}
    for piece in fusion.pieces:
        first = keys.index(piece.key) * BLOCK_TOKENS + piece.first
        same = old.token_ids[first : first + piece.num_tokens]
        assert same == fusion.token_ids[piece.start : piece.stop]
    before = [a for a, _ in fusion.moved]
    assert all(at - 1 in computed for at in before), "the first tokens of a run"
    assert fusion.num_exact >= MOST_BORDER and fusion.end <= len(fusion.token_ids) - LEAST_END


def test_what_nobody_keeps_is_computed_until_somebody_does(both: Any) -> None:
    """The process found the first half in its own prefix cache, so that it kept the second alone."""
    engine, planner = both
    half = len(planner.plan(OLD).token_ids) // 2
    kept = keep(engine, planner, OLD, half)
    fusion = planner.plan(EDITS["header"]()).fusion
    assert {piece.key for piece in fusion.pieces} <= {*kept}
    keep(engine, planner, OLD)
    whole = planner.plan(EDITS["header"]()).fusion
    assert sum(b - a for a, b in whole.moved) > 1.8 * sum(b - a for a, b in fusion.moved)


class TestNever:
    def test_after_an_erasure(self, both: Any) -> None:
        engine, planner = both
        before = planner.plan(OLD)
        keep(engine, planner, OLD)
        assert planner.plan(EDITS["header"]()).fusion is not None
        engine.precompute([PASSAGES[0]])
        engine.release([PASSAGES[0]])  # as another process: the planner is not told
        after = planner.plan(EDITS["header"]())
        assert after.fusion is None and after.kept_about != before.kept_about
        planner.kept.add(before, 0)
        assert planner.plan(EDITS["header"]()).fusion is None, "it was computed before the erasure"

    def test_another_tenants(self, made: Any, both: Any) -> None:
        engine, planner = both
        keep(engine, planner, OLD)
        other = PlanningEngine(replace(planner.config, namespace="other"))
        other.keep_prompts()
        planned = other.plan(EDITS["header"]())
        assert planned.fusion is None and planned.kept_about != planner.plan(OLD).kept_about
        assert not {*kept_keys(planned.kept_about, planned.token_ids)} & {
            *kept_keys(planner.plan(OLD).kept_about, planned.token_ids)
        }

    @pytest.mark.parametrize(
        "asked", [{"moved": "off"}, {"method": "full"}, {"recompute_ratio": 1.0, "method": "epic"}]
    )
    def test_where_it_is_switched_off_or_the_answer_must_be_exact(self, both: Any, asked: dict[str, Any]) -> None:
        engine, planner = both
        keep(engine, planner, OLD)
        assert planner.plan(EDITS["header"](), **asked).fusion is None

    def test_what_is_gone(self, both: Any) -> None:
        engine, planner = both
        keep(engine, planner, OLD)
        planner.kept.forget()
        assert planner.plan(EDITS["header"]()).fusion is None
