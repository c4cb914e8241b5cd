"""A failure at the second document of a job, and at later ones: the error reaches the caller, the documents before it
are found, and a second run has nothing to do for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheclip_care import verify
from cacheclip_ingest.library import Library
from cacheclip_testing import SENTENCES
from ingest_cases import LetterEmbedder, Workshop
from planted_faults import Broken, Fault

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.store import ChunkStore, TenantStore, text_row

NAMES = ["a.txt", "b.txt", "c.txt"]
STEPS: list[tuple[Callable[[Workshop], Any], str, int]] = [
    (lambda shop: LetterEmbedder, "embed", 3),  # the first one tries the model
    (lambda shop: LetterEmbedder, "embed", 4),
    (lambda shop: Library, "fix_settings", 1),
    *((lambda shop: Library, "replace", at) for at in (2, 3)),
    *((lambda shop: CacheClipEngine, "release", at) for at in (2, 3)),
    *((lambda shop: CacheClipEngine, "precompute", at) for at in (2, 3)),
    (lambda shop: shop.engine.primary, "encode_many", 2),
    (lambda shop: TenantStore, "put", 4),
    (lambda shop: ChunkStore, "write", 4),
]


@pytest.fixture
def shop(tmp_path: Path, tiny_models: dict[str, str]) -> Workshop:
    shop = Workshop(tmp_path, tiny_models)
    for number, name in enumerate(NAMES):
        shop.write(name, " ".join(SENTENCES[2 * number : 2 * number + 2]))
    shop.engine.chunk_caches()
    return shop


def is_found(shop: Workshop, passage: str) -> bool:
    """Stored, and found in prompts if it is long enough to be looked for."""
    return shop.engine.is_stored(passage) and (text_row(passage) is None or shop.engine.texts.index.known(passage))


@pytest.mark.some(5)
@pytest.mark.parametrize(("owner", "name", "at"), STEPS, ids=[f"{name}-{at}" for _, name, at in STEPS])
def test_a_second_run_does_the_rest(
    shop: Workshop, owner: Callable[[Workshop], Any], name: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {*threading.enumerate()}
    with monkeypatch.context() as patch:
        Fault(patch, owner(shop), name, at)
        with pytest.raises(Broken, match=f"{name} failed at call {at}"):
            shop.run()
    catalog = shop.engine.store.catalog
    assert {*threading.enumerate()} <= before and not catalog.announcements.writers()
    assert verify(shop.store).is_clean
    known = [Path(path).name for path in shop.library.documents()]
    assert known == NAMES[: len(known)] and len(known) < len(NAMES) + (name == "release")
    for document in known:
        passages = shop.library.passages_of(str(shop.corpus / document))
        assert passages and all(is_found(shop, passage) for passage in passages)
    again = shop.run()
    assert (again.unchanged, again.added, again.failed) == (len(known), len(NAMES) - len(known), [])
    assert {Path(path).name for path in shop.library.documents()} == {*NAMES}
    passages = [each for name in NAMES for each in shop.library.passages_of(str(shop.corpus / name))]
    assert all(is_found(shop, passage) for passage in passages)
    assert shop.run().unchanged == len(NAMES) and not shop.library.damaged()
