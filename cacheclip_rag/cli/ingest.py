"""``cacheclip ingest PATH… --store DIR``, and ``cacheclip ingest --upgrade --store DIR``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigurationError
from .common import (
    AuxiliaryOption,
    BackendOption,
    ChunkContextOption,
    DeviceOption,
    DtypeOption,
    EmbeddingOption,
    JsonOption,
    NamespaceOption,
    PrimaryOption,
    StoreOption,
    VLLMOption,
    existing_store,
    format_bytes,
    print_json,
    stoppable,
    vllm_options,
)

if TYPE_CHECKING:
    from ..engine import CacheClipEngine
    from ..ingest.library import Library
    from ..ingest.plan import IngestPlan

_SHOWN = 20
"""Most failed or skipped paths in output for people."""


def ingest(
    context: typer.Context,
    store: StoreOption,
    paths: Annotated[
        list[str] | None, typer.Argument(help="Text, Markdown and PDF files, or folders that contain them.")
    ] = None,
    primary: PrimaryOption = None,
    auxiliary: AuxiliaryOption = None,
    embedding: EmbeddingOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    namespace: NamespaceOption = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Most tokens in a chunk. [default: 512]")] = None,
    overlap: Annotated[int | None, typer.Option(help="Tokens shared by neighbouring chunks. [default: 0]")] = None,
    chunk_context: ChunkContextOption = None,
    codec: Annotated[
        str | None,
        typer.Option(help="How KV is stored: int8 (recommended; a quarter of float32), bfloat16. [default: --dtype]"),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(help="Limit of the store in bytes, also for later runs; 0: no limit. [default: unchanged]"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print what would be done, and its cost (chunks, bytes, minutes); change nothing."
        ),
    ] = False,
    upgrade: Annotated[
        bool,
        typer.Option(
            "--upgrade",
            help="Instead of documents: encode the stored passages again for the current (or another) --chunk-context.",
        ),
    ] = False,
    backend: BackendOption = "transformers",
    vllm: VLLMOption = None,
    as_json: JsonOption = False,
) -> None:
    """Precompute the chunk caches of documents and index them for retrieval. A second run processes only changes."""
    from ..config import EngineConfig

    _check_paths(paths, upgrade)
    options = vllm_options(vllm, backend)
    if codec is not None:
        EngineConfig(codec=codec)  # refused before torch is imported, which takes seconds
    if upgrade:
        existing_store(store)

    from ..engine import CacheClipEngine
    from ..ingest.embedding import Embedder
    from ..ingest.job import ingest as run
    from ..ingest.job import plan, undone_if_failed
    from ..ingest.library import Library
    from ..ingest.splitting import check_sizes
    from ..ingest.upgrade import plan_upgrade
    from .settings import engine_config, merge_settings

    folder = Path(store).expanduser()
    if dry_run and not folder.is_dir():  # a dry run must not create the folder
        folder = Path(context.with_resource(TemporaryDirectory()))
    library = Library.open(folder) if upgrade else Library(folder)
    settings = merge_settings(
        library,
        primary=primary,
        auxiliary=auxiliary,
        embedding=embedding,
        dtype=dtype,
        namespace=namespace,
        chunk_tokens=chunk_tokens,
        overlap_tokens=overlap,
        chunk_context=None if upgrade else chunk_context,
        codec=codec,
    )
    if upgrade and chunk_context is not None:
        settings = replace(settings, chunk_context=chunk_context)
    check_sizes(settings.chunk_tokens, settings.overlap_tokens)
    config = engine_config(settings, str(folder), device=device)
    if backend == "vllm":
        from ..runtime.vllm.encoding import vllm_engine

        engine = context.with_resource(vllm_engine(config, vllm=options))
    else:
        engine = CacheClipEngine(config)
    limit = engine.store.store.limit if max_bytes is None else max_bytes or None
    if dry_run:
        if upgrade:
            found = plan_upgrade(library, engine, limit)
        else:
            found = plan(paths or (), library=library, engine=engine, settings=settings, max_bytes=limit)
        _print_plan(found, as_json)
        return
    with undone_if_failed(library, engine):
        if max_bytes is not None:
            engine.store.store.set_limit(limit)
        if upgrade:
            _upgrade(library, engine, store, limit, as_json)
            return
        report = run(
            paths or (),
            library=library,
            engine=engine,
            embedder=Embedder(settings.embedding, device),
            settings=settings,
        )
    if as_json:
        print_json({"store": store, **report.to_dict()})
    else:
        typer.echo(
            f"{report.documents} documents: {report.added} added, {report.changed} changed, {report.unchanged} "
            f"unchanged, {report.removed} removed; {report.chunks} chunks, {report.computed} computed"
        )
        _print_problems(report.failed, report.skipped)
        _print_evicted(report.evicted, limit)
    if report.chunks and any(known != engine.context_of() for known in library.contexts()):
        typer.echo(
            "Some passages are stored with another chunk context and are not found any more. Encode them again: "
            f"cacheclip ingest --upgrade --store {store}",
            err=True,
        )
    if report.failed or report.evicted:
        raise typer.Exit(1)


def _check_paths(paths: list[str] | None, upgrade: bool) -> None:
    if upgrade and paths:
        raise ConfigurationError(
            f"--upgrade encodes what is stored and reads no documents, got {', '.join(paths)}. Run one after the other."
        )
    if not upgrade and not paths:
        raise ConfigurationError("expected documents or folders, got none. Name some, or use --upgrade.")


def _upgrade(library: Library, engine: CacheClipEngine, store: str, limit: int | None, as_json: bool) -> None:
    from ..ingest.upgrade import upgrade as run

    with stoppable(library.folder):
        report = run(library, engine)
    if as_json:
        print_json({"store": store, **report.to_dict()})
    else:
        typer.echo(
            f"{report.documents} documents, {report.chunks} chunks: {report.computed} computed; {report.removed} "
            "entries of earlier chunk contexts removed"
        )
        _print_evicted(report.evicted, limit)
    if report.evicted:
        raise typer.Exit(1)


def _print_evicted(evicted: int, limit: int | None) -> None:
    if not evicted:
        return
    size = format_bytes(limit) if limit is not None else "a limit"
    typer.echo(
        f"warning: {evicted} of these chunks are not stored any more, because the store is limited to {size}. Raise "
        "the limit with --max-bytes; what is missing is stored again after an answer that needs it.",
        err=True,
    )


def _print_plan(found: IngestPlan, as_json: bool) -> None:
    if as_json:
        print_json({"dry_run": True, **found.to_dict()})
        return
    typer.echo(
        f"{found.added} documents to add, {found.changed} changed, {found.unchanged} unchanged, {found.removed} to "
        f"remove; {found.chunks} chunks, {found.computed} of them to compute ({found.tokens} tokens)\n"
        f"about {format_bytes(found.bytes)} and {found.seconds / 60:.1f} minutes, embeddings not counted"
    )
    if found.excess_bytes and found.max_bytes is not None:
        typer.echo(
            f"warning: the store is limited to {format_bytes(found.max_bytes)}, {format_bytes(found.excess_bytes)} too "
            "little: chunk caches would be evicted. Raise the limit with --max-bytes.",
            err=True,
        )
    _print_problems(found.failed, found.skipped)


def _print_problems(failed: list[dict[str, str]], skipped: list[dict[str, str]]) -> None:
    for kind, problems in (("failed", failed), ("skipped", skipped)):
        for problem in problems[:_SHOWN]:
            typer.echo(f"{kind}: {problem['error']}", err=True)
        if len(problems) > _SHOWN:
            typer.echo(f"{kind}: and {len(problems) - _SHOWN} more (all of them: --json)", err=True)
