"""Parts of stored texts in prompts: all that are long enough, none that are not there."""

import json
import logging
import random
import textwrap
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cacheclip_rag.base.keys import text_digest
from cacheclip_rag.finding import search
from cacheclip_rag.finding.common_parts import LEAST_SURE, TextMatch
from cacheclip_rag.finding.folding import fold
from cacheclip_rag.store import Catalog, TextIndex
from tests.conftest import examples
from tests.store.samples import CatalogCare
from tests.store.test_folding import FORMS, LANGUAGES


def prose(seed: int, words: int = 150) -> str:
    """Words that no other seed has, in sentences and paragraphs."""
    rng = random.Random(seed)
    made = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(words)]
    lines = [" ".join(made[n : n + 12]).capitalize() + "." for n in range(0, words, 12)]
    return "".join(line + (" ", "\n")[rng.random() < 0.3] for line in lines).strip()


def index_of(*texts: str, namespace: str = "ours", catalog: Catalog | None = None) -> TextIndex:
    index = TextIndex((catalog or Catalog()).database, namespace)
    index.add(texts)
    return index


def bare(text: str) -> str:
    """A text without what is not compared."""
    return "".join(c for c in text if not c.isspace() and c not in '">\\')


def check(prompt: str, matches: list[TextMatch], texts: list[str]) -> None:
    """Every match says what stands in the prompt; no two overlap."""
    assert all(a.stop <= b.start for a, b in zip(matches, matches[1:], strict=False))
    for match in matches:
        found = prompt[match.start : match.stop]
        if match.of is None:
            assert found in texts
        else:
            assert match.of in texts
            assert bare(found) == bare(match.of[match.at : match.at + len(found)])


def covered(matches: list[TextMatch]) -> int:
    return sum(match.stop - match.start for match in matches)


REWRITES: dict[str, Callable[[str], str]] = {
    "cut at both ends": lambda text: text[len(text) // 5 : -len(text) // 5],
    "without its first line": lambda text: text.partition(" ")[2],
    "quoted": lambda text: "\n".join(f"> {line}" for line in textwrap.wrap(text, 80)),
    "as JSON": lambda text: json.dumps({"text": text}),
    "wrapped": lambda text: "\n".join(textwrap.wrap(text, 60)),
    "on one line": lambda text: " ".join(text.split()),
}


IN_ANOTHER_FORM = [
    ("English", "JSON"),
    ("Hebrew", "escapes with braces"),
    ("emoji", "a URL"),
    ("Korean", "a URL in a URL"),
    ("Japanese", "bytes of Python"),
    ("French", "entities for spaces"),
    ("Hindi", "zero width"),
    ("signs", "variation selectors"),
]


class TestFinding:
    @pytest.mark.parametrize("name", REWRITES)
    def test_a_text_that_was_rewritten(self, name: str) -> None:
        texts = [prose(number) for number in range(4)]
        written = [REWRITES[name](text) for text in texts[:3]]
        prompt = "Use these.\n\n" + "\n\n".join(written) + "\n\nWho was it?"
        matches = index_of(*texts).find(prompt)
        check(prompt, matches, texts)
        assert {match.of for match in matches} == set(texts[:3])
        assert covered(matches) > 0.95 * sum(len(bare(text)) for text in written)

    @pytest.mark.parametrize(("language", "form"), IN_ANOTHER_FORM)
    def test_a_text_in_another_form(self, language: str, form: str) -> None:
        """The whole of it is told, as stretches that are alike or as what lies between them; each shows the same.
        (That every form is one is tested beside ``fold``.)"""
        text, write = LANGUAGES[language] * 3, FORMS[form]
        for stored, asked in ((text, write(text)), (write(text), text)):
            prompt = f"Read this.\n\n{asked}\n\nWhat is the rule?"
            matches = index_of(stored, prose(1)).find(prompt)
            assert all(a.stop <= b.start for a, b in pairwise(matches))
            assert {match.of or prompt[match.start : match.stop] for match in matches} == {stored}
            assert covered(matches) >= 0.5 * len(asked.strip())
            for match in matches:
                part = fold(prompt[: match.stop])[0][len(fold(prompt[: match.start])[0]) :].tobytes()
                assert part in fold((match.of or stored)[max(0, match.at - 8) :])[0].tobytes()

    def test_the_longest_wins(self) -> None:
        parent = prose(1, 400)
        child = parent[600:900].strip()
        index = index_of(parent, child)
        assert [m.of for m in index.find(f"See {parent[200:1500]}!")] == [parent]
        assert [m.of for m in index.find(f"See {child}!")] == [None]
        assert [m.of for m in index.find(f"See {parent}!")] == [None]

    def test_the_longest_stays_whole(self) -> None:
        """A shorter text before it takes none of its beginning."""
        text = prose(1, 200)
        first, second = text[:420], text[214:699]
        for texts in ([first, second], [first, text[100:699]]):
            matches = index_of(*texts).find(f"See {text[:699]}!")
            check(f"See {text[:699]}!", matches, texts)
            assert covered(matches) >= 698, "a blank between them may be nobody's"
            assert max(m.stop - m.start for m in matches) == len(texts[1])
            assert matches[-1].of is None, "all of it is one match"

    def test_a_parent_is_longer_than_texts_that_tile_the_prompt(self) -> None:
        parent = f"name: {prose(2, 8)}\n\n{prose(1, 200)}"
        lines = [line for line in parent.replace(". ", ".\n").splitlines()[2:] if len(line) > 16]
        assert len(lines) > 8
        body = parent[parent.index(lines[0]) :]
        matches = index_of(parent, *lines).find(f"See {body}!")
        assert [(m.of, m.stop - m.start) for m in matches] == [(parent, len(body))]

    @pytest.mark.parametrize("times", [12, 50])
    def test_a_part_that_comes_many_times(self, times: int) -> None:
        text = prose(1)
        prompt = "\n--\n".join([text[100:400]] * times)
        assert [(m.at, m.stop - m.start) for m in index_of(text).find(prompt)] == [(100, 300)] * times

    def test_a_given_text_is_found_in_part_and_short_parts_are_left_alone(self) -> None:
        text = prose(1)
        [match] = index_of().find(f"See {text[50:600]}", [text])
        assert (match.of, match.at) == (text, 50)
        assert index_of(text).find(f"It says {text[40:80]!r}, and no more.") == []

    @examples(60)
    @given(data=st.data())
    def test_every_common_part_that_is_long_enough(self, data: Any) -> None:
        texts = [prose(seed, 80) for seed in range(3)]
        index = index_of(*texts)
        pieces, least = [], 0
        for _ in range(data.draw(st.integers(1, 4))):
            text = data.draw(st.sampled_from(texts))
            start = data.draw(st.integers(0, len(text) - 1))
            piece = text[start : start + data.draw(st.integers(1, 300))]
            pieces.append(piece)
            least += len(bare(piece)) >= LEAST_SURE
        prompt = data.draw(st.sampled_from(["\n", " -- ", "", "\\n> "])).join(pieces)
        matches = index.find(prompt)
        check(prompt, matches, texts)
        for piece in pieces:
            if len(bare(piece)) < LEAST_SURE:
                continue
            places = [n for n in range(len(prompt)) if prompt.startswith(piece, n)]
            most = max(sum(max(0, min(m.stop, n + len(piece)) - max(m.start, n)) for m in matches) for n in places)
            assert most >= len(piece) - LEAST_SURE, "other parts may take its edges"

    @examples(60)
    @given(prompt=st.text(max_size=400), texts=st.lists(st.text(max_size=300), max_size=3))
    def test_any_text_in_any_prompt(self, prompt: str, texts: list[str]) -> None:
        given = [text for text in texts if text]
        check(prompt, index_of(*given).find(prompt), given)
        both = prompt + "".join(given)
        check(both, index_of(*given).find(both, [prompt]), [*given, prompt])


def table(rng: random.Random) -> str:
    rows = ["| " + " | ".join(str(rng.randrange(1000)) for _ in range(3)) + " |" for _ in range(60)]
    return "\n".join(["| a | b | c |", "|---|---|---|", *rows])


TEXTS: dict[str, Callable[[random.Random], str]] = {
    "prose": lambda rng: prose(7, 300),
    "code": lambda rng: Path(search.__file__).read_text()[:6000],
    "CSV": lambda rng: "\n".join(",".join(f"{rng.uniform(0, 1000):.2f}" for _ in range(6)) for _ in range(50)),
    "Markdown table": table,
    "Chinese": lambda rng: "".join(chr(rng.randrange(0x4E00, 0x9000)) for _ in range(500)),
    "Russian": lambda rng: "".join(chr(rng.randrange(0x430, 0x450)) if rng.random() < 0.8 else " " for _ in range(900)),
    "hexadecimal": lambda rng: "".join(f"{rng.getrandbits(32):08x}\n" for _ in range(90)),
}


class TestFewCharactersAToken:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("kind", TEXTS)
    def test_every_part_of_32_small_tokens(self, kind: str) -> None:
        """A token is at least a digit, a sign, two and a half letters, or half of a Chinese character."""
        rng = random.Random(3)
        text = TEXTS[kind](rng).strip()
        index = index_of(text, prose(1))
        for _ in range(60):
            start = stop = rng.randrange(len(text) * 3 // 4)
            while stop < len(text) and sum(map(self.tokens, text[start:stop])) < 32:
                stop += 1
            prompt = f"Please read this: {text[start:stop]}\n\nWhat does it say?"
            matches = index.find(prompt)
            check(prompt, matches, [text])
            assert covered(matches) >= 0.8 * (stop - start), text[start:stop]

    @staticmethod
    def tokens(character: str) -> float:
        if character.isspace() or character == '"':
            return 0
        return 2 if character > "\u3000" else 0.4 if character.isalpha() else 1

    def test_the_index_of_prose_stays_small(self) -> None:
        anchors = {}
        for kind in ("prose", "CSV"):
            text = TEXTS[kind](random.Random(0))
            [(count,)] = index_of(text)._database.query("SELECT count(*) FROM anchors")
            anchors[kind] = len(text) / count
        assert anchors["prose"] > 18 and anchors["CSV"] > 5, "characters for one anchor"


class TestSharing:
    def test_a_released_text_is_found_no_more(self) -> None:
        text, other = prose(1), prose(2)
        index = index_of(text, text, other)
        index.add([text])
        assert index._database.query("SELECT count(*) FROM contents") == [(2,)], "each is stored once"
        index.remove([text])
        assert index.find(text[50:600]) == []
        assert [m.of for m in index.find(other[50:600])] == [other]
        for table, content in (("contents", "*"), ("anchors", "DISTINCT content")):
            assert index._database.query(f"SELECT count({content}) FROM {table}") == [(1,)]

    def test_a_dropped_tenant_leaves_nothing_that_is_found(self, tmp_path: Path) -> None:
        catalog, text = Catalog(tmp_path), prose(1)
        index = index_of(text, catalog=catalog)
        catalog.drop("ours", lambda keys: None)
        assert index.find(text[50:600]) == []
        CatalogCare(catalog.database).drop_unused_texts()
        assert catalog.database.query("SELECT count(*) FROM anchors") == [(0,)]

    def test_texts_that_nobody_uses_are_collected(self) -> None:
        catalog, texts = Catalog(), [prose(1), prose(2)]
        index = index_of(*texts, catalog=catalog)
        catalog.sources.add("ours", "node", texts[0])
        CatalogCare(catalog.database).drop_unused_texts()
        assert index.find(texts[1][50:600]) == []
        assert [m.of for m in index.find(texts[0][50:600])] == [texts[0]]


class TestDamage:
    @pytest.mark.parametrize("content", [b"nonsense", "words", None, 7])
    def test_a_damaged_text_is_not_found(self, content: object, caplog: pytest.LogCaptureFixture) -> None:
        text = prose(1)
        index = index_of(text, prose(2))
        sql = "UPDATE OR IGNORE contents SET text = ? WHERE digest = ?"
        index._database.execute(sql, (content if content is not None else b"", text_digest(text)))
        assert index.find(text[50:600]) == []
        assert [m.of for m in index.find(prose(2)[50:600])] == [prose(2)]
        assert "damaged" in caplog.text

    @pytest.mark.parametrize("wrong", ["place + 7", "place - 7", "0", "1 << 40", "-5"])
    def test_places_of_another_form_are_not_needed(self, wrong: str) -> None:
        """An older version of the package may have left out other characters."""
        text = prose(1)
        index = index_of(text, prose(2))
        index._database.execute(f"UPDATE OR IGNORE anchors SET place = {wrong}")
        matches = index.find(text[50:600])
        check(text[50:600], matches, [text])
        assert [(m.start, m.stop, m.at) for m in matches] == [(0, 550, 50)]

    def test_equal_hashes_of_other_bytes_end_the_search(self) -> None:
        text, other = prose(1), prose(2)
        index = index_of(text, other)
        index._database.execute("UPDATE OR IGNORE anchors SET content = 3 - content")
        check(text, index.find(text[50:600]), [text, other])

    def test_a_catalog_that_cannot_be_read_is_told_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        text = prose(1)
        index = index_of(text, catalog=Catalog(tmp_path))
        index._database.execute("DROP TABLE anchors")
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert [m.of for m in index.find(f"{text[50:600]}\n{prose(2)[9:500]}", [prose(2)])] == [prose(2)]
        assert caplog.text.count("parts of stored texts are not found") == 1


class TestHostileTexts:
    def test_boilerplate_of_many_texts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is found in one of them; a text's own words are found in this text."""
        head = prose(0, 60)
        texts = [f"{head}\n{prose(number, 60)}" for number in range(1, 300)]
        index, looked = index_of(*texts), []
        original = index._contents
        monkeypatch.setattr(index, "_contents", lambda wanted: looked.append(len(wanted)) or original(wanted))
        prompt = f"{head}\n{texts[217][len(head) + 60 :]}\n\nWho?"
        matches = index.find(prompt)
        check(prompt, matches, texts)
        assert covered(matches) > 0.9 * (len(prompt) - 8)
        assert texts[217] in [match.of for match in matches]
        assert max(looked) < 100, "few texts are read"

    def test_the_comparison_is_bounded(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr(search, "_ROOM", 8000)
        monkeypatch.setattr(search, "_PER_BYTE", 0)
        texts = [prose(number) for number in range(6)]
        prompt = "\n".join(text[100:700] for text in texts)
        matches = index_of(*texts).find(prompt)
        check(prompt, matches, texts)
        assert 0 < len(matches) < 6 and "too many places look alike" in caplog.text

    @pytest.mark.parametrize("text", ["a" * 3000, "ab" * 2000, "x" * 999 + "\n" * 999])
    def test_repeated_letters(self, text: str) -> None:
        index = index_of(text, text[:2500], text[:2000])
        prompt = f"{text[:1000]}! {text[:900]}"
        matches = index.find(prompt)
        assert all(a.stop <= b.start for a, b in zip(matches, matches[1:], strict=False))
        assert covered(matches) >= 900
