"""Ingestion into a shared store: workers encode, one process commits.

:class:`Encode` and :class:`Commit` are two stages of a pipeline, which Ray Data and others run; :func:`encode_table` is
the work of the first one as a function (Spark's ``mapInArrow``, Dask). A payload is written before its row, and only
once, so that a batch may run again: what it wrote before is found.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cacheclip_rag import (
    CacheClipEngine,
    CacheClipError,
    ConfigurationError,
    DocumentError,
    EngineConfig,
    MissingExtraError,
    StoreError,
)
from cacheclip_rag.adapters import normalise_chunk
from cacheclip_rag.plugins import cache_home, check_choice, own_folder, progress_bar, shown_url
from cacheclip_rag.store import text_digest

from .library import LibrarySettings, differences
from .passages import PassageReader, read_each
from .plan import IngestPlan, plan_documents
from .survey import IngestCounts, Survey

try:
    from cacheclip_shared.care import room
    from cacheclip_shared.objects import Objects
    from cacheclip_shared.place import SharedPlace, need
    from cacheclip_shared.store import SharedStore, read_store_file
    from cacheclip_shared.table import Removal, SharedText, TextTable, rows_of, schema
except ImportError as error:
    raise MissingExtraError("cacheclip-shared (for stores in object storage)", "shared") from error

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

ENGINES = ("local", "ray")
KV_OF_TEXTS = ("all", "hot")
_SETTINGS_FILE = "settings.json"
_DOCUMENTS_AT_ONCE = 8
"""Documents of a batch: what a killed worker costs."""
_PAUSES_S = (11.0, 60.0)
"""After which a batch is tried again that storage failed: by then it is asked again."""
_OWN_ERROR = re.compile(rf"^{re.escape(CacheClipError.__module__)}\.\w+: (.*)$", re.MULTILINE)
"""In the traces of the processes that an error of a worker came through."""
_Told = tuple[str, str, str]
"""What is wrong with a document, as :meth:`~cacheclip_ingest.survey.Survey.tell` takes it."""
_COMMIT_ROWS, _COMMIT_S = 4096, 10.0
"""A commit has so many rows, or comes so long after the last one."""


def encode_table(
    table: pa.Table, engine: CacheClipEngine, failed: Callable[[str, str], object] | None = None
) -> pa.Table:
    """Store the KV of texts, and return the rows that :class:`Commit` adds to the store's catalog.

    Args:
        table: columns ``text`` and ``document``, perhaps ``version``: what changes with the document.
        engine: with a shared store. It leaves commits to others from now on. Threads that share it take turns.
        failed: is told documents with a text that cannot be stored, and why; the other texts are stored.

    Raises:
        ConfigurationError: the engine's store is none that machines share.
    """
    pa, store = need("pyarrow"), engine.store.chunk_store
    if not isinstance(store, SharedStore):
        raise ConfigurationError(
            f"expected an engine with a shared store, such as s3://bucket/prefix, got {engine.config.store!r}."
        )
    store.commits = False
    given = table.to_pylist()
    texts: dict[str, list[tuple[str, str]]] = {}
    for row in given:
        texts.setdefault(row["text"], []).append((row["document"], row["document"]))
    versions = {row["document"]: row.get("version") or "" for row in given}

    def skipped(text: str, names: Sequence[str], error: CacheClipError) -> None:
        logger.warning("a text of %s is left out: %s", ", ".join(names), error)
        if failed is not None:
            for name in names:
                failed(name, f"{name}: {error}")

    with store.encoding:  # rows of another thread's table would be taken with these
        try:
            store.look_again(engine.config.namespace, [text_digest(normalise_chunk(text)).hex() for text in texts])
        except OSError as error:
            raise StoreError(f"payloads of {engine.config.store} cannot be looked for: {error}.") from error
        computed = engine.precompute(texts, skipped=skipped)
        rows = store.take_rows(engine.config.namespace)
    version = pa.array([versions.get(document, "") for document in rows["document"].to_pylist()], pa.string())
    rows = rows.set_column(rows.schema.get_field_index("version"), "version", version)
    return _with_computed(rows, computed)


class Encode:
    """Encodes tables, with models that are loaded once. Takes texts as :func:`encode_table` does, or whole documents:
    columns ``path`` (a file or URL) and ``version``, perhaps ``digest`` (SHA-256 that a file must have). With
    ``kv="hot"``, only texts: the second answer of a server that uses one stores its KV.

    Rows with a ``problem`` hold no text of a document, but what is wrong with it: ``failed`` (then there are no other
    rows of a whole document), ``empty``, or a ``note`` on what it lacks."""

    def __init__(self, config: EngineConfig, chunk_tokens: int = 512, overlap_tokens: int = 0, kv: str = "all") -> None:
        check_choice("kv", kv, KV_OF_TEXTS)
        self._config, self._sizes, self._kv = config, (chunk_tokens, overlap_tokens), kv

    @cached_property
    def engine(self) -> CacheClipEngine:
        return CacheClipEngine(self._config)

    def __call__(self, table: pa.Table) -> pa.Table:
        told: list[_Told] = []
        has_documents = "path" in table.column_names
        if has_documents:
            table = self._passages(table, told)
        rows = self._encoded(table, told) if self._kv == "all" else self._texts(table)
        failed = {name for kind, name, _ in told if kind == "failed"} if has_documents else set()
        return _with_problems(_without(rows, failed), told)

    def _texts(self, table: pa.Table) -> pa.Table:
        texts = [SharedText(r["text"], r["document"], r["document"], r.get("version") or "") for r in table.to_pylist()]
        return _with_computed(rows_of(self._config.namespace, texts), 0)

    def _encoded(self, table: pa.Table, told: list[_Told]) -> pa.Table:
        """Tried again if storage fails for a while: an error would end the job."""
        for pause_s in (*_PAUSES_S, None):
            failed: dict[str, str] = {}
            try:
                rows = encode_table(table, self.engine, failed.__setitem__)
                break
            except StoreError as error:
                if pause_s is None:
                    raise
                logger.warning("a batch is tried again in %.0f s: %s", pause_s, error)
                time.sleep(pause_s)
        told += [("failed", name, said) for name, said in failed.items()]
        return rows

    def _passages(self, table: pa.Table, told: list[_Told]) -> pa.Table:
        reader, rows = PassageReader(self.engine.primary, *self._sizes), []

        def tell(kind: str, name: str, said: str) -> None:
            if kind != "note":
                logger.warning("left out: %s", said)
            told.append((kind, name, said))

        for row in table.to_pylist():
            texts = reader.passages(row["path"], row.get("digest") or "", tell)
            rows += [{"document": row["path"], "version": row["version"], "text": text} for text in texts]
        text = need("pyarrow").string()
        names = ("document", "version", "text")
        return need("pyarrow").Table.from_pylist(rows, schema=need("pyarrow").schema([(name, text) for name in names]))


def _with_computed(rows: pa.Table, computed: int) -> pa.Table:
    """Rows, the first of which says how many texts were computed."""
    counts = need("pyarrow").array([computed, *[0] * (rows.num_rows - 1)][: rows.num_rows], need("pyarrow").int64())
    return rows.append_column("computed", counts)


def _without(rows: pa.Table, documents: Collection[str]) -> pa.Table:
    """Rows of other documents. The count of what was computed stays."""
    pa, compute = need("pyarrow"), need("pyarrow.compute")
    others = compute.invert(compute.is_in(rows["document"], pa.array([*documents], pa.string())))
    return _with_computed(rows.drop_columns(["computed"]).filter(others), sum(rows["computed"].to_pylist()))


def _with_problems(rows: pa.Table, told: Sequence[_Told]) -> pa.Table:
    """Rows, and a row for each problem: without a namespace, and with the column ``problem``."""
    pa = need("pyarrow")
    rows = rows.append_column("problem", pa.nulls(rows.num_rows, pa.string()))
    said = [{"problem": kind, "document": name, "text": text} for kind, name, text in told]
    return pa.concat_tables([rows, pa.Table.from_pylist(said, schema=rows.schema)])


class Commit:
    """Commits rows of :func:`encode_table`. Run one: commits of several wait for one another."""

    def __init__(self, url: str) -> None:
        self._place = SharedPlace(url)
        self._tables: dict[str, TextTable] = {}

    def __call__(self, table: pa.Table) -> pa.Table:
        """Rows that are there already add nothing, nor do problems; the result counts texts and new rows."""
        pa, compute = need("pyarrow"), need("pyarrow.compute")
        table, new = table.filter(compute.is_valid(table["namespace"])), 0
        for namespace in set(table["namespace"].to_pylist()):
            rows = table.filter(compute.equal(table["namespace"], namespace)).select(schema().names)
            new += self.table(namespace).commit(rows)
        computed = sum(table["computed"].to_pylist()) if "computed" in table.column_names else 0
        return pa.table({"texts": [table.num_rows], "new": [new], "computed": [computed]})

    def table(self, namespace: str) -> TextTable:
        return self._tables.setdefault(namespace, TextTable(self._place, namespace))


@dataclass(slots=True)
class SharedReport(IngestCounts):
    """Result of an ingestion run."""

    documents: int = 0
    """Documents of the tenant afterwards."""
    above_quota: bool = False
    """Whether documents failed because the tenant's KV has reached its quota."""


def ingest_shared(
    paths: Sequence[str],
    config: EngineConfig,
    settings: LibrarySettings,
    *,
    engine: str = "local",
    workers: int = 1,
    kv: str = "all",
    confirmed: bool = False,
) -> SharedReport:
    """Bring a shared store up to date with files, folders and URLs. Only new and changed documents are encoded; those
    that are gone from a given path, which could be looked at, are removed. May be killed at any time, and run again.

    Args:
        engine: ``local``: this process; ``ray``: ``workers`` actors of Ray, in the cluster of ``RAY_ADDRESS`` if set.
        kv: ``all``: of every text; ``hot``: of those that answers use, stored by the second one.
        confirmed: remove documents even if more than half of those of a given path are gone, or all of a folder.

    Raises:
        ConfigurationError: the store was made with other settings.
        DocumentError: a path does not exist, or no document was found.
        StoreError: there is no store, or it does not answer.
    """
    url, commit = str(config.store), Commit(str(config.store))
    table = commit.table(config.namespace)
    survey = _survey(paths, table, config, settings, kv)
    report = survey.begin(SharedReport)
    left = room(url, config.namespace) if kv == "all" else math.inf
    run = {"local": _encoded_here, "ray": _encoded_by_ray}[engine]
    encode = {name: getattr(settings, name) for name in ("chunk_tokens", "overlap_tokens")}
    encode |= {"config": config, "kv": kv}
    work = [{"path": item.name, "version": item.version, "digest": item.digest} for item in survey.work]
    done: set[str] = set()
    with progress_bar("ingesting", len(work), "documents") as advance:
        for rows in _together(_heard(run(work, encode, workers), survey) if left > 0 else iter(())):
            if not done:  # after all models have worked
                fix_settings(url, settings)
            counts = commit(rows).to_pylist()[0]
            report.chunks, report.computed = report.chunks + counts["texts"], report.computed + counts["computed"]
            done |= {*rows["document"].to_pylist()}
            advance(len(done))
            if left < math.inf and (left := room(url, config.namespace)) <= 0:
                break
    report.above_quota = left <= 0 and survey.fail_others(done, "the tenant's quota is reached")
    survey.fail_others(done, "no worker gave it back; ingest again")
    report.added = sum(item.is_new for item in survey.work if item.name in done)
    report.changed = sum(not item.is_new for item in survey.work if item.name in done)
    if gone := survey.settle(report, confirmed):
        table.commit(schema().empty_table(), Removal(names={*gone}))
    report.documents = len(({*survey.known} | done) - {*gone})
    return report


def plan_shared(
    paths: Sequence[str], config: EngineConfig, settings: LibrarySettings, *, kv: str = "all", confirmed: bool = False
) -> IngestPlan:
    """What :func:`ingest_shared` would do, and its cost in this process. Changes nothing, and raises the same
    errors."""
    survey = _survey(paths, TextTable(SharedPlace(str(config.store)), config.namespace), config, settings, kv)
    engine, sizes = CacheClipEngine(config), (settings.chunk_tokens, settings.overlap_tokens)
    try:
        documents = read_each(survey.work, lambda: PassageReader(engine.primary, *sizes), survey.tell)
        found = plan_documents(survey, documents, engine if survey.work and kv == "all" else None, confirmed=confirmed)
    finally:
        engine.close()
    if kv == "all" and (left := room(str(config.store), config.namespace)) < math.inf:
        found.excess_bytes = max(0, found.bytes - int(left))
    return found


def _survey(paths: Sequence[str], table: TextTable, config: EngineConfig, settings: LibrarySettings, kv: str) -> Survey:
    check_settings(str(config.store), settings)
    kept = {name: value for name, value in asdict(settings).items() if name != "embedding"}
    kept |= {"kv": kv} if kv != "all" else {}
    tag = json.dumps({**kept, "method": str(config.method), "system_prompt": config.system_prompt}, sort_keys=True)

    def version(digest: str) -> str:
        return hashlib.sha256(f"{digest}\n{tag}".encode()).hexdigest()[:32]

    return Survey.take(paths, documents_of(table), version=version)


def documents_of(table: TextTable) -> dict[str, str]:
    """Version of each document of a tenant."""
    rows = table.rows(["document", "version"]).to_pylist()
    return {row["document"]: row["version"] or "" for row in rows if row["document"]}


def remove_shared(url: str, namespace: str | None, choose: Callable[[Collection[str]], list[str]]) -> list[str]:
    """Take documents out of a shared store; returns their names.

    Args:
        namespace: tenant; None: the one that the store was made for.
        choose: of the names of the tenant's documents, those that go.

    Raises:
        DocumentError: the tenant has no documents.
        StoreError: there is no store, or it cannot be used.
    """
    settings = read_settings(url)
    chosen = namespace or (settings.namespace if settings is not None else "default")
    table = TextTable(SharedPlace(url), chosen)
    if not (known := documents_of(table)):
        raise DocumentError(f"namespace {chosen!r} of {url} has no documents, so nothing is removed.")
    gone = choose(known)
    table.commit(schema().empty_table(), Removal(names={*gone}))
    return gone


def fix_settings(url: str, settings: LibrarySettings) -> None:
    """Record the settings of a store's documents, unless an ingestion has; raises what :func:`check_settings` does."""
    try:
        Objects(SharedPlace(url)).create(_SETTINGS_FILE, json.dumps(asdict(settings)).encode())
    except OSError as error:
        raise StoreError(f"the shared store {shown_url(url)} cannot be written: {error}.") from error
    check_settings(url, settings)


def check_settings(url: str, settings: LibrarySettings) -> None:
    """Raise ConfigurationError unless these are the settings of a store's first ingestion, if there was one."""
    names = [name for name in asdict(settings) if name not in ("namespace", "embedding")]
    if found := differences(settings, read_settings(url) or settings, names):
        raise ConfigurationError(
            f"the store {shown_url(url)} was made with {found}. Leave these options out, or create another store."
        )


def read_settings(url: str) -> LibrarySettings | None:
    """Settings of a store's documents; None before the first ingestion. Raises StoreError if there is no store."""
    objects = Objects(SharedPlace(url))
    read_store_file(objects)
    try:
        found = objects.fetch_json(_SETTINGS_FILE)
        return LibrarySettings(**found) if found is not None else None
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{shown_url(url)}: {_SETTINGS_FILE} cannot be read: {error}.") from error


# -- engines --------------------------------------------------------------------------------------------------------


def _heard(tables: Iterator[pa.Table], survey: Survey) -> Iterator[pa.Table]:
    """Rows of texts. The survey hears of problems."""
    compute = need("pyarrow.compute")
    for table in tables:
        is_problem = compute.is_valid(table["problem"])
        for row in table.filter(is_problem).select(["problem", "document", "text"]).to_pylist():
            survey.tell(row["problem"], row["document"], row["text"])
        if (rows := table.filter(compute.invert(is_problem))).num_rows:
            yield rows


def _together(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Tables that are committed together."""
    waiting: list[pa.Table] = []
    since = time.monotonic()
    for table in tables:
        waiting.append(table)
        if sum(each.num_rows for each in waiting) >= _COMMIT_ROWS or time.monotonic() - since > _COMMIT_S:
            yield need("pyarrow").concat_tables(waiting)
            waiting, since = [], time.monotonic()
    if waiting:
        yield need("pyarrow").concat_tables(waiting)


def _encoded_here(work: Sequence[Mapping[str, str]], encode: Mapping[str, Any], workers: int) -> Iterator[pa.Table]:
    worker = Encode(**encode)
    try:
        for start in range(0, len(work), _DOCUMENTS_AT_ONCE):
            yield worker(need("pyarrow").Table.from_pylist([*work[start : start + _DOCUMENTS_AT_ONCE]]))
    finally:
        if work:
            worker.engine.close()


def _start(ray: Any) -> None:
    """Ray's workers look for code in the folder in which it was started."""
    if "CACHECLIP_HOME" in os.environ:
        os.environ["CACHECLIP_HOME"] = str(cache_home())  # it may be relative
    with chdir(own_folder()):
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")


def _encoded_by_ray(work: Sequence[Mapping[str, str]], encode: Mapping[str, Any], workers: int) -> Iterator[pa.Table]:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingExtraError("ray (for --engine ray)", "ray") from error
    if not work:
        return
    _start(ray)
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    has_gpus = bool(ray.cluster_resources().get("GPU")) and encode["config"].device != "cpu"
    batches = -(-len(work) // _DOCUMENTS_AT_ONCE)
    documents = ray.data.from_items([*work], override_num_blocks=batches)
    rows = documents.map_batches(
        Encode,
        fn_constructor_kwargs=dict(encode),
        batch_size=_DOCUMENTS_AT_ONCE,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=min(workers, batches)),
        num_cpus=1,
        num_gpus=1 if has_gpus else 0,
    )  # a killed worker costs its batch: Ray Data starts it anew, and gives it the batch again
    try:
        yield from rows.iter_batches(batch_size=None, batch_format="pyarrow")
    except ray.exceptions.RayError as error:
        found = _OWN_ERROR.findall(str(error)) or [str(error).strip().rpartition("\n")[2][:300]]
        raise CacheClipError(
            f"a worker of Ray failed: {found[-1].rstrip('.')}. What is committed stays; run it again."
        ) from None
