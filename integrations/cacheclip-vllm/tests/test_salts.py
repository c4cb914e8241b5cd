"""Every prompt that reaches vLLM is salted by its tenant, whatever became of its plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cacheclip_vllm.planner import Planner
from cacheclip_vllm.settings import ServerSettings
from vllm_served import BOTH, NORTH, OWN, PICTURE, PROMPT, SEAL, Served, running

from cacheclip_rag import EngineConfig

USER = {"role": "user", "content": PROMPT}
CHATS: dict[str, dict[str, Any]] = {
    "planned": {"messages": [USER]},
    "two answers": {"messages": [USER], "n": 2},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}]},
    "a picture": {"messages": [{"role": "user", "content": [PICTURE]}]},
    "another role": {"messages": [{"role": "function", "content": PROMPT}]},
    "no messages": {"messages": []},
    "of no kind": {"messages": "Hello"},
    "another model": {"messages": [USER], "model": "an-adapter"},
    "its own template": {"messages": [USER], "chat_template": "{{ messages }}"},
    "nothing stored": {"messages": [{"role": "user", "content": "Hello"}]},
    "full": {"messages": [USER], "cacheclip": {"method": "full"}},
    "a stream": {"messages": [USER], "stream": True},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": PROMPT},
    "several": {"prompt": [PROMPT, "Hello"]},
    "token ids": {"prompt": [1, 2, 3]},
    "lists of token ids": {"prompt": [[1, 2], [3]]},
    "a suffix": {"prompt": PROMPT, "suffix": "x"},
    "best of two": {"prompt": PROMPT, "best_of": 2},
    "no prompt": {},
}
ASKED = [("/v1/chat/completions", name) for name in CHATS] + [("/v1/completions", name) for name in COMPLETIONS]


@pytest.fixture(scope="module")
def tenants(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("keys") / "tenants.json"
    file.write_text(json.dumps({NORTH: "north", BOTH: ["south", "north"]}))
    with running(ServerSettings(config, "tiny", api_key=OWN, tenants=file, seal=SEAL)) as found:
        yield found


def salt_of(served: Served, path: str, body: dict[str, Any], key: str) -> Any:
    before = len(served.inner.bodies)
    served.client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
    assert len(served.inner.bodies) == before + 1, "it reaches vLLM"
    return served.inner.last.get("cache_salt")


def check_salts(served: Served, path: str, body: dict[str, Any]) -> None:
    salts = [salt_of(served, path, body, key) for key in (OWN, NORTH, BOTH)]
    assert all(isinstance(salt, str) and len(salt) == 64 for salt in salts) and len({*salts}) == 3
    same = {**body, "cacheclip": {**body.get("cacheclip", {}), "tenant": "north"}}
    assert salt_of(served, path, same, BOTH) == salts[1], "the tenant's, not the key's"
    assert salt_of(served, path, {**body, "cache_salt": salts[0]}, NORTH) not in salts, "none takes another's"


@pytest.mark.some(3)
@pytest.mark.parametrize(("path", "name"), ASKED, ids=[name for _, name in ASKED])
def test_whatever_is_asked(tenants: Served, path: str, name: str) -> None:
    check_salts(tenants, path, (CHATS if "chat" in path else COMPLETIONS)[name])


@pytest.mark.parametrize("fails", ["make_method", "segments", "plan", "queue"])
def test_whatever_goes_wrong(tenants: Served, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **options: Any) -> Any:
        raise ZeroDivisionError

    if fails == "queue":
        monkeypatch.setattr(tenants.middleware.planning._queue, "_most_waiting", 0)
        monkeypatch.setattr(tenants.middleware.planning._queue, "_most_running", 0)
    else:
        monkeypatch.setattr(Planner, fails, broken)
    check_salts(tenants, "/v1/chat/completions", CHATS["planned"])
    assert "kv_transfer_params" not in tenants.inner.last
