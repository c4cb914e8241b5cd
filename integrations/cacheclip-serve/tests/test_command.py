"""``cacheclip serve`` as a process, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from cacheclip_serve import command
from cacheclip_serve.server import Server, served_name
from cacheclip_serve.transformers import TransformersBackend
from cacheclip_testing import run_without_torch
from typer.testing import CliRunner

from cacheclip_rag import ConfigurationError, EngineConfig, MissingExtraError
from cacheclip_rag.cli import app


@pytest.mark.long
def test_it_serves_until_a_signal(tiny_models: dict[str, str], tmp_path: Path) -> None:
    options = ["--primary", tiny_models["llama"], "--auxiliary", tiny_models["auxiliary"], "--port", "0", "--json"]
    program = "from cacheclip_rag.cli import main; main()"
    started = [sys.executable, "-c", program, "serve", "--store", str(tmp_path / "store"), *options]
    environment = {**os.environ, "CACHECLIP_API_KEY": "a-secret-key"}
    pipe = subprocess.PIPE
    with subprocess.Popen(started, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        ready = json.loads(process.stdout.readline() or process.stderr.read())
        assert ready == {"address": ready["address"], "model": "llama", "backend": "transformers"}
        body = {"messages": [{"role": "user", "content": "Something private"}], "max_tokens": 120, "stream": True}
        headers = {"authorization": "Bearer a-secret-key"}
        with httpx.Client(base_url=ready["address"], headers=headers, timeout=60) as client:
            assert client.get("/health").status_code == client.get("/metrics").status_code == 200
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200
                lines = response.iter_lines()
                assert next(lines).startswith("data: {")
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]", "a running answer is finished"
        assert process.wait(60) == 0
        logged = process.stderr.read()
    assert "/health" not in logged and "/metrics" not in logged, "probes would fill the log"
    assert "/v1/chat/completions 200 in" in logged and "private" not in logged and "secret" not in logged


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--backend", "vlm"], "backend must be one of transformers, vllm"),
        (["--method", "cachclip"], "cacheclip"),
        (["--ratio", "2"], "write recompute_ratio = RATIO"),
        (["--finish", "maybe"], "write finish = ..."),
        (["--api-key", "short"], "API key"),
        (["--tenants", "none.toml"], "cannot read none.toml"),
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "0.0.0.0", "--api-key", "0123456789", "--inspect"], "at local addresses only"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_it_refuses(tmp_path: Path, options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["serve", "--store", str(tmp_path / "store"), *options])
    assert isinstance(done.exception, ConfigurationError) and words in str(done.exception)


def test_it_refuses_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    refused = {
        "write max_queue = ... under [serve]": ["--store", tmp_path / "none", "--max-queue", "1"],
        "--hot needs a shared store, such as --store s3://bucket/prefix, got none": ["--hot", "valkey://h"],
        "unknown option '--seed'": ["--store", tmp_path / "none", "--", "--seed"],
    }
    commands = [["serve", *options] for options in refused.values()]
    for words, done in zip(refused, run_without_torch(*commands), strict=True):
        assert (done.code, done.out) == (2, "") and words in done.err, done.err
    assert not (tmp_path / "none").exists()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]", "unknown table [server]. Did you mean 'serve'?"),
        ("[serve]\nmax_runing = 1", "[serve]: unknown setting max_runing. Did you mean 'max_running'?"),
        ("[serve]\nmax_running = 0", "[serve]: max_running must be a whole number, 1 or more, got 0"),
        ("[serve]\nmax_queue = 1.5", "max_queue must be a whole number"),
        ("[serve]\ntemperature = 3", "temperature must be a number from 0 to 2"),
        ("[serve]\nhide_hits = 1", "hide_hits must be True or False"),
        ("[serve]\nserved_name = 7", "served_name must be a non-empty string"),
        ("[serve]\naliases = 'a'", "aliases must be a list of non-empty strings"),
    ],
)
def test_its_table_of_the_settings_file(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "settings.toml").write_text(text)
    done = CliRunner().invoke(app, ["serve", "--settings", str(tmp_path / "settings.toml")])
    assert isinstance(done.exception, ConfigurationError) and words in str(done.exception)


def test_a_page_of_answers_would_show_hits(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("[serve]\nhide_hits = true")
    done = CliRunner().invoke(app, ["serve", "--settings", str(tmp_path / "settings.toml"), "--inspect"])
    assert isinstance(done.exception, ConfigurationError) and "which hide_hits forbids" in str(done.exception)


def test_the_memory_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option counts more than the file."""
    found: list[Any] = []
    monkeypatch.setattr(command, "_serve", lambda settings, *_: found.append(settings.config()))
    (tmp_path / "settings.toml").write_text("memory_bytes = 5")
    for given in (["--memory", "2MiB"], []):
        options = ["--store", str(tmp_path), "--settings", str(tmp_path / "settings.toml"), *given]
        assert CliRunner().invoke(app, ["serve", *options]).exit_code == 0
    assert [config.memory_bytes for config in found] == [2**21, 5]


def test_names_and_tools(tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stated: list[Any] = []
    monkeypatch.setattr(Server, "__init__", lambda self, backend, **settings: stated.append(settings))
    monkeypatch.setattr(Server, "run", lambda self: None)
    (tmp_path / "settings.toml").write_text("[serve]\ndrop_tools = true\naliases = ['a', 'b']")
    own = ["serve", "--store", str(tmp_path / "store"), "--primary", tiny_models["llama"], "--auxiliary", "none"]
    CliRunner().invoke(app, [*own, "--settings", str(tmp_path / "settings.toml")])
    CliRunner().invoke(app, own)
    assert [(each["aliases"], each["drops_tools"]) for each in stated] == [(["a", "b"], True), ((), False)]


@pytest.mark.parametrize(("given", "most"), [([], 2**30), (["max_bytes = 5000000"], 5_000_000)])
def test_without_a_store_kv_stays_in_bounded_memory(
    tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], most: int
) -> None:
    configs: list[EngineConfig] = []
    monkeypatch.setattr(Server, "run", lambda self: None)
    monkeypatch.setattr(TransformersBackend, "__init__", lambda self, config, **_: configs.append(config))
    (tmp_path / "settings.toml").write_text("\n".join(given))
    options = ["--primary", tiny_models["llama"], "--auxiliary", tiny_models["auxiliary"]]
    done = CliRunner().invoke(app, ["serve", *options, "--settings", str(tmp_path / "settings.toml")])
    assert done.exit_code == 0 and "stay in memory until the server ends" in done.stderr, done.exception
    assert [(each.store, each.max_bytes) for each in configs] == [(None, most)]


def test_without_the_part_for_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cacheclip_vllm", None)
    monkeypatch.delitem(sys.modules, "cacheclip_vllm.launch", raising=False)
    done = CliRunner().invoke(app, ["serve", "--store", str(tmp_path / "store"), "--backend", "vllm"])
    assert isinstance(done.exception, MissingExtraError) and "[vllm]" in str(done.exception)


def test_no_path_of_the_server_is_a_models_name(tiny_models: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    names = [tiny_models["llama"], str(tmp_path / "model.gguf"), "Qwen/Qwen2.5-0.5B-Instruct", "packaged:smollm2-135m"]
    assert [served_name(each) for each in names] == ["llama", "model.gguf", *names[2:]]
