"""Entries for tests of stores, by number."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from cacheclip_care import CatalogCare, clear, collect_garbage, repair, verify  # noqa: F401

from cacheclip_rag.store import ChunkStore, TenantStore, chunk_key

TOKENS = 4


def key(number: int, namespace: str = "t") -> str:
    return chunk_key(model_fingerprint="m", prefix_ids=[1], chunk_ids=[number], rope_pin="", namespace=namespace)


def kv(number: int, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 2, 2, tokens, 4, generator=generator).to(dtype)


def put(store: TenantStore, *numbers: int, tokens: int = TOKENS) -> None:
    """Entries ``kv(number)`` under ``key(number)``, of the texts ``text <number>``."""
    for number in numbers:
        store.put(key(number, store.namespace), kv(number, tokens), "float32", text=f"text {number}")


def is_intact(store: TenantStore, number: int, tokens: int = TOKENS) -> bool:
    got = store.get(key(number, store.namespace))
    return got is not None and torch.equal(got.tensor(), kv(number, tokens))


def opened(folder: Path | None, max_bytes: int | None = None, memory_bytes: int = 0) -> TenantStore:
    """Tenant t of a store."""
    return TenantStore(ChunkStore.open(folder, max_bytes, memory_bytes), "t")


def path_of(folder: Path, number: int, namespace: str = "t") -> Path:
    """Payload file of an entry in the store ``folder``."""
    name = key(number, namespace)
    return folder / "kv" / name[:2] / f"{name}.kv"


def change(folder: Path, *statements: str, rows: Sequence[Sequence[Any]] = ()) -> None:
    """The catalog, as another program may; the last statement for each of these rows, if there are some."""
    with closing(sqlite3.connect(folder / "catalog.sqlite3", isolation_level=None)) as catalog:
        for statement in statements:
            catalog.executemany(statement, rows) if rows else catalog.executescript(statement)


def remove_catalog(folder: Path) -> None:
    for file in folder.glob("catalog.sqlite3*"):
        file.unlink()


def payload_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("kv/*/*"))


def bytes_on_disk(folder: Path) -> int:
    """Bytes that payloads and temporary files take, as the file system says."""
    total = 0
    for path in (*folder.glob("kv/*/*"), *folder.glob("tmp/*")):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:  # completed or evicted just now
            continue
    return total


def totals_are_right(store: TenantStore | ChunkStore) -> bool:
    """Whether the totals that the catalog keeps are those that are counted anew, of every tenant."""
    catalog = store.catalog
    kept = catalog.total(), catalog.tenants()
    CatalogCare(catalog.database).count_again()
    return kept == (catalog.total(), catalog.tenants())
