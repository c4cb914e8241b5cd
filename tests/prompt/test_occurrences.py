"""Which pieces of a prompt count as one chunk, and how much of it they are."""

import textwrap
from collections.abc import Callable, Sequence

import pytest

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.finding.common_parts import pieces_in
from cacheclip_rag.prompt.layout import Span, occurrences, share_of
from cacheclip_rag.prompt.segments import Chunk
from cacheclip_rag.runtime.base import TokenizedText
from cacheclip_rag.store import Catalog, TextIndex
from tests.conftest import SENTENCES

L = " ".join(SENTENCES[:8])
FIRST, SECOND, LAST = (" ".join(SENTENCES[slice(*ends)]) for ends in ((0, 4), (4, 8), (5, 8)))
SIZE = 100


def spans(*pieces: tuple[int, int], whole: str = "a text", continuing: Sequence[int] = ()) -> list[Span]:
    """Spans of tokens ``[first, stop)`` of a chunk of 100 tokens, one after the other."""
    found, start = list[Span](), 0
    for number, (first, stop) in enumerate(pieces):
        tokens = TokenizedText((0,) * (stop - first), ((0, 1),) * (stop - first))
        chunk = Chunk("x", whole, first)
        found.append(Span(chunk, tokens, start, first, number in continuing, SIZE))
        start += len(tokens) + 1
    return found


@pytest.mark.parametrize(
    ("pieces", "shares"),
    [
        ([(0, 100)], [1.0]),
        ([(1, 99)], [1.0]),
        ([(2, 99)], [0.97]),
        ([(0, 40), (40, 100)], [1.0]),
        ([(66, 100), (0, 33), (33, 66)], [1.0]),
        ([(0, 40), (60, 90)], [0.7]),
        ([(0, 40), (30, 70)], [0.7]),
        ([(0, 40), (10, 50)], [0.4, 0.4]),
        ([(0, 100), (0, 100)], [1.0, 1.0]),
        ([(0, 100), (20, 60)], [1.0, 0.4]),
        ([(50, 100), (0, 50), (50, 100), (0, 50)], [1.0, 1.0]),
        ([], []),
    ],
)
def test_pieces_of_one_text(pieces: list[tuple[int, int]], shares: list[float]) -> None:
    found = occurrences(spans(*pieces))
    assert [chunk.share for chunk in found] == pytest.approx(shares)
    assert sum(len(chunk.spans) for chunk in found) == len(pieces)


def test_pieces_that_go_on_and_of_several_texts() -> None:
    assert [chunk.share for chunk in occurrences(spans((0, 100), (0, 50), (20, 60), continuing=[2]))] == [1.0, 0.6]
    first, second = spans((0, 50), (50, 100)), spans((0, 50), (50, 100), whole="another text")
    found = occurrences([first[0], second[0], first[1], second[1]])
    assert [(chunk.spans, chunk.share) for chunk in found] == [(tuple(first), 1.0), (tuple(second), 1.0)]
    assert share_of([*spans((0, 30), (20, 50))]) == 0.5


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("prompt", "strict"),
    [
        (f"{FIRST}\n> {SECOND}", 1),
        (f"{FIRST}\n\n[page 2 of 7, continued from above]\n\n{SECOND}", 2),
        (f"{FIRST} {LAST}", 2),
        (f"{FIRST} Nobody knows any more how the book came to the place where it now is. {LAST}", 2),
        (f"{FIRST}\n\n{'Something else stands here, which is another text. ' * 3}\n\n{SECOND}", 2),
        (f"{SECOND}\n\n{FIRST}", 2),
    ],
    ids=["quoted", "marked", "left out", "written anew", "another text between", "other order"],
)
def test_what_goes_on_where_a_piece_ended(engine: CacheClipEngine, prompt: str, strict: int) -> None:
    """Matches of text and spans of tokens agree. Statistics count what there is of a text as one chunk."""
    engine.precompute([L])
    index = TextIndex(Catalog().database, "")
    index.add([L])
    prompt = f"Read.\n\n{prompt}\n\nWho?"
    chunks = engine.plan(prompt).layout.chunks
    assert len(pieces_in(index.find(prompt))) == [span.continues for span in chunks].count(False) == strict
    assert len(occurrences(chunks)) == 1


class TestStatistics:
    @pytest.fixture
    def stats(self, engine: CacheClipEngine) -> Callable[..., tuple[int, int, float | None]]:
        engine.precompute([L])

        def found(*pieces: str) -> tuple[int, int, float | None]:
            prompt = "\n\n".join(f"Source {number}:\n{piece}" for number, piece in enumerate(pieces))
            stats = engine.generate(f"{prompt}\n\nWho?", SamplingParams(max_tokens=1)).stats
            return stats.hits, stats.partial_hits, stats.partial_share

        return found

    def test_split_again(self, stats: Callable[..., tuple[int, int, float | None]]) -> None:
        first, second, third = textwrap.wrap(L, len(L) // 3 + 20)
        assert stats(first, second, third) == stats(third, first, second) == (1, 0, None)
        hits, partial, share = stats(third, first)
        assert (hits, partial) == (1, 1) and 0.6 < (share or 0) < 0.7
        assert stats(L, L) == (2, 0, None)
        assert stats(L, first)[:2] == (2, 1)

    def test_missing(self, engine: CacheClipEngine) -> None:
        engine.precompute([L])
        engine.store.delete(engine.store.keys())
        first, second = textwrap.wrap(L, len(L) // 2 + 20)
        assert engine.generate(f"{second}\n\nand\n\n{first}\n\nWho?", SamplingParams(max_tokens=1)).stats.misses == 1

    def test_thrown_away(self, engine: CacheClipEngine) -> None:
        engine.precompute([L])
        prompt, params = f"Read.\n\n{L[:500]}\n\nWho?", SamplingParams(max_tokens=1)
        sure = engine.generate(prompt, params).stats
        engine.prefixes.clear()
        unsure = CacheClipEngine(engine.config, min_confidence=1.0).generate(prompt, params).stats
        assert unsure.gated and not sure.gated and sure.partial_hits == 1
        for name in ("hits", "partial_hits", "partial_share"):
            assert getattr(unsure, name) == getattr(sure, name)
