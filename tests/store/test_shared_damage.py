"""A shared store in which one tenant's data is damaged or made up: the other tenants notice nothing."""

from __future__ import annotations

import io
import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag.base.errors import StoreError
from cacheclip_rag.store import TenantStore
from cacheclip_rag.store.shared.care import TenantsError, compact, create, gc, stats, verify
from cacheclip_rag.store.shared.place import SharedPlace, need, tenant_folder
from cacheclip_rag.store.shared.store import SharedStore
from cacheclip_rag.store.shared.table import SharedText, TextTable, rows_of, schema
from tests.store.samples import key, kv

pytest.importorskip("obstore", reason="the extra shared is not installed: pip install -e '.[shared]'")

WHOLE = tenant_folder("whole")
DAMAGED = {f"damaged {number}": tenant_folder(f"damaged {number}") for number in range(8)}
MUTATIONS = 200


def text_of(name: str, number: int) -> str:
    return f"Text {number} of the tenant {name}, which is long enough to be found in prompts of it."


def add(tenant: TenantStore, number: int) -> None:
    """A text with KV, which waits for a commit."""
    text = text_of(tenant.namespace, number)
    tenant.put(key(number, tenant.namespace), kv(number), "int8", text=text)
    tenant.index.add([text])


def erase(tenant: TenantStore, number: int) -> None:
    tenant.release([text_of(tenant.namespace, number)])
    tenant.index.remove([text_of(tenant.namespace, number)])


class Scene:
    """A store of several tenants, and a machine that serves them all."""

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, f"file://{root}"
        self.store = SharedStore(SharedPlace(self.url))
        self.store.shared.on_tenant = lambda: None  # polls are the test's
        self.tenants = {name: TenantStore(self.store, name) for name in (*DAMAGED, "whole")}

    def fill(self) -> None:
        """Three texts for each, of which the damaged ones erased one."""
        create(self.url)
        for number in range(3):
            for tenant in self.tenants.values():
                add(tenant, number)
            self.store.commit()
        for name in DAMAGED:
            erase(self.tenants[name], 2)
        self.store.commit()

    def close(self) -> None:
        self.store.commits = False  # what waits for damaged tables waits in vain
        self.store.close()

    def known(self, name: str, *numbers: int) -> list[int]:
        return [number for number in numbers if self.tenants[name].index.known(text_of(name, number))]

    def files(self, name: str, pattern: str) -> list[Path]:
        """Of a tenant, oldest first."""
        return sorted((self.root / DAMAGED[name]).glob(pattern), key=lambda file: file.stat().st_mtime_ns)


# -- mutations ------------------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63 - 1, 2**63, 10**30, 1e308, "", "x", "\x00", "9" * 5000, [], {}, [[]]),
    *({"": None}, "{", "[" * 200, "2026-01-01", "1e999"),
)
PATHS = (
    *("../../x.parquet", f"../../{WHOLE}/catalog/x.parquet", "a//b.parquet", "/etc/passwd", "s3://b/x.parquet"),
    *("file:///etc/passwd", "%2e%2e/%2e%2e/x.parquet", "..%2f..%2fx.parquet", "\x00", "", ".", "a\nb.parquet"),
    *("_delta_log/00000000000000000000.json", "x" * 300 + ".parquet", "part.parquet/", "\ud83d.parquet", "nö.parquet"),
)


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 3, 20))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def random_bytes(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.randbytes(rng.choice((0, 1, 100, 10_000))))


def delete(file: Path, rng: random.Random) -> None:
    file.unlink()


def folder_instead(file: Path, rng: random.Random) -> None:
    file.unlink()
    file.mkdir()


def circular_link(file: Path, rng: random.Random) -> None:
    file.unlink()
    file.symlink_to(file)


def of_another_tenant(file: Path, rng: random.Random) -> None:
    (root,) = (each.parent for each in file.parents if each.name == "tenants")
    file.write_bytes(rng.choice(sorted((root / WHOLE).rglob(f"*{file.suffix}"))).read_bytes())


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value in JSON: its container and index."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for index, each in pairs:
        yield value, index
        yield from places_in(each)


def change_actions(file: Path, change: Callable[[list[Any]], None]) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.write_text("\n".join(map(json.dumps, lines)))


def wrong_values(file: Path, rng: random.Random) -> None:
    def change(lines: list[Any]) -> None:
        for _ in range(rng.choice((1, 1, 4))):
            container, index = rng.choice([*places_in(lines)])
            container[index] = rng.choice(VALUES)

    change_actions(file, change)


def no_action(file: Path, rng: random.Random) -> None:
    change_actions(file, lambda lines: lines.pop(rng.randrange(len(lines))))


def repeated_actions(file: Path, rng: random.Random) -> None:
    change_actions(file, lambda lines: lines.extend(rng.choices(lines, k=3)))


def absurd_path(file: Path, rng: random.Random) -> None:
    def change(lines: list[Any]) -> None:
        for action in (line[kind] for line in lines for kind in ("add", "remove") if kind in line):
            action["path"] = rng.choice(PATHS)

    change_actions(file, change)


def other_schema(file: Path, rng: random.Random) -> None:
    def change(lines: list[Any]) -> None:
        for action in (line["metaData"] for line in lines if "metaData" in line):
            found = json.loads(action["schemaString"])
            container, index = rng.choice([*places_in(found)])
            container[index] = rng.choice((*VALUES, "integer", "binary", "timestamp_ntz", "decimal(99,99)"))
            action["schemaString"] = json.dumps(found)

    change_actions(file, change)


def more_protocol(file: Path, rng: random.Random) -> None:
    action = {"minReaderVersion": rng.choice((3, 99, -1)), "minWriterVersion": rng.choice((7, 99))}
    action |= {"readerFeatures": ["deletionVectors", "x"], "writerFeatures": ["x"]} if rng.random() < 0.5 else {}
    change_actions(file, lambda lines: lines.append({"protocol": action}))


def another_number(file: Path, rng: random.Random) -> None:
    file.rename(file.with_name(rng.choice(("09223372036854775807.json", "9" * 20 + ".json", "x.json", "1.json"))))


def log_lost(file: Path, rng: random.Random) -> None:
    shutil.rmtree(file.parent)


def absurd_checkpoint(file: Path, rng: random.Random) -> None:
    version = rng.choice((0, 1, 2**63 - 1, -1, "x", 1e300))
    found = rng.choice(({"version": version, "size": 1, "parts": rng.choice((None, 10**9))}, [], "x"))
    (file.parent / "_last_checkpoint").write_text(json.dumps(found))
    if rng.random() < 0.5:
        (file.parent / f"{1:020}.checkpoint.parquet").write_bytes(rng.randbytes(rng.choice((0, 50))))


LOG: tuple[Callable[[Path, random.Random], None], ...] = (
    *(flip, flip, flip, cut, random_bytes, delete, folder_instead, circular_link, of_another_tenant, no_action),
    *(wrong_values, wrong_values, wrong_values, wrong_values, absurd_path, absurd_path, absurd_path, absurd_path),
    *(repeated_actions, other_schema, other_schema, other_schema, more_protocol, another_number, log_lost),
    absurd_checkpoint,
)


def other_columns(file: Path, rng: random.Random) -> None:
    """A column has another type, is missing, or is there twice."""
    pa, parquet = need("pyarrow"), need("pyarrow.parquet")
    table = parquet.read_table(io.BytesIO(file.read_bytes()))
    number = rng.randrange(table.num_columns)
    made = [1, 2.5, "x", b"\xff", [1], {"key": 1}, [{"key": "x"}], None, True, 2**40]
    column = pa.array([rng.choice(made)] * table.num_rows)
    change = rng.choice(("set", "set", "set", "drop", "twice"))
    name = table.column_names[number]
    table = table.drop_columns([name]) if change == "drop" else table.append_column(name, column)
    parquet.write_table(table if change != "set" else table.remove_column(number), file)


def absurd_rows(file: Path, rng: random.Random) -> None:
    """Rows that a commit of another program may write."""
    pa, parquet = need("pyarrow"), need("pyarrow.parquet")
    rows = parquet.read_table(io.BytesIO(file.read_bytes())).to_pylist()
    for row in rows:
        name = rng.choice(schema().names)
        of_type = {
            "kv": [None, [None], [{"key": "../x", "codec": "int8", "bytes": -1, "tokens": 2**62}]],
            "at": [None, 2**62, -(2**62)],
        }
        numbers = [None, -1, 0, 2**63 - 1, -(2**63)]
        is_text = pa.types.is_string(schema().field(name).type)
        row[name] = rng.choice(of_type.get(name, [None, "", "x", "../..", "' OR '1'='1"] if is_text else numbers))
        if rng.random() < 0.5 and row["kv"]:
            row["kv"] = [{**each, "bytes": 2**63 - 1} for each in row["kv"] if each] * 2
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema()), file)


def no_text(file: Path, rng: random.Random) -> None:
    """A string that is none, and a time that Python cannot hold."""
    pa, parquet = need("pyarrow"), need("pyarrow.parquet")
    table = parquet.read_table(io.BytesIO(file.read_bytes()))
    raw = pa.array([b"\xff\xfe"] * table.num_rows).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    far = pa.array([2**62] * table.num_rows).cast(pa.timestamp("us", tz="UTC"))
    name, column = rng.choice((("text", text), ("digest", text), ("namespace", text), ("at", far)))
    parquet.write_table(table.set_column(table.column_names.index(name), name, column), file)


FILES: tuple[Callable[[Path, random.Random], None], ...] = (
    *(flip, flip, flip, flip, flip, flip, cut, cut, random_bytes, delete, delete, folder_instead, circular_link),
    *(of_another_tenant, other_columns, other_columns, other_columns, absurd_rows, absurd_rows, absurd_rows, no_text),
)
PAYLOADS = (flip, flip, flip, cut, random_bytes, delete, folder_instead, circular_link, of_another_tenant)
JSON = (b"[" * 100_000, b"\xff", b'{"max_bytes": true}', b'{"max_bytes": -1}', b'{"max_bytes": NaN}', b"[]", b"", b"1")


def json_of_ours(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.choice(JSON))


def mutate(scene: Scene, name: str, rng: random.Random) -> str:
    """Damage something in a tenant's folder; returns what was done."""
    where = rng.choice(("log", "log", "log", "files", "files", "payloads", "json"))
    if where == "json":
        file, run = scene.root / DAMAGED[name] / rng.choice(("garbage.json", "quota.json")), json_of_ours
    else:
        pattern, kinds = {
            "log": ("catalog/_delta_log/*.json", LOG),
            "files": ("catalog/*.parquet", FILES),
            "payloads": ("kv/*/*/*.kv", PAYLOADS),
        }[where]
        file, run = rng.choice(scene.files(name, pattern)), rng.choice(kinds)
    run(file, rng)
    return f"{name}: {run.__name__} of {file.relative_to(scene.root / DAMAGED[name])}"


# -- what the others do meanwhile -----------------------------------------------------------------------------------


def go_on(scene: Scene) -> str:
    """The whole tenant gets new texts, commits and erases. Returns what is said of those that failed."""
    whole, failed = scene.tenants["whole"], ""
    elsewhere = TextTable(scene.store.place, "whole")
    elsewhere.commit(rows_of("whole", [SharedText(text_of("whole", 10))]))
    scene.store.poll()
    assert scene.known("whole", 0, 1, 2, 10) == [0, 1, 2, 10], "new texts are not seen"
    for tenant in scene.tenants.values():
        tenant.index.find(text_of(tenant.namespace, 0))
        tenant.get(key(0, tenant.namespace))
        add(tenant, 11)
        erase(tenant, 1)
    try:
        scene.store.commit()
    except StoreError as error:
        failed = str(error)
    assert "'whole'" not in failed
    texts = {text_of("whole", number) for number in (0, 2, 10, 11)}
    assert {*elsewhere.rows(["text"])["text"].to_pylist()} == texts, "a text is not committed, or not erased"
    add(whole, 12)
    assert whole.commit() == 1, "a tenant's commit is its own"
    assert [whole.get(key(number, "whole")) is not None for number in (0, 11, 12)] == [True] * 3
    assert not scene.store.objects.breaker.is_open, "damage is no outage"
    return failed


def cared(run: Callable[[str], dict[str, Any]], url: str, said: list[str]) -> dict[str, Any]:
    """What was found, of the whole tenant at least."""
    try:
        return run(url)
    except TenantsError as error:
        said.append(str(error))
        return error.found


def care(scene: Scene, number: int) -> list[str]:
    """The whole tenant is counted, cleaned and checked. Returns what is said of others."""
    said: list[str] = []
    cared(compact if number % 2 else partial(gc, grace_s=0), scene.url, said)
    damaged = cared(verify, scene.url, said)["damaged"]
    assert WHOLE not in " ".join([*said, *damaged])
    counts = cared(stats, scene.url, said)["tenants"][WHOLE]
    payloads = 5 if number % 2 else 4
    assert (counts["texts"], counts["payloads"]) == (5, payloads), "garbage stays, or something else is gone"
    return [*said, *damaged]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHECLIP_HOME", str(folder / "home"))
        made = Scene(folder / "store")
        made.fill()
        made.close()
    return made.root


@pytest.fixture
def scene(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
    shutil.copytree(filled, tmp_path / "store")
    made = Scene(tmp_path / "store")
    yield made
    made.close()


@pytest.mark.parametrize("first", range(0, MUTATIONS, len(DAMAGED)))
def test_whatever_one_tenant_has_stops_no_other_one(first: int, scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Whose texts are lost is named."""
    if first % 16:
        scene.store.poll()
    chances = {name: random.Random(first + number) for number, name in enumerate(DAMAGED)}
    done = {name: mutate(scene, name, rng) for name, rng in chances.items()}
    print(*done.values(), sep="\n")
    said = [go_on(scene)]
    lost = [name for name in DAMAGED if scene.known(name, 0) != [0]]
    said += care(scene, first // len(DAMAGED))
    said += [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    for name in lost:
        assert any(f"'{name}'" in each or DAMAGED[name] in each for each in said), f"nobody says: {done[name]}"
