"""``cacheclip store stats|limit|verify|repair|gc|clear``, and ``cacheclip explain-miss``: why a text was not reused."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheclip_rag import ConfigurationError, DocumentError
from cacheclip_rag.plugins import (
    COMPANIONS,
    Commands,
    CommandSettings,
    ExistingStoreOption,
    JsonOption,
    NamespaceOption,
    engine_options,
    existing_folder,
    expanded,
    format_bytes,
    is_url,
    look_after,
    no_store,
    parse_bytes,
    print_json,
    print_names,
    show_done,
)

if TYPE_CHECKING:
    from .reports import RepairReport

_MOST_TEXTS = 20
"""Most stored texts that are explained if none is named."""


def register(commands: Commands) -> None:
    """Called by the command line of the core, which found this function by its entry point."""
    for command in (stats, limit, verify, repair, gc, clear):
        commands.add(f"store {command.__name__}", command)
    commands.add("explain-miss", explain_miss)


def stats(store: ExistingStoreOption, as_json: JsonOption = False) -> None:
    """Entries, bytes, limit, tenants and documents of a store."""
    if is_url(store):
        look_after(store, lambda kind: kind.stats(store), as_json)
        return
    from .folder import count_learned, open_store

    folder = expanded(store)
    opened = open_store(folder)
    result = opened.stats().to_dict()
    del result["tiers"]  # counters per process: always 0 here
    tenants = {name: total.bytes for name, total in sorted(opened.catalog.tenants().items())}
    quotas = {name: quota for name in tenants if (quota := opened.quota(name)) is not None}
    learned = count_learned(opened)
    counts = {"documents": 0, "passages": 0, "learned": learned}  # what scripts read, whatever is installed
    for companion in COMPANIONS:
        counts |= companion.counts(folder)
    if as_json:
        names = {"tenant_bytes": tenants, "quotas": quotas, **counts}
        print_json({"store": str(folder), **result, **names})
        return
    limit = f", limit {format_bytes(result['max_bytes'])}" if result["max_bytes"] is not None else ""
    typer.echo(f"chunk caches  {result['entries']}  ({format_bytes(result['bytes'])}{limit})")
    for name, size in tenants.items():
        limit = f", limit {format_bytes(quotas[name])}" if name in quotas else ""
        typer.echo(f"  {name}  ({format_bytes(size)}{limit})")
    for name, count in counts.items():
        typer.echo(f"{name:<14}{count}")


def limit(
    store: ExistingStoreOption,
    max_bytes: Annotated[
        int, typer.Argument(parser=parse_bytes, help="Bytes, or a size such as 200GiB; 0: no limit.", metavar="SIZE")
    ],
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set the limit of a store, or with --namespace of one tenant. Evicts at once what is above it; in a shared store,
    which has limits of tenants only, gc does."""
    if is_url(store) and namespace is not None:
        from cacheclip_rag.store import store_kind

        store_kind(store).set_quota(store, namespace, max_bytes or None)
        show_done({"store": store, "namespace": namespace, "max_bytes": max_bytes or None}, as_json)
        return
    from .folder import open_store

    opened = open_store(expanded(existing_folder(store)))
    wanted = max_bytes or None
    evicted = opened.set_limit(wanted) if namespace is None else opened.set_quota(namespace, wanted)
    if as_json:
        print_json({"store": store, "namespace": namespace, "max_bytes": wanted, "evicted": evicted})
    else:
        typer.echo(f"limit {format_bytes(max_bytes) if wanted else 'none'}; {evicted} chunk caches evicted")


def verify(store: ExistingStoreOption, as_json: JsonOption = False) -> None:
    """Read everything and compare it with its checksums; exit code 1 if anything is wrong. Mends nothing in a folder;
    in a shared store, what is damaged is deleted, and will be computed again."""
    if is_url(store):
        done = look_after(store, lambda kind: kind.verify(store), as_json)
        if done["damaged"] or done["missing"]:
            raise typer.Exit(1)
        return
    from .folder import verify as run

    folder = expanded(store)
    report = run(folder)
    for companion in COMPANIONS:
        report.problems += companion.problems(folder)
    if as_json:
        print_json({"store": store, **report.to_dict()})
    else:
        typer.echo(f"{report.entries} chunk caches, {format_bytes(report.bytes)}")
        for title, names in (
            ("damaged", report.damaged),
            ("cannot be read now", report.unreadable),
            ("of another version", report.other_versions),
            ("missing", report.missing),
            ("unknown file", report.unknown_files),
            ("problem", report.problems),
        ):
            print_names(title, names)
        if report.unreadable:
            typer.echo("what cannot be read may be intact: look at the disk, and at who may read the store")
        typer.echo("nothing is wrong" if report.is_clean else f"mend it: cacheclip store repair --store {store}")
    if not report.is_clean:
        raise typer.Exit(1)


def repair(store: ExistingStoreOption, as_json: JsonOption = False) -> None:
    """Delete what is damaged, and make catalog and files agree. What cannot be read stays; exit code 1 if there is any.
    Stop other users of the store before."""
    from .folder import repair as run

    folder = expanded(existing_folder(store))
    report = run(folder)
    done = [each for companion in COMPANIONS for each in companion.repair(folder)]
    if as_json:
        print_json({"store": store, **report.to_dict(), "library": done})
    else:
        _show_repair(report, done)
    if report.unreadable:
        raise typer.Exit(1)


def _show_repair(report: RepairReport, done_beside: list[str]) -> None:
    typer.echo(
        f"{report.entries} chunk caches: {report.recorded} recorded again, {report.deleted} damaged ones deleted, "
        f"{report.forgotten} without payload forgotten"
    )
    if report.found_whole_only:
        typer.echo(
            f"{report.found_whole_only} texts are found in prompts as a whole only, because the catalog lost the texts "
            "themselves. Precompute or ingest them again: this costs a look-up each."
        )
    print_names("cannot be read now, left as it is", report.unreadable)
    print_names("of another version, left as it is", report.other_versions)
    print_names("removed", report.removed_files)
    print_names("moved", report.moved_files)
    print_names("documents", done_beside)


def gc(
    store: ExistingStoreOption,
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds for which a shared store's payloads without a row stay.")
    ] = 3600.0,
    as_json: JsonOption = False,
) -> None:
    """Remove what nobody can use: what killed processes left, payloads and texts without an entry."""
    if is_url(store):
        look_after(store, lambda kind: kind.gc(store, grace), as_json)
        return
    from .folder import collect_garbage

    gone = collect_garbage(expanded(store))
    if as_json:
        print_json({"store": store, **gone})
        return
    typer.echo(
        f"{gone['writes']} unfinished writes, {gone['temporaries']} temporary files, {gone['payloads']} payloads, "
        f"{gone['texts']} texts removed; {gone['evicted']} chunk caches evicted"
    )


def clear(
    store: ExistingStoreOption,
    source: Annotated[
        str | None,
        typer.Argument(help="Only what has no other source, such as cacheclip:learned: what recurred in prompts."),
    ] = None,
    namespace: NamespaceOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete all chunk caches, texts and sources, or those of one tenant. Documents of ingest stay."""
    from .folder import clear as run

    folder = expanded(existing_folder(store))
    what = f"of tenant {namespace!r}" if namespace is not None else "of all tenants"
    what += f" from source {source!r}" if source is not None else ""
    if not yes:
        if as_json:
            raise ConfigurationError("clear with --json does not ask: add --yes.")
        typer.confirm(f"Delete all chunk caches {what} in {folder}?", abort=True, err=True)
    removed = run(folder, namespace, source)
    if as_json:
        print_json({"store": store, "source": source, "namespace": namespace, "removed": removed})
    else:
        typer.echo(f"{removed} chunk caches {what} deleted")


@engine_options("store", "primary")
def explain_miss(
    prompt: Annotated[Path, typer.Argument(help="File with the prompt as the model got it.")],
    settings: CommandSettings,
    text: Annotated[
        list[Path] | None, typer.Option(help="File with a text that should be reused; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain why texts were, or were not, reused in a prompt. Without --text, checks the stored texts that share most
    words with the prompt. Exit code 1 if a text is not reused."""
    store = existing_folder(settings.store)

    from cacheclip_rag import CacheClipEngine
    from cacheclip_rag.store import is_store

    from .explain import explain_miss as explain, plausible

    folder = expanded(store)
    if not is_store(folder):
        raise no_store(store)
    engine = CacheClipEngine(settings.store_config())
    written = _read(prompt)
    reused = (span.whole for span in engine.plan(written).layout.chunks)
    passages = chain.from_iterable(companion.texts(folder) for companion in COMPANIONS)
    known = chain(reused, engine.texts.index.texts(), engine.texts.texts(), passages)
    texts = [_read(path) for path in text or []] or plausible(known, written)[:_MOST_TEXTS]
    reports = [explain(engine, written, each) for each in dict.fromkeys(texts)]
    if as_json:
        print_json({"store": store, "texts": [report.to_dict() for report in reports]})
    else:
        for report in reports:
            label = {"hit": "hit ", "part": "part"}.get(report.reason, "miss")
            typer.echo(f"{label}  {report.text!r}\n      {report.explanation}")
        if not reports:
            typer.echo("no stored text resembles a part of the prompt. Name the expected text with --text FILE.")
    if not reports or not all(report.is_hit for report in reports):
        raise typer.Exit(1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"cannot read {path}: {error}. Give a text file in UTF-8.") from error
