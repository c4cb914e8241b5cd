"""Makes a shared store, and cleans, checks and counts it, where deleting is allowed; servers need no such role."""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from cacheclip_rag import ConfigurationError, StoreError
from cacheclip_rag.store import CODECS, Frame, FrameError, OtherVersionError, TenantsError

from .objects import Objects
from .place import LAYOUT, SharedPlace, failing_as, key_and_codec, tenant_folder
from .store import GRACE_S, STORE_FILE, read_store_file
from .table import Removal, TextTable, is_digest, is_payload, schema
from .table_care import TendedTable

_TENANTS = "tenants/"
_FOLDER = re.compile(r"tenants/[0-9a-f]{16}")
_GARBAGE_FILE = "garbage.json"
_QUOTA_FILE = "quota.json"


def create(url: str, codec: str | None = None) -> dict[str, Any]:
    """Make a store, or return what it was made with.

    Raises:
        ConfigurationError: an unknown codec, or the store was made with another one.
        StoreError: the storage does not answer, or ignores ``If-None-Match``, so that one writer could replace what
            another one has written.
    """
    if codec is not None and (codec not in CODECS or codec == "opaque"):
        raise ConfigurationError(
            f"codec must be one of {', '.join(name for name in CODECS if name != 'opaque')}, got {codec!r}."
        )
    objects = Objects(SharedPlace(url))
    made = {"layout": LAYOUT, "id": secrets.token_hex(16), "codec": codec}
    try:
        if not _writes_once(objects):
            raise StoreError(
                f"{url} does not keep an object that is written again with If-None-Match, so that writers would "
                "replace one another's. Use a storage with conditional writes, such as S3, MinIO, Ceph, GCS or Azure."
            )
        is_new = objects.create(STORE_FILE, json.dumps(made).encode())
    except OSError as error:
        raise StoreError(f"the shared store {url} cannot be made: {error}.") from error
    if not is_new:
        made = read_store_file(objects)
        if codec is not None and made["codec"] != codec:
            raise ConfigurationError(f"the store {url} was made with codec {made['codec']}, got {codec}.")
    return made


def _writes_once(objects: Objects) -> bool:
    """Whether storage keeps an object that is written again."""
    name = f"probe-{secrets.token_hex(8)}"
    objects.create(name, b"1")
    try:
        return not objects.create(name, b"2")
    finally:
        objects.remove([name])


def _opened(url: str) -> Objects:
    objects = Objects(SharedPlace(url))
    read_store_file(objects)
    objects.is_patient = True
    return objects


def _storage(objects: Objects) -> AbstractContextManager[None]:
    """What fails raises StoreError."""
    return failing_as(f"the shared store {objects.place.url} cannot be read or changed now")


def _each_tenant(objects: Objects, run: Callable[[str], None], found: dict[str, Any]) -> None:
    """Run for each tenant's folder, which adds to ``found``. One that fails does not stop the others; then TenantsError
    is raised."""
    with _storage(objects):
        listed = objects.breaker.call(objects._client.list_with_delimiter, objects.place.patient, _TENANTS)
    failed = []
    for folder in sorted(path.rstrip("/") for path in listed["common_prefixes"]):
        if not _FOLDER.fullmatch(folder):
            continue
        try:
            with _storage(objects):
                run(folder)
        except StoreError as error:
            failed.append(f"{folder}: {error}")
    if failed:
        message = f"{len(failed)} tenants could not be looked after, the others were. {' '.join(failed)}"
        raise TenantsError(message, found)


@dataclass(slots=True)
class SharedTenant:
    """What one tenant has in a shared store."""

    table: TendedTable
    objects: list[dict[str, Any]] = field(default_factory=list)
    """Payloads: path, size, last_modified."""
    known: dict[tuple[str, str], str] = field(default_factory=dict)
    """Keys and codecs that a row names, and the digest of its text."""
    rows: int = 0
    texts: int = 0
    documents: int = 0
    quota: int | None = None
    """Bytes that the KV of its texts may take; None: as many as they are."""

    @property
    def num_bytes(self) -> int:
        return sum(each["size"] for each in self.objects)

    def oldest_above_quota(self) -> Removal:
        """Payloads that were written first, as many as are above the quota. Their texts stay."""
        removal, own = Removal(), {key_and_codec(each["path"]): each for each in self.objects}
        named = sorted((each["last_modified"], name) for name, each in own.items() if name in self.known)
        excess = sum(own[name]["size"] for _, name in named) - self.quota if self.quota is not None else 0
        for _, name in named:
            if excess <= 0:
                break
            assert name is not None, "a row names it"
            removal.payloads.setdefault(self.known[name], set()).add(name)
            excess -= own[name]["size"]
        return removal


def _look(objects: Objects, folder: str) -> SharedTenant:
    table = TendedTable(objects.place, folder=folder)
    found = SharedTenant(table)
    rows = table.rows(["digest", "document", "kv"]).to_pylist()
    found.rows, found.texts = len(rows), len({row["digest"] for row in rows})
    found.documents = len({row["document"] for row in rows} - {"", None})
    named = ((row["digest"], each) for row in rows if is_digest(row["digest"]) for each in row["kv"] or ())
    found.known = {(each["key"], each["codec"]): digest for digest, each in named if is_payload(each)}
    found.objects = [*objects.objects_of(f"{folder}/kv/")]
    found.quota = _quota(objects, folder)
    return found


def _quota(objects: Objects, folder: str) -> int | None:
    found = _json(objects, f"{folder}/{_QUOTA_FILE}", {"max_bytes": None})
    quota = found.get("max_bytes", "")
    if quota is not None and type(quota) is not int:
        raise StoreError(f"{folder}/{_QUOTA_FILE} holds no quota. Set it: cacheclip store limit.")
    return quota


def _json(objects: Objects, name: str, otherwise: dict[str, Any]) -> dict[str, Any]:
    """What a file of ours holds: ``otherwise`` if there is none, {} if it is none of ours."""
    try:
        found = objects.fetch_json(name)
    except ValueError:
        return {}
    return otherwise if found is None else found if isinstance(found, dict) else {}


def set_quota(url: str, namespace: str, max_bytes: int | None) -> None:
    """Limit the bytes of the KV of a tenant's texts; None: no limit. :func:`gc` and ingestion hold it."""
    objects, name = _opened(url), f"{tenant_folder(namespace)}/{_QUOTA_FILE}"
    with _storage(objects):
        if max_bytes is None:
            objects.remove([name])
        else:
            objects.replace(name, json.dumps({"max_bytes": max_bytes}).encode())


def room(url: str, namespace: str) -> float:
    """Bytes that the KV of a tenant's texts may still take; infinite without a quota. Raises StoreError."""
    objects, folder = _opened(url), tenant_folder(namespace)
    with _storage(objects):
        quota = _quota(objects, folder)
        if quota is None:
            return math.inf
        rows = TextTable(objects.place, namespace).rows(["kv"])["kv"].to_pylist()
    sizes: dict[tuple[str, str], int] = {
        (kv["key"], kv["codec"]): kv["bytes"] for row in rows for kv in row or () if is_payload(kv)
    }
    return quota - sum(sizes.values())


def stats(url: str) -> dict[str, Any]:
    """Rows, texts, documents, payloads and bytes of each tenant."""
    objects, tenants = _opened(url), dict[str, dict[str, Any]]()
    found: dict[str, Any] = dict.fromkeys(("rows", "texts", "documents", "payloads", "bytes"), 0)
    found["tenants"] = tenants

    def count(folder: str) -> None:
        own = _look(objects, folder)
        counts = {"rows": own.rows, "texts": own.texts, "documents": own.documents}
        counts |= {"payloads": len(own.objects), "bytes": own.num_bytes}
        tenants[folder] = {**counts, "max_bytes": own.quota}
        for name, number in counts.items():
            found[name] += number

    _each_tenant(objects, count, found)
    return found


def gc(url: str, grace_s: float = GRACE_S) -> dict[str, int]:
    """Delete payloads that no row names: those that an earlier run saw so ``grace_s`` seconds ago, and that are as old.
    What an ingestion found meanwhile is younger: it writes what it finds again before it commits. Above a tenant's
    quota, the oldest payloads lose their rows first; their texts stay, and are computed again where they are used. Also
    deletes files of the table that held removed texts. ``grace_s`` 0 deletes at once; run it while nothing is
    ingested."""
    objects, found = _opened(url), {"above_quota": 0, "deleted": 0, "bytes": 0, "waiting": 0, "table_files": 0}
    now = time.time()

    def clean(folder: str) -> None:
        tenant, name = _look(objects, folder), f"{folder}/{_GARBAGE_FILE}"
        if above := tenant.oldest_above_quota():
            tenant.table.commit(schema().empty_table(), above)
            gone_names = set().union(*above.payloads.values())
            tenant.known = {each: digest for each, digest in tenant.known.items() if each not in gone_names}
            found["above_quota"] += len(gone_names)
        seen = {path: at for path, at in _json(objects, name, {}).items() if isinstance(at, float)}
        own = {each["path"]: each for each in tenant.objects if key_and_codec(each["path"]) is not None}
        garbage = {path: each for path, each in own.items() if key_and_codec(path) not in tenant.known}
        since = {path: seen.get(path, now) for path in garbage}
        gone = [
            path
            for path, each in garbage.items()
            if now - since[path] >= grace_s and now - each["last_modified"].timestamp() >= grace_s - 1.0
        ]
        kept = {path for path in gone if _has_no_text(objects, path)}
        gone = [path for path in gone if path not in kept]
        objects.remove(gone)
        waiting = {path: since[path] for path in garbage if path not in gone and path not in kept}
        objects.replace(name, json.dumps(waiting).encode())
        found["deleted"], found["waiting"] = found["deleted"] + len(gone), found["waiting"] + len(waiting)
        found["bytes"] += sum(garbage[path]["size"] for path in gone)
        found["table_files"] += tenant.table.vacuum(grace_s / 3600)

    _each_tenant(objects, clean, found)
    return found


def _has_no_text(objects: Objects, path: str) -> bool:
    """Whether a payload is that of the shared prefix, which no row names, and which every prompt reads."""
    head, size = objects.beginning(path, 1 << 16)
    try:
        return Frame.parse(head, (key_and_codec(path) or ("", ""))[0], num_bytes=size).digest is None
    except FrameError:
        return False


def verify(url: str) -> dict[str, Any]:
    """Read every payload and compare it with its checksums. A damaged one is deleted, so that it is computed again; one
    of another version stays. Rows no longer name payloads that are gone: nothing would compute them again. A damaged
    file of the table is taken out of it: its documents are ingested anew."""
    objects = _opened(url)
    found: dict[str, Any] = {"payloads": 0, "bytes": 0, "damaged": [], "other_versions": 0, "missing": 0}

    def read(folder: str) -> None:
        found["damaged"] += TendedTable(objects.place, folder=folder).repair()
        tenant = _look(objects, folder)
        for each in tenant.objects:
            found["payloads"] += 1
            found["bytes"] += each["size"]
            name = key_and_codec(each["path"])
            if name is None:
                found["other_versions"] += 1
                continue
            key, codec = name
            try:
                frame = Frame.parse(objects.fetch(each["path"]), key)
                frame.verify()
                if frame.codec != codec:
                    raise FrameError(f"it is stored as {frame.codec}")
            except OtherVersionError:
                found["other_versions"] += 1
            except FrameError:
                found["damaged"].append(each["path"])
        paths = {each["path"] for each in tenant.objects} - {*found["damaged"]}
        whole = {key_and_codec(path, any_version=True) for path in paths}
        missing = {name: digest for name, digest in tenant.known.items() if name not in whole}
        objects.remove([each["path"] for each in tenant.objects if each["path"] in found["damaged"]])
        found["missing"] += len(missing)
        if missing:
            removal = Removal()
            for name, digest in missing.items():
                removal.payloads.setdefault(digest, set()).add(name)
            tenant.table.commit(schema().empty_table(), removal)

    _each_tenant(objects, read, found)
    return found


def compact(url: str) -> dict[str, int]:
    """Put the small files of every tenant's table together."""
    objects, found = _opened(url), {"files": 0, "removed": 0}

    def pack(folder: str) -> None:
        for name, count in TendedTable(objects.place, folder=folder).compact().items():
            found[name] += count

    _each_tenant(objects, pack, found)
    return found
