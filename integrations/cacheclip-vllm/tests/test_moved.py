"""What the server and the scheduler's connector do for KV of earlier prompts that vLLM's workers keep."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from cacheclip_testing import SENTENCES
from cacheclip_vllm.captures import CapturedRows
from cacheclip_vllm.kept import Keep, KeptBlocks, cut
from cacheclip_vllm.parameters import PARAMETER, SEAL_VARIABLE, Settings, read_keep, request_parameters
from cacheclip_vllm.settings import ServerSettings
from serve_cases import until
from vllm_served import COMPLETION, SEAL, Served, running

from cacheclip_rag import ConfigurationError, EngineConfig
from cacheclip_rag.planning import BLOCK_TOKENS, FusionPlan, PlanningRuntime, kept_keys, load_planning

WORDS = sorted({*" ".join(SENTENCES).split()})
TEXT = " ".join(random.Random(5).choices(WORDS, k=250))
EDITED = f"Checksum 07c2e, longer. {TEXT} Who?"
KEEP, NORTH = Keep("default", "a" * 64), Keep("north", "b" * 64)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def server(config: EngineConfig) -> Iterator[Served]:
    with running(ServerSettings(replace(config, device="cpu"), "tiny", seal=SEAL)) as found:
        yield found


@pytest.fixture
def served(server: Served) -> Served:
    """It knows a prompt."""
    planner = server.middleware.planning.planner("default")
    planner.kept.forget()
    server.inner.told = {"outcome": "fused", "reason": None}
    server.complete(f"Checksum a91f3. {TEXT} Who?")
    until(lambda: planner.plan(f"Checksum 3. {TEXT} Who?").fusion is not None)
    return server


class TestServer:
    def test_the_kv_of_an_edited_prompt(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        stats = served.complete(EDITED).json()["cacheclip"]
        carried = served.inner.last["kv_transfer_params"][PARAMETER]
        fusion = FusionPlan.from_dict(carried["plan"])
        assert fusion.moved and {piece.key for piece in fusion.pieces} == fusion.moved_keys
        assert stats["moved_tokens"] > stats["prompt_tokens"] / 2 and stats["outcome"] == "fused"
        assert stats["fallback"] is None and stats["moved_past"] > 0.8
        monkeypatch.setenv(SEAL_VARIABLE, SEAL)
        settings = Settings.of({"store": "there", "sealed": True})
        assert read_keep(carried, settings).about == carried["keep"]["about"]
        with pytest.raises(ConfigurationError, match="not planned by this server"):
            read_keep({**carried, "keep": {"namespace": "default", "about": "c" * 64}}, settings)

    @pytest.mark.parametrize(
        ("body", "is_kept"),
        [
            ({"cacheclip": {"moved": "off"}}, True),
            ({"cacheclip": {"method": "full"}}, True),
            ({"cache_salt": "mine"}, False),
            ({"cache_salt": "mine", "cacheclip": {"moved": "on"}}, False),
            ({"response_format": {"type": "json_object"}}, True),
        ],
        ids=str,
    )
    def test_where_nothing_is_moved(self, served: Served, body: dict[str, Any], is_kept: bool) -> None:
        assert served.complete(EDITED, **body).json()["cacheclip"]["moved_tokens"] == 0
        carried = served.inner.last.get("kv_transfer_params", {}).get(PARAMETER, {})
        assert "plan" not in carried and ("keep" in carried) == is_kept

    def test_with_tools_if_the_request_says_so(self, served: Served) -> None:
        """Nobody could verify the first tokens of a call."""

        numbers = count()

        def moved(**own: Any) -> bool:
            served.ask(f"Checksum {next(numbers)}. {TEXT}", tools=TOOLS, **own)
            return "plan" in served.inner.last["kv_transfer_params"][PARAMETER]

        until(lambda: moved(cacheclip={"moved": "on"}))
        assert not moved()

    def test_what_is_gone_is_forgotten(self, served: Served) -> None:
        served.inner.told = {"outcome": "plain", "reason": "gone"}
        served.complete(EDITED)
        planner = served.middleware.planning.planner("default")
        until(lambda: planner.plan(EDITED).fusion is None)

    def test_settings_without_it(self, config: EngineConfig) -> None:
        for changed in ({"moved": "off"}, {"require_certificate": True}, {"device": "cuda"}):
            own = ServerSettings(replace(config, **{"device": "cpu", **changed}), "tiny", seal=SEAL)
            assert own.prompt_bytes == 0
        with running(replace(own, config=replace(config, device="cpu", moved="off"))) as served:
            served.complete(EDITED)
            assert "kv_transfer_params" not in served.inner.last
            refused = served.client.post(COMPLETION, json={"prompt": EDITED, "cacheclip": {"moved": "on"}})
            assert refused.status_code == 400 and "cacheclip.moved" in refused.text


@pytest.fixture(scope="module")
def runtime(tiny_models: dict[str, str]) -> PlanningRuntime:
    return load_planning(tiny_models["llama"])


def blocks_for(runtime: PlanningRuntime, tokens: int) -> KeptBlocks:
    bytes_of_token = 2 * runtime.num_layers * runtime.num_kv_heads * runtime.head_dim * runtime.dtype.itemsize
    return KeptBlocks(tokens * bytes_of_token, runtime)


def keep(blocks: KeptBlocks, ids: list[int], about: Keep = KEEP, start: int = 0) -> tuple[str, ...] | None:
    """The names of the blocks of a prompt that is computed in one step."""
    blocks.follow(about)
    if not blocks.begin("r", about, ids):
        return None
    (rows,) = blocks.named([CapturedRows("r", "r", (), start, len(ids), start, len(ids))])
    return rows.keys


def plan(*keys: str, namespace: str = "default") -> FusionPlan:
    pieces = [[n * BLOCK_TOKENS, key, 0, BLOCK_TOKENS] for n, key in enumerate(keys)]
    whole = FusionPlan.computing([1] * 99, BLOCK_TOKENS * len(keys), model="m", rope_pin="", namespace=namespace)
    moved = [[0, BLOCK_TOKENS * len(keys)]]
    return FusionPlan.from_dict({**whole.to_dict(), "pieces": pieces, "moved": moved})


class TestBlocks:
    IDS, OTHERS = [*range(40)], [*range(50, 90)]

    def test_the_oldest_go_first(self, runtime: PlanningRuntime) -> None:
        blocks = blocks_for(runtime, 64)
        first = keep(blocks, self.IDS)
        assert first is not None and len(first) == 2 and blocks.holds(plan(*first))
        second = keep(blocks, self.OTHERS)
        assert second is not None and blocks.take_dropped() == []
        assert blocks.holds(plan(*first)), "and is used"
        third = keep(blocks, [*range(100, 140)])
        assert third is not None and blocks.take_dropped() == [second[1], second[0]], "the end of a prompt goes first"
        assert blocks.holds(plan(*first, *third)) and not blocks.holds(plan(second[0]))

    def test_the_first_tokens_that_vllm_has_itself(self, runtime: PlanningRuntime) -> None:
        assert keep(blocks_for(runtime, 64), self.IDS, start=17) == ()
        assert keep(blocks_for(runtime, 64), self.IDS, start=16) == (kept_keys(KEEP.about, self.IDS)[1],)

    def test_no_room(self, runtime: PlanningRuntime) -> None:
        assert keep(blocks_for(runtime, 32), self.IDS) is None and keep(blocks_for(runtime, 0), [1]) is None
        blocks = blocks_for(runtime, 64)
        assert blocks.begin("one", KEEP, self.IDS) and not blocks.begin("other", KEEP, self.IDS)
        blocks.forget("one")
        assert blocks.begin("other", KEEP, self.IDS)

    def test_never_another_tenants_nor_after_an_erasure(self, runtime: PlanningRuntime) -> None:
        blocks = blocks_for(runtime, 160)
        (own, _), (other, _) = keep(blocks, self.IDS) or (), keep(blocks, self.IDS, NORTH) or ()
        assert own != other and blocks.holds(plan(other, namespace="north"))
        assert not blocks.holds(plan(other)) and not blocks.holds(plan(own, namespace="north"))
        blocks.begin("late", KEEP, self.OTHERS)
        blocks.follow(Keep("default", "c" * 64))  # something was erased
        assert not blocks.holds(plan(own)) and own in blocks.take_dropped()
        assert blocks.named([CapturedRows("late", "late", (), 0, 40, 0, 40)])[0].keys == ()
        assert blocks.holds(plan(other, namespace="north"))

    def test_it_is_there_again(self, runtime: PlanningRuntime) -> None:
        """What is dropped and captured between two steps stays on the workers."""
        blocks = blocks_for(runtime, 64)
        first = keep(blocks, self.IDS)
        blocks.clear()
        assert keep(blocks, self.IDS) == first and blocks.take_dropped() == []

    def test_cut(self, runtime: PlanningRuntime) -> None:
        shape = (runtime.num_layers, 2, runtime.num_kv_heads, 40, runtime.head_dim)
        kv = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        free = runtime.position_free(kv.clone(), 8)
        blocks = cut(kv, CapturedRows("r", "r", (), 8, 48, 40, 48, ("x", "y")), runtime)
        assert torch.equal(blocks["x"], free[:, :, :, 8:24]) and torch.equal(blocks["y"], free[:, :, :, 24:40])


@pytest.mark.parametrize("wrong", [{"keep": 1}, {"keep": {"namespace": "default"}}, {"keeps": {}}, {}, 1], ids=str)
def test_what_is_no_keep(wrong: Any) -> None:
    with pytest.raises(ConfigurationError):
        read_keep(wrong, Settings.of({"store": "there"}))


def test_a_tenant_of_another_connector() -> None:
    carried = request_parameters(keep=NORTH)[PARAMETER]
    assert read_keep(carried, Settings.of({"store": "there"})) is None
    assert read_keep(carried, Settings.of({"store": "there", "namespaces": ["north"]})) == NORTH
    with pytest.raises(ConfigurationError, match="prompt_bytes"):
        Settings.of({"store": "there", "prompt_bytes": -1})
