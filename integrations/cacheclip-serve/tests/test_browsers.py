"""Web pages that ask through a browser."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cacheclip_serve.access import Access, check_origins
from serve_cases import Served, running

from cacheclip_rag import ConfigurationError, EngineConfig

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
