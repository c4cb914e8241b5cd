"""The adapters' shared client over a server: the same answers as with the model here."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from cacheclip_serve import Access
from cacheclip_testing.plugin import CHUNKS, rag_prompt
from serve_cases import NAME, Served, running

from cacheclip_rag import Answer, ConfigurationError, EngineConfig, PromptTooLongError, ServerError
from cacheclip_rag.adapters import ServedFields, final_events, last_answer
from cacheclip_rag.methods import preset

KEY, NORTH = "server-key-1", "north-key-11"
PROMPT = rag_prompt(CHUNKS)


class PlainModel(ServedFields):
    """The least that an adapter does."""

    def ask(self, prompt: str, **options: Any) -> Answer:
        return last_answer(final_events(self._answering().stream(prompt, options=self._call_options(options))))


@pytest.fixture(scope="module")
def server(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with keys, and with the chunks of its own tenant."""
    store = str(tmp_path_factory.mktemp("adapters") / "store")
    access = Access("default", KEY, {NORTH: ("north", "east")})
    with running(replace(config, store=store), access=access) as found:
        found.engine.precompute(CHUNKS)
        yield found


@pytest.fixture
def own(server: Served) -> dict[str, Any]:
    """Settings of a model that the server answers for."""
    return {"base_url": server.url, "api_key": KEY, "max_tokens": 12}


def stats_of(llm: PlainModel, prompt: str = PROMPT, **options: Any) -> dict[str, Any]:
    return llm.ask(prompt, **options).stats.to_dict()


def test_answers_as_the_engine(server: Served, own: dict[str, Any]) -> None:
    answer = server.engine.generate(PROMPT, max_tokens=12)
    llm = PlainModel(**own)
    assert llm.ask(PROMPT).text == answer.text != ""
    stats = stats_of(llm)
    assert set(stats) == set(answer.stats.to_dict()) and stats["hits"] == len(CHUNKS)
    assert llm.model_name == NAME


def test_tenants(own: dict[str, Any]) -> None:
    assert stats_of(PlainModel(**{**own, "api_key": NORTH}))["hits"] == 0
    assert stats_of(PlainModel(**{**own, "api_key": NORTH}, namespace="east"))["hits"] == 0
    with pytest.raises(ServerError, match="may not use that tenant") as caught:
        stats_of(PlainModel(**{**own, "api_key": NORTH}, namespace="south"))
    assert caught.value.status == 403


def test_a_key_from_the_environment(own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHECLIP_API_KEY", KEY)
    llm = PlainModel(**{**own, "api_key": None})
    assert stats_of(llm)["hits"] == len(CHUNKS)
    monkeypatch.setenv("CACHECLIP_API_KEY", "another-key")
    with pytest.raises(ServerError, match="API key"):
        stats_of(llm)


SERVERS = {"store": "s", "auxiliary": None, "dtype": "bfloat16", "device": "cuda", "max_bytes": 3}


@pytest.mark.parametrize("name", SERVERS)
def test_refuses_what_belongs_to_the_server(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be combined with base_url"):
        PlainModel(base_url="http://localhost:1/v1", **{name: SERVERS[name]})


def test_refuses_what_a_server_cannot_do(own: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="preset's name"):
        PlainModel(**own, method=preset("direct"))
    with pytest.raises(ConfigurationError, match="names of methods"):
        stats_of(PlainModel(**own), method=preset("direct"))
    with pytest.raises(ConfigurationError, match="no engine here"):
        _ = PlainModel(**own).engine
    with pytest.raises(ConfigurationError, match="no engine here"):
        PlainModel(**own).warm_up()
    with pytest.raises(ConfigurationError, match="address of a server"):
        PlainModel(base_url="localhost:8000")


def test_errors_of_the_server(own: dict[str, Any]) -> None:
    with pytest.raises(PromptTooLongError):
        stats_of(PlainModel(**own), "word " * 6000)
    with pytest.raises(ConfigurationError, match="no model 'gpt-5'"):
        stats_of(PlainModel(**own, primary="gpt-5"))
    with pytest.raises(ServerError, match="cannot be reached"):
        stats_of(PlainModel(base_url="http://127.0.0.1:9/v1", max_tokens=2))


def test_the_key_is_not_written(own: dict[str, Any]) -> None:
    llm = PlainModel(**own)
    assert KEY not in repr(llm) and KEY not in llm.model_dump_json()
    assert pickle.loads(pickle.dumps(llm)).ask(PROMPT).text == llm.ask(PROMPT).text
