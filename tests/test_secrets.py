"""No message, log, repr, output or dump shows a password or a key that stands in a URL or a setting."""

import base64
import io
import json
import logging
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
from cacheclip_shared.care import create
from cacheclip_shared.place import SharedPlace
from langchain_cacheclip import CacheClipLLM as TextModel, ChatCacheClip
from langchain_core.load import dumpd
from llama_index.llms.cacheclip import CacheClipLLM

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.base.errors import CacheClipError, ConfigurationError
from cacheclip_rag.base.urls import shown_url, without_secrets
from cacheclip_rag.cli import main
from cacheclip_rag.config import EngineConfig
from tests.conftest import CHUNKS, rag_prompt, some_of

SECRET = "s3cr3t"
MODELS: list[Any] = [CacheClipLLM, ChatCacheClip, TextModel]


@pytest.fixture
def seen(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What is collected, and at the end everything that was logged, must be without the secret."""
    found: list[str] = []
    caplog.set_level(logging.DEBUG)
    yield found
    found += [logging.Formatter().format(record) for record in caplog.records]
    assert found and not [each for each in found if SECRET in each]


@pytest.fixture(autouse=True)
def no_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at the port of the endpoint."""
    options = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "no secret", "AWS_REGION": "here"}
    for name, value in {**options, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)


def result_of(ask: Callable[[], object]) -> str:
    """What comes of a call, or what its error says, with its causes."""
    try:
        return repr(ask())
    except CacheClipError as error:
        return f"{error!r} {error} {''.join(traceback.format_exception(error))}"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3cr3t@h:1/0", "redis://***@h:1/0"),
        ("valkeys://us/er:s3cr3t?#/@x@h:1", "valkeys://***@h:1"),
        ("redis://h:1?password=s3cr3t&db=2", "redis://h:1?password=***&db=***"),
        ("s3://b/p?hot=redis://:s3cr3t@h:6379", "s3://b/p?hot=redis://***@h:6379"),
        ("s3://b/p?hot=redis://:s3cr 3t's@h:6379", "s3://b/p?hot=redis://***@h:6379"),
        ("s3://b/p?hot=:s3cr3t@h", "s3://b/p?hot=***@h"),
        ("s3://b/p&hot=redis://:s3cr3t@h", "s3://b/p&hot=***"),
        ("s3://b/p?hot=redis://:x's3cr3t@h:6379", "s3://b/p?hot=redis://***@h:6379"),
        ("s3://key:s3cr3t@b/p", "s3://***@b/p"),
        ("az://c/p?sv=1&sig=s3cr3t", "az://c/p?sv=***&sig=***"),
        ("http://user:s3cr/3t@h:8000/v1", "http://***@h:8000/v1"),
        *((same, same) for same in ("s3://b/a@b", "http://h:8000/v1/a@b", "/data/a@b", "s3://b/p?hot=valkey://h:1")),
    ],
)
def test_urls(url: str, shown: str) -> None:
    assert shown_url(url) == shown_url(shown) == shown
    if " " not in url:
        assert without_secrets(f"got '{url}': run --store {url}") == f"got '{shown}': run --store {shown}"


WRONG = (
    *("s3://b/p?hot={}@h:6379", "s3://b/p?hot=:{}@h:6379", "s3://b/p?hot=http://:{}@h", "s3://b/p?hot=redis://:{}/x@h"),
    *("s3://b/p?hot=redis://:{}@h:port", "s3://b/p?hot=redis://h:1?password={}&socket_timeout=x", "redis://:{}@h"),
    *("s3://key:{}@b/p", "s3://b/p?secret_access_key={}", "ftp://user:{}@h/p", "s3://b/p?hot=redis://***@h"),
)


@pytest.mark.parametrize("store", WRONG)
def test_wrong_settings(store: str, seen: list[str], tiny_models: dict[str, str]) -> None:
    """Wherever it is seen that they are wrong."""
    given = store.format(SECRET)
    models: dict[str, Any] = {"primary": tiny_models["llama"], "auxiliary": None}
    with pytest.raises(CacheClipError, match="expected|must be|left out") as caught:
        CacheClipEngine(EngineConfig(**models, store=given)).generate("Hello", max_tokens=1)
    seen.append(str(caught.value))
    for ask in (lambda: EngineConfig(store=given), lambda: create(given), lambda: SharedPlace(given)):
        seen.append(result_of(ask))
    seen += [result_of(lambda kind=kind: kind(store=given)) for kind in MODELS]  # type: ignore[misc]
    seen.append(output_of("store", "stats", "--store", given))
    seen.append(output_of("store", "create", given))


FOLDERS_ONLY = (
    *(("ask", "Why?"), ("explain-miss", "Why?"), ("store", "repair"), ("store", "clear", "--yes")),
    *(("store", "limit", "1GB"), ("ingest", ".", "--embedding", "a/b")),
)


@some_of(
    3,
    way=["'", " ", '"', "<"],
    store=["s3://b/p?hot=redis://:x{}@h:1", "redis:/:{}@h", "redis:/us:{}@h:1", "s3:/b?hot=:{}@h"],
)
def test_commands_that_need_a_folder(store: str, way: str, seen: list[str]) -> None:
    """Some passwords end a URL in a text, and a URL that lacks a slash would be a folder."""
    given = store.format(way + SECRET)
    seen += [output_of(*command, "--store", given) for command in FOLDERS_ONLY]
    seen.append(output_of("serve", "--hot", given))
    seen.append(output_of("serve", "--hot", "redis://h", "--store", given.replace("://", ":/")))
    if "://" not in store:
        seen += [output_of("store", "stats", "--store", given), output_of("store", "create", given)]
        for ask in (lambda: EngineConfig(store=given), *(lambda kind=kind: kind(store=given) for kind in MODELS)):
            seen.append(result_of(ask))
    says = ("expected", "must be", "--hot needs", "works on")
    assert [each for each in seen if not any(words in each for words in says)] == []


def output_of(*arguments: str) -> str:
    """What the command prints."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out), suppress(SystemExit):
        patch.setattr("sys.argv", ["cacheclip", *arguments])
        main()
    assert out.getvalue()
    return out.getvalue()


@contextmanager
def server(says: bytes | None, got: list[bytes] | None = None) -> Iterator[int]:
    """The port of a server that answers each request with the same bytes; None: never. ``got``: what it has read."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    threading.Thread(target=talk, args=(connection,), daemon=True).start()

        def talk(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                while data := connection.recv(1 << 16):
                    if got is not None:
                        got.append(data)
                    if says is not None:
                        connection.sendall(says * 64)

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("way", ["another host", "refused", "bad password", "timeout", "no redis"])
def test_a_hot_tier_that_fails(way: str, seen: list[str], tiny_models: dict[str, str], tmp_path: Path) -> None:
    says = {"bad password": b"-WRONGPASS invalid username-password pair\r\n", "no redis": b"HTTP/1.1 400 Bad\r\n\r\n"}
    with server(says.get(way)) as port:
        where = {"another host": "nowhere.invalid:6379", "refused": "127.0.0.1:1"}.get(way, f"127.0.0.1:{port}")
        store = f"file://{tmp_path}/store?hot=redis://user:{SECRET}@{where}"
        seen.append(output_of("store", "create", store))
        config = EngineConfig(primary=tiny_models["llama"], auxiliary=None, method="epic-corrected", store=store)
        assert str(config.store) == store
        engine = CacheClipEngine(config)
        assert engine.precompute(CHUNKS) == len(CHUNKS)
        answer = engine.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=2))
        seen += [repr(answer), engine.metrics.to_prometheus(), repr(config), repr(engine.store)]
        engine.close()
        for arguments in (("stats",), ("verify",), ("gc",), ("stats", "--json"), ("limit", "--namespace", "a", "1GB")):
            seen.append(output_of("store", *arguments, "--store", store))


def test_credentials_of_storage(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"id-{SECRET}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for endpoint in ("127.0.0.1:1", f"user:{SECRET}@127.0.0.1:1", f"user:{SECRET}@nowhere.invalid"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{endpoint}")
        for name in ("stats", "verify", "gc"):
            seen.append(output_of("store", name, "--store", "s3://bucket/prefix"))
        seen.append(output_of("store", "create", "s3://bucket/prefix"))


@pytest.mark.parametrize("kind", MODELS)
def test_adapters(kind: Any, seen: list[str]) -> None:
    """Traces hold their dumps. A copy works on, and who loads a dump is told what it lacks."""
    store, url = f"s3://b/p?hot=redis://:{SECRET}@h:1", f"http://user:{SECRET}@127.0.0.1:1/v1"
    for llm in (kind(store=store, auxiliary=None), kind(base_url=url, api_key=SECRET)):
        seen += [repr(llm), str(llm), json.dumps(llm.model_dump(), default=repr), llm.model_dump_json()]
        seen += [repr(llm._identifying_params), str(dumpd(llm))] if kind is not CacheClipLLM else [str(llm.to_dict())]
        assert (llm.model_copy().store, llm.model_copy().base_url) == (llm.store, llm.base_url)
    assert "***@127.0.0.1:1/v1" in repr(llm) and llm.base_url == url
    seen.append(result_of(lambda: llm._answering().stream("Hello") and [*llm._answering().stream("Hello")]))
    seen.append(repr(llm._remote()))
    dumped = kind(store=store, auxiliary=None).model_dump()["store"]
    with pytest.raises(ConfigurationError, match="Give it again"):
        kind(store=dumped)


@pytest.mark.parametrize("kind", MODELS)
def test_requests_to_a_server(kind: Any, seen: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """The server gets user and password; httpx logs each URL."""
    got: list[bytes] = []
    with server(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", got) as port:
        llm = kind(base_url=f"http://us%40er:{SECRET}'%2F@127.0.0.1:{port}/v1/")
        seen.append(result_of(lambda: [*llm._answering().stream("Hello")]))
        seen.append(result_of(lambda: llm._remote().served))
        seen.append(result_of(lambda: llm.engine))
    assert "status 500" in seen[0] and f"POST http://127.0.0.1:{port}/v1/chat/completions" in caplog.text
    sent = b"".join(got)
    assert sent.count(base64.b64encode(f"us@er:{SECRET}'/".encode())) == sent.count(b" HTTP/1.1") >= 2
    assert b"POST /v1/chat/completions HTTP" in sent and b"GET /v1/models HTTP" in sent


WRONG_SERVERS = ("{}/x@h:1/v1", "{}#x@h/v1", "{}?x@h/v1", "{}@h:x", "{}@h:0", "{}@h/v1?x=y", "{}@", "1/x@h", "{}@[h/v1")


@pytest.mark.parametrize("url", [*(f"http://user:{each}" for each in WRONG_SERVERS), "http:/user:{}@h", "user:{}'s@h"])
@pytest.mark.parametrize("kind", MODELS)
def test_wrong_addresses_of_servers(kind: Any, url: str, seen: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="base_url must be the address of a server") as caught:
        kind(base_url=url.format(SECRET))
    seen.append("".join(traceback.format_exception(caught.value)))
