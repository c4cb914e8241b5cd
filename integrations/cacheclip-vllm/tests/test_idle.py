"""What the server sends vLLM while nothing else runs: conversations with fused answers, as plain prefills."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cacheclip_testing.plugin import CHUNKS
from cacheclip_vllm import idle
from cacheclip_vllm.middleware import _MOST_KEPT
from cacheclip_vllm.parameters import EXACT
from cacheclip_vllm.settings import ServerSettings
from serve_cases import until
from starlette.responses import JSONResponse
from vllm_inner import WORDS
from vllm_served import CHAT, NORTH, OWN, PROMPT, SEAL, Served, running

from cacheclip_rag import CacheClipEngine, EngineConfig

USER, SAID = {"role": "user", "content": PROMPT}, {"role": "assistant", "content": "".join(WORDS)}
IDLE = {"cacheclip": {"finish": "idle"}}


@pytest.fixture
def served(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(idle, "_MOST_ROWS", 48)
    with running(ServerSettings(replace(config, finish="idle"), "tiny", seal=SEAL)) as found:
        yield found


def is_idle(served: Served) -> bool:
    """Also when the last response has reached its client, the server may not be done with it."""
    idle = served.middleware._idle
    return not idle._running and not idle._conversations


def slices(served: Served) -> list[dict[str, Any]]:
    """What was sent by the server itself, once nothing is left."""
    until(lambda: is_idle(served))
    return [body for body in served.inner.bodies if body.get("max_tokens") == 1]


def expected(served: Served, prompt: str) -> list[int]:
    """Token ids of a conversation, in whole blocks."""
    runtime = served.middleware.planning.planner("default").primary
    ids = [*served.middleware.planning.planner("default").plan(prompt).token_ids]
    ids += runtime.tokenize("".join(WORDS)).ids
    return ids[: len(ids) // 16 * 16]


def ends_in_its_answer(served: Served, prompt: str) -> bool:
    """Whether the last whole block of a conversation does."""
    return len(expected(served, prompt)) > len(served.middleware.planning.planner("default").plan(prompt).token_ids)


@pytest.mark.some(2)
@pytest.mark.parametrize("stream", [False, True])
def test_a_fused_answer(served: Served, stream: bool) -> None:
    """The whole conversation, each slice a longer beginning of it, without a plan."""
    asked = next(each for each in (PROMPT + " ?" * n for n in range(16)) if ends_in_its_answer(served, each))
    served.ask(asked, stream=stream)
    sent, ids = slices(served), expected(served, asked)
    assert sent[-1]["prompt"] == ids and len(sent) > 1
    for each, other in zip(sent, sent[1:], strict=False):
        assert len(each["prompt"]) < len(other["prompt"]) and ids[: len(each["prompt"])] == each["prompt"]
    assert all(set(each) == {"prompt", "max_tokens", "temperature"} for each in sent)
    assert sum(len(body.get("messages", ())) for body in served.inner.bodies) == 1, "nothing else was asked"


def test_a_long_answer_counts_to_its_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_inner.WORDS", words := [f" w{number}" for number in range(_MOST_KEPT // 50)])
    answers: list[str] = []
    monkeypatch.setattr(served.middleware._idle, "offer", lambda *offered: answers.append(offered[-1]))
    served.ask(stream=True)
    until(lambda: answers)
    assert answers == ["".join(words)]


def test_which_conversations(served: Served) -> None:
    """None that vLLM computed plainly, that asks for no completion, or after which no turn comes."""
    served.ask("Hello"), served.ask(cacheclip={"method": "full"}), served.ask(cacheclip={"finish": "none"})
    served.ask(cacheclip={"background": True})
    served.inner.told = {"outcome": "exact", "reason": "it is there"}
    served.ask()
    served.inner.told = {"outcome": "cached", "reason": None}
    assert not slices(served)
    served.ask()
    assert slices(served)


def test_off_by_default(config: EngineConfig) -> None:
    with running(ServerSettings(config, "tiny", seal=SEAL)) as served:
        served.ask()
        assert not slices(served)
        served.ask(**IDLE)
        assert slices(served), "as a request says"


def test_a_request_comes_first(served: Served) -> None:
    """The slice that runs is the last one until it is answered; then its conversation, the latest, is the next."""
    inner = served.inner
    inner.plain_gate.clear()
    served.ask()
    until(lambda: len(inner.bodies) == 2)
    other = threading.Thread(target=served.ask, args=(f"{PROMPT} And who?",))
    inner.gate.clear()
    streaming = threading.Thread(target=served.events)
    streaming.start()
    until(lambda: len(inner.bodies) == 3)
    inner.plain_gate.set()
    other.start()
    other.join()
    assert [body.get("max_tokens") for body in inner.bodies] == [None, 1, None, None], "one is still answered"
    inner.gate.set()
    streaming.join()
    sent = slices(served)
    assert sent[-1]["prompt"] == expected(served, PROMPT)


def test_the_next_turn_takes_the_place_of_the_one_before(served: Served) -> None:
    """The latest comes first. Four conversations wait at most: the oldest are left as they are."""
    oldest = f"{CHUNKS[3]}\n\n{CHUNKS[2]}\n\n{CHUNKS[1]}"
    inner, asked = served.inner, [oldest, *CHUNKS[1:], PROMPT, f"{PROMPT} Who?"]
    inner.gate.clear()
    streaming = threading.Thread(target=served.events, kwargs={"cacheclip": {"method": "full"}})
    streaming.start()
    until(lambda: bool(inner.bodies))
    for each in asked:
        served.ask(each)
    inner.gate.set()
    streaming.join()
    prompts = [body["prompt"] for body in slices(served)]
    found = [prompts.index(ids) if (ids := expected(served, each)) in prompts else None for each in asked]
    assert found[0] is None is found[4] and found[5] < found[3] < found[2] < found[1]  # type: ignore[operator]


def test_the_next_turn_is_plain(served: Served) -> None:
    """No chunk of it is scored, as long as vLLM is known to hold the exact KV."""
    cache = SimpleNamespace(block_size=16, num_gpu_blocks=2000)
    served.inner.app.state.vllm_config = SimpleNamespace(cache_config=cache)

    def turn(content: str = "Who?", **fields: Any) -> tuple[str, str | None, int]:
        own = served.client.post(CHAT, json={"messages": [USER, SAID, {"role": "user", "content": content}], **fields})
        said = own.json()["cacheclip"]
        return said["outcome"], said["reason"], said["hits"]

    assert turn(cacheclip={"finish": "none"})[0] == "fused"
    served.ask()
    assert slices(served)
    served.inner.cached = 300
    assert turn() == ("exact", EXACT, len(CHUNKS)) and "kv_transfer_params" not in served.inner.last
    assert turn("\n\n".join(CHUNKS * 3))[0] == "fused", "it has more to compute than a plan has"
    assert turn(cache_salt="another")[0] == "fused"
    served.inner.cached = 10
    assert [turn()[0], turn()[0]] == ["plain", "fused"], "it did not hold it any more"


@pytest.mark.parametrize("emptied", ["by others", "by its operator"])
def test_what_vllm_holds_no_longer(served: Served, emptied: str) -> None:
    cache = SimpleNamespace(block_size=16, num_gpu_blocks=40)
    served.inner.app.state.vllm_config = SimpleNamespace(cache_config=cache)
    served.ask()
    assert slices(served)
    if emptied == "by others":
        for _ in range(9):
            served.ask("Hello " * 200)
    else:
        served.client.post("/reset_prefix_cache")
    turns = [USER, SAID, {"role": "user", "content": "Who?"}]
    assert served.client.post(CHAT, json={"messages": turns}).json()["cacheclip"]["outcome"] == "fused"


def test_released_texts_are_not_sent_again(served: Served, config: EngineConfig) -> None:
    inner = served.inner
    inner.plain_gate.clear()
    served.ask()
    until(lambda: len(inner.bodies) == 2)
    engine = CacheClipEngine(config)
    try:
        assert engine.release([CHUNKS[0]])
        inner.plain_gate.set()
        assert len(slices(served)) == 1, "the one that was under way"
    finally:
        engine.precompute(CHUNKS)


def test_a_cache_without_room(served: Served) -> None:
    served.inner.cached = 0
    served.ask()
    assert len(slices(served)) == 2, "what the first slice left is gone"


def test_what_goes_wrong(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.inner.plain_error = JSONResponse({}, 503)
    assert served.ask().status_code == 200
    assert len(slices(served)) == 1 and "was not computed: RuntimeError: vLLM answered with status 503" in caplog.text
    assert PROMPT[:30] not in caplog.text
    served.inner.plain_error = None
    served.ask()
    assert len(slices(served)) > 2


def test_the_server_ends_while_a_slice_runs(config: EngineConfig) -> None:
    with running(ServerSettings(replace(config, finish="idle"), "tiny", seal=SEAL)) as served:
        served.inner.plain_gate.clear()
        served.ask()
        until(lambda: len(served.inner.bodies) == 2)


def test_tenants_stay_apart(config: EngineConfig, tmp_path: Path) -> None:
    """Slices have the salt of the tenant's plain requests; equal prompts of two tenants are two conversations."""
    (tmp_path / "tenants.json").write_text(json.dumps({NORTH: "north"}))
    idle = replace(config, finish="idle")
    with running(ServerSettings(idle, "tiny", "", OWN, tmp_path / "tenants.json", SEAL)) as served:
        salts = []
        for key in (OWN, NORTH):
            served.ask("Hello", key=key)
            salts.append(served.inner.last["cache_salt"])
        assert served.ask(CHUNKS[0], key=OWN).status_code == served.ask(CHUNKS[0], key=NORTH).status_code == 200
        assert {each["cache_salt"] for each in slices(served)} == {*salts} and len({*salts}) == 2
