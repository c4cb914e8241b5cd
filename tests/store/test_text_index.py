"""Finding stored texts inside a prompt."""

import logging
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cacheclip_rag.base.database import Database
from cacheclip_rag.base.errors import StoreError
from cacheclip_rag.base.keys import text_digest
from cacheclip_rag.finding import search, texts as module
from cacheclip_rag.finding.common_parts import WINDOW
from cacheclip_rag.finding.texts import REACH, SCHEMA, TextIndex, text_row
from cacheclip_rag.prompt.segments import Chunk, given_texts, segment_text
from cacheclip_rag.store import Catalog
from tests.conftest import examples

LENGTHS = [
    *range(WINDOW - 1, WINDOW + 9),
    *(size + WINDOW + near for size in (128, REACH, 2 * REACH) for near in (-2, -1, 0)),
]
"""Characters: texts with no window, with few, and around those where the reach grows or ends."""
LETTERS = "The lighthouse of Brindle Point was built in 1847."
LAMP = "Its lamp burned whale oil until 1871, when it was changed."


def index_of(*texts: str) -> TextIndex:
    index = TextIndex(Database(None, SCHEMA, 1), "ours")
    index.add(texts)
    return index


def shared(folder: Path, namespace: str = "ours") -> TextIndex:
    """What another process would have: nothing in common but the file."""
    return TextIndex(Catalog(folder).database, namespace)


def found(index: TextIndex, prompt: str, candidates: list[str] | None = None) -> list[str]:
    return [prompt[m.start : m.stop] for m in index.find(prompt, candidates or [], parts=False)]


class TestFinding:
    def test_nothing_else(self) -> None:
        for prompt in ("", "short", LETTERS[:-1], LETTERS[1:], LETTERS.upper(), LETTERS.replace("4", "5")):
            assert found(index_of(LETTERS), prompt) == [], prompt

    @pytest.mark.parametrize("length", LENGTHS)
    def test_lengths_around_the_window_and_the_reach(self, length: int) -> None:
        text = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(length))
        assert found(index_of(text), f"-- {text} --") == ([text] if length >= WINDOW else [])

    def test_lone_surrogates(self) -> None:
        """What json and surrogateescape let in must neither crash nor match something else."""
        text = "broken \ud83d half of a pair, \udcff byte"
        assert found(index_of(text), f"[{text}]") == [text]
        assert found(index_of(text), f"[{text}]".replace("\ud83d", "\ud83c")) == []


def test_candidates_are_found_without_being_stored_and_not_remembered() -> None:
    index = index_of(LAMP)
    assert found(index, f"{LETTERS} {LAMP}", [LETTERS]) == [LETTERS, LAMP]
    assert found(index, f"{LETTERS} {LAMP}") == [LAMP]


class TestSharing:
    def test_removed_and_added_while_another_looks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        looking, changing = shared(tmp_path), shared(tmp_path)
        changing.add([LETTERS])
        query = looking._database.query

        def interrupted(sql: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
            changing.remove([LETTERS])
            changing.add([LETTERS])
            return query(sql, arguments)

        with monkeypatch.context() as patch:
            patch.setattr(looking._database, "query", interrupted)
            assert found(looking, LETTERS) == [LETTERS]
        assert found(looking, LETTERS) == [LETTERS]

    @pytest.mark.parametrize("length", [20, 150])
    def test_one_version_of_a_text_that_is_replaced_meanwhile(self, length: int, monkeypatch: Any) -> None:
        """Another thread adds the new version and removes the old one while a prompt with both is searched."""
        index, new = index_of(LETTERS), (LAMP * 4)[:length]
        query = index._database.query
        threads: list[threading.Thread] = []

        def replaced() -> None:
            index.add([new])
            index.remove([LETTERS])

        def interrupted(sql: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
            rows = query(sql, arguments)
            if not threads:
                threads.append(threading.Thread(target=replaced))
                threads[0].start()
                threads[0].join(0.2)
            return rows

        with monkeypatch.context() as patch:
            patch.setattr(index._database, "query", interrupted)
            matches = index.find(f"{LETTERS} {new}", parts=False)
        threads[0].join()
        assert len(matches) == 1

    def test_known_to_every_process_until_it_is_removed(self, tmp_path: Path) -> None:
        one, other, theirs = shared(tmp_path), shared(tmp_path), shared(tmp_path, "theirs")
        assert not other.known(LETTERS)
        one.add([LETTERS, "short"])
        assert other.known(LETTERS) and not theirs.known(LETTERS)
        assert not other.known(LAMP) and not other.known("short")
        other.remove([LETTERS])
        assert not one.known(LETTERS)

    def test_rows_written_elsewhere_restore_the_texts(self, tmp_path: Path) -> None:
        """A catalog can be made again from the rows alone."""
        rows = [row for text in (LETTERS, LAMP, "short") if (row := text_row(text)) is not None]
        assert len(rows) == 2
        index = shared(tmp_path)
        index.add_rows(rows)
        index.add_rows(rows)
        assert found(index, f"{LAMP} {LETTERS}") == [LAMP, LETTERS] and index.known(LAMP)

    def test_all_texts_of_a_namespace(self, tmp_path: Path) -> None:
        texts = [f"{number}. {LETTERS} {LAMP}" for number in range(5)]
        shared(tmp_path).add([*texts, LETTERS[:20]])
        shared(tmp_path, "theirs").add([f"Theirs: {LETTERS} {LAMP}"])
        assert [*shared(tmp_path).texts()] == texts, "those of a few words are not kept"
        shared(tmp_path).remove(texts[:2])
        assert [*shared(tmp_path).texts()] == texts[2:] and [*index_of().texts()] == []


class TestUnusableCatalog:
    @pytest.fixture
    def broken(self, tmp_path: Path) -> TextIndex:
        (tmp_path / "catalog.sqlite3").write_bytes(b"this is no database, " * 100)
        return shared(tmp_path)

    def test_given_texts_are_found_with_one_warning_and_changes_raise(self, broken: TextIndex, caplog: Any) -> None:
        for _ in range(3):
            assert found(broken, f"{LETTERS} {LAMP}", [LAMP]) == [LAMP]
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "catalog.sqlite3" in record.getMessage()
        for use in (broken.add, broken.remove, lambda texts: broken.known(texts[0])):
            with pytest.raises(StoreError, match="catalog.sqlite3"):
                use([LETTERS])

    def test_a_repaired_catalog_is_used_again(self, tmp_path: Path, broken: TextIndex) -> None:
        assert found(broken, LETTERS) == []
        (tmp_path / "catalog.sqlite3").unlink()
        broken.add([LETTERS])
        assert found(broken, LETTERS) == [LETTERS]


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
    @examples(150)
    @given(data=st.data())
    def test_equals_brute_force_and_joins_to_the_prompt(self, data: st.DataObject) -> None:
        texts = data.draw(st.lists(small, max_size=6), "stored")
        candidates = data.draw(st.lists(small, max_size=3), "candidates")
        parts = data.draw(st.lists(st.one_of(st.sampled_from([*texts, *candidates, "a"]), small), max_size=8), "prompt")
        prompt = "".join(parts)
        index = index_of(*texts)
        matches = [(m.start, m.stop) for m in index.find(prompt, candidates, parts=False)]
        assert matches == brute(prompt, texts + candidates)
        segments = segment_text(prompt, index, given_texts(candidates))
        assert "".join(s.text for s in segments) == prompt
        allowed = {*texts, *(c.strip() for c in candidates)}
        assert all(s.text in allowed for s in segments if isinstance(s, Chunk))
        assert all(s.text for s in segments)

    @examples(80)
    @given(texts=st.lists(st.text(min_size=WINDOW, max_size=50), min_size=1, max_size=4), glue=st.text(max_size=5))
    def test_any_unicode(self, texts: list[str], glue: str) -> None:
        prompt = glue.join(texts)
        segments = segment_text(prompt, index_of(*texts))
        assert "".join(s.text for s in segments) == prompt
        assert all(s.text in texts for s in segments if isinstance(s, Chunk))
        assert any(isinstance(s, Chunk) for s in segments)

    @examples(40)
    @given(data=st.data())
    def test_any_history_of_changes(self, data: st.DataObject) -> None:
        pool = [f"{letter} text that is long enough to match" for letter in "abcd"]
        one, present = index_of(), set()
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

    @pytest.mark.some(3)
    @pytest.mark.parametrize("alphabet", ["a", "ab", "a\U0001f5fc\udcff", "abcdefghijklmnopqrstuvwxyz "])
    @pytest.mark.parametrize("longest", [40, 700])
    def test_overlapping_and_nested_texts(self, alphabet: str, longest: int, monkeypatch: Any, caplog: Any) -> None:
        """Texts are cut out of one long text: they share starts, ends and middles. Also with popular anchors."""
        rng = random.Random(longest)
        for round_ in range(25):
            monkeypatch.setattr(module, "_POPULAR", rng.choice([1, 2, 512]))
            whole = "".join(rng.choices(alphabet, k=2 * longest))
            pieces = [whole[first : first + rng.randrange(longest)] for first in rng.choices(range(len(whole)), k=14)]
            stored, given, others = [text for text in pieces[:8] if text != pieces[8]], pieces[8:11], pieces[11:]
            index = index_of(*pieces[:9])
            index.remove(pieces[8:9])
            prompt = "".join(rng.choice([*stored, *given, *others, "b", whole]) for _ in range(6))
            found_here = [(match.start, match.stop) for match in index.find(prompt, given, parts=False)]
            assert found_here == brute(prompt, stored + given), (round_, prompt)
        assert not caplog.records


class CountingDatabase(Database):
    """Counts the rows that queries return."""

    rows = 0

    def query(self, sql: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        found = super().query(sql, arguments)
        self.rows += len(found)
        return found


@pytest.mark.long
@pytest.mark.parametrize("head", ["", "file_path: /data/annual-report.pdf\npage_label: 7\n\n" * 8])
def test_a_search_reads_few_rows(head: str) -> None:
    """Also if all texts have the same start: rows of texts that are not in the prompt stay in the file."""
    database = CountingDatabase(None, SCHEMA, 1)
    index, count = TextIndex(database, "ours"), 1000
    rng = random.Random(0)
    texts = [head + " ".join(str(rng.randrange(10**9)) for _ in range(60)) for _ in range(count)]
    index.add(texts)
    assert found(index, f"Here: {texts[777]} Yes. {texts[5]}") == [texts[777], texts[5]]
    assert database.rows < 60


class TestHostileTexts:
    """Texts and prompts in which every place looks like the start of every text. Work is counted."""

    RUNS = [("-" * length) for length in range(100, 1100)]
    DIFFERENT_MIDDLES = [f"{'-' * (300 + n % 7)}word {n}{'-' * 300}" for n in range(1000)]

    @pytest.fixture
    def digests(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Slices of prompts whose digest was computed."""
        made: list[str] = []
        monkeypatch.setattr(search, "text_digest", lambda text: made.append(text) or text_digest(text))
        return made

    @pytest.mark.some(2)
    @pytest.mark.parametrize("texts_of", [RUNS, DIFFERENT_MIDDLES], ids=["runs", "middles"])
    def test_a_search_with_too_many_pairs_stops(self, texts_of: list[str], digests: list[str], caplog: Any) -> None:
        """And finds what is in few places."""
        index = index_of(*texts_of, LETTERS)
        matches = found(index, LETTERS + "-" * 8000 + LETTERS)
        assert matches[0] == matches[-1] == LETTERS and len(digests) == len(matches)
        assert ["was stopped" in record.getMessage() for record in caplog.records] == [True]

    def test_a_text_with_its_own_words_is_found(self) -> None:
        text = self.DIFFERENT_MIDDLES[77]
        prompt = "-" * 2000 + text + "-" * 2000
        matches = index_of(*self.DIFFERENT_MIDDLES).find(prompt)
        assert text in [prompt[match.start : match.stop] for match in matches if match.of is None]

    def test_a_search_with_too_many_wrong_hashes_stops(self, digests: list[str], monkeypatch: Any, caplog: Any) -> None:
        """Somebody may find texts whose hashes are equal; here the rows of runs are given wrong digests."""
        monkeypatch.setattr(search, "_MOST_WRONG", 5)
        index = index_of(LETTERS)
        rows = [row for text in self.RUNS[:10] if (row := text_row(text)) is not None]
        index.add_rows([row._replace(digest=bytes(16)) for row in rows])
        assert found(index, LETTERS + "-" * 8000 + LETTERS) == [LETTERS]
        assert len(digests) == 7
        assert ["was stopped" in record.getMessage() for record in caplog.records] == [True]

    def test_rows_of_other_texts_are_never_matches(self) -> None:
        """Everything but the digest says that the text is there."""
        index, row = index_of(), text_row(LETTERS)
        assert row is not None
        index.add_rows([row._replace(digest=bytes(16))])
        assert found(index, LETTERS) == []
        assert found(index, LETTERS, [LETTERS]) == [LETTERS]
