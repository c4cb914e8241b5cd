"""A shared store in which one tenant's data is damaged or made up: the other tenants notice nothing."""

import io
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cacheclip_shared.care import TenantsError, compact, create, gc, stats, verify
from cacheclip_shared.place import SharedPlace, need, object_name, tenant_folder
from cacheclip_shared.store import SharedStore
from cacheclip_shared.table import Removal, SharedText, TextTable, rows_of, schema
from store_entries import key, kv
from thinned import some_of

from cacheclip_rag import StoreError
from cacheclip_rag.store import TenantStore, text_digest

WHOLE = tenant_folder("whole")
DAMAGED = {f"damaged {number}": tenant_folder(f"damaged {number}") for number in range(4)}
MUTATIONS = 200 if "CACHECLIP_TEST_ALL" in os.environ else 40


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
        self.store.catalog.tables.on_tenant = lambda: None  # polls are the test's
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
    *("../../x.parquet", f"../../{WHOLE[8:]}/kv/x.parquet", "a//b.parquet", "/etc/passwd", "s3://b/x.parquet"),
    *("file:///etc/passwd", "%2e%2e/%2e%2e/x.parquet", f"..%2f../{WHOLE[8:]}/kv/x.parquet", "\x00", "", "."),
    "a\nb.parquet",
    *("_delta_log/00000000000000000000.json", "x" * 300 + ".parquet", "part.parquet/", "\ud83d.parquet", "nö.parquet"),
)


Mutation = Callable[[Path, random.Random], None]


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


def change_actions(file: Path, change: Callable[[list[Any]], object]) -> None:
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


LOG: tuple[Mutation, ...] = (
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
        no_kv = [None, [None], [{"key": "../x", "codec": "int8", "bytes": -1, "tokens": 2**62}]]
        of_type = {"kv": no_kv, "at": [None, 2**62, -(2**62)]}
        numbers = [None, -1, 0, 2**63 - 1, -(2**63)]
        is_text = pa.types.is_string(schema().field(name).type)
        row[name] = rng.choice(of_type.get(name, [None, "", "x", "../..", "' OR '1'='1"] if is_text else numbers))
        if rng.random() < 0.5 and row["kv"]:
            row["kv"] = [{**each, "bytes": 2**63 - 1} for each in row["kv"] if each] * 2
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema()), file)


def unreadable(file: Path, name: str) -> None:
    """A string that is none, a time that Python cannot hold, or numbers for payloads, in all rows."""
    pa, parquet = need("pyarrow"), need("pyarrow.parquet")
    table = parquet.read_table(io.BytesIO(file.read_bytes()))
    raw = pa.array([b"\xff\xfe"] * table.num_rows).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    far = pa.array([2**62] * table.num_rows).cast(pa.timestamp("us", tz="UTC"))
    column = {"at": far, "kv": pa.array([[1]] * table.num_rows)}.get(name, text)
    parquet.write_table(table.set_column(table.column_names.index(name), name, column), file)


def no_text(file: Path, rng: random.Random) -> None:
    unreadable(file, rng.choice(("text", "digest", "namespace", "at")))


FILES: tuple[Mutation, ...] = (
    *(flip, flip, flip, flip, flip, flip, cut, cut, random_bytes, delete, delete, folder_instead, circular_link),
    *(of_another_tenant, other_columns, other_columns, other_columns, absurd_rows, absurd_rows, absurd_rows, no_text),
)
PAYLOADS = (flip, flip, flip, cut, random_bytes, delete, folder_instead, circular_link, of_another_tenant)
JSON = (b"[" * 100_000, b"\xff", b'{"max_bytes": true}', b'{"max_bytes": -1}', b'{"max_bytes": NaN}', b"[]", b"", b"1")


def json_of_ours(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.choice(JSON))


def mutate(scene: Scene, name: str, rng: random.Random) -> str:
    """Damage something in a tenant's folder; returns what was done."""
    log, files = ("catalog/_delta_log/*.json", LOG), ("catalog/*.parquet", FILES)
    where = rng.choice((log, log, log, files, files, ("kv/*/*/*.kv", PAYLOADS), None))
    if where is None:
        file, run = scene.root / DAMAGED[name] / rng.choice(("garbage.json", "quota.json")), json_of_ours
    else:
        file, run = rng.choice(scene.files(name, where[0])), rng.choice(where[1])
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
    assert f"{WHOLE}: " not in " ".join(said) and not [name for name in damaged if name.startswith(WHOLE)]
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


def named_files(scene: Scene, name: str, otherwise: str) -> list[str]:
    """Files that a tenant's log names, if it can be read: an action that is gone without a trace is no damage."""
    try:
        table = need("deltalake").DeltaTable(str(scene.root / DAMAGED[name] / "catalog"))
        return list(need("pyarrow").table(table.get_add_actions(flatten=True))["path"].to_pylist())
    except Exception:
        return [otherwise]


@pytest.mark.some(3)
@pytest.mark.parametrize("first", range(0, MUTATIONS, len(DAMAGED)))
def test_whatever_one_tenant_has_stops_no_other_one(first: int, scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Whose texts are lost is named."""
    if first % 16:
        scene.store.poll()
    chances = {name: random.Random(first + number) for number, name in enumerate(DAMAGED)}
    of_text = {name: scene.files(name, "catalog/*.parquet")[0].name for name in DAMAGED}
    done = {name: mutate(scene, name, rng) for name, rng in chances.items()}
    print(*done.values(), sep="\n")
    expected = [name for name in DAMAGED if of_text[name] in named_files(scene, name, of_text[name])]
    said = [go_on(scene)]
    lost = [name for name in expected if scene.known(name, 0) != [0]]
    said += care(scene, first // len(DAMAGED))
    said += [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    for name in lost:
        assert any(f"'{name}'" in each or DAMAGED[name] in each for each in said), f"nobody says: {done[name]}"


# -- one kind at a time ---------------------------------------------------------------------------------------------

NAME, FOLDER = next(iter(DAMAGED.items()))


def texts_of(table: TextTable) -> set[str]:
    return {*table.rows(["text"])["text"].to_pylist()}


def erasure(number: int) -> Removal:
    return Removal({text_digest(text_of(NAME, number)).hex()})


MENDED = [("add", path) for path in PATHS[:4]] + [("remove", path) for path in PATHS[:8]]


@pytest.mark.some(9)
@pytest.mark.parametrize(("action", "path"), [*(("add", path) for path in PATHS), *MENDED[4:]])
def test_a_log_names_files_of_its_own_folder_only(scene: Scene, path: str, action: str) -> None:
    """Nothing else is read or deleted by those who may do so."""
    log = scene.files(NAME, "catalog/_delta_log/*.json")
    (secret, *_) = sorted((scene.root / WHOLE / "catalog").glob("*.parquet"))
    victims = [scene.root / "tenants/x.parquet", scene.root / WHOLE / "kv/x.parquet"]
    for victim in victims:
        victim.write_bytes(secret.read_bytes())
    victims += log[:1] if action == "add" else []
    own = {"add": {"modificationTime": 1, "stats": None}, "remove": {"deletionTimestamp": 1}}[action]
    made = {action: {"path": path, "partitionValues": {}, "size": 9999, "dataChange": True, **own}}
    log[-1].write_text(f"{log[-1].read_text()}\n{json.dumps(made)}\n")
    rows, said = TextTable(scene.store.place, NAME), list[str]()
    if action == "add":
        with pytest.raises(StoreError, match=FOLDER):
            rows.commit(rows_of(NAME, []), erasure(0))
    for run in (partial(gc, grace_s=0), compact):
        cared(run, scene.url, said)
    refused = list[str]()
    cared(verify, scene.url, refused)
    assert all(victim.exists() for victim in victims) and WHOLE not in " ".join([*said, *refused])
    assert not refused or (action, path) not in MENDED
    if not refused:
        rows.commit(rows_of(NAME, []), erasure(0))
        assert texts_of(rows) == {text_of(NAME, 1)}


def test_what_a_table_says_is_no_damage_of_this_machines_copy(scene: Scene) -> None:
    """Which would be made anew, for all tenants."""
    scene.store.poll()
    copy = next(scene.store.place.replica.glob("*.sqlite3"))
    log = scene.files(NAME, "catalog/_delta_log/*.json")[1]
    change_actions(log, lambda lines: [line["add"].update(path=str(copy)) for line in lines if "add" in line])
    machine = Scene(scene.root)
    before = copy.stat().st_ino
    machine.store.poll()
    assert copy.stat().st_ino == before and machine.known("whole", 0, 1) == [0, 1]
    machine.close()


@pytest.mark.parametrize("kind", ["deleted", "renamed"])
def test_a_log_that_is_lost_is_no_empty_table(scene: Scene, kind: str) -> None:
    """Nobody forgets its texts, and their payloads are no garbage."""
    scene.store.poll()
    for file in scene.files(NAME, "catalog/_delta_log/*.json"):
        file.unlink() if kind == "deleted" else file.rename(file.with_name(f"x{file.name}"))
    before = scene.files(NAME, "kv/*/*/*.kv")
    machine = Scene(scene.root)
    machine.store.poll()
    assert machine.known(NAME, 0, 1) == [0, 1]
    for run in (partial(gc, grace_s=0), verify):
        with pytest.raises(TenantsError, match=f"{FOLDER}.* and no log. Restore"):
            run(scene.url)
    with pytest.raises(StoreError, match="no log"):
        TextTable(scene.store.place, NAME).commit(rows_of(NAME, [SharedText("A text.")]))
    assert scene.files(NAME, "kv/*/*/*.kv") == before
    machine.close()


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", ["missing", "damaged pages", "damaged footer", "no text", "a far time", "kv"])
def test_a_file_of_rows_that_cannot_be_used_is_named_and_taken_out(scene: Scene, kind: str, caplog: Any) -> None:
    """Whatever its reader raises: most of it are errors as those of a disk. Its payloads are no garbage before."""
    (file, *_) = scene.files(NAME, "catalog/*.parquet")
    if kind == "missing":
        file.unlink()
    elif kind in ("no text", "a far time", "kv"):
        unreadable(file, {"no text": "text", "a far time": "at"}.get(kind, kind))
    else:
        data = bytearray(file.read_bytes())
        start = 4 if kind == "damaged pages" else len(data) - 40
        data[start : start + 12] = b"\xff" * 12
        file.write_bytes(data)
    for _ in range(3):
        scene.store.poll()
    assert len([each for each in caplog.records if file.name in each.getMessage()]) == 1
    assert scene.known(NAME, 0, 1) == [1]
    with pytest.raises(StoreError, match=f"{file.name}.* Run: cacheclip store verify"):
        TextTable(scene.store.place, NAME).rows()
    if kind not in ("no text", "a far time"):  # in what tells garbage
        with pytest.raises(TenantsError, match=f"{file.name}.* Run: cacheclip store verify"):
            gc(scene.url, grace_s=0)
    assert verify(scene.url)["damaged"] == [f"{FOLDER}/catalog/{file.name}"]
    assert verify(scene.url)["damaged"] == [] and texts_of(TextTable(scene.store.place, NAME)) == {text_of(NAME, 1)}


def test_rows_that_no_commit_wrote_are_counted(scene: Scene, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absurd numbers disturb no sum; a row without KV is a row. No payload is kept for a row that is none."""
    (row,) = rows_of(NAME, [SharedText(text_of(NAME, 20))]).to_pylist()
    payload = {"key": key(20, NAME), "codec": "int8", "bytes": 2**63 - 1, "tokens": 2**63 - 1}
    made = [{**row, "kv": each} for each in (None, [payload] * 3, [{**payload, "bytes": -1}])] + [{**row, "at": None}]
    kv_of_other = [{"key": key(0, NAME), "codec": "int8", "bytes": 9, "tokens": 9}]
    made += [{**row, "digest": each, "kv": kv_of_other} for each in (None, "' OR '1'='1")]
    table = TextTable(scene.store.place, NAME)
    table.commit(rows_of(NAME, []), erasure(0))
    rows = need("pyarrow").Table.from_pylist(made, schema=schema())
    need("deltalake").write_deltalake(table.address, rows, mode="append")
    scene.store.poll()
    assert scene.known(NAME, 0, 1, 20) == [1, 20] and "4 rows of" in caplog.text and FOLDER in caplog.text
    read, asked = TextTable.read, list[str]()

    def counted(table: TextTable, file: str, columns: Any = None) -> Any:
        asked.append(file)
        return read(table, file, columns)

    with monkeypatch.context() as patched:
        patched.setattr(TextTable, "read", counted)
        assert table._indexed() == table._indexed() and len(asked) == len({*asked}), "a file is read once"
    digests = {each["digest"] for rows in table._indexed().values() for each in rows}
    assert digests == {text_digest(text_of(NAME, number)).hex() for number in (1, 20)}
    assert scene.store.stats().bytes < 10**6 and "not seen" not in caplog.text
    gc(scene.url, grace_s=0)
    assert not (scene.root / object_name(NAME, key(0, NAME), "int8")).exists()
    go_on(scene)


def test_a_panic_of_a_library_is_an_error_of_its_tenant(scene: Scene, monkeypatch: Any, caplog: Any) -> None:
    """It is no ``Exception``; what waits for the commit goes on waiting."""
    panic, delta = type("PanicException", (BaseException,), {}), need("deltalake")
    opened = delta.DeltaTable

    def panics(address: str, **options: Any) -> Any:
        if FOLDER in address:
            raise panic("index out of bounds")
        return opened(address, **options)

    monkeypatch.setattr(delta, "DeltaTable", panics)
    failed = go_on(scene)
    assert f"'{NAME}' wait: " in failed and "index out of bounds" in failed and f"tenant '{NAME}'" in caplog.text
    assert scene.store.catalog.changes.namespaces() == [NAME]
    care(scene, 1)
    monkeypatch.undo()
    monkeypatch.setenv("CACHECLIP_HOME", str(scene.root.parent / "home"))
    scene.store.commit()
    assert texts_of(TextTable(scene.store.place, NAME)) == {text_of(NAME, number) for number in (0, 11)}


def test_a_commit_that_fails_though_nobody_commits_is_given_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the other tenants of the server wait for it no half minute."""
    newest = scene.files(NAME, "catalog/_delta_log/*.json")[-1]
    newest.unlink()
    newest.mkdir()
    pauses: list[float] = []
    monkeypatch.setattr("cacheclip_shared.table.time.sleep", pauses.append)
    with pytest.raises(StoreError, match=FOLDER):
        TextTable(scene.store.place, NAME).commit(rows_of(NAME, [SharedText("A text.")]))
    assert 0 < len(pauses) < 10


@some_of(3, data=JSON, name=["quota.json", "garbage.json"])
def test_other_tenants_are_cleaned_and_counted_beside_a_damaged_file_of_ours(
    scene: Scene, name: str, data: bytes
) -> None:
    (scene.root / FOLDER / name).write_bytes(data)
    erase(scene.tenants["whole"], 0)
    scene.store.commit()
    said: list[str] = []
    assert cared(partial(gc, grace_s=0), scene.url, said)["deleted"] >= 1
    assert len(cared(stats, scene.url, said)["tenants"]) >= len(DAMAGED)
    assert all(FOLDER in each and "1 tenants" in each for each in said)
    assert not said or name == "quota.json", "what is no list of garbage is none"


@pytest.mark.parametrize("data", JSON)
def test_a_damaged_description_of_the_store_is_one_error(scene: Scene, data: bytes) -> None:
    (scene.root / "store.json").write_bytes(data)
    for run in (create, stats, lambda url: SharedStore.at(SharedPlace(url))):
        with pytest.raises(StoreError, match=r"store\.json is not a file of|expected a store of layout"):
            run(scene.url)


def test_the_command_shows_what_was_done_for_the_others(scene: Scene, cacheclip: Any) -> None:
    (scene.root / FOLDER / "quota.json").write_bytes(JSON[0])
    for command in ("stats", "gc", "verify"):
        done = cacheclip("store", command, "--store", scene.url, "--json")
        assert done.code == 1 and FOLDER in done.err and WHOLE not in done.err
        found = done.json
        assert command != "stats" or (found["tenants"][WHOLE]["texts"] == 3 and FOLDER not in found["tenants"])
        assert command != "verify" or found["payloads"] >= 2 * len(DAMAGED)


@pytest.mark.some(3)
@pytest.mark.parametrize("file", ["catalog/_delta_log/*.json", "catalog/*.parquet", "quota.json"])
def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(scene: Scene, file: str) -> None:
    for name in DAMAGED:
        path = next(iter(scene.files(name, file)), scene.root / DAMAGED[name] / file)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    said = [go_on(scene), *care(scene, 0)]
    if file != "quota.json":
        assert all(name in "".join(said) or DAMAGED[name] in "".join(said) for name in DAMAGED), said
