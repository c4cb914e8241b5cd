"""What documents lose is released by the next run if one run fails at it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ingest_cases import Workshop
from store_steps import Steps, step_numbers

from cacheclip_rag import StoreError
from cacheclip_rag.chunks.texts import ChunkTexts

CHANGES: dict[str, Callable[[Workshop, str], object]] = {
    "gone": lambda shop, name: (shop.corpus / name).unlink(),
    "emptied": lambda shop, name: shop.write(name, ""),
    "changed": lambda shop, name: shop.write(name, f"Another text in {name}, which came in the place of the old one."),
}


def full() -> StoreError:
    return StoreError("the disk is full")


@pytest.mark.some(3)
@pytest.mark.parametrize("error", [full, KeyboardInterrupt])
@pytest.mark.parametrize("change", CHANGES)
def test_what_documents_lose_is_released_in_the_end(
    workshop: Workshop, change: str, error: Callable[[], BaseException]
) -> None:
    """Two documents lose texts; the release of each text fails once, and later texts wait for the run after."""
    for name in ("c.txt", "d.txt", "e.txt"):  # more than are lost: else the run would ask
        workshop.write(name, f"A text of {name} that no other document has, and that nobody takes away.")
    workshop.run()
    lost = [text for name in ("a.txt", "b.md") for text in workshop.library.passages_of(str(workshop.corpus / name))]
    for name in ("a.txt", "b.md"):
        CHANGES[change](workshop, name)
    release, failures = ChunkTexts.release, 0
    for number in step_numbers():
        steps = Steps(number)

        def releasing(texts: ChunkTexts, given: list[str], steps: Steps = steps) -> int:
            steps.take(given[0], error)
            return release(texts, given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ChunkTexts, "release", releasing)
            try:
                workshop.run()
            except (StoreError, KeyboardInterrupt):
                failures += 1
        if not steps.has_failed:
            break
    assert failures >= 2
    workshop.run()
    store, index = workshop.engine.store, workshop.engine.texts.index
    assert not [text for text in lost if store.holds_text(text) or index.known(text)]
    assert {*lost}.isdisjoint(text for _, _, text in workshop.library.passages())
    kept = workshop.library.passages_of(str(workshop.corpus / "c.txt"))
    assert kept and all(map(workshop.engine.is_stored, kept))
