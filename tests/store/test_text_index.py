"""Finding stored texts inside a prompt."""

from __future__ import annotations

import gc
import random
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheclip_rag.errors import StoreError
from cacheclip_rag.prompt.segments import Chunk, segment_text
from cacheclip_rag.store import Catalog
from cacheclip_rag.store import texts as module
from cacheclip_rag.store.catalog import TextRow
from cacheclip_rag.store.texts import REGION, WINDOW, TextIndex

LETTERS = "The lighthouse of Brindle Point was built in 1847."
LAMP = "Its lamp burned whale oil until 1871, when it was changed."


def index_of(*texts: str) -> TextIndex:
    index = TextIndex()
    index.add(texts)
    return index


def found(index: TextIndex, prompt: str, candidates: list[str] | None = None) -> list[str]:
    return [prompt[m.start : m.stop] for m in index.find(prompt, candidates or [])]


class TestFinding:
    def test_in_order_of_the_prompt(self) -> None:
        index = index_of(LETTERS, LAMP)
        assert found(index, f"Read.\n{LAMP}\n--\n{LETTERS}\nWhat?") == [LAMP, LETTERS]

    def test_whole_prompt_start_and_end(self) -> None:
        index = index_of(LETTERS, LAMP)
        assert found(index, LETTERS) == [LETTERS]
        assert found(index, LETTERS + LAMP) == [LETTERS, LAMP]

    def test_several_times(self) -> None:
        assert found(index_of(LETTERS), f"{LETTERS} {LETTERS}\n{LETTERS}") == [LETTERS] * 3

    @pytest.mark.parametrize(
        "prompt", ["", "short", LETTERS[:-1], LETTERS[1:], LETTERS.upper(), LETTERS.replace("4", "5")]
    )
    def test_nothing_else(self, prompt: str) -> None:
        assert found(index_of(LETTERS), prompt) == []

    def test_empty_index(self) -> None:
        assert found(TextIndex(), LETTERS) == []

    def test_leftmost_wins_where_chunks_overlap(self) -> None:
        first, second = "one two three four five six", "four five six seven eight nine"
        assert found(index_of(second, first), "one two three four five six seven eight nine") == [first]

    def test_the_second_of_overlapping_chunks_is_found_where_it_stands_alone(self) -> None:
        first, second = "one two three four five six", "four five six seven eight nine"
        prompt = f"{first} seven eight nine | {second}"
        assert found(index_of(first, second), prompt) == [first, second]

    def test_longest_wins_at_the_same_start(self) -> None:
        short, long = LETTERS, LETTERS + " " + LAMP
        for order in ([short, long], [long, short]):
            assert found(index_of(*order), f"x {long} y {short} z") == [long, short]

    def test_chunk_within_a_chunk(self) -> None:
        inner, outer = "the lamp burned whale oil", "In short: the lamp burned whale oil for years."
        index = index_of(inner, outer)
        assert found(index, f"{outer} And {inner}!") == [outer, inner]

    def test_many_texts_with_a_long_shared_head(self) -> None:
        """A metadata header longer than the region of the anchors: the digest decides, and each is found."""
        head = "file_path: /data/annual-report.pdf\npage_label: 7\n\n" * 8
        assert len(head) > REGION
        texts = [f"{head}Number {n} of the texts, with an end of its own." for n in range(40)]
        index = index_of(*texts)
        for n in (0, 17, 39):
            assert found(index, f"intro {texts[n]} outro") == [texts[n]]
        assert found(index, "\n".join(texts)) == texts

    @pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, REGION, REGION + WINDOW, REGION + 3 * WINDOW])
    def test_lengths_around_the_window_and_the_region(self, length: int) -> None:
        text = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(length))
        assert found(index_of(text), f"-- {text} --") == ([text] if length >= WINDOW else [])

    @pytest.mark.parametrize("text", ["a" * 40, "ab" * 30, "\n" * 20, " " * WINDOW])
    def test_periodic_texts(self, text: str) -> None:
        assert found(index_of(text), text) == [text]
        prompt = "x" + text + "y" + text
        assert "".join(found(index_of(text), prompt)) == text * 2

    @pytest.mark.parametrize(
        "text",
        [
            "東京タワーは高さ333メートルの電波塔です。",
            "🗼🇫🇷👩‍👩‍👧‍👦 emoji families count as well 🎉",
            "e\u0301toiles combinées e\u0301",
            "\u0000 control \u0001\u0002 chars \x7f",
        ],
    )
    def test_unicode(self, text: str) -> None:
        assert found(index_of(text), f"«{text}» {text}?") == [text, text]

    def test_composed_and_decomposed_are_different_texts(self) -> None:
        assert found(index_of("caf\u00e9 au lait, caf\u00e9 noir"), "cafe\u0301 au lait, cafe\u0301 noir") == []

    def test_lone_surrogates(self) -> None:
        """What json and surrogateescape let in must neither crash nor match something else."""
        text = "broken \ud83d half of a pair, \udcff byte"
        assert found(index_of(text), f"[{text}]") == [text]
        assert found(index_of(text), f"[{text}]".replace("\ud83d", "\ud83c")) == []


class TestCandidates:
    def test_found_without_being_stored_and_not_remembered(self) -> None:
        index = index_of(LAMP)
        assert found(index, f"{LETTERS} {LAMP}", [LETTERS]) == [LETTERS, LAMP]
        assert found(index, f"{LETTERS} {LAMP}") == [LAMP]

    def test_not_in_the_prompt_or_too_short(self) -> None:
        assert found(TextIndex(), LETTERS, [LAMP, "built in 1847", ""]) == []

    def test_longest_wins_between_stored_and_candidate(self) -> None:
        assert found(index_of(LETTERS), f"{LETTERS} {LAMP}", [f"{LETTERS} {LAMP}"]) == [f"{LETTERS} {LAMP}"]


class TestChanges:
    def test_removed_is_not_found_and_added_again_is(self) -> None:
        index = index_of(LETTERS, LAMP)
        prompt = f"{LETTERS} {LAMP}"
        for _ in range(3):
            index.remove([LETTERS])
            assert found(index, prompt) == [LAMP]
            index.add([LETTERS])
            assert found(index, prompt) == [LETTERS, LAMP]

    def test_removed_and_added_again_between_two_looks(self) -> None:
        index = index_of(LETTERS)
        assert found(index, LETTERS) == [LETTERS]
        index.remove([LETTERS])
        index.add([LETTERS])
        assert found(index, LETTERS) == [LETTERS]

    def test_removing_what_was_never_there(self) -> None:
        index = index_of(LETTERS)
        index.remove([LAMP, "", "short"])
        assert found(index, LETTERS) == [LETTERS]

    def test_added_twice_is_once(self) -> None:
        index = index_of(LETTERS, LETTERS)
        index.add([LETTERS])
        assert found(index, LETTERS) == [LETTERS]
        index.remove([LETTERS])
        assert found(index, LETTERS) == []


class TestSharing:
    def test_two_objects_over_one_folder(self, tmp_path: Path) -> None:
        one, other = TextIndex(Catalog(tmp_path)), TextIndex(Catalog(tmp_path))
        one.add([LETTERS])
        assert found(other, LETTERS) == [LETTERS]
        other.add([LAMP])
        assert found(one, f"{LETTERS}{LAMP}") == [LETTERS, LAMP]
        one.remove([LETTERS])
        assert found(other, f"{LETTERS}{LAMP}") == [LAMP]
        one.add([LETTERS])
        assert found(other, f"{LETTERS}{LAMP}") == [LETTERS, LAMP]

    def test_survives_reopening(self, tmp_path: Path) -> None:
        catalog = Catalog(tmp_path)
        one = TextIndex(catalog)
        one.add([LETTERS, LAMP])
        one.remove([LAMP])
        catalog.close()
        assert found(TextIndex(Catalog(tmp_path)), LETTERS + LAMP) == [LETTERS]

    def test_usable_after_close(self, tmp_path: Path) -> None:
        catalog = Catalog(tmp_path)
        index = TextIndex(catalog)
        index.add([LETTERS])
        catalog.close()
        assert found(index, LETTERS) == [LETTERS]

    def test_other_namespace_is_not_found(self, tmp_path: Path) -> None:
        ours, theirs = TextIndex(Catalog(tmp_path), "ours"), TextIndex(Catalog(tmp_path), "theirs")
        ours.add([LETTERS])
        assert found(theirs, LETTERS) == []
        theirs.add([LETTERS])
        ours.remove([LETTERS])
        assert found(theirs, LETTERS) == [LETTERS] and found(ours, LETTERS) == []

    def test_removed_and_added_while_another_looks(self, tmp_path: Path) -> None:
        """Between the other's two queries: afterwards the text must still be found there, now and later."""
        looking, changing = TextIndex(Catalog(tmp_path)), TextIndex(Catalog(tmp_path))
        changing.add([LETTERS])
        assert found(looking, LETTERS) == [LETTERS]
        texts_after = looking._catalog.texts_after
        seen: list[int] = []

        def interrupted(namespace: str, serial: int, count: int) -> list[tuple[int, TextRow, bool]]:
            rows = texts_after(namespace, serial, count)
            if not seen:
                seen.append(serial)
                changing.remove([LETTERS])
                changing.add([LETTERS])
            return rows

        looking._catalog.texts_after = interrupted  # type: ignore[method-assign]
        assert found(looking, LETTERS) == [LETTERS]
        del looking._catalog.texts_after
        assert found(looking, LETTERS) == [LETTERS]
        assert found(looking, LETTERS) == [LETTERS]

    def test_threads(self, tmp_path: Path) -> None:
        index = TextIndex(Catalog(tmp_path))
        texts = [f"Text number {n} which is long enough." for n in range(40)]
        problems: list[str] = []

        def work(part: int) -> None:
            try:
                for text in texts[part::4]:
                    index.add([text])
                    if found(index, f"<{text}>") != [text]:
                        problems.append(text)
            except BaseException as error:
                problems.append(repr(error))

        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        assert found(index, "\n".join(texts)) == texts

    def test_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError):
            TextIndex(Catalog(tmp_path / "file" / "store")).add([LETTERS])


small = st.text("ab ", min_size=0, max_size=60)


def brute(prompt: str, texts: list[str]) -> list[tuple[int, int]]:
    """Leftmost, then longest, by trying every text at every position."""
    matches, position = [], 0
    while position < len(prompt):
        here = [t for t in texts if len(t) >= WINDOW and prompt.startswith(t, position)]
        if here:
            matches.append((position, position + max(map(len, here))))
            position = matches[-1][1]
        else:
            position += 1
    return matches


class TestProperties:
    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_equals_brute_force_and_joins_to_the_prompt(self, data: st.DataObject) -> None:
        texts = data.draw(st.lists(small, max_size=6), "stored")
        candidates = data.draw(st.lists(small, max_size=3), "candidates")
        parts = data.draw(st.lists(st.one_of(st.sampled_from([*texts, *candidates, "a"]), small), max_size=8), "prompt")
        prompt = "".join(parts)
        index = index_of(*texts)
        assert [(m.start, m.stop) for m in index.find(prompt, candidates)] == brute(prompt, texts + candidates)
        segments = segment_text(prompt, index, candidates)
        assert "".join(s.text for s in segments) == prompt
        allowed = {*texts, *(c.strip() for c in candidates)}
        assert all(s.text in allowed for s in segments if isinstance(s, Chunk))
        assert all(s.text for s in segments)

    @settings(max_examples=80, deadline=None)
    @given(texts=st.lists(st.text(min_size=WINDOW, max_size=50), min_size=1, max_size=4), glue=st.text(max_size=5))
    def test_any_unicode(self, texts: list[str], glue: str) -> None:
        prompt = glue.join(texts)
        segments = segment_text(prompt, index_of(*texts))
        assert "".join(s.text for s in segments) == prompt
        assert all(s.text in texts for s in segments if isinstance(s, Chunk))
        assert any(isinstance(s, Chunk) for s in segments)

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_any_history_of_changes(self, data: st.DataObject) -> None:
        pool = [f"{letter} text that is long enough to match" for letter in "abcd"]
        one, present = TextIndex(), set()
        for _ in range(data.draw(st.integers(1, 12))):
            text = data.draw(st.sampled_from(pool))
            if data.draw(st.booleans()):
                one.add([text])
                present.add(text)
            else:
                one.remove([text])
                present.discard(text)
            if data.draw(st.booleans()):
                assert found(one, "|".join(pool)) == [t for t in pool if t in present]
        assert found(one, "|".join(pool)) == [t for t in pool if t in present]


class TestManyTexts:
    def test_a_history_in_small_batches(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Texts are put in order now and then, changes overrule them, and windows are compared a few at a time."""
        monkeypatch.setattr(module, "_BATCH", 3)
        monkeypatch.setattr(module, "_PAIRS", 2)
        head = "file_path: /data/annual-report.pdf\n" * 10
        texts = [f"{head}text {number} of many, {'and so on ' * (number % 5)}and its end." for number in range(40)]
        writing, reading = TextIndex(Catalog(tmp_path)), TextIndex(Catalog(tmp_path))
        rng, there = random.Random(0), set()
        for step in range(60):
            some = rng.sample(texts, rng.randrange(1, 9))
            if rng.random() < 0.6:
                writing.add(some)
                there |= set(some)
            else:
                writing.remove(some)
                there -= set(some)
            if step % 3 == 0:
                order = rng.sample(texts, len(texts))
                assert found(reading, "\n".join(order)) == [text for text in order if text in there], step
        assert len(reading._settled) > 3

    def test_what_a_text_costs_in_memory(self) -> None:
        index, count = TextIndex(), 20_000
        index.add(f"Number {number} of many texts, none of which is kept." for number in range(count))
        found(index, "loads what is loaded at first use")
        other = TextIndex(index._catalog)
        tracemalloc.start()
        try:
            assert found(other, "Here: Number 777 of many texts, none of which is kept. Yes.") != []
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] / count < 100
        finally:
            tracemalloc.stop()
