"""``cacheclip serve --store DIR``."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigurationError
from ..methods import DEFAULT_METHOD, check_method
from ..removed import OPTIONS, refuse_removed
from .common import (
    AuxiliaryOption,
    ChunkContextOption,
    DeviceOption,
    DtypeOption,
    FinishOption,
    JsonOption,
    MinConfidenceOption,
    NamespaceOption,
    PrimaryOption,
    RequireCertificateOption,
    StoreOption,
    number_or_name,
    print_json,
)

if TYPE_CHECKING:
    from ..config import EngineConfig


def serve(
    context: typer.Context,
    store: StoreOption,
    primary: PrimaryOption = None,
    auxiliary: AuxiliaryOption = None,
    backend: Annotated[str, typer.Option(help="What runs the primary: transformers or vllm.")] = "transformers",
    host: Annotated[str, typer.Option(help="Address to listen at; other than local ones need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")] = 8000,
    served_name: Annotated[
        str | None, typer.Option(help="Name of the model in requests. [default: the primary's]")
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
    method: Annotated[str, typer.Option(help="Preset of requests that name none.")] = DEFAULT_METHOD,
    ratio: Annotated[
        str | None,
        typer.Option("--ratio", help="Share of chunk tokens to recompute, 0 to 1, or auto. [default: the method's]"),
    ] = None,
    max_ttft_s: Annotated[
        float | None, typer.Option("--max-ttft", help="Seconds to the first token, instead of a ratio.")
    ] = None,
    min_confidence: MinConfidenceOption = None,
    finish: FinishOption = "none",
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="Of requests that state none; 1 is OpenAI's, 0 is greedy.")
    ] = 1.0,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Of chat requests that state none. [default: the model's context]"),
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Most answers at once; each holds its prompt's KV.")] = 4,
    max_queue: Annotated[int, typer.Option(min=0, help="Most questions that wait; more are refused (429).")] = 64,
    timeout: Annotated[float, typer.Option(min=0.1, help="Most seconds of a request, waiting included.")] = 600.0,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest body of a request.")] = 2**23,
    memory_bytes: Annotated[int, typer.Option(min=0, help="Memory tier before the disk; 0: none.")] = 0,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    namespace: NamespaceOption = None,
    chunk_context: ChunkContextOption = None,
    system_prompt: Annotated[str | None, typer.Option(help="For conversations without one.")] = None,
    require_certificate: RequireCertificateOption = False,
    shadow_rate: Annotated[
        float, typer.Option(min=0, max=1, help="Share of answers compared with full prefill afterwards; see /metrics.")
    ] = 0.0,
    hide_hits: Annotated[
        bool, typer.Option("--hide-hits", help="Leave out of responses which chunks were stored.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve OpenAI's API: chat completions, completions, models, health and metrics. Stops at SIGTERM or Ctrl-C, when
    running answers are finished. With --json, prints the address when it is ready. With --backend vllm, flags that are
    not listed here are passed on to vLLM; write -- before them."""
    from ..checks import check_choice, check_confidence, check_ratio_and_limit
    from ..sampling import FINISH_MODES
    from ..serving.access import Access, read_tenants
    from ..serving.backend import check_backend

    # what can be refused without torch, which takes seconds to import
    refuse_removed([each.partition("=")[0] for each in context.args], OPTIONS)
    check_backend(backend)
    if backend == "vllm":
        from ..serving.vllm.options import check_given, check_vllm

        check_vllm()
        check_given([name for name in context.params if _is_given(context, name)])
    elif context.args:
        raise ConfigurationError(f"unknown option {context.args[0]!r}. See: cacheclip serve --help")
    check_method(method)
    check_choice("finish", finish, FINISH_MODES)
    chosen_ratio = number_or_name(ratio)
    check_ratio_and_limit(chosen_ratio, max_ttft_s)
    least = number_or_name(min_confidence)
    if least is not None:
        check_confidence("--min-confidence", least)
    config = _config(
        store,
        primary=primary,
        auxiliary=auxiliary,
        dtype=dtype,
        namespace=namespace,
        chunk_context=chunk_context,
    )
    config = config.from_options(
        config,
        {
            "device": device,
            "method": method,
            "recompute_ratio": chosen_ratio,
            "max_ttft_s": max_ttft_s,
            "min_confidence": least,
            "finish": finish,
            "memory_bytes": memory_bytes,
            "system_prompt": system_prompt,
            "require_certificate": require_certificate,
            "shadow_rate": shadow_rate,
        },
    )
    if backend == "vllm":
        from ..serving.vllm.launch import launch

        launch(
            config,
            context.args,
            served_name=served_name,
            host=host,
            port=port,
            api_key=api_key,
            tenants=tenants,
            body_bytes=max_body_bytes,
            as_json=as_json,
        )
    access = Access(config.namespace, api_key, read_tenants(tenants) if tenants else {})

    from ..serving.app import Limits
    from ..serving.server import Server
    from ..serving.server import served_name as name_of
    from ..serving.transformers import TransformersBackend

    name = served_name or name_of(config.primary)

    def tell(address: str) -> None:
        if as_json:
            print_json({"address": address, "model": name, "backend": backend})
            sys.stdout.flush()
        else:
            typer.echo(f"{name} is ready at {address}/v1", err=True)

    server = Server(
        TransformersBackend(config, hide_hits=hide_hits),
        name=name,
        access=access,
        limits=Limits(max_running, max_queue, timeout, max_body_bytes),
        host=host,
        port=port,
        temperature=temperature,
        max_tokens=max_tokens,
        on_ready=tell,
    )
    _log_to_stderr()
    with suppress(KeyboardInterrupt):
        server.run()


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option was given, and is not at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def _config(store: str, **given: str | None) -> EngineConfig:
    """Settings of the engine: those of the store's documents, if it has any, and the given ones."""
    from ..ingest.library import Library
    from .settings import engine_config, merge_settings

    folder = Path(store).expanduser()
    library = Library(folder) if (folder / "library.sqlite3").is_file() else None
    return engine_config(merge_settings(library, **given), store, device="cpu")


def _log_to_stderr() -> None:
    """Warnings, and a line for each request."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("cacheclip_rag.serving").setLevel(logging.INFO)
    for name in ("cacheclip_rag", "uvicorn"):
        logging.getLogger(name).addHandler(handler)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
