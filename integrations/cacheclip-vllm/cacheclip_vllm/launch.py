"""Starts vLLM's server with our connector and middleware, in place of this process.

This process checks the options, opens the planner once, so that what it refuses is said before vLLM loads its weights,
and then becomes vLLM's server. So signals reach vLLM itself, which stops its processes, and nothing is left behind.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from cacheclip_serve import address_of, check_origins, check_reachable, served_name as name_of

from cacheclip_rag import ConfigurationError, EngineConfig
from cacheclip_rag.models import choose_device, concrete, resolve
from cacheclip_rag.plugins import expanded, own_folder, python_command, python_environment, shown_url

from .internals import check_vllm, is_tried
from .offline import engine_options, worker_of
from .options import absolute_paths, check_flags, is_on, value_of
from .parameters import NAMESPACES_VARIABLE, STORE_VARIABLE
from .planner import Planner
from .served import Served
from .settings import ServerSettings

_VLLM = ("-m", "cacheclip_vllm.serve", "serve")
_MIDDLEWARE = "cacheclip_vllm.middleware.CacheClip"
_SHUTDOWN_S = 20
"""Seconds that running answers have to end after SIGTERM; vLLM by itself cuts them off at once. Kubernetes kills a
container after 30."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program in place of this one."""

    arguments: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    """Variables beside those of this process."""


def command(settings: ServerSettings, flags: Sequence[str], *, host: str, port: int) -> Command:
    """How vLLM's server is started: with settings as the middleware reads them, and checked flags of vLLM, passed on as
    they are. Raises the errors of :func:`~cacheclip_rag.models.load.resolve`."""
    config, access = settings.config, settings.access
    tenants = {config.namespace, *(tenant for names in access.tenants.values() for tenant in names)}
    worker, prompt_bytes = worker_of(config.device), settings.prompt_bytes
    engine = engine_options(config.store, namespace=None, device=worker, sealed=True, prompt_bytes=prompt_bytes)
    environment = {**settings.to_environment(), NAMESPACES_VARIABLE: json.dumps(sorted(tenants))}
    if shown_url(config.store) != str(config.store):
        environment[STORE_VARIABLE] = engine["kv_transfer_config"]["kv_connector_extra_config"].pop("store")
    arguments = [
        *python_command(*_VLLM, str(resolve(config.primary))),
        *("--served-model-name", settings.name, *settings.aliases),
        *("--host", host, "--port", str(port)),
        *("--dtype", config.dtype),
        *("--worker-cls", engine["worker_cls"]),
        *("--kv-transfer-config", json.dumps(engine["kv_transfer_config"])),
        *("--middleware", _MIDDLEWARE),
        *("--enable-prompt-tokens-details", "--enable-per-request-metrics"),
        *("--shutdown-timeout", str(_SHUTDOWN_S)),
        *("--api-server-count", "1"),  # by default one for each data-parallel rank
    ]
    environment["VLLM_USE_RUST_FRONTEND"] = "0"  # it has no middleware
    # of a flag given twice, the last one counts
    return Command((*arguments, *absolute_paths(flags)), environment)


def launch_server(
    config: EngineConfig,
    flags: Sequence[str] = (),
    *,
    served_name: str | None = None,
    aliases: Sequence[str] = (),
    drops_tools: bool = False,
    embedding: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    tenants: Path | None = None,
    origins: Sequence[str] = (),
    body_bytes: int = 2**23,
    inspect: bool = False,
    as_json: bool = False,
) -> NoReturn:
    """Become vLLM's server. What vLLM writes goes to stderr.

    Args:
        config: settings of the planners.
        flags: of vLLM, passed on as they are.
        port: 0 takes a free one.
        inspect: show how the last answers came about, at /inspect.
        as_json: write a JSON object with the address to stdout when the server is ready.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigurationError: options contradict each other, have no effect with vLLM, or nothing could be reused; or
            other machines could reach the address, and no API key is set.
        CertificateError: the settings require a certificate, and there is none.
    """
    check_vllm()
    _check_environment()
    check_flags(flags)  # what is refused takes no time
    config = _on_device(config)
    port = port or _free_port(host)
    settings = ServerSettings(
        config,
        served_name or name_of(config.primary),
        address_of(host, port),
        api_key,
        None if tenants is None else expanded(tenants).absolute(),
        secrets.token_urlsafe(32),
        body_bytes,
        calls_tools=is_on(flags, "enable-auto-tool-choice"),
        shows_metrics=is_on(flags, "enable-per-request-metrics"),
        aliases=tuple(aliases),
        drops_tools=drops_tools,
        embedding=embedding,
        is_untried=not is_tried(),
        inspects=inspect,
    )
    check_reachable(host, settings.access, inspects=inspect)
    check_origins(origins, settings.access)
    config = concrete(config)
    settings = replace(settings, config=config)
    if origins or settings.access.is_open:  # vLLM allows every web page by default
        flags = ["--allowed-origins", json.dumps([*origins]), *flags]
    _start(settings, flags, host, port, as_json)


def _start(settings: ServerSettings, flags: Sequence[str], host: str, port: int, as_json: bool) -> NoReturn:
    """Become vLLM's server. From here on models may be fetched."""
    planner = Planner(settings.planner_config)
    settings = replace(settings, served=_served(settings.config, flags))
    planner.serve(settings.served)
    if as_json:
        settings = _to_stdout(settings)
    program = command(settings, flags, host=host, port=port)
    planner.warm_up()
    planner.close()
    _become(program)


def _check_environment() -> None:
    if os.environ.get("VLLM_API_KEY"):
        raise ConfigurationError(
            "VLLM_API_KEY is set, and vLLM would refuse all other keys, those of tenants too. Unset it, and give "
            "--api-key or set CACHECLIP_API_KEY."
        )


def _on_device(config: EngineConfig) -> EngineConfig:
    """The settings with the device that vLLM will use."""
    config = replace(config, device=choose_device(config.device))
    if config.device not in ("cpu", "cuda"):
        raise ConfigurationError(f"device must be cpu or cuda with --backend vllm, got {config.device!r}.")
    return config


def _become(program: Command) -> NoReturn:
    """Run a program in place of this one, in a folder of its own. What it writes to stdout goes to stderr."""
    environment = python_environment(**program.environment)
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(own_folder())
    os.dup2(2, 1)
    os.execve(program.arguments[0], program.arguments, environment)


def _to_stdout(settings: ServerSettings) -> ServerSettings:
    """Settings whose JSON object goes to what is stdout now; vLLM's log must not."""
    stdout = os.dup(1)
    os.set_inheritable(stdout, True)
    return replace(settings, json_to=stdout)


def _served(config: EngineConfig, flags: Sequence[str]) -> Served:
    quantization = value_of(flags, "quantization", "-q")
    return Served.running(config.primary, config.device, quantization, value_of(flags, "kv-cache-dtype") or "auto")


def _free_port(host: str) -> int:
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            return int(listening.getsockname()[1])
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen at {host}: {error.strerror or error}. Choose another --host."
        ) from error
