"""The compose file of Open WebUI: its settings are ones that our programs and the page know."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from cacheclip_serve.command import ServeTable
from typer.main import get_command

from cacheclip_rag import EngineConfig
from cacheclip_rag.cli import app

REPOSITORY = Path(__file__).parents[3]
FOLDER = REPOSITORY / "examples/open-webui"
PAGE = (REPOSITORY / "docs/pages/how-to/open-webui.md").read_text(encoding="utf-8")
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture
def services() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    return services


def table() -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the engine, and those of the server."""
    settings = tomllib.loads((FOLDER / "settings.toml").read_text(encoding="utf-8"))
    return settings, settings.pop("serve")


def test_the_command_line_takes_the_command_and_the_settings(services: dict[str, Any]) -> None:
    own, serve = services["cacheclip"], get_command(app).get_command(None, "serve")  # type: ignore[attr-defined,arg-type]
    known = {name for parameter in serve.params for name in parameter.opts}
    assert {each for each in own["command"] if each.startswith("--")} <= known
    mounted = {volume.split(":")[1] for volume in own["volumes"]}
    assert own["command"][own["command"].index("--settings") + 1] in mounted
    assert {*re.findall(r"/store|/models", DOCKERFILE)} <= mounted and f" AS {own['build']['target']}\n" in DOCKERFILE
    assert [*own["environment"]] == [each.envvar for each in serve.params if each.name == "api_key"]
    engine, server = table()
    EngineConfig(primary="any", **engine)
    ServeTable(**server)
    with pytest.raises(TypeError, match="drop_tool"):
        ServeTable(**server, drop_tool=True)


def test_open_webui_asks_the_server_for_all_that_it_needs(services: dict[str, Any]) -> None:
    asks, port = services["open-webui"]["environment"], re.findall(r"EXPOSE (\d+)", DOCKERFILE)[0]
    assert {value for name, value in asks.items() if "URL" in name} == {f"http://cacheclip:{port}/v1"}
    assert {value for name, value in asks.items() if "KEY" in name} == {"${CACHECLIP_API_KEY}"}
    assert asks["RAG_EMBEDDING_MODEL"] == table()[1]["embedding"]


def test_the_page_says_what_each_setting_is_for(services: dict[str, Any]) -> None:
    rows = {name for row in re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert rows == {*services["open-webui"]["environment"], *table()[0], *table()[1]}
