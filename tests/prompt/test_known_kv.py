"""What is known of a prompt's KV, against rules about its spans, one by one."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from cacheclip_rag.prompt.known_kv import FOLLOW_UP_SHARE, known_kv
from cacheclip_rag.prompt.layout import Layout, Span
from cacheclip_rag.prompt.segments import Chunk, Fresh
from cacheclip_rag.runtime.base import KVRun, KVSource, TokenizedText


def layout_of(lengths: Sequence[tuple[bool, int]], num_prefix: int = 0, exact_from: int | None = None) -> Layout:
    spans: list[Span] = []
    for is_chunk, length in lengths:
        tokens = TokenizedText(tuple([7] * length), tuple((n, n + 1) for n in range(length)))
        segment = Chunk("x" * length, "x" * length) if is_chunk else Fresh("x" * length)
        spans.append(Span(segment, tokens, spans[-1].stop if spans else 0))
    return Layout(tuple([7] * sum(n for _, n in lengths)), tuple(spans), num_prefix, exact_from)


def runs_of(exact: int, continued: int, turns: int = 1) -> list[KVRun]:
    return [KVRun(KVSource.CACHED, 0, exact), KVRun(KVSource.CONTINUED, exact, max(exact, continued), turns)]


LAYOUT = layout_of([(False, 3), (True, 4), (False, 2), (True, 5), (False, 3)], 2)


def test_continued_is_what_is_used_of_approximate_kv() -> None:
    """Against each slot's source, one by one."""
    kinds = set()
    for exact in range(LAYOUT.num_tokens):
        for continued in range(LAYOUT.num_tokens):
            known = known_kv(LAYOUT, LAYOUT.chunks, runs_of(exact, continued))
            sources = ["exact" if slot < exact else "continued" for slot in range(max(exact, continued))]
            for span in LAYOUT.chunks:
                if span.start < len(sources) < span.stop:
                    sources = sources[: span.start]
            if len(sources) <= LAYOUT.num_prefix:
                sources = []
            expected = (len(sources), "continued" in sources, sources.count("exact"))
            assert (int(known.held.sum()), bool(known.turns), known.count(KVSource.CACHED)) == expected
            kinds.add((bool(known.turns), exact < continued, bool(expected[0])))
    assert len(kinds) == 5


def computed(layout: Layout, reused: Sequence[Span], exact: int, continued: int, ratio: float) -> int:
    """Rows of a recompute, by the borders of spans: the slow way."""
    held = max(exact, continued)
    held = min((span.start for span in reused if span.start < held < span.stop), default=held)
    held = held if held > layout.num_prefix else 0
    exact, is_continued = min(exact, held), held > exact
    own = {span for span in reused if span.start == layout.exact_from}
    unread = [span for span in reused if span.stop > held]
    stale = sum(
        span.stop - max(span.start, exact)
        for span in (reused if is_continued else unread)
        if span not in own and span.stop > exact
    )
    rated = sum(len(span.tokens) for span in (unread if is_continued else reused))
    if is_continued and held < layout.num_tokens - 1:
        again = [span for span in reused if span.stop <= held]
        tokens = sum(len(s.tokens) if s in own else max(0, s.stop - max(s.start, exact)) for s in again)
        rated += round(FOLLOW_UP_SHARE * tokens)
    fresh = layout.num_tokens - max(layout.num_prefix, held) - sum(len(span.tokens) for span in unread)
    return fresh + min(stale, round(ratio * rated))


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_the_slow_way(seed: int) -> None:
    generator, seen = random.Random(seed), set()
    for _ in range(300):
        lengths = [(False, generator.randint(2, 5))]
        lengths += [(generator.random() < 0.6, generator.randint(1, 9)) for _ in range(generator.randint(1, 6))]
        lengths.append((False, generator.randint(1, 3)))
        first = next((n for n, (is_chunk, _) in enumerate(lengths) if is_chunk), 1)
        start = sum(length for _, length in lengths[:first])
        num_prefix = generator.choice([0, 1, start])
        layout = layout_of(lengths, num_prefix, generator.choice([None, num_prefix]))
        reused = [span for span in layout.chunks if generator.random() < 0.8]
        exact, continued = (generator.randint(0, layout.num_tokens - 1) for _ in range(2))
        known = known_kv(layout, reused, runs_of(exact, continued))
        for ratio in (0.0, 0.3, 1.0):
            assert known.computed_tokens(ratio) == computed(layout, reused, exact, continued, ratio), (layout, ratio)
        seen.add((bool(known.turns), bool(known.own.any()), bool(known.count(KVSource.CACHED))))
    assert len(seen) >= 7


class TestManySources:
    """Runs that do not follow one another from the first token on."""

    def test_a_chunk_is_taken_as_a_whole_or_not_at_all(self) -> None:
        whole, part = KVRun(KVSource.CONTINUED, 8, 14, 2), KVRun(KVSource.CONTINUED, 4, 6, 3)
        known = known_kv(LAYOUT, LAYOUT.chunks, [part, whole])
        first, second = LAYOUT.chunks
        assert known.is_held(second) and not known.is_held(first) and known.turns == 2
        kinds = [KVSource.PREFIX, KVSource.COMPUTED, KVSource.STORED, KVSource.COMPUTED, KVSource.CONTINUED]
        assert known.source.tolist() == np.repeat([*kinds, KVSource.COMPUTED], [2, 1, 4, 1, 6, 3]).tolist()

    def test_stale_tokens_are_those_of_each_run(self) -> None:
        run = KVRun(KVSource.CONTINUED, 8, 14, 1, np.array([False, True] * 3))
        known = known_kv(LAYOUT, LAYOUT.chunks, [run])
        assert known.stale.nonzero()[0].tolist() == [3, 4, 5, 6, 9, 11, 13]

    def test_stale_tokens_of_moved_kv_are_as_those_of_a_stored_chunk(self) -> None:
        """Another method, or ratio, may have left it."""
        chunk = LAYOUT.chunks[1]
        stale = np.ones(len(chunk.tokens), np.bool_)
        known = known_kv(LAYOUT, [chunk], [KVRun(KVSource.MOVED, chunk.start, chunk.stop, 1, stale)])
        assert known.rated_tokens == known_kv(LAYOUT, [chunk]).rated_tokens == len(chunk.tokens)


class TestWithout:
    def test_a_chunk_that_cannot_be_read_is_computed(self) -> None:
        layout = layout_of([(False, 2), (True, 4), (False, 2), (True, 5), (False, 3)], 2, exact_from=2)
        first, second = layout.chunks
        known = known_kv(layout, layout.chunks)
        assert known.is_exact(first) and not known.is_exact(second)
        left = known.without([(first.start, first.stop)])
        again = known_kv(layout, [second])
        assert left.reused == again.reused == (second,)
        for name in ("source", "chunk", "held", "own", "exact", "stale"):
            assert getattr(left, name).tolist() == getattr(again, name).tolist(), name
        assert known.is_exact(first), "the value itself has not changed"
