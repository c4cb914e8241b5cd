"""Texts that cost a reader a time which grows with the square of their size. Each is so large that nobody waits for it:
the tests have no clock, and end."""

from __future__ import annotations

from pathlib import Path

import pytest
from cacheclip_ingest.documents import read_document
from cacheclip_ingest.html import html_text
from cacheclip_ingest.markup import tokens
from cacheclip_ingest.splitting import _RULE, Splitter, _records
from cacheclip_ingest.text import cleaned, without_comments
from thinned import some_of

SIZE = 100_000

OPEN = "<!-- <!--> <!--x> <![CDATA[ </ </a <a <a=' <? <!DOCTYPE <!x <script <style> <title> <textarea> <iframe".split()


class TestPages:
    @pytest.mark.some(5)
    @pytest.mark.parametrize(
        "each", [*OPEN, '<a b="', "<a b=' ", "<a " + "=" * 9, "<a / ", "<script>//</", "<<", "&#", "&"]
    )
    def test_what_nothing_closes(self, tmp_path: Path, each: str) -> None:
        page = tmp_path / "a.html"
        page.write_text(f"<p>The mast is tall.</p>{each * (SIZE // len(each))}")
        assert "The mast is tall." in read_document(page)

    def test_every_character_is_read_once(self) -> None:
        """What is left out between tokens, and the tokens, are together no longer than the page."""
        page = "<p title='>'>a &amp; b<!-- c --><br/><title>x <b> y</title><script>1 < 2</script>z" + "<!--" * 99
        read = [(each.kind, each.text) for each in tokens(page)]
        assert [each for each in read if each[1] and each[0] != "open"] == [
            *(("begin", "p"), ("text", "a & b"), ("begin", "br"), ("end", "br"), ("begin", "title")),
            *(("text", "x <b> y"), ("end", "title"), ("begin", "script"), ("text", "1 < 2"), ("end", "script")),
            ("text", "z"),
        ]
        assert read[-2] == ("open", "<!--" * 99)

    @pytest.mark.parametrize(
        ("end", "num_open"),
        [
            ("<!-- the rest", 13),
            ("<!-- the rest -->", 0),
            ("<!-- the rest ->", 16),
            ("<script>", 0),
            ("<style>a", 1),
            ("<textarea>kept", 0),
            ("<title>kept", 0),
            ("</b a='>'", 9),
            ("<b title='>", 0),
            ("<b title", 8),
            ("<script>draw()", 6),
            ("<? x", 4),
            ("< x", 0),
            ("", 0),
        ],
    )
    def test_what_browsers_do_not_show_at_its_end_is_noted(self, end: str, num_open: int) -> None:
        text = html_text(f"<p>The mast is tall.</p>{end}")
        assert "The mast is tall." in text and ("kept" in text) == ("kept" in end)
        assert bool(text.notes) == bool(num_open)
        assert all(f"its last {num_open} characters" in note for note in text.notes)

    @pytest.mark.some(4)
    @pytest.mark.parametrize(
        ("page", "shown"),
        [
            *(("a<!-->b", "ab"), ("a<!--->b", "ab"), ("a<!-- > -- > -->b", "ab"), ("a<!-- --!>b", "ab")),
            *(("a<![CDATA[x > y]]>b", "a y]]>b"), ("a<?php x ?>b", "ab"), ("a</>b</ x>c", "abc"), ("a<!x>b", "ab")),
            *(("a < b <c", "a < b"), ("1<2", "1<2"), ("<<!-- -->!-- x", "<!-- x"), ("a<b/>c<b />d", "acd")),
            *(("<b title='a>b' x=\"'>\">c", "c"), ("<p a=don't>c", "c"), ('<p title="a"">c', "c"), ("<P>c</P >", "c")),
            *(("<title>How to <!-- x</title>c", "# How to <!-- x\n\nc"), ("<script>'<!--'</script>c", "c")),
            *(("<SCRIPT>a</script >c", "c"), ("<script src=a />c", "c"), ("<textarea><b>&lt;</textarea>", "<b><")),
            *(("<script>a</scripts>b</script>c", "c"), ("<img alt='a &amp; b'>", "a & b"), ("<img ALT=a/>", "a/")),
            *(("<input value=a value>", ""), ("<p hidden>a</p>b", "b"), ("<p a=b hidden>a</p>b", "b")),
        ],
    )
    def test_where_things_end(self, page: str, shown: str) -> None:
        assert html_text(page) == shown

    @pytest.mark.parametrize(
        ("number", "letter"),
        [
            *(("9" * 5000, "\ufffd"), ("9" * 9, "\ufffd"), ("0" * 5000 + "65", "A"), ("x" + "0" * 5000 + "41", "A")),
            *(("65", "A"), ("0", "\ufffd"), ("x" + "9" * 5000, "\ufffd"), ("0" * 5000, "\ufffd")),
        ],
    )
    def test_numbers_of_characters(self, number: str, letter: str) -> None:
        assert html_text(f"<p>Lease &#{number};</p><input value='&#{number};'>").split() == ["Lease", letter, letter]

    def test_tables_of_wide_and_high_cells_stay_small(self) -> None:
        page = "<table><tr>" + "<td colspan=100 rowspan=99>a" * 2000 + "<tr><td>b" * 2000
        text = html_text(page)
        assert text.count("a") == text.count("b") == 2000 and len(text) < 20 * len(page)


class TestTexts:
    @pytest.mark.parametrize("start", ["\u0130" * SIZE + "</svg>", "<svg>" * (SIZE // 5) + "</SVG>"])
    def test_drawings(self, start: str) -> None:
        assert cleaned(start + "<svg " * (SIZE // 5)).endswith("<svg " * (SIZE // 5))

    @some_of(
        3,
        end=["", "-->", "\n```", "`"],
        each=["<!--", "```\n", "~~~ ", "`", "`a", " " * 9, ">", "\n>", "    <!--\n", "```\n~~~\n"],
    )
    def test_comments(self, each: str, end: str) -> None:
        assert without_comments(each * (SIZE // len(each)) + end).startswith("" if each == "<!--" else each)

    @pytest.mark.some(3)
    @pytest.mark.parametrize("each", [" ", "\t", "-", "|-", "| -", ">", ":-", "- "])
    @pytest.mark.parametrize("start", ["", "-", "|-|"])
    def test_rules_of_tables(self, start: str, each: str) -> None:
        assert _RULE.fullmatch(start + each * SIZE + "x") is None

    @pytest.mark.parametrize(
        ("line", "is_rule"),
        [
            *((each, True) for each in ("|-|-|\n", "---|---", " :-: | --: \n", "> |-|", "|-", "-", ":-", "| - |  \n")),
            *((each, False) for each in ("", "|", "||", "|-||-|", "a", ":", "- -", "|-|x", ": -")),
        ],
    )
    def test_what_a_rule_is(self, line: str, is_rule: bool) -> None:
        assert bool(_RULE.fullmatch(line)) == is_rule

    def test_rows_of_a_quoted_value(self) -> None:
        text = 'a,b\n"' + "\n" * SIZE + '"\nc,d\n'
        assert _records(text) == ["a,b\n", text[4:-4], "c,d\n"]


class _Counter:
    """A tokenizer of four characters a token, which counts what it reads."""

    def __init__(self) -> None:
        self.read = 0

    def count(self, text: str) -> int:
        self.read += len(text)
        return len(text) // 4 + 1


@pytest.mark.some(4)
@pytest.mark.parametrize("each", ["x", ">", "a b. ", "\u6e2f", "*a ", "|a", "-"])
@pytest.mark.parametrize(
    ("kind", "start"),
    [("", ""), ("", "|a|b|\n|-|-|\n|"), ("markdown", "# A\n\nThe mast is tall.\n"), ("table", "a,b\n")],
)
def test_a_line_without_an_end(kind: str, start: str, each: str) -> None:
    """The tokens of every character are counted a few times, however long the line is."""
    tokenizer, text = _Counter(), start + each * (30_000 // len(each))
    passages = Splitter(tokenizer, 256).split(text, **{kind: True} if kind else {})
    assert tokenizer.read < 40 * len(text)
    assert len("".join("".join(passages).split())) >= len("".join(text.split())), "nothing is lost"
