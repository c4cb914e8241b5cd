"""API keys, tenants apart, and web pages that ask through a browser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from cacheclip_serve.access import Access, check_origins, read_tenants
from cacheclip_serve.errors import RequestError
from cacheclip_serve.server import Server
from cacheclip_testing.plugin import CHUNKS
from serve_cases import Served, running

from cacheclip_rag import ConfigurationError, EngineConfig

OWN, NORTH, BOTH = "server-key-1", "north-key-11", "both-key-111"
TENANTS = {NORTH: ("north",), BOTH: ("south", "north")}


@pytest.fixture(scope="module")
def guarded(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with its own key, and keys of tenants."""
    store = str(tmp_path_factory.mktemp("tenants") / "store")
    with running(replace(config, store=store), access=Access("default", OWN, TENANTS)) as found:
        yield found


def ask(served: Served, key: str | None, tenant: str | None = None, text: str = CHUNKS[0]) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    field: dict[str, Any] = {"documents": [text], **({"tenant": tenant} if tenant else {})}
    body = {"messages": [{"role": "user", "content": f"{text}\n\nWhat?"}], "max_tokens": 2, "cacheclip": field}
    return served.client.post("/v1/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize("key", [None, "wrong-key-11", NORTH[:-1], NORTH + "1", "ümlaut-key"])
def test_a_known_key_is_needed(guarded: Served, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    for path in ("/v1/models", "/v1/models/tiny", "/metrics"):
        response = guarded.client.get(path, headers=headers)
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"
    assert guarded.client.post("/v1/chat/completions", content=b"{", headers=headers).status_code == 401
    assert guarded.client.get("/health").status_code == 200


def test_another_scheme_is_no_key(guarded: Served) -> None:
    for given in (f"Basic {OWN}", OWN, f"Bearer{OWN}", "Bearer", ""):
        assert guarded.client.get("/v1/models", headers={"authorization": given}).status_code == 401


def test_tenants_are_apart(guarded: Served) -> None:
    assert guarded.server.app._queue._is_shared, "one place is kept free of each"

    def hits(key: str, tenant: str | None = None) -> int:
        response = ask(guarded, key, tenant)
        assert response.status_code == 200, response.text
        return int(response.json()["cacheclip"]["hits"])

    assert hits(NORTH) == 0
    while hits(NORTH) == 0:  # stored after the answer
        pass
    assert hits(OWN) == 0, "the server's own tenant"
    assert hits(BOTH) == 0, "south, the first of its tenants"
    assert hits(BOTH, "north") == 1 and hits(NORTH, "north") == 1


def test_tenants_share_one_limit_of_prefix_caches(guarded: Served) -> None:
    assert ask(guarded, NORTH).status_code == ask(guarded, BOTH).status_code == 200
    north, south = (guarded.backend.engine(name).prefixes for name in ("north", "south"))
    assert north._sharing is south._sharing and len(north._sharing) >= 2, "each would have a whole limit of its own"


def test_a_key_allows_its_tenants_only(guarded: Served) -> None:
    for key, tenant in ((NORTH, "south"), (BOTH, "default"), (OWN, "north")):
        response = ask(guarded, key, tenant)
        assert response.status_code == 403
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("permission_error", "cacheclip.tenant")
    assert "default" not in guarded.backend._engines or ask(guarded, OWN).status_code == 200


def test_metrics_are_the_servers_own(guarded: Served) -> None:
    def read(key: str) -> httpx.Response:
        return guarded.client.get("/metrics", headers={"authorization": f"Bearer {key}"})

    ask(guarded, NORTH), ask(guarded, BOTH)
    assert read(NORTH).status_code == 403
    text = read(OWN).text
    answers = [line for line in text.splitlines() if line.startswith("cacheclip_answers_total")]
    engines = guarded.backend._engines.values()
    counted = [v for e in engines for k, v in e.metrics.snapshot().items() if k.startswith("answers_total")]
    assert sum(float(line.split()[-1]) for line in answers) == sum(counted) >= 2
    assert text.count("cacheclip_store_bytes{") == 1, "the tenants share one store"
    assert "north" not in text


def test_without_keys_no_tenant_can_be_named(served: Served) -> None:
    response = served.chat(cacheclip={"tenant": "default"})
    assert response.status_code == 403 and "--tenants" in response.json()["error"]["message"]


class TestKeys:
    def test_of_a_file(self, tmp_path: Path) -> None:
        toml, json = tmp_path / "tenants.toml", tmp_path / "tenants.json"
        toml.write_text(f'"{NORTH}" = "north"\n"{BOTH}" = ["south", "north"]\n')
        json.write_text(f'{{"{NORTH}": "north", "{BOTH}": ["south", "north"]}}')
        assert read_tenants(toml) == read_tenants(json) == TENANTS

    @pytest.mark.parametrize("text", ["", "[1]", '"secret-key" = 3', '"secret-key" = []', "secret-key", '"k" = [""]'])
    def test_of_a_malformed_file(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "tenants.toml"
        file.write_text(text)
        with pytest.raises(ConfigurationError) as caught:
            read_tenants(file)
        assert "secret" not in str(caught.value)
        with pytest.raises(ConfigurationError, match="cannot read"):
            read_tenants(tmp_path / "none.toml")

    @pytest.mark.parametrize("key", ["short", "with a space", "ümlautschlüssel"])
    def test_that_cannot_be(self, key: str) -> None:
        with pytest.raises(ConfigurationError, match="API key"):
            Access("default", key)
        with pytest.raises(ConfigurationError, match="API key"):
            Access("default", None, {key: ("north",)})

    def test_of_server_and_tenant_differ(self) -> None:
        with pytest.raises(ConfigurationError, match="each its own"):
            Access("default", NORTH, TENANTS)

    def test_are_not_shown(self) -> None:
        assert OWN not in repr(Access("default", OWN, TENANTS)) and NORTH not in repr(Access("default", OWN, TENANTS))

    def test_all_are_compared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first match does not end it, or the time would tell a key's place."""
        compared: list[bytes] = []
        monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append(a) is None and a == b)
        assert Access("default", OWN, TENANTS).identify(f"Bearer {OWN}").tenants == ("default",)
        assert len(compared) == 3
        with pytest.raises(RequestError):
            Access("default", OWN, TENANTS).identify("Bearer other")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_no_other_machine_without_a_key(host: str) -> None:
    backend: Any = object()
    with pytest.raises(ConfigurationError, match="--api-key"):
        Server(backend, name="tiny", access=Access("default"), host=host)
    Server(backend, name="tiny", access=Access("default", OWN), host=host)


PAGE = "https://chat.example.org"
CHAT = "/v1/chat/completions"


def preflight(served: Served, origin: str) -> Any:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    return served.client.options(CHAT, headers={"origin": origin, **asked})


def test_only_the_named_page(config: EngineConfig) -> None:
    with running(replace(config, store=None), origins=[PAGE, "http://localhost:3000"]) as served:
        for origin in (PAGE, "http://localhost:3000"):
            response = preflight(served, origin)
            assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, origin)
            assert "authorization" in response.headers["access-control-allow-headers"]
        assert "access-control-allow-origin" not in preflight(served, "https://evil.example.org").headers
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 2, "stream": stream}
            response = served.client.post(CHAT, json=body, headers={"origin": PAGE})
            assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, PAGE)
        refused = served.client.post(CHAT, json={}, headers={"origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, PAGE)


def test_no_page_by_default(served: Served) -> None:
    response = preflight(served, PAGE)
    assert response.status_code == 405 and "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("origin", ["*", "null", "chat.example.org", "https://a.org/page", "https://*.org", ""])
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigurationError, match="origin"):
        check_origins([origin], Access("default"))
    if origin == "*":
        check_origins([origin], Access("default", "a-secret-key"))
