"""Operations of several steps on a store in a folder, of which any one step fails.

What must hold: the operation is done, or the caller sees the error; nothing half is visible, and what the operation
does not touch is there; a second try does what the first one would have done, and leaves the store whole.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from store_steps import CHANGES, Steps, counted_catalogs, failing, step_numbers

from cacheclip_rag.base.errors import StoreError
from cacheclip_rag.chunks.texts import ChunkTexts
from cacheclip_rag.store import ChunkStore, TenantStore, catalog, chunk_key, eviction
from cacheclip_rag.store.reading_pool import in_order
from tests.store.samples import BLOCK, clear, collect_garbage, repair, totals_are_right, verify

TOKENS = 4


def models(number: int) -> tuple[str, ...]:
    """The models that a text has KV of: a step fails for each."""
    return ("one", "two") if number < 4 else ("one",)


def text(number: int) -> str:
    return f"The lamp of lighthouse number {number} burned oil until the electric light came."


def key(number: int, model: str = "one") -> str:
    return chunk_key(model_fingerprint=model, prefix_ids=[1], chunk_ids=[number], rope_pin="", namespace="t")


def kv(number: int, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(2, 2, 2, tokens, 4, generator=torch.Generator().manual_seed(number))


def put(store: TenantStore, *numbers: int, tokens: int = TOKENS) -> None:
    """Texts with their KV."""
    for number in numbers:
        for model in models(number):
            store.put(key(number, model), kv(number, tokens), "float32", text=text(number))
        ChunkTexts(store).add(text(number), f"source {number}", "a document")


def opened(folder: Path) -> TenantStore:
    return TenantStore(ChunkStore.open(folder, memory_bytes=1 << 20), "t")


def is_right(store: TenantStore, number: int, *tokens: int | None) -> bool:
    """Whether a text's KV is that of so many tokens, in one of these versions; None: it may be missing."""
    found = [store.get(key(number, model)) for model in models(number)]
    lengths = [None if stored is None else stored.shape[3] for stored in found]
    equal = [stored is None or torch.equal(stored.tensor(), kv(number, stored.shape[3])) for stored in found]
    return {*lengths} <= {*tokens} and all(equal)


def is_gone(store: TenantStore, number: int, by_another: bool) -> bool:
    """Whether nothing of a text is in the catalog, on disk or in memory: ``by_another`` process, once it is asked
    for."""
    texts, keys = ChunkTexts(store), [key(number, model) for model in models(number)]
    if by_another:
        assert [*store.get_each(keys)] == [None] * len(keys)
    in_tiers = [backend.get_many(keys) for backend in store.chunk_store.tiers.backends]
    found = [store.holds_text(text(number)), texts.index.known(text(number)), texts.index.find(text(number))]
    return not any([*found, *in_tiers, text(number) in texts.index.texts()])


@dataclass(frozen=True)
class Operation:
    run: Callable[[Path, TenantStore], object]
    there: tuple[int, ...]
    """Texts that are there afterwards."""
    untouched: tuple[int, ...] = ()
    """Texts that no failure may cost."""
    prepare: Callable[[Path, TenantStore], object] = lambda folder, store: None
    least: int = 3
    """Steps that it has at least."""
    forgets_texts: bool = True
    """Whether texts that have no KV afterwards are gone too."""
    tokens: Mapping[int, int] = field(default_factory=dict)
    """Numbers of tokens that texts have afterwards."""
    by_another: bool = False
    """Whether it opens the store anew, as another process does."""


def garbage(folder: Path, store: TenantStore) -> None:
    """Two payloads without an entry, two temporary files of dead writers, and texts without KV."""
    put(store, 4, 5)
    for number in (4, 5):
        for name in (key(number, model) for model in models(number)):
            store.catalog.database.execute("DELETE FROM entries WHERE key = ?", (name,))
        (folder / "tmp" / f"{number:032x}-1").write_bytes(b"half")
    ChunkTexts(store).remove_sources(["source 4", "source 5"])


def damage(folder: Path, store: TenantStore) -> None:
    """A damaged payload, a missing one, one without an entry, and files of others."""
    for number, change in ((1, lambda file: file.write_bytes(b"damaged")), (2, Path.unlink)):
        change(folder / "kv" / key(number)[:2] / f"{key(number)}.kv")
    put(store, 4)
    store.catalog.database.execute("DELETE FROM entries WHERE key = ?", (key(4),))
    (folder / "kv" / "note.txt").write_text("of another program")
    (folder / "tmp" / f"{7:032x}-1").write_bytes(b"half")


def limited(folder: Path, store: TenantStore) -> None:
    """No room for a fourth text."""
    store.chunk_store.set_limit(6 * BLOCK)


OPERATIONS = {
    "put": Operation(lambda folder, store: put(store, 4), (1, 2, 3, 4), (1, 2, 3), least=20),
    "put again": Operation(lambda folder, store: put(store, 3, tokens=99), (1, 2, 3), (1, 2), least=20, tokens={3: 99}),
    "put and evict": Operation(lambda folder, store: put(store, 4), (4,), (), limited, least=20, forgets_texts=False),
    "delete": Operation(
        lambda folder, store: store.delete([key(n, model) for n in (1, 2) for model in models(n)]),
        (3,),
        (3,),
        least=9,
        forgets_texts=False,
    ),
    "release": Operation(lambda folder, store: ChunkTexts(store).release([text(1), text(2)]), (3,), (3,), least=12),
    "lower the limit": Operation(
        lambda folder, store: store.chunk_store.set_limit(2 * BLOCK), (3,), (3,), least=5, forgets_texts=False
    ),
    "lower the quota": Operation(
        lambda folder, store: store.chunk_store.set_quota("t", 2 * BLOCK), (3,), (3,), least=5, forgets_texts=False
    ),
    "drop a tenant": Operation(lambda folder, store: store.chunk_store.drop_tenant("t"), (), (), least=12),
    "collect garbage": Operation(
        lambda folder, store: collect_garbage(folder), (1, 2, 3), (1, 2, 3), garbage, least=8, by_another=True
    ),
    "repair": Operation(lambda folder, store: repair(folder), (3, 4), (3,), damage, least=10, forgets_texts=False),
    "clear": Operation(lambda folder, store: clear(folder), (), least=12, by_another=True),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of three texts."""
    folder = tmp_path_factory.mktemp("store") / "store"
    store = opened(folder)
    put(store, 1, 2, 3)
    store.close()
    return folder


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (catalog, eviction):
        monkeypatch.setattr(module, "BATCH", 2)
    with counted_catalogs():
        yield


def check(folder: Path, store: TenantStore, operation: Operation, for_good: bool) -> None:
    """The operation was done, as if nothing had failed."""
    for number in range(1, 6):
        if number in operation.there:
            assert is_right(store, number, operation.tokens.get(number, TOKENS)), f"text {number} is missing"
        elif operation.forgets_texts:
            assert is_gone(store, number, operation.by_another), f"text {number} is there"
    assert totals_are_right(store) and not store.catalog.announcements.writers()
    store.close()
    assert verify(folder).is_clean, verify(folder)
    living = store.chunk_store.writes.living()  # what one of these could not remove is swept after its end
    left = [name.name for name in (folder / "tmp").iterdir() if not for_good or name.name[:32] not in living]
    assert not left, left


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "for_good"), [*((name, False) for name in OPERATIONS), *((name, True) for name in ("put", "release"))]
)
def test_any_step_fails(prepared: Path, tmp_path: Path, name: str, for_good: bool) -> None:
    operation = OPERATIONS[name]
    for number in step_numbers():
        folder = tmp_path / str(number)
        shutil.copytree(prepared, folder)
        store = opened(folder)
        for known in (1, 2, 3):
            assert is_right(store, known, TOKENS)
        operation.prepare(folder, store)
        steps = Steps(number, for_good=for_good)
        failure: StoreError | None = None
        with failing(steps):
            try:
                operation.run(folder, store)
            except StoreError as error:
                failure = error
        if not steps.has_failed:
            assert failure is None and number >= operation.least, f"only {number} steps"
            return check(folder, store, operation, for_good)
        try:
            for known in range(1, 6):
                others = () if known in operation.untouched else (None, operation.tokens.get(known))
                assert is_right(store, known, TOKENS, *others), f"text {known} is lost, or not what was put"
            is_told = for_good or steps.failed.startswith(CHANGES)  # to the catalog, later
            assert is_told or not store.catalog.announcements.writers(), "announced bytes were not given back"
            if failure is not None:
                operation.run(folder, store)
            check(folder, store, operation, for_good)
        except BaseException as error:
            error.add_note(f"step {number} failed: {steps.failed}; the caller saw {failure!r}")
            raise
        shutil.rmtree(folder)
    raise AssertionError("unreachable")


def test_reads_under_way_end_before_an_error_of_the_next_one() -> None:
    """Else they would go on in memory that nobody holds any more."""
    gate, ended = threading.Event(), list[int]()

    def read() -> None:
        assert gate.wait(60)
        time.sleep(0.02)
        ended.append(1)

    def reads() -> Iterator[Callable[[], None]]:
        yield read
        yield read
        gate.set()
        raise StoreError("the catalog cannot be used")

    with pytest.raises(StoreError, match="cannot be used"):
        in_order(reads(), 4, lambda: True)
    assert ended == [1, 1]
