"""What all users of a machine can read has no passwords: command lines, vLLM's log, what is shown of settings."""

from __future__ import annotations

import json

import pytest
from cacheclip_vllm.launch import command
from cacheclip_vllm.parameters import STORE_VARIABLE, Settings
from cacheclip_vllm.settings import ServerSettings

from cacheclip_rag import EngineConfig

SECRET = "s3cr3t"


def test_the_command(tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    store = f"s3://b/p?hot=redis://:{SECRET}@h:1"
    config = EngineConfig(primary=tiny_models["llama"], auxiliary=None, store=store, device="cpu")
    settings = ServerSettings(config, "tiny", api_key=f"key-{SECRET}", seal=SECRET)
    program = command(settings, [], host="127.0.0.1", port=8000)
    seen = [repr(settings), repr(program), " ".join(program.arguments), repr(settings.access)]
    for name, value in program.environment.items():
        monkeypatch.setenv(name, value)
    extra = json.loads(program.arguments[program.arguments.index("--kv-transfer-config") + 1])
    connector = Settings.of(extra["kv_connector_extra_config"])
    assert connector.store == store == program.environment[STORE_VARIABLE]
    assert not [each for each in [*seen, repr(connector)] if SECRET in each]
    config = EngineConfig(primary=tiny_models["llama"], store="s3://b/p")
    plain = command(ServerSettings(config, "t"), [], host="", port=1)
    assert '"s3://b/p"' in " ".join(plain.arguments) and STORE_VARIABLE not in plain.environment
