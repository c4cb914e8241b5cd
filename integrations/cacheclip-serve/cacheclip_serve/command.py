"""``cacheclip serve``, with ``--store DIR`` or in memory."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import typer

from cacheclip_rag import ConfigurationError, EngineConfig, MissingExtraError
from cacheclip_rag.plugins import (
    Commands,
    CommandSettings,
    JsonOption,
    Table,
    check_backend,
    check_choice,
    check_number,
    check_whole_number,
    engine_options,
    format_bytes,
    is_url,
    parse_bytes,
    print_json,
    shown_url,
    split_hot,
)

_MEMORY_BYTES = 2**30
"""Limit of KV in memory for a server without a store."""


@dataclass(frozen=True, slots=True)
class ServeTable(Table):
    """``[serve]``"""

    served_name: str | None = None
    """Name of the model in requests; None: the primary's."""
    aliases: list[str] | None = None
    """Other names by which requests may ask for it."""
    temperature: float = 1.0
    """Of requests that state none; 1 is OpenAI's, 0 is greedy."""
    max_tokens: int | None = None
    """Of chat requests that state none; None: the model's context."""
    max_running: int = 32
    """Most answers at once, as far as their KV fits in half of the memory that is free at the start."""
    max_queue: int = 64
    """Most questions that wait; more are refused (429)."""
    timeout_s: float = 600.0
    """Most seconds of a request, waiting included."""
    max_body_bytes: int = 2**23
    """Largest body of a request."""
    embedding: str | None = None
    """Embedding model of /v1/embeddings; needs cacheclip-ingest. None: there is none."""
    drop_tools: bool = False
    """True: tools that need not be called are left out of prompts if the chat template has no place for them; else such
    requests are refused (400)."""
    learn: str = "texts"
    """``texts``: what recurs in prompts, or is marked as retrieved (``<source>``), is stored while nothing runs, and
    evicted first; ``off``. Not in a shared store, with ``on_miss = "ignore"``, nor for ``--backend vllm``."""
    learned_bytes: int = 2**30
    """Most bytes of such texts of a tenant."""
    hide_hits: bool = False
    """True: responses do not tell which chunks were stored. Not for ``--backend vllm``."""

    def __post_init__(self) -> None:
        Table.__post_init__(self)
        check_number("temperature", self.temperature, "a number from 0 to 2", most=2.0)
        check_number("timeout_s", self.timeout_s, "0.1 seconds or more", least=0.1, most=float("inf"))
        check_choice("learn", self.learn, ("texts", "off"))
        for name in ("max_tokens", "max_running", "max_body_bytes", "learned_bytes"):
            if getattr(self, name) is not None:
                check_whole_number(name, getattr(self, name), least=1)


@dataclass(frozen=True, slots=True)
class Door:
    """Where the server listens, and whom it lets in."""

    host: str
    port: int
    api_key: str | None
    tenants: Path | None
    origins: tuple[str, ...]
    inspect: bool = False
    """Whether it has a page of the last answers."""


@engine_options("store", "primary", "auxiliary", "method", "dtype", "device")
def serve(
    context: typer.Context,
    settings: CommandSettings,
    backend: Annotated[
        str, typer.Option(help="What runs the primary: transformers (llama.cpp for a GGUF file) or vllm.")
    ] = "transformers",
    host: Annotated[str, typer.Option(help="Address to listen at; other than local ones need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8000,
    hot: Annotated[
        str | None,
        typer.Option(help="Valkey or Redis server before a shared store, such as valkey://cache:6379."),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes,
            metavar="SIZE",
            help="Memory for chunk caches before the store, such as 8GiB; the setting memory_bytes.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="CACHECLIP_API_KEY",
            show_envvar=True,
            help="Key that requests need; other users of this "
            "machine can read a command line, so rather set the variable.",
        ),
    ] = None,
    tenants: Annotated[
        Path | None, typer.Option(help="TOML or JSON file of API keys, each with its tenant or a list of tenants.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of a web page that may ask through a browser (CORS); can be given again."),
    ] = None,
    inspect: Annotated[
        bool, typer.Option("--inspect", help="Show how the last answers came about, at /inspect; local addresses only.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve OpenAI's and Anthropic's APIs, beside models, health and metrics. Stops at SIGTERM or Ctrl-C, when
    running answers are finished. With --json, prints the address when it is ready. With --backend vllm, flags that are
    not listed here are passed on to vLLM; write -- before them."""
    check_backend(backend)
    settings = _with_tiers(settings, hot, memory)
    door = Door(host, port, api_key, tenants, tuple(allow_origin or ()), inspect)
    if backend == "vllm":
        _serve_vllm(settings, door, context.args, as_json)
    elif context.args:
        raise ConfigurationError(f"unknown option {context.args[0]!r}. See: cacheclip serve --help")
    else:
        _serve(settings, door, as_json)


def _with_tiers(settings: CommandSettings, hot: str | None, memory: int | None) -> CommandSettings:
    """The settings with what the command line says of tiers before the store."""
    if hot is not None:
        shared = str(settings.engine.get("store") or "")
        if not is_url(shared):
            got = repr(shown_url(shared)) if shared else "none"
            raise ConfigurationError(f"--hot needs a shared store, such as --store s3://bucket/prefix, got {got}.")
        store = f"{split_hot(shared)[0]}?hot={hot}"
        settings = replace(settings, engine={**settings.engine, "store": EngineConfig(store=store).store})
    if memory is not None:
        settings = replace(settings, engine={**settings.engine, "memory_bytes": memory})
    return settings


def _serve_vllm(settings: CommandSettings, door: Door, flags: list[str], as_json: bool) -> None:
    """Become vLLM's server, which gets the flags."""
    try:
        from cacheclip_vllm import check_settings, launch_server
    except ModuleNotFoundError as error:
        raise MissingExtraError("cacheclip-vllm", "vllm") from error

    table = settings.table(ServeTable)
    stated = {
        each.name: getattr(table, each.name) for each in fields(table) if getattr(table, each.name) != each.default
    }
    check_settings({**settings.engine, **stated})
    launch_server(
        settings.store_config(),
        flags,
        served_name=table.served_name,
        aliases=table.aliases or (),
        drops_tools=table.drop_tools,
        embedding=table.embedding,
        host=door.host,
        port=door.port,
        api_key=door.api_key,
        tenants=door.tenants,
        origins=door.origins,
        body_bytes=table.max_body_bytes,
        inspect=door.inspect,
        as_json=as_json,
    )


def _serve(settings: CommandSettings, door: Door, as_json: bool) -> None:
    """Serve with an engine in this process, until a signal comes."""
    from .access import Access, read_tenants

    table = settings.table(ServeTable)
    if door.inspect and table.hide_hits:
        raise ConfigurationError("--inspect shows which chunks were stored, which hide_hits forbids. Choose one.")
    config = settings.store_config() if settings.engine.get("store") else _in_memory(settings.config())
    access = Access(config.namespace, door.api_key, read_tenants(door.tenants) if door.tenants else {})

    from .app import Limits
    from .embeddings import EmbeddingService
    from .inspection import Inspection
    from .server import Server, served_name
    from .transformers import TransformersBackend

    name = table.served_name or served_name(config.primary)
    names = (access.tenant, *(each for of_key in access.tenants.values() for each in of_key))
    inspection = Inspection(names) if door.inspect else None
    learns = table.learn == "texts" and config.on_miss == "store"

    def tell(address: str) -> None:
        if learns:
            where = f"in {store}" if (store := settings.engine.get("store")) else "in memory"
            typer.echo(f'texts that recur in prompts are stored {where} (learn = "off" under [serve]: none)', err=True)
        pages = inspection.addresses(address) if inspection is not None else []
        for tenant, page in pages:
            typer.echo(f"answers of {tenant}: {page}", err=True)
        if as_json:
            print_json({"address": address, "model": name, "backend": "transformers"})
            sys.stdout.flush()
        else:
            typer.echo(f"{name} is ready at {address}/v1", err=True)

    server = Server(
        TransformersBackend(
            config,
            hide_hits=table.hide_hits,
            learned_bytes=table.learned_bytes if learns else 0,
            inspection=inspection,
        ),
        name=name,
        aliases=table.aliases or (),
        drops_tools=table.drop_tools,
        embeddings=EmbeddingService(table.embedding, device=config.device, most_waiting=table.max_queue),
        access=access,
        limits=Limits(table.max_running, table.max_queue, table.timeout_s, table.max_body_bytes),
        host=door.host,
        port=door.port,
        origins=door.origins,
        temperature=table.temperature,
        max_tokens=table.max_tokens,
        inspection=inspection,
        on_ready=tell,
    )
    _log_to_stderr()
    with suppress(KeyboardInterrupt):
        server.run()


def _in_memory(config: EngineConfig) -> EngineConfig:
    """For a server without a store, whose clients may give any number of documents."""
    config = replace(config, max_bytes=config.max_bytes or _MEMORY_BYTES)
    typer.echo(
        f"No store was given: texts, and up to {format_bytes(config.max_bytes or 0)} of KV, stay in memory until the "
        "server ends. To keep them: --store DIR.",
        err=True,
    )
    return config


def _log_to_stderr() -> None:
    """Warnings, and a line for each request."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("cacheclip_rag", "cacheclip_serve", "uvicorn"):
        logging.getLogger(name).addHandler(handler)
    logging.getLogger("cacheclip_serve").setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def register(commands: Commands) -> None:
    """Called by the command line of the core, which found this function by its entry point."""
    commands.add("serve", serve, ServeTable, takes_flags=True)
