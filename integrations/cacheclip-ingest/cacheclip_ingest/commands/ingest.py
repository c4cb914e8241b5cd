"""``cacheclip ingest PATH… --store DIR``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheclip_rag import ConfigurationError, MissingExtraError
from cacheclip_rag.plugins import (
    CommandSettings,
    JsonOption,
    check_choice,
    checked_model,
    engine_options,
    expanded,
    format_bytes,
    is_url,
    print_json,
    print_names,
    shown_url,
)

from .tables import IngestTable

if TYPE_CHECKING:
    from cacheclip_rag import CacheClipEngine, EngineConfig

    from ..job import IngestReport
    from ..plan import IngestPlan
    from ..shared import SharedReport


def _checked_backend(name: str) -> str:
    check_choice("backend", name, ("transformers", "vllm"))
    return name


_Paths = Annotated[
    list[str],
    typer.Argument(help="Text, Markdown and PDF files, or folders that contain them; URLs of object storage."),
]
_Embedding = Annotated[
    str | None,
    typer.Option(
        callback=checked_model,
        show_default="the store's, else all-MiniLM-L6-v2",
        help="sentence-transformers model for retrieval.",
    ),
]
_ChunkTokens = Annotated[int | None, typer.Option(show_default="512", help="Most tokens in a chunk.")]
_DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print what would be done, and its cost (chunks, bytes, minutes); change nothing."),
]
_Strict = Annotated[
    bool, typer.Option("--strict", help="End with exit code 1 if a document's text lacks what its readers see.")
]
_Yes = Annotated[
    bool,
    typer.Option(
        "--yes", help="Remove what is gone, even if it is most of what was ingested from a path, or all of a folder."
    ),
]
_Backend = Annotated[
    str,
    typer.Option(
        "--backend",
        callback=_checked_backend,
        help="What runs the primary: transformers in this process, or vllm.",
    ),
]
_Engine = Annotated[
    str | None,
    typer.Option("--engine", help="What spreads the work, for a shared store: ray.", show_default="local"),
]
_Workers = Annotated[int, typer.Option("--workers", min=1, help="Processes that encode, with --engine ray.")]


@engine_options("store", "primary", "auxiliary", "dtype", "device", "namespace")
def ingest(
    context: typer.Context,
    settings: CommandSettings,
    paths: _Paths,
    embedding: _Embedding = None,
    chunk_tokens: _ChunkTokens = None,
    dry_run: _DryRun = False,
    strict: _Strict = False,
    yes: _Yes = False,
    backend: _Backend = "transformers",
    engine: _Engine = None,
    workers: _Workers = 1,
    as_json: JsonOption = False,
) -> None:
    """Precompute the chunk caches of documents and index them for retrieval. A second run processes only changes."""
    store = settings.store
    if is_url(store):
        local = {"--embedding": embedding, "--backend": backend == "vllm"}
        if ignored := [name for name, value in local.items() if value]:
            raise ConfigurationError(
                f"{', '.join(ignored)} works on a store folder, not on {shown_url(store)}. Leave it out."
            )
        shared = _ingest_shared(settings, paths, chunk_tokens, engine or "local", workers, dry_run, yes)
        _finish(store, shared, strict, as_json)
        return
    if engine is not None or workers != 1 or settings.table(IngestTable).kv != "all":
        raise ConfigurationError(
            "--engine, --workers and kv of [ingest] need a shared store, such as --store s3://bucket/prefix."
        )
    own = {"embedding": embedding, "chunk_tokens": chunk_tokens}
    found, limit = _ingest_folder(context, settings, paths, own, backend, dry_run, yes)
    _finish(store, found, strict, as_json, limit)


def _ingest_folder(
    context: typer.Context,
    settings: CommandSettings,
    paths: list[str],
    own: dict[str, Any],
    backend: str,
    dry_run: bool,
    confirmed: bool,
) -> tuple[IngestReport | IngestPlan, int | None]:
    """Into a folder: KV, texts and embeddings. Gives the limit of the store too; None: it has none.

    Args:
        own: settings of documents that were given as options; None: not given.
    """
    from ..embedding import Embedder
    from ..job import ingest as run, plan_ingestion
    from ..library import Library
    from ..splitting import check_sizes
    from .settings import merge_settings

    folder = expanded(settings.store)
    if dry_run and not folder.is_dir():  # a dry run must not create the folder
        folder = Path(context.with_resource(TemporaryDirectory()))
    library = Library(folder)
    chosen = merge_settings(library, _given(settings, own))
    check_sizes(chosen.chunk_tokens, chosen.overlap_tokens)
    config = chosen.engine_config(**{**settings.engine, "store": folder})
    made = _engine(context, replace(config, max_bytes=None), backend, dict(settings.vllm))
    limit = made.store.chunk_store.limit if config.max_bytes is None else config.max_bytes or None
    embedder = Embedder(chosen.embedding, config.device)
    common: dict[str, Any] = {"library": library, "engine": made, "settings": chosen, "embedder": embedder}
    if dry_run:
        return plan_ingestion(paths, max_bytes=limit, confirmed=confirmed, **common), limit
    return run(paths, max_bytes=config.max_bytes, confirmed=confirmed, **common), limit


def _given(settings: CommandSettings, own: dict[str, Any]) -> dict[str, Any]:
    """Settings of engine and documents that were given."""
    own = {**own, "overlap_tokens": settings.table(IngestTable).overlap_tokens}
    return {**settings.engine, **{name: value for name, value in own.items() if value is not None}}


def _finish(
    store: str, found: IngestReport | SharedReport | IngestPlan, strict: bool, as_json: bool, limit: int | None = None
) -> None:
    """Print a report or a plan. Exit code 1 if it is found wanting."""
    from ..plan import IngestPlan

    is_plan = isinstance(found, IngestPlan)
    if as_json:
        print_json({**({"dry_run": True} if is_plan else {"store": store}), **found.to_dict()})
    elif isinstance(found, IngestPlan):
        _print_plan(found)
    else:
        _print_report(found, limit)
    is_nothing = not (found.added or found.changed or found.unchanged or found.removed)
    is_wanting = bool(found.failed or getattr(found, "evicted", 0) or is_nothing)
    if found.unconfirmed or (strict and (found.failed or found.notes)) or (is_wanting and not is_plan):
        raise typer.Exit(1)


def _ingest_shared(
    settings: CommandSettings,
    paths: list[str],
    chunk_tokens: int | None,
    engine: str,
    workers: int,
    dry_run: bool,
    confirmed: bool,
) -> SharedReport | IngestPlan:
    """Into object storage: KV and texts, no embeddings."""
    from cacheclip_rag.models import concrete

    from ..library import LibrarySettings
    from ..shared import ENGINES, KV_OF_TEXTS, ingest_shared, plan_shared, read_settings
    from ..splitting import check_sizes
    from .settings import given_settings

    kv = settings.table(IngestTable).kv
    check_choice("engine", engine, ENGINES)
    if workers != 1 and engine == "local":
        raise ConfigurationError(f"one process encodes without --engine ray, got --workers {workers}. Add it.")
    check_choice("kv", kv, KV_OF_TEXTS)
    known = read_settings(settings.store) or LibrarySettings()
    chosen = replace(known, **given_settings(_given(settings, {"chunk_tokens": chunk_tokens})))
    check_sizes(chosen.chunk_tokens, chosen.overlap_tokens)
    config = concrete(chosen.engine_config(**{**settings.engine, "store": settings.store}))
    chosen = replace(chosen, dtype=config.dtype)
    if dry_run:
        return plan_shared(paths, config, chosen, kv=kv, confirmed=confirmed)
    return ingest_shared(paths, config, chosen, engine=engine, workers=workers, kv=kv, confirmed=confirmed)


def _engine(context: typer.Context, config: EngineConfig, backend: str, vllm: dict[str, Any]) -> CacheClipEngine:
    """The engine that computes chunks, until the command ends."""
    from cacheclip_rag import CacheClipEngine

    if backend == "transformers":
        return CacheClipEngine(config)
    try:
        from cacheclip_vllm import vllm_engine
    except ModuleNotFoundError as error:
        raise MissingExtraError("cacheclip-vllm (for --backend vllm)", "vllm") from error
    return context.with_resource(vllm_engine(config, vllm=vllm))


def _print_report(report: IngestReport | SharedReport, limit: int | None) -> None:
    typer.echo(
        f"{report.documents} documents: {report.added} added, {report.changed} changed, {report.unchanged} "
        f"unchanged, {report.removed} removed; {report.chunks} chunks, {report.computed} computed"
    )
    _print_problems(report)
    if evicted := getattr(report, "evicted", 0):
        size = format_bytes(limit) if limit is not None else "a limit"
        typer.echo(
            f"warning: {evicted} of these chunks are not stored any more, because the store is limited to {size}. "
            "Raise the limit with cacheclip store limit; what is missing is stored again after an answer that needs "
            "it.",
            err=True,
        )
    if getattr(report, "above_quota", False):
        typer.echo(
            "the tenant's quota is reached. Raise it with cacheclip store limit, or remove documents and run "
            "cacheclip store gc; then ingest again.",
            err=True,
        )


def _print_plan(found: IngestPlan) -> None:
    typer.echo(
        f"{found.added} documents to add, {found.changed} changed, {found.unchanged} unchanged, {found.removed} to "
        f"remove; {found.chunks} chunks, {found.computed} of them to compute ({found.tokens} tokens)\n"
        f"about {format_bytes(found.bytes)} and {found.seconds / 60:.1f} minutes, embeddings not counted"
    )
    if found.excess_bytes and found.max_bytes is not None:
        typer.echo(
            f"warning: the store is limited to {format_bytes(found.max_bytes)}, {format_bytes(found.excess_bytes)} too "
            "little: chunk caches would be evicted. Raise the limit with max_bytes.",
            err=True,
        )
    elif found.excess_bytes:
        typer.echo(
            f"warning: the tenant's quota is {format_bytes(found.excess_bytes)} too little: the run would end before "
            "its last documents. Raise it with cacheclip store limit.",
            err=True,
        )
    _print_problems(found)


def _print_problems(found: IngestReport | SharedReport | IngestPlan) -> None:
    for kind, problems in (("failed", found.failed), ("skipped", found.skipped)):
        print_names(kind, [problem["error"] for problem in problems], err=True)
    print_names("note", [note["note"] for note in found.notes], err=True)
    if found.unconfirmed:
        print_names("gone, and kept", found.unconfirmed, err=True)
        typer.echo(
            f"{len(found.unconfirmed)} documents are gone or empty: more than half of what was ingested from a given "
            "path, or all of a folder, so nothing is removed. If a folder or share is not there for now, bring it "
            "back, and ingest again. If they are gone for good, add --yes.",
            err=True,
        )
