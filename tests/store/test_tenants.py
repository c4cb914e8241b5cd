"""The same texts in two tenants: neither sees, changes or hides what is the other's, with and without a catalog."""

import inspect
import random
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from cacheclip_rag.base.errors import StoreError
from cacheclip_rag.chunks.texts import ChunkTexts
from cacheclip_rag.finding.texts import TextIndex, TextMatch, text_row
from cacheclip_rag.store import Catalog, ChunkStore, TenantStore, encode_frame, text_digest
from cacheclip_rag.store.ahead import LayerReads
from cacheclip_rag.store.announcements import Announcements
from cacheclip_rag.store.entries import Entry, Total
from cacheclip_rag.store.eviction import LEARNED, make_room
from cacheclip_rag.store.limits import StoreLimits
from cacheclip_rag.store.sources import Sources
from tests.store.samples import is_intact, key, kv, opened, path_of, verify

TEXTS = {
    number: f"Page {number}. " + " ".join(f"In the year {number * 1000 + line} the lamp was lit." for line in range(6))
    for number in range(1, 5)
}
OWN = {"t": (1, 2), "u": (1, 3, 4)}
"""Texts of each tenant; the first is in both."""


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    store = ChunkStore.open(tmp_path)
    for name in ("u", "t"):
        tenant = TenantStore(store, name)
        for number in OWN[name]:
            tenant.put(key(number, name), kv(number), "float32", text=TEXTS[number])
            tenant.index.add([TEXTS[number]])
            store.catalog.sources.add(name, f"source {number}", TEXTS[number], f"document {number % 2}")
        store.set_quota(name, {"t": 10**8, "u": 10**9}[name])
    return store


def state(store: ChunkStore, name: str) -> dict[str, Any]:
    """All that the store knows of a tenant."""
    catalog, tenant = store.catalog, TenantStore(store, name)
    return {
        "entries": {key(n, name): catalog.entries_of(name, [key(n, name)]).get(key(n, name)) for n in TEXTS},
        "payloads": {n: is_intact(tenant, n) for n in TEXTS},
        "keys": sorted(tenant.keys()),
        "sources": {n: catalog.sources.texts(name, f"source {n}") for n in TEXTS},
        "known": {n: tenant.index.known(text) for n, text in TEXTS.items()},
        "texts": sorted(tenant.index.texts()),
        "found": {n: tenant.index.find(f"It says: {text[9:150]}!") for n, text in TEXTS.items()},
        "total": catalog.total(name),
        "quota": catalog.limits.quota(name),
        "erasures": catalog.erasures(name),
    }


READS: dict[str, tuple[Callable[[Catalog], Any], Any]] = {
    "entries_of": (lambda c: {*c.entries_of("t", [key(n, name) for n in TEXTS for name in "tu"])}, {key(1), key(2)}),
    "keys": (lambda c: {*c.keys("t")}, {key(1), key(2)}),
    "keys_of": (lambda c: [c.keys_of("t", text_digest(TEXTS[n])) for n in TEXTS], [[key(1)], [key(2)], [], []]),
    "has_texts": (lambda c: [c.has_texts(name) for name in ("t", "u", "v")], [True, True, False]),
    "total": (lambda c: [c.total(name) for name in ("t", "u")], [Total(2, 8192), Total(3, 12288)]),
    "limits.quota": (lambda c: [c.limits.quota(name) for name in ("t", "u", "v")], [10**8, 10**9, None]),
    "sources.names": (lambda c: {*c.sources.names("t")}, {"source 1", "source 2"}),
    "sources.holders": (
        lambda c: [c.sources.holders("t", text_digest(TEXTS[n])) for n in TEXTS],
        [[("source 1", "document 1")], [("source 2", "document 0")], [], []],
    ),
    "text_index": (lambda c: [n for n, text in TEXTS.items() if c.text_index("t").known(text)], [1, 2]),
    "sources.texts": (lambda c: {*c.sources.texts("t")}, {TEXTS[1], TEXTS[2]}),
    "sources.learned": (lambda c: [(c.sources.add("u", LEARNED, TEXTS[3], ""), c.sources.learned("t"))[1]], [{}]),
    "sources.orphans": (lambda c: c.sources.orphans("t", ["source 1", "document 0", "source 3"]), [TEXTS[2], TEXTS[1]]),
    "erasures": (lambda c: [(c.note_erasure("u"), c.erasures(name) == 0)[1] for name in ("t", "u")], [True, False]),
}
"""Methods of the catalog and its parts that only read: what they say of tenant t."""
WRITES: dict[str, Callable[[ChunkStore], Any]] = {
    "remove": lambda s: s.catalog.remove("t", [key(n, name) for n in TEXTS for name in "tu"]),
    "limits.set_quota": lambda s: s.catalog.limits.set_quota("t", 5),
    "announcements.reserve": lambda s: s.catalog.announcements.reserve("t", key(9), 4096, "0" * 32, s.writes.evict),
    "announcements.drop": lambda s: s.catalog.announcements.drop("t"),
    "drop": lambda s: s.catalog.drop("t", s.writes.evict),
    "sources.add": lambda s: s.catalog.sources.add("t", "source 3", TEXTS[4], "document 0"),
    "sources.remove": lambda s: s.catalog.sources.remove("t", ["source 1", "document 1", "source 3"]),
    "note_erasure": lambda s: s.catalog.note_erasure("t"),
}
"""Methods of the catalog and its parts that change something of tenant t."""
OF_TENANT: dict[str, Callable[[TenantStore], Any]] = {
    "get": lambda t: t.get(key(1, "u")),
    "get_each": lambda t: [*t.get_each([key(n, "u") for n in TEXTS])],
    "layers": lambda t: [*LayerReads(t).begin([key(n, "u") for n in TEXTS])],
    "codecs_of": lambda t: t.codecs_of([key(n, "u") for n in TEXTS]),
    "reads_of": lambda t: t.reads_of([key(n, "u") for n in TEXTS]),
    "drop_unreadable": lambda t: t.drop_unreadable([key(n, "u") for n in TEXTS]),
    "delete": lambda t: t.delete([key(n, "u") for n in TEXTS]),
    "release": lambda t: t.release([TEXTS[3], TEXTS[4]]),
    "holds_text": lambda t: t.holds_text(TEXTS[3]),
    "in": lambda t: key(1, "u") in t,
}
"""What tenant t gets of u: nothing, and u keeps it."""
OF_INDEX: dict[str, Callable[[TextIndex], Any]] = {
    "find": lambda i: i.find(TEXTS[3]),
    "known": lambda i: i.known(TEXTS[3]),
    "holds": lambda i: i.holds(text_row(TEXTS[3])),  # type: ignore[arg-type]
    "remove": lambda i: i.remove([*TEXTS.values()]),
    "mend": lambda i: i.mend([]),
    "add": lambda i: i.add([TEXTS[2]]),
}
"""What tenant t's index says of u's texts: nothing, and u keeps them."""


def test_every_method_of_the_catalog_with_a_namespace_is_tried() -> None:
    parts = {"": Catalog, "sources.": Sources, "limits.": StoreLimits, "announcements.": Announcements}
    members = [(f"{part}{name}", each) for part, kind in parts.items() for name, each in methods_of(kind)]
    assert {name for name, each in members if "namespace" in inspect.signature(each).parameters} == {*READS, *WRITES}


def methods_of(kind: type) -> list[tuple[str, Any]]:
    """Public methods of a class."""
    return [(name, each) for name, each in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"]


@pytest.mark.parametrize("method", READS)
def test_the_catalog_tells_a_tenant_of_its_own(store: ChunkStore, method: str) -> None:
    read, expected = READS[method]
    found = read(store.catalog)
    if method == "sources.orphans":  # in any order
        found, expected = sorted(found), sorted(expected)
    assert found == expected


@pytest.mark.parametrize("method", WRITES)
def test_the_catalog_changes_a_tenants_own(store: ChunkStore, method: str) -> None:
    before = state(store, "u")
    WRITES[method](store)
    assert state(store, "u") == before


def test_a_write_that_is_abandoned_ends_no_other_tenants(store: ChunkStore) -> None:
    """Only its number says whose it is."""
    reserve, evict = store.catalog.announcements.reserve, store.writes.evict
    (own, _), (others, _) = (reserve(name, key(9, name), 4096, name * 32, evict) for name in "tu")
    assert own is not None and others is not None
    store.catalog.announcements.abandon(own)
    assert store.catalog.announcements.writers() == ["u" * 32]


@pytest.mark.parametrize("catalog", [True, False], ids=["catalog", "no catalog"])
@pytest.mark.parametrize("method", OF_TENANT)
def test_a_tenants_store_has_nothing_of_another(store: ChunkStore, tmp_path: Path, method: str, catalog: bool) -> None:
    before = state(store, "u")
    store.close()
    kept = (tmp_path / "catalog.sqlite3").read_bytes()
    if not catalog:
        for ending in ("-wal", "-shm"):
            (tmp_path / f"catalog.sqlite3{ending}").unlink(missing_ok=True)
        (tmp_path / "catalog.sqlite3").write_bytes(b"this is no database " * 500)
    found = None
    with nullcontext() if catalog else suppress(StoreError):
        found = OF_TENANT[method](TenantStore(ChunkStore.open(tmp_path), "t"))
    assert not found or not any([*(found.values() if isinstance(found, dict) else found)])
    if not catalog:
        (tmp_path / "catalog.sqlite3").write_bytes(kept)
    assert state(ChunkStore.open(tmp_path), "u") == before


@pytest.mark.parametrize("method", OF_INDEX)
def test_an_index_has_nothing_of_another(store: ChunkStore, method: str) -> None:
    before = state(store, "u")
    assert not OF_INDEX[method](TenantStore(store, "t").index)
    assert state(store, "u") == before


@pytest.mark.parametrize("in_parts", [True, False])
def test_anothers_payload_under_ones_key_is_not_read(store: ChunkStore, tmp_path: Path, in_parts: bool) -> None:
    """The catalog says that it is there; the payload says whose it is."""
    path_of(tmp_path, 1).write_bytes(encode_frame(kv(1), "float32", key(1), namespace="u"))
    tenant = TenantStore(store, "t")
    assert [*LayerReads(tenant).begin([key(1)])] == [None] if in_parts else tenant.get(key(1)) is None


@pytest.mark.parametrize("flooding", ["u", "w"])
def test_a_flood_of_equal_openings_hides_nothing_of_another(tmp_path: Path, flooding: str) -> None:
    """Boilerplate that hundreds of another tenant's texts share is found in one's own."""
    opening = " ".join(f"Section {n}: the terms of use that stand before every page." for n in range(5))
    store = ChunkStore.open(tmp_path)
    TenantStore(store, flooding).index.add([f"{opening} And then number {n} of them." for n in range(300)])
    mine = f"{opening} My own words."
    index = TenantStore(store, "t").index
    index.add([mine])
    assert index.find(f"It says: {opening[5:250]}!") == [TextMatch(9, 9 + 245, of=mine, at=5)]
    assert [(match.start, match.stop) for match in index.find(f"{mine} End.")] == [(0, len(mine))]


@pytest.mark.parametrize("count", [1, 2, 499, 500, 501, 999, 1000, 1501])
def test_each_of_many_keys_is_found(count: int) -> None:
    """Also the last of a batch and the first of the next."""
    catalog, keys = Catalog(), [key(number) for number in range(count)]
    for number, name in enumerate(keys):
        catalog.record(Entry(name, "t", None, 4096 + number, 1, "float32"))
    found = catalog.entries_of("t", keys)
    assert [found[name].num_bytes for name in keys] == [4096 + number for number in range(count)]
    assert catalog.entries_of("t", [key(10**6), *keys]) == found


Held = dict[str, list[tuple[str, int]]]


def brute_force(held: Held, limit: int, writing: str, size: int) -> dict[str, list[str]]:
    """The tenant with the most bytes loses its least recently used entry until the write fits."""
    left = {name: [*entries] for name, entries in held.items()}

    def most(name: str) -> tuple[int, str]:
        own = sum(size for _, size in left[name])
        return own + (size if name == writing and own else 0), name

    while sum(each for entries in left.values() for _, each in entries) + size > limit:
        full = [name for name in left if left[name]]
        if not full:
            break
        left[max(full, key=most)].pop(0)
    return {name: [each for each, _ in entries] for name, entries in left.items()}


def test_evictions_are_those_of_one_entry_at_a_time() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        catalog, held, number = Catalog(), Held(), 0
        for name in "abcd"[: chance.randrange(1, 5)]:
            held[name] = []
            for _ in range(chance.randrange(0, 14)):
                number, size = number + 1, chance.choice((1, 2, 3, 10, 40)) * 100
                held[name].append((key(number), size))
                catalog.record(Entry(key(number), name, None, size, 1, "float32"))
        total = sum(size for entries in held.values() for _, size in entries)
        limit, writing = chance.randrange(total // 3, total + 200), chance.choice("abcde")
        size = min(limit, chance.choice((100, 1000, total // 2)))
        catalog.limits.set_of_store(limit)
        evicted: list[str] = []
        with catalog.database.transaction() as run:
            fits, count = make_room(run, writing, key(999), size, evicted.extend)
        expected = brute_force(held, limit, writing, size)
        assert {name: catalog.keys(name) for name in held} == expected, seed
        assert fits and len(evicted) == count == number - sum(map(len, expected.values())), seed


def test_a_text_that_is_stored_while_it_is_released_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["It is stored again while it is released.", "It is released."]
    store = opened(tmp_path)
    for number, text in enumerate(texts, 1):
        store.put(key(number), kv(number), "float32", text=text)
    library = ChunkTexts(store)
    remove = store.index.remove

    def stored_meanwhile(gone: list[str]) -> None:
        opened(tmp_path).put(key(1), kv(1), "float32", text=texts[0])
        remove(gone)

    monkeypatch.setattr(store.index, "remove", stored_meanwhile)
    assert library.release(texts) == 2
    assert is_intact(store, 1) and library.index.known(texts[0]) and not library.index.known(texts[1])
    assert verify(tmp_path).is_clean
