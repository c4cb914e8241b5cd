"""Attacks on the store: kill it, damage it, fill it, flood it, and see whether it keeps its promises.

    python benchmarks/store_attack.py all --quick
    python benchmarks/store_attack.py kill --kills 300 --seed 7

Every attack states its promise, shows hits in a control without damage, and prints its seed. The exit code is 1 if a
promise was broken. Real files and real processes; answers come from the fake runtime, which refuses KV of another text.
Runs on Linux. Figures depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import inspect
import io
import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from cacheclip_care import CatalogCare, clear, collect_garbage, repair, verify
from cacheclip_ingest import Library, LibrarySettings, library as documents
from cacheclip_shared.object_storage import s3_server
from cacheclip_testing import TINY_MODELS, FakeRuntime, build_model
from transformers.utils.logging import disable_progress_bar

from cacheclip_rag import CacheClipEngine, ConfigurationError, SamplingParams, StoreError
from cacheclip_rag.chunks.texts import ChunkTexts
from cacheclip_rag.models import register_runtime
from cacheclip_rag.plugins import main as main_of_cli
from cacheclip_rag.runtime import TokenizedText
from cacheclip_rag.store import (
    CATALOG_FILE,
    ChunkStore,
    FormatError,
    TenantStore,
    chunk_key,
    decode_frame,
    encode_frame,
)
from cacheclip_rag.store.catalog import VERSION

QUESTION = "\n\nWhat does the keeper write?"
SHORT = SamplingParams(max_tokens=2)


@dataclass
class Result:
    """What an attack found."""

    promise: str
    figures: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def expect(self, kept: bool, complaint: str) -> None:
        if not kept:
            self.broken.append(complaint)

    def control(self, hits: int, what: str = "hits") -> None:
        """Without hits in the control, an attack shows nothing."""
        self.figures["control_hits"] = hits
        if not hits and not self.broken:  # which ends some attacks early
            raise SystemExit(f"the control has no {what}: this attack shows nothing")


class CheckedRuntime(FakeRuntime):
    """The fake, which also refuses a wrong shared prefix. A text has the same tokens whether or not it is a chunk."""

    def tokenize(self, text: str, *, control: bool = False) -> TokenizedText:
        found = list(re.finditer(r"\w+|[^\w\s]|\s+", text))
        return TokenizedText(tuple(self._id_of(match[0]) for match in found), tuple(match.span() for match in found))

    def encode(self, ids: Sequence[int], context: torch.Tensor | None = None) -> torch.Tensor:
        if context is not None and not torch.equal(context, self._kv(self._ids_of(context))):
            raise AssertionError("the shared prefix was damaged")
        return super().encode(ids, context)

    def _ids_of(self, kv: torch.Tensor) -> list[int]:
        high, low = kv[0, 0, 0].T.tolist()
        return [int(256 * first + second) for first, second in zip(high, low, strict=True)]


def text_of(rng: random.Random, characters: int = 120) -> str:
    words = ("harbour", "lamp", "stone", "keeper", "year", "river", "oil", "letter")
    return " ".join(rng.choice(words) + str(rng.randrange(1000)) for _ in range(characters // 8))


def key_of(namespace: str, number: int) -> str:
    return chunk_key(model_fingerprint="m", prefix_ids=(), chunk_ids=(number,), rope_pin="", namespace=namespace)


def fake_engine(folder: Path, namespace: str = "default", **options: Any) -> CacheClipEngine:
    settings = {"primary": "fake:primary", "auxiliary": None, "method": "direct", "prefix_cache_bytes": 0}
    return CacheClipEngine(**{**settings, "store": folder, "namespace": namespace, **options})


def disk_bytes(folder: Path) -> int:
    """Bytes that payloads and temporary files take. A file that is renamed meanwhile counts once."""
    found = {}
    for name in ("tmp", "kv"):
        for place, _, files in os.walk(folder / name):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(place, file))
                    found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


# -- processes that write ---------------------------------------------------------------------------------------------


TENANTS = ("a", "b", "c")


def value_of(key: str) -> float:
    return float(int(key[:5], 16))


class Writer:
    """One process that puts, reads, deletes and releases at random, until a file ``stop`` appears."""

    def __init__(self, folder: Path, seed: int, max_tokens: int, keys: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.max_tokens, self.keys = max_tokens, keys
        self.count: Counter[str] = Counter()
        self.log = folder / "log" / f"{seed}.jsonl"

    def run(self) -> None:
        """Never raises: what goes wrong is logged."""
        try:
            self._open()
            while not (self.folder / "stop").exists():
                step = self.rng.choices(
                    (self._put, self._get, self._delete, self._release, self._open, self._drop),
                    (45, 42, 6, 5, 0.5, 0.2),
                )[0]
                step()
            self.store.close()
        except BaseException:
            self._complain(traceback.format_exc())
        self._write({"count": self.count})

    def _write(self, line: dict[str, Any]) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _complain(self, what: str) -> None:
        self._write({"wrong": what})

    def _open(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.store = ChunkStore.open(self.folder / "store")
        self.tenants = {name: TenantStore(self.store, name) for name in TENANTS}

    def _any(self) -> tuple[Any, int, str]:
        name, number = self.rng.choice(TENANTS), self.rng.randrange(self.keys)
        return self.tenants[name], number, key_of(name, number)

    def _put(self) -> None:
        tenant, number, key = self._any()
        kv = torch.full((1, 2, 1, self.rng.randrange(1, self.max_tokens), 64), value_of(key))
        text = f"the text with the number {number // 2}"
        self.count["puts"] += tenant.put(key, kv, "float32", text=text)
        tenant.index.add([text])

    def _get(self) -> None:
        tenant, _, key = self._any()
        stored = tenant.get(key)
        self.count["hits" if stored is not None else "misses"] += 1
        if stored is not None and not bool((stored.tensor() == value_of(key)).all()):
            self._complain(f"wrong KV under {key}")

    def _delete(self) -> None:
        tenant, _, key = self._any()
        self.count["deleted"] += tenant.delete([key])

    def _release(self) -> None:
        tenant, number, _ = self._any()
        text = f"the text with the number {number // 2}"
        self.count["released"] += ChunkTexts(tenant).release([text])

    def _drop(self) -> None:
        self.count["dropped"] += self.store.drop_tenant(TENANTS[-1])


class Answerer(Writer):
    """One process that answers questions with chunks, and releases some."""

    def run(self) -> None:
        try:
            texts = [text_of(random.Random(number)) for number in range(30)]
            engine = fake_engine(self.folder / "store", "answers")
            while not (self.folder / "stop").exists():
                chunks = self.rng.sample(texts, 3)
                found = engine.generate("\n\n".join(chunks) + QUESTION, SHORT, documents=chunks)
                self.count["hits"] += found.stats.hits
                if self.rng.random() < 0.1:
                    engine.release(self.rng.sample(texts, 2))
            engine.close()
        except BaseException:
            self._complain(traceback.format_exc())
        self._write({"count": self.count})


@contextlib.contextmanager
def writing(writers: Sequence[Writer]) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Run writers, each in a process of its own; at the end of the block they are asked to stop."""
    (writers[0].folder / "log").mkdir(exist_ok=True)
    stop = writers[0].folder / "stop"
    stop.unlink(missing_ok=True)
    processes: list[Any] = [multiprocessing.get_context("fork").Process(target=writer.run) for writer in writers]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        stop.touch()
        for process in processes:
            process.join(120)
            if process.is_alive():
                process.kill()
                (writers[0].folder / "log" / "hung.jsonl").write_text('{"wrong": "a process did not stop in 120 s"}\n')


def logged(folder: Path) -> tuple[Counter[str], list[str]]:
    """What the writers counted, and what went wrong."""
    count: Counter[str] = Counter()
    wrong = []
    for path in (folder / "log").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a killed process may leave half a line
                found = json.loads(line)
                count.update(found.get("count", {}))
                wrong += [found["wrong"]] if "wrong" in found else []
    return count, wrong


def send(processes: Sequence[Any], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its log says why
            os.kill(process.pid, number)


def wait_stopped(processes: Sequence[Any]) -> None:
    """Wait until all processes are stopped by SIGSTOP."""
    for process in processes:
        while process.is_alive():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ":
                    break
            time.sleep(0.0005)


def attack_limit(args: argparse.Namespace, folder: Path) -> Result:
    """Payloads and temporary files never take more bytes on disk than the limit, whatever four processes write; at the
    end, the store counts exactly what is on disk."""
    result = Result(inspect.getdoc(attack_limit) or "")
    rng = random.Random(args.seed)
    limit = int(args.limit_mb * 1e6)
    store = ChunkStore.open(folder / "store", max_bytes=limit)
    store.apply_limit()
    store.close()
    most, samples, until = 0, 0, time.monotonic() + args.seconds
    writers = [Writer(folder, rng.getrandbits(32), args.max_tokens, args.keys) for _ in range(args.processes)]
    with writing(writers) as processes:
        while time.monotonic() < until:
            # all are stopped while files are counted: what one deletes and another writes meanwhile would count twice
            send(processes, signal.SIGSTOP)
            wait_stopped(processes)
            used = disk_bytes(folder / "store")
            counted = [[used]]
            with contextlib.suppress(sqlite3.OperationalError):  # locked by a process that is stopped
                counted = sql(folder / "store" / CATALOG_FILE, "SELECT bytes FROM totals WHERE namespace = ''")
            send(processes, signal.SIGCONT)
            if used > (counted[0][0] if counted else 0):
                result.figures["samples_with_uncounted_bytes"] = 1 + result.figures.get(
                    "samples_with_uncounted_bytes", 0
                )
            if used > limit and used > most:
                result.broken.append(f"{used} bytes on disk, the limit is {limit}")
            most, samples = max(most, used), samples + 1
            time.sleep(rng.uniform(0.001, 0.02))
    count, wrong = logged(folder)
    result.broken += wrong
    result.control(min(count["hits"], count["puts"]))
    store = ChunkStore.open(folder / "store")
    counted, on_disk = store.stats().bytes, disk_bytes(folder / "store")
    store.close()
    result.figures |= {"limit": limit, "most_bytes": most, "samples": samples, "counted": counted, "on_disk": on_disk}
    result.figures |= dict(count)
    uncounted = result.figures.setdefault("samples_with_uncounted_bytes", 0)
    result.expect(
        not uncounted, f"in {uncounted} of {samples} samples, bytes were on disk that the store did not count"
    )
    result.expect(most > 0.8 * limit, f"only {most} bytes were on disk: the limit was not tried")
    result.expect(counted == on_disk, f"the store counts {counted} bytes, {on_disk} are on disk")
    report = verify(folder / "store")
    result.expect(report.is_clean, f"verify finds {_summary(report)}")
    return result


def _summary(report: Any) -> dict[str, Any]:
    return {name: found if name == "problems" else len(found) for name, found in report.to_dict().items()
            if isinstance(found, list) and found}  # fmt: skip


def attack_kill(args: argparse.Namespace, folder: Path) -> Result:
    """After a SIGKILL at any moment, the next open leaves no temporary file, no payload without an entry and no wrong
    KV, and the limit holds. A tenant that nobody evicts keeps all of its entries."""
    result = Result(inspect.getdoc(attack_kill) or "")
    rng = random.Random(args.seed)
    limit = int(args.limit_mb * 1e6)
    where = folder / "store"
    store = ChunkStore.open(where, max_bytes=limit)
    store.apply_limit()
    put_kept(store)
    store.close()
    found: Counter[str] = Counter()
    while found["kills"] < args.kills:
        seeds = [rng.getrandbits(32) for _ in range(4)]
        writers = [Writer(folder, seed, args.max_tokens, args.keys) for seed in seeds[1:]] + [
            Answerer(folder, seeds[0], 0, 0)
        ]
        with writing(writers) as processes:
            victims = processes if rng.random() < 0.25 else rng.sample(processes, 1)
            time.sleep(rng.uniform(0.02, args.longest_s))
            for process in victims:
                process.kill()
            found["kills"] += len(victims)
            time.sleep(rng.uniform(0, 0.1))
        die_between(where, rng.randrange(KEPT, KEPT + 20))
        found["kills"] += 1
        _look(where, limit, args.keys, found, result)
        if result.broken:
            break
    count, wrong = logged(folder)
    result.broken += wrong
    result.control(min(found["read"], count["hits"], found["temporaries_before"]), "hits and temporary files")
    result.figures |= {**found, **{f"writers_{name}": number for name, number in count.items()}}
    return result


def _look(where: Path, limit: int, keys: int, found: Counter[str], result: Result) -> None:
    """Open the store after a kill, and compare it with the promise."""
    after = f"after {found['kills']} kills"
    used = disk_bytes(where)
    result.expect(used <= limit, f"{after}: {used} bytes on disk, the limit is {limit}")
    found["temporaries_before"] += len([*(where / "tmp").glob("*")])
    store = ChunkStore.open(where)
    temporaries = len([*(where / "tmp").glob("*")])
    result.expect(not temporaries, f"{after}: {temporaries} temporary files are left")
    known = {entry.key for entry in CatalogCare(store.catalog.database).entries()}
    orphans = set(store.tiers.list()) - known
    result.expect(not orphans, f"{after}: {len(orphans)} payloads have no entry")
    writes = store.catalog.database.query("SELECT * FROM writes")
    result.expect(not writes, f"{after}: {len(writes)} announced writes are left")
    found["entries_without_payload"] += len(known - set(store.tiers.list()))
    held = kept_in(store)
    found["kept"] += len(held)
    result.expect(len(held) == KEPT, f"{after}: {len(held)} of {KEPT} entries are left that nobody evicts")
    report = verify(where)
    if not report.is_clean:
        found["repairs"] += 1
        found.update(f"verify_{name}" for name in _summary(report))
        found.update(re.sub(r"\d+", "N", problem) for problem in report.problems)
    for name in TENANTS:
        tenant = TenantStore(store, name)
        for number in range(keys):
            key = key_of(name, number)
            stored = tenant.get(key)
            found["read"] += stored is not None
            right = stored is None or bool((stored.tensor() == value_of(key)).all())
            result.expect(right, f"{after}: wrong KV under {key}")
    store.close()
    if not verify(where).is_clean:
        repair(where)
        left = verify(where)
        result.expect(left.is_clean, f"{after}: verify finds after repair {_summary(left)}")


KEPT = 20
"""Entries of a tenant that is never the largest, and that no writer uses: none of them may go."""


def kept_kv(number: int) -> torch.Tensor:
    return torch.full((2, 2, 1, 8, 16), float(number))


def put_kept(store: ChunkStore, numbers: Sequence[int] = range(KEPT), namespace: str = "kept") -> None:
    tenant = TenantStore(store, namespace)
    for number in numbers:
        text = f"what is kept has the number {number} in its text"
        tenant.put(key_of(namespace, number), kept_kv(number), "float32", text=text)


def kept_in(store: ChunkStore, namespace: str = "kept", most: int = KEPT) -> set[int]:
    """Numbers of the entries that are there with the right KV."""
    tenant = TenantStore(store, namespace)
    found = {number: tenant.get(key_of(namespace, number)) for number in range(most)}
    return {n for n, stored in found.items() if stored is not None and torch.equal(stored.tensor(), kept_kv(n))}


def die_between(where: Path, number: int) -> None:
    """A process that is killed when its payload is written and not yet renamed."""

    def work() -> None:
        os.replace = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        put_kept(ChunkStore.open(where), [number])

    in_a_child(work)


def in_a_child(work: Callable[[], object]) -> tuple[int, str]:
    """Run in a forked process: its exit code (a killed one's is negative), and the error that it ended in."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with contextlib.suppress(StoreError):
                    work()
                code = 0
            except BaseException:
                said.write(_last_lines())
                said.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return code, said.read()


# -- kills and faults at every moment ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Something that a process does with a store of 20 entries of one tenant and 8 of another."""

    run: Callable[[Path], object]
    may_go: Callable[[], set[int]] = set
    """Entries of the first tenant that may be gone afterwards."""
    prepare: Callable[[Path], object] = lambda folder: None
    others_may_go: bool = False
    """Whether those of the other tenant may go."""


def _damage_two(folder: Path) -> None:
    for number in (3, 7):
        key = key_of("kept", number)
        path = folder / "kv" / key[:2] / f"{key}.kv"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


def _leave_garbage(folder: Path) -> None:
    store = ChunkStore.open(folder)
    store.catalog.remove("kept", [key_of("kept", 4)])
    store.close()
    die_between(folder, 30)


def _limit(folder: Path) -> None:
    store = ChunkStore.open(folder)
    store.set_limit(17 * 4096)


def _put_in_full(folder: Path) -> None:
    store = ChunkStore.open(folder)
    put_kept(store, range(100, 103), "new")


def _be_full(folder: Path) -> None:
    store = ChunkStore.open(folder)
    store.set_limit(28 * 4096)
    store.close()


def _ingest(folder: Path) -> None:
    engine = fake_engine(folder, "ingest")
    engine.precompute([f"{text_of(random.Random(number))}" for number in range(4)], source="s", document="d")


WORKS = {
    "open": Work(lambda folder: ChunkStore.open(folder), prepare=lambda folder: die_between(folder, 30)),
    "read": Work(lambda folder: kept_in(ChunkStore.open(folder))),
    "read damaged": Work(lambda folder: kept_in(ChunkStore.open(folder)), lambda: {3, 7}, _damage_two),
    "put": Work(lambda folder: put_kept(ChunkStore.open(folder), range(100, 103), "new")),
    "put in a full store": Work(_put_in_full, lambda: {*range(3)}, _be_full),
    "ingest": Work(_ingest),
    "limit": Work(_limit, lambda: {*range(11)}),
    "clear": Work(lambda folder: clear(folder, "other"), others_may_go=True),
    "gc": Work(collect_garbage, lambda: {4}, _leave_garbage),
    "repair": Work(repair, lambda: {3, 7}, _damage_two),
    "repair without a catalog": Work(repair, lambda: {3, 7}, lambda folder: (_damage_two(folder), _no_catalog(folder))),
    "verify": Work(verify, lambda: {3, 7}, _damage_two),
}


def _no_catalog(folder: Path) -> None:
    for path in folder.glob(f"{CATALOG_FILE}*"):
        path.unlink()


class Moments:
    """Counts the calls of the system, and statements of SQLite, of a process; at one of them it does something else."""

    CALLS = ("open", "read", "write", "stat", "lstat", "listdir", "replace", "unlink", "mkdir", "fstat")

    def __init__(self, number: int, then: Callable[[], object], *, statements: bool) -> None:
        self.left, self.then = number, then
        for name in self.CALLS:
            setattr(os, name, self._counted(getattr(os, name)))
        if statements:
            connect = sqlite3.connect

            def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
                connection = connect(*arguments, **options)
                connection.set_trace_callback(lambda _: self._count())
                return connection

            sqlite3.connect = connected  # type: ignore[assignment]

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self._count()
            return call(*arguments, **options)

        return counted

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.then()


def _scene_of(folder: Path, work: Work) -> Path:
    """The store that a work begins with."""
    store = ChunkStore.open(folder)
    put_kept(store)
    put_kept(store, range(8), "other")
    store.close()
    work.prepare(folder)
    return folder


def _compare(where: Path, work: Work, what: str, found: Counter[str], result: Result) -> None:
    """The oracle: expected entries minus those that are allowed to go."""
    ChunkStore.open(where).close()
    temporaries = len([*(where / "tmp").glob("*")])
    result.expect(not temporaries, f"{what}: {temporaries} temporary files are left")
    store = ChunkStore.open(where)
    held, others = kept_in(store), kept_in(store, "other", 8)
    lost = set(range(KEPT)) - held - work.may_go()
    result.expect(not lost, f"{what}: {len(lost)} entries are lost that should be there: {sorted(lost)}")
    result.expect(
        len(others) == 8 or work.others_may_go, f"{what}: {8 - len(others)} entries of another tenant are lost"
    )
    limit, total = store.catalog.limits.of_store, store.catalog.total().bytes
    result.expect(limit is None or total <= limit, f"{what}: {total} bytes are stored, the limit is {limit}")
    found["entries"] += len(held) + len(others)
    store.close()
    repair(where)
    left = verify(where)
    result.expect(left.is_clean, f"{what}: verify finds after repair {_summary(left)}")
    store = ChunkStore.open(where)
    lost = set(range(KEPT)) - kept_in(store) - work.may_go()
    result.expect(not lost, f"{what}: {len(lost)} entries are lost after repair")
    store.close()


def _calls(scene: Path, where: Path, rng: random.Random, stride: int) -> Iterator[int]:
    """Numbers of calls, the later ones with larger gaps. For each, ``where`` is a new copy of the scene."""
    number, step = 1, 1
    while True:
        _remove(where)
        shutil.copytree(scene, where)
        yield number
        number += rng.randint(1, step * stride)
        step = 1 if number < 40 else 1 + number // 40


def attack_moments(args: argparse.Namespace, folder: Path) -> Result:
    """A process that is killed at any call of the system or any statement of SQLite, whatever it does (open, read, put,
    ingest, limit, clear, gc, repair, verify), costs no entry but those that it was to remove."""
    result = Result(inspect.getdoc(attack_moments) or "")
    rng, found = random.Random(args.seed), Counter[str]()
    for name, work in WORKS.items():
        scene, where = _scene_of(folder / "scene" / name, work), folder / "store"
        for number in _calls(scene, where, rng, args.stride):

            def killed(number: int = number, work: Work = work, where: Path = where) -> None:
                Moments(number, lambda: os.kill(os.getpid(), signal.SIGKILL), statements=True)
                work.run(where)

            code, said = in_a_child(killed)
            result.expect(code in (0, -signal.SIGKILL), f"{name}, at {number}: {said}")
            if code == 0:
                break
            found["kills"] += 1
            found["temporaries_before"] += len([*(where / "tmp").glob("*")])
            _compare(where, work, f"{name}, killed at {number}", found, result)
        found[f"moments of {name}"] = number
    result.control(min(found["entries"], found["temporaries_before"]), "entries and temporary files")
    result.figures |= found
    return result


def attack_faults(args: argparse.Namespace, folder: Path) -> Result:
    """Whatever call of the system fails (EIO, EMFILE, EACCES, ESTALE, ENOSPC, EROFS, no memory), once or from then on,
    nothing whole is deleted, and afterwards all is there."""
    result = Result(inspect.getdoc(attack_faults) or "")
    rng, found = random.Random(args.seed), Counter[str]()
    names = ("EIO", "EMFILE", "EACCES", "ESTALE", "ENOSPC", "EROFS")
    errors = [*(OSError(getattr(errno, name), name) for name in names), MemoryError()]
    for name, work in WORKS.items():
        scene, where = _scene_of(folder / "scene" / name, work), folder / "store"
        for number in _calls(scene, where, rng, args.stride):
            error, again = rng.choice(errors), rng.random() < 0.3

            def fail(
                number: int = number, work: Work = work, where: Path = where, error: Any = error, again: bool = again
            ) -> None:
                def then() -> None:
                    found["reached"] += 1
                    if again:
                        moments.left = 1
                    raise error

                moments = Moments(number, then, statements=False)
                with contextlib.suppress(StoreError, OSError, MemoryError):
                    work.run(where)
                os._exit(3 if found["reached"] else 0)

            found["reached"] = 0
            code, said = in_a_child(fail)
            if code == 0:
                break
            what = f"{name}, {type(error).__name__} {error} at {number}{' and after it' if again else ''}"
            result.expect(code == 3, f"{what}: {said}")
            found["faults"] += 1
            _compare(where, work, what, found, result)
        found[f"calls of {name}"] = number
    del found["reached"]
    result.control(found["entries"], "entries")
    result.figures |= found
    return result


# -- damage -----------------------------------------------------------------------------------------------------------


class Stated(logging.Handler):
    """Collects warnings of store, search, chunk caches and library."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(tuple(f"cacheclip_rag.{room}" for room in ("store", "finding", "chunks", "ingest"))):
            self.lines.append(record.getMessage())


@dataclass
class Scene:
    """A store that is damaged, with an undamaged copy and an older one."""

    store: Path
    copy: Path
    older: Path
    texts: list[str]
    rng: random.Random

    @classmethod
    def make(cls, folder: Path, rng: random.Random) -> Scene:
        texts = [text_of(rng) for _ in range(6)]
        scene = cls(folder / "store", folder / "copy", folder / "older", texts, rng)
        for copy, count in ((scene.older, 2), (scene.copy, len(texts))):
            for namespace in ("default", "other"):  # the same texts, so that payloads of both tenants look alike
                engine = fake_engine(scene.store, namespace)
                for number, text in enumerate(texts[:count]):
                    engine.precompute([text], source=f"source {number}", document="document")
                engine.close()
            scene.add_documents()
            shutil.copytree(scene.store, copy)
        return scene

    def add_documents(self) -> None:
        """Passages with vectors that say nothing: only damage is looked for."""
        library = Library(self.store)
        for number in range(4):
            texts = [f"passage {ordinal} of document {number}" for ordinal in range(5)]
            library.replace(f"document {number}", "digest", texts, torch.eye(5, 8).numpy())
        library.fix_settings(LibrarySettings("primary", None, "embedding", "float32", "default", 512, 0, "passages"))
        library.close()

    def restore(self) -> None:
        _remove(self.store)
        shutil.copytree(self.copy, self.store)

    @property
    def catalog(self) -> Path:
        return self.store / CATALOG_FILE

    def payload(self) -> Path:
        """A random payload. Those of the other tenant are not asked for, but may be damaged too."""
        return self.rng.choice(sorted((self.copy / "kv").glob("*/*.kv"))).relative_to(self.copy)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


Damage = Callable[[Path, Scene], None]


def flip_bits(path: Path, scene: Scene) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(scene.rng.choice((1, 1, 2, 20))):
        content[scene.rng.randrange(len(content))] ^= 1 << scene.rng.randrange(8)
    path.write_bytes(content)


def random_bytes(path: Path, scene: Scene) -> None:
    """Bytes at one place; half of the time near the beginning, where headers are."""
    length = scene.rng.choice((1, 4, 16, 100, 4096))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(scene.rng.randrange(scene.rng.choice((100, size))))
        file.write(scene.rng.randbytes(length))


def cut(path: Path, scene: Scene) -> None:
    os.truncate(path, scene.rng.randrange(path.stat().st_size))


def grow(path: Path, scene: Scene) -> None:
    with path.open("ab") as file:
        file.write(scene.rng.randbytes(scene.rng.choice((1, 64, 5000))))


def zero(path: Path, scene: Scene) -> None:
    """A range of zeros, as a power failure may leave."""
    size = path.stat().st_size
    start = scene.rng.choice((0, scene.rng.randrange(size)))
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(scene.rng.choice((size - start, min(size - start, 512)))))


def empty(path: Path, scene: Scene) -> None:
    path.write_bytes(b"")


def delete(path: Path, scene: Scene) -> None:
    path.unlink()


def swap(path: Path, scene: Scene) -> None:
    """Another entry's payload, of either tenant."""
    other = scene.store / scene.payload()
    first, second = path.read_bytes(), other.read_bytes() if other.is_file() else b""
    path.write_bytes(second)
    if other.is_file():
        other.write_bytes(first)


def other_codec(path: Path, scene: Scene) -> None:
    """The same key with a coarser codec, as an engine with other settings writes it."""
    stored = decode_frame(path.read_bytes(), path.stem)
    frame, codec = stored.frame, scene.rng.choice(("int8", "bfloat16"))
    path.write_bytes(
        encode_frame(stored.tensor(), codec, frame.key, namespace=frame.namespace, digest=frame.digest, text=frame.text)
    )


def older_version(path: Path, scene: Scene) -> None:
    """A frame of another version."""
    content = bytearray(path.read_bytes())
    content[8] = scene.rng.choice((0, 1, 3))
    path.write_bytes(content)


def fifo(path: Path, scene: Scene) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path, scene: Scene) -> None:
    """A symbolic link to the same content, to another payload, to nothing or to itself."""
    moved = path.with_name("moved")
    os.replace(path, moved)
    path.symlink_to(scene.rng.choice((moved, scene.store / scene.payload(), Path("nowhere"), path)))


def folder_instead(path: Path, scene: Scene) -> None:
    path.unlink()
    path.mkdir()
    if scene.rng.random() < 0.5:
        (path / "file").write_bytes(b"x")


def huge(path: Path, scene: Scene) -> None:
    """A sparse file with the right beginning."""
    os.truncate(path, scene.rng.choice((10**8, 10**12)))


def folder_gone(path: Path, scene: Scene) -> None:
    shutil.rmtree(scene.store / scene.rng.choice(("kv", "kv", "tmp", "writers")), ignore_errors=True)


def file_instead_of_folder(path: Path, scene: Scene) -> None:
    target = scene.rng.choice((path.parent, scene.store / "kv", scene.store / "tmp", scene.store / "writers"))
    shutil.rmtree(target, ignore_errors=True)
    target.write_bytes(b"x")


def other_database(path: Path, scene: Scene) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.executescript("CREATE TABLE entries (key TEXT, namespace TEXT); INSERT INTO entries VALUES ('a', 'b');")
    connection.close()


def marked_database(path: Path, scene: Scene) -> None:
    """A database with this program's marks and other tables."""
    other_database(path, scene)
    connection = sqlite3.connect(path)
    connection.executescript(f"PRAGMA application_id = {0x43434B56}; PRAGMA user_version = {VERSION};")
    connection.close()


def text_file(path: Path, scene: Scene) -> None:
    path.write_text("this is no database\n" * 300)


def older_catalog(path: Path, scene: Scene) -> None:
    """A backup from before some entries were written."""
    shutil.copy(scene.older / path.name, path)


def stale_wal(path: Path, scene: Scene) -> None:
    """Garbage beside the file, as new files: SQLite maps the old ones, and cutting a mapped file ends the process."""
    for ending in ("-wal", "-shm"):
        beside = path.with_name(path.name + ending)
        beside.unlink(missing_ok=True)
        beside.write_bytes(scene.rng.randbytes(scene.rng.choice((0, 100, 40000))))


VALUES = ("x", "", "é" * 50, b"", b"\xff\xfe\x00", -1, 0, 1, 2**40, 2**62, -(2**63), 1.5, None)
"""Values that rows are changed to. SQLite stores any of them in any column."""


def _table(path: Path, scene: Scene) -> str:
    tables = sql(path, "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name")
    return str(scene.rng.choice(tables)[0])


def change_rows(path: Path, scene: Scene) -> None:
    """A column of a row, or of all rows, gets another value, maybe of another type."""
    table = _table(path, scene)
    column = scene.rng.choice([row[1] for row in sql(path, f"PRAGMA table_info({table})")])
    where = "" if scene.rng.random() < 0.5 else " WHERE random() % 3 = 0"
    with contextlib.suppress(sqlite3.IntegrityError):
        sql(path, f"UPDATE OR REPLACE {table} SET {column} = ?{where}", scene.rng.choice(VALUES))


def add_rows(path: Path, scene: Scene) -> None:
    """Rows that no program writes: of any values, in any table."""
    table = _table(path, scene)
    width = len(sql(path, f"PRAGMA table_info({table})"))
    values = [scene.rng.choice((*VALUES, "default", "max_bytes", "other")) for _ in range(width)]
    with contextlib.suppress(sqlite3.Error):
        sql(path, f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * width)})", *values)


def delete_rows(path: Path, scene: Scene) -> None:
    table = _table(path, scene)
    sql(path, f"DELETE FROM {table}" + scene.rng.choice(("", " WHERE random() % 2")))


def drop_tables(path: Path, scene: Scene) -> None:
    kind, name = scene.rng.choice(sql(path, "SELECT type, name FROM sqlite_master WHERE sql IS NOT NULL"))
    sql(path, f"DROP {kind} {name}")


def sql(path: Path, statement: str, *arguments: object) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        with connection:
            return connection.execute(statement, arguments).fetchall()
    finally:
        connection.close()


OF_PAYLOADS: tuple[Damage, ...] = (
    flip_bits, flip_bits, flip_bits, random_bytes, cut, grow, zero, empty, delete, swap, swap, other_codec,
    older_version, fifo, link, folder_instead, huge, folder_gone, file_instead_of_folder,
)  # fmt: skip
OF_CATALOG: tuple[Damage, ...] = (
    flip_bits, random_bytes, random_bytes, random_bytes, cut, grow, zero, empty, delete, other_database,
    marked_database, text_file, older_catalog, stale_wal, change_rows, change_rows, change_rows, add_rows,
    delete_rows, drop_tables, fifo, link, folder_instead,
)  # fmt: skip
SILENT = {older_catalog, change_rows, add_rows, delete_rows, drop_tables, flip_bits, random_bytes, zero}
"""Damage after which the catalog is a valid catalog of other texts, so that nobody can tell what is missing."""


def attack_damage(args: argparse.Namespace, folder: Path) -> Result:
    """Whatever is damaged, an engine answers: with the undamaged answer, never with wrong KV, never with an exception.
    A chunk that is not reused is counted as a miss, or a warning says why."""
    result = Result(inspect.getdoc(attack_damage) or "")
    stated = Stated()
    logging.getLogger("cacheclip_rag").addHandler(stated)
    scene = Scene.make(folder, random.Random(args.seed))
    case = _Case(scene, stated, result, Counter())
    case.ask(fake_engine(scene.store), "control")
    right = case.answers.pop()
    result.control(case.hits)
    result.expect(case.hits == len(scene.texts), f"the control has {case.hits} hits")
    of_store = {"payloads": OF_PAYLOADS, "catalog": OF_CATALOG}
    damages = [functions for name, functions in of_store.items() if name in args.what]
    numbers = [args.only] if args.only is not None else range(args.damages)
    for number in numbers if damages else ():
        scene.restore()
        scene.rng = random.Random(f"{args.seed} {number}")
        case.run(number, damages)
    for number in range(args.damages // 4 if "library" in args.what and args.only is None else 0):
        scene.restore()
        scene.rng = random.Random(f"{args.seed} library {number}")
        case.search(number)
    result.expect(case.answers <= {right}, f"answers differ: {case.answers} instead of {right}")
    result.figures |= dict(sorted(case.found.items()))
    logging.getLogger("cacheclip_rag").removeHandler(stated)
    return result


@dataclass
class _Case:
    """Damages, and what an engine says."""

    scene: Scene
    stated: Stated
    result: Result
    found: Counter[str]
    answers: set[str] = field(default_factory=set)
    hits: int = 0
    """Of the last answer."""

    def run(self, number: int, choices: Sequence[tuple[Damage, ...]]) -> None:
        """One store, damaged once or a few times, and asked before (half of the time) and after."""
        scene, rng = self.scene, self.scene.rng
        engine = fake_engine(scene.store, memory_bytes=rng.choice((0, 0, 10**6)))
        if rng.random() < 0.5:
            self.ask(engine, f"{number}, before damage")
            self.result.expect(self.hits == len(scene.texts), f"{number}: {self.hits} hits before damage")
        done = []
        for _ in range(rng.choice((1, 1, 2, 4))):
            damages = rng.choice(choices)
            damage = rng.choice(damages)
            path = scene.store / scene.payload() if damages is OF_PAYLOADS else scene.catalog
            if not path.is_file() or path.is_symlink():
                continue
            with contextlib.suppress(OSError, LookupError, ValueError, MemoryError, sqlite3.Error):  # damaged already
                damage(path, scene)
                done.append((damage, damages is OF_CATALOG))
        names = ", ".join(f"{damage.__name__} of {'catalog' if of else 'payload'}" for damage, of in done)
        where = f"damage {number} ({names})"
        self.found["damages"] += len(done)
        silent = any(of and damage in SILENT for damage, of in done)
        silent |= not scene.catalog.exists() and not (scene.store / "kv").exists()  # a store that never was, it seems
        self.ask(engine, where, silent=silent)
        misses = self.hits < len(scene.texts)
        self.found["answers_with_misses"] += misses
        silent |= bool(self.stated.lines)  # a warning is given once
        self.ask(engine, f"{where}, again", silent=True)
        self.close(engine, where)
        if rng.random() < 0.2:
            self.mend(where)
            silent = True  # the repair says what it deleted
        engine = fake_engine(scene.store)
        self.ask(engine, f"{where}, in a new engine", silent=silent)
        self.ask(engine, f"{where}, in a new engine, again", silent=True)
        self.close(engine, where)
        if self.hits < len(scene.texts):
            self.found[f"not_healed_after {names}" if len(done) == 1 else "not_healed_after several"] += 1
        else:
            self.found["healed"] += misses

    def search(self, number: int) -> None:
        """Search a damaged library: it is refused, or every passage is one that was stored, and warnings name the
        documents of which passages are missing."""
        scene, damage = self.scene, self.scene.rng.choice(OF_CATALOG)
        where = f"damage {number} ({damage.__name__} of library)"
        path = scene.store / documents.FILE_NAME
        library, is_open = Library(scene.store), scene.rng.random() < 0.5
        if is_open:
            where += ", open"
            self.result.expect(len(library.search(torch.ones(1, 8).numpy(), 99)) == 20, f"{where}: before damage")
        with contextlib.suppress(OSError, LookupError, ValueError, sqlite3.Error):
            damage(path, scene)
        self.stated.lines.clear()
        self.found["libraries"] += 1
        try:
            library = library if is_open else Library.open(scene.store)
            found = library.search(torch.ones(1, 8).numpy(), 99)
            damaged = library.damaged()
        except (StoreError, ConfigurationError):
            self.found["libraries_refused"] += 1
        except Exception:
            self.result.broken.append(f"{where}: {_last_lines()}")
        else:
            for passage in found:
                right = passage.text == f"passage {passage.ordinal} of {passage.path}"
                self.result.expect(right, f"{where}: a wrong passage: {passage}")
            if len(found) < 20 and not self.stated.lines and not damaged:
                self.found["libraries_that_nobody_can_tell"] += damage in SILENT
                self.result.expect(damage in SILENT, f"{where}: {len(found)} passages, and nothing says why")
        library.close()

    def close(self, engine: CacheClipEngine, where: str) -> None:
        try:
            engine.close()
        except Exception:
            self.result.broken.append(f"{where}: close: {_last_lines()}")

    def ask(self, engine: CacheClipEngine, where: str, *, silent: bool = False) -> None:
        """Ask a question with all chunks."""
        texts = self.scene.texts
        documents = texts if self.scene.rng.random() < 0.5 else ()
        self.stated.lines.clear()
        started = time.perf_counter()
        self.found["answers"] += 1
        try:
            answer = engine.generate("\n\n".join(texts) + QUESTION, SHORT, documents=documents)
        except FormatError:  # the store says that it is of another version, and what to do
            self.hits = 0
            self.found["refused"] += 1
            self.stated.lines.append("refused")
            return
        except Exception:
            self.hits = 0
            self.result.broken.append(f"{where}: {_last_lines()}")
            return
        seconds = time.perf_counter() - started
        self.answers.add(answer.text)
        self.hits, misses = answer.stats.hits, answer.stats.misses
        self.result.expect(seconds < 5, f"{where}: the answer took {seconds:.1f} s")
        if self.hits < len(texts) and not misses and not self.stated.lines:
            self.found["misses_nobody_can_state"] += silent
            self.result.expect(silent, f"{where}: {self.hits} hits, no miss is counted and no warning says why")

    def mend(self, where: str) -> None:
        """Repair the store; afterwards it is clean, or repair says why not."""
        try:
            repair(self.scene.store)
            left = verify(self.scene.store)
            self.found["repaired"] += left.is_clean
            self.result.expect(left.is_clean, f"{where}: verify finds after repair {_summary(left)}")
        except StoreError as error:
            self.found["repair_refused"] += 1
            self.result.expect(False, f"{where}: repair: {error}")
        except Exception:
            self.result.broken.append(f"{where}: repair: {_last_lines()}")


def _last_lines() -> str:
    """The error and the place of this package where it came from."""
    lines = traceback.format_exc().strip().splitlines()
    places = [line.strip() for line in lines if "cacheclip_rag" in line and line.strip().startswith("File")]
    return f"{lines[-1]} ({places[-1] if places else 'elsewhere'})"


# -- a store that machines share --------------------------------------------------------------------------------------

COMMIT_S = 0.2
"""Between two commits of a job, so that some kills hit one."""


@contextlib.contextmanager
def storage(home: Path) -> Iterator[None]:
    """An S3 server, which this process and those that it starts use, each machine with a home of its own."""
    with s3_server() as (address, _):
        values = {
            "AWS_ALLOW_HTTP": "true",
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        os.environ.update({**values, "AWS_REGION": "us-east-1", "CACHECLIP_HOME": str(home)})
        urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
        yield


def store_command(*arguments: str) -> dict[str, Any]:
    """What ``cacheclip store`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        sys.argv = ["cacheclip", "store", *arguments, "--json"]
        main_of_cli()
    return dict(json.loads(said.getvalue()))


class Job:
    """An ingestion into a shared store, each time in a process of its own."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.folder, self.engine, self.url = folder, engine, "s3://bucket/killed"
        self.texts: list[str] = []
        model = str(build_model(folder / "model", TINY_MODELS["llama"]))
        self.settings = LibrarySettings(primary=model, auxiliary=None, dtype="float32")
        self.config = self.settings.engine_config(self.url, device="cpu")
        (folder / "documents").mkdir()

    def write(self, rng: random.Random, count: int) -> None:
        """New texts in all documents."""
        self.texts = [f"{number}. {text_of(rng)}" for number in range(count)]
        for number, text in enumerate(self.texts):
            (self.folder / "documents" / f"{number}.txt").write_text(text)

    def run(self) -> None:
        """In the process of the job: to its end, unless it is killed."""
        from cacheclip_ingest import shared

        together = shared._together

        def marking(tables: Iterator[Any]) -> Iterator[Any]:
            yield from together(each for each in tables if (self.folder / "began").touch() is None)

        shared._together, shared._COMMIT_S = marking, COMMIT_S
        options = {"engine": self.engine, "workers": 1}
        report = shared.ingest_shared([str(self.folder / "documents")], self.config, self.settings, **options)  # type: ignore[arg-type]
        (self.folder / "report").write_text(json.dumps(report.to_dict()))

    def start(self) -> int:
        (self.folder / "began").unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setpgrp()
                self.run()
                code = 0
            finally:
                os._exit(code)
        return child

    def work_s(self) -> tuple[float, float]:
        """Seconds to the first batch, and from there to the end, of a run that nobody kills, into another store."""
        own = self.config
        self.config = replace(own, store=f"{self.url}-undisturbed")
        self.in_child(lambda: store_command("create", str(self.config.store)))
        began, child = time.monotonic(), self.start()
        until_first = self.wait_for_batch(child) - began
        os.waitpid(child, 0)
        self.config = own
        return until_first, time.monotonic() - began - until_first

    def wait_for_batch(self, child: int) -> float:
        """The time when the first batch is encoded, or the job has ended."""
        while not (self.folder / "began").exists() and os.waitid(os.P_PID, child, _ENDED | os.WNOWAIT) is None:
            time.sleep(0.005)
        return time.monotonic()

    def look(self) -> dict[str, Any]:
        """What the catalog says, and how many payloads are not there that it names: as others read it."""
        import obstore
        from deltalake import DeltaTable

        place = obstore.store.from_url(self.url, client_options={"allow_http": True})
        objects = [("", *each["path"].split("/")) for page in obstore.list(place) for each in page]
        there = {(names[-2], names[-1].partition(".")[0]) for names in objects if names[-1].endswith(".kv")}
        tables = [f"{self.url}{'/'.join(names[:4])}" for names in objects if names[-2] == "_delta_log"]
        rows = [row for table in {*tables} for row in DeltaTable(table).to_pyarrow_table().to_pylist()]
        gone = sum((each["key"], each["codec"]) not in there for row in rows for each in row["kv"])
        return {"rows": [(Path(row["document"]).name, row["text"]) for row in rows], "gone": gone}

    def in_child(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The client of object storage has threads, which a fork does not copy: this process does not use it."""
        code, said = in_a_child(lambda: (self.folder / "found").write_text(json.dumps(work())))
        if code:
            raise SystemExit(f"cannot look at the store: {said}")
        return dict(json.loads((self.folder / "found").read_text()))

    def compared(self) -> dict[str, Any]:
        """In a process of its own, with an empty home: the KV of every text beside KV that is computed now."""
        shared, fresh = CacheClipEngine(self.config), CacheClipEngine(self.config, store=None)
        fresh.precompute(self.texts)
        pairs = [[each.chunk_caches()[0].read(text) for each in (shared, fresh)] for text in self.texts]
        differences = [
            float((a.tensor() - b.tensor()).abs().max()) for a, b in pairs if a is not None and b is not None
        ]
        shared.close()
        return {"read": len(differences), "wrong": sum(each > 1e-3 for each in differences)}


_ENDED = os.WEXITED | os.WNOHANG


@contextlib.contextmanager
def ray_cluster(engine: str) -> Iterator[psutil.Process | None]:
    """A cluster of Ray that outlives its drivers. This process does not connect to it, because it forks."""
    if engine != "ray":
        yield None
        return
    import ray

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_AUTH_MODE"] = "disabled"  # it listens on this machine only
        options = [
            "--node-ip-address",
            "127.0.0.1",
            "--port",
            str(port),
            "--num-cpus",
            "2",
            "--object-store-memory",
            "100000000",
            "--temp-dir",
            folder,
        ]
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *options]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as head:
            os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
            cluster = psutil.Process(head.pid)
            try:
                while not any(each.name() == "raylet" for each in cluster.children(recursive=True)):
                    time.sleep(0.1)
                yield cluster
            finally:
                ray.shutdown()  # of a driver in this process, which Ray would end
                for each in (*cluster.children(recursive=True), cluster):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()


def workers_of(cluster: psutil.Process | None) -> list[psutil.Process]:
    """Processes that encode."""
    found = cluster.children(recursive=True) if cluster is not None else []
    return [each for each in found if "MapWorker" in " ".join(each.cmdline())]


def attack_shared(args: argparse.Namespace, folder: Path) -> Result:
    """A job of small texts into a shared store that is killed at random moments (with Ray, its workers too), and then
    run to its end, leaves every text once, with its own KV; whatever the catalog names is there at every moment."""
    result = Result(inspect.getdoc(attack_shared) or "")
    rng = random.Random(args.seed)
    job, found = Job(folder, args.engine), Counter[str]()
    job.write(rng, args.texts)
    with storage(folder / "home"), ray_cluster(args.engine) as cluster:
        job.in_child(lambda: store_command("create", job.url))
        first_s, work_s = job.work_s()
        result.figures |= {"undisturbed_s": round(first_s + work_s, 1)}
        while found["kills"] < args.kills:
            child = job.start()
            if rng.random() < 0.2:
                time.sleep(rng.uniform(0, first_s))
            else:
                job.wait_for_batch(child)
                time.sleep(rng.uniform(0, 2 * work_s / args.kills))
            for worker in workers_of(cluster)[:1]:
                worker.kill()
                found["kills"] += 1
                time.sleep(rng.uniform(0, first_s / 2))
            os.kill(child, signal.SIGKILL)
            was_killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < 0
            found["kills" if was_killed else "ended"] += 1
            if not was_killed:
                job.write(rng, args.texts)  # so that the next one has work
            if found["kills"] % 5 == 0:
                rows = job.in_child(job.look)
                result.expect(not rows["gone"], f"{rows['gone']} payloads that the catalog names are not there")
                result.expect(len(rows["rows"]) == len({*map(tuple, rows["rows"])}), "a text is there twice")
                found["rows_before_the_end"] = len(rows["rows"])
        for computed in ("computed_at_the_end", "computed_again"):
            os.waitpid(job.start(), 0)
            report = json.loads((folder / "report").read_text())
            found[computed] = report["computed"]
            result.expect(not report["failed"], f"{len(report['failed'])} documents failed")
        rows, kv = job.in_child(job.look), job.in_child(job.compared)
        expected = [(f"{number}.txt", text) for number, text in enumerate(job.texts)]
        result.expect(
            sorted(map(tuple, rows["rows"])) == sorted(expected), f"{len(rows['rows'])} rows, not each text once"
        )
        result.expect(found["computed_again"] == 0, "a job that has nothing to do computes something")
        result.expect(kv == {"read": len(job.texts), "wrong": 0}, f"KV: {kv}")
        where = ("--store", job.url)
        care = job.in_child(lambda: {**store_command("verify", *where), **store_command("gc", *where, "--grace", "0")})
        result.expect(not care["damaged"] and not care["missing"], f"{care}")
    result.figures |= {**found, "payloads": care["payloads"] - care["deleted"], "unnamed_payloads": care["deleted"]}
    return result


# -- command line -----------------------------------------------------------------------------------------------------


OPTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    "limit": {
        "seconds": (600.0, 8.0),
        "processes": (4, 4),
        "limit-mb": (4.0, 4.0),
        "max-tokens": (300, 300),
        "keys": (60, 60),
    },
    "kill": {
        "kills": (300, 8),
        "longest-s": (0.6, 0.3),
        "limit-mb": (40.0, 40.0),
        "max-tokens": (4000, 4000),
        "keys": (60, 60),
    },
    "moments": {"stride": (1, 12)},
    "faults": {"stride": (1, 12)},
    "damage": {"damages": (10_000, 100)},
    "shared": {"kills": (50, 4), "texts": (500, 60), "engine": ("local", "local")},
}
"""Options of each attack: their defaults, and those of a quick run."""
ATTACKS: dict[str, Callable[[argparse.Namespace, Path], Result]] = {
    name: globals()[f"attack_{name}"] for name in OPTIONS
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="attack", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--seed", type=int, default=None, help="default: another one each time")
    common.add_argument("--json", action="store_true")
    common.add_argument("--quick", action="store_true", help="everything small: seconds instead of minutes")
    common.add_argument("--folder", type=Path, help="where stores are made; default the system's temporary folder")
    for name in (*OPTIONS, "all"):
        text = inspect.getdoc(ATTACKS[name]) if name in ATTACKS else "every attack, one after the other"
        command = commands.add_parser(name, parents=[common], help=text, description=text)
        for option, (default, _) in OPTIONS.get(name, {}).items():
            command.add_argument(f"--{option}", type=type(default), help=f"default {default}")
        if name == "damage":
            command.add_argument("--what", default="payloads,catalog,library", help="what is damaged")
            command.add_argument("--only", type=int, help="do this damage only")
    args = parser.parse_args()
    torch.set_num_threads(1)  # processes are forked
    disable_progress_bar()
    register_runtime("fake", CheckedRuntime)
    args.seed = random.randrange(2**31) if args.seed is None else args.seed
    names = [*ATTACKS] if args.attack == "all" else [args.attack]
    found = {name: run(name, args) for name in names}
    if args.json:
        print(json.dumps({"seed": args.seed, **{name: vars(result) for name, result in found.items()}}, indent=1))
    sys.exit(any(result.broken for result in found.values()))


def run(name: str, args: argparse.Namespace) -> Result:
    """Run one attack in a folder of its own, and show what it found."""
    given = argparse.Namespace(**{"what": "payloads,catalog,library", "only": None, **vars(args)})
    for option, defaults in OPTIONS[name].items():
        attribute = option.replace("-", "_")
        if getattr(given, attribute, None) is None or args.attack == "all":
            setattr(given, attribute, defaults[args.quick])
    logging.getLogger("cacheclip_rag").setLevel(logging.WARNING)
    logging.getLogger("cacheclip_rag").propagate = False
    logging.getLogger("cacheclip_rag").addHandler(logging.NullHandler())
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="store-attack-", dir=args.folder, ignore_cleanup_errors=True) as folder:
        result = ATTACKS[name](given, Path(folder))
    result.figures["seconds"] = round(time.perf_counter() - started, 1)
    if not args.json:
        print(f"{name} (seed {args.seed}): {' '.join(result.promise.split())}")
        for figure, value in result.figures.items():
            print(f"  {figure}: {value}")
        print(f"  {'BROKEN' if result.broken else 'kept'}", flush=True)
        for complaint, count in Counter(result.broken).most_common(50):
            print(f"  - {complaint}" + (f" ({count} times)" if count > 1 else ""), flush=True)
    return result


if __name__ == "__main__":
    main()
