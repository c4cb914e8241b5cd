"""Tables that are longer than a passage: every passage of one has its header."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cacheclip_ingest.splitting import Splitter

from cacheclip_rag.models import load_model

HEADER = "| berth | tenant | euros owed |\n|---|---|---|\n"


@pytest.fixture(scope="module")
def tokenizer(tiny_models: dict[str, str]) -> Any:
    return load_model(tiny_models["llama"]).tokenizer


def rows(count: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(f"| {n} | Sandpiper {'x' * rng.randrange(30)} | {rng.randrange(991)} |\n" for n in range(count))


def check(passages: list[str], header: str, table: str, tokenizer: Any, most: int) -> None:
    """Every row stands once, in order, in a passage that has the header before it."""
    found = []
    for passage in passages:
        assert len(tokenizer(passage, add_special_tokens=False)["input_ids"]) <= most
        if header.strip() in passage:
            found += passage.split(header.strip())[1].strip().splitlines()
        assert not any(row in passage for row in table.splitlines()) or header.strip() in passage
    assert [row for row in found if row in table.splitlines()] == table.splitlines()


@pytest.mark.some(3)
@pytest.mark.parametrize("size", [128, 512])
@pytest.mark.parametrize("before", ["", "# Berths\n\n", "A long way to it. " * 110 + "\n\n", "```\na | b\n```\n\n"])
@pytest.mark.parametrize("after", ["", "\nWhat comes after the table.\n"])
def test_of_markdown(tokenizer: Any, size: int, before: str, after: str) -> None:
    table = rows(120)
    passages = Splitter(tokenizer, size).split(f"{before}{HEADER}{table}{after}", markdown=True)
    assert len(passages) > 3
    check(passages, HEADER, table, tokenizer, size)
    said = "".join("".join(passages).replace(HEADER.strip(), "").split())
    assert said == "".join(f"{before}{table}{after}".split()), "nothing else is repeated, and nothing is lost"
    if before.startswith("# "):
        assert passages[0].startswith(f"# Berths\n\n{HEADER}"), "a heading stands with the first rows"


@pytest.mark.parametrize("markdown", [True, False])
def test_that_just_fit_a_passage(tokenizer: Any, markdown: bool) -> None:
    """With the end of the text before it, a table about as long as a passage would be cut without its header."""
    sizes = [len(tokenizer(HEADER + rows(n), add_special_tokens=False)["input_ids"]) for n in range(99)]
    table = rows(sum(size <= 512 for size in sizes) - 1)
    for sentences in range(18, 42, 4):
        text = "The harbour master counts the ships of the year. " * sentences + f"\n\n{HEADER}{table}\n\nAfter."
        check(Splitter(tokenizer, 512).split(text, markdown=markdown), HEADER, table, tokenizer, 512)


def test_two_tables_have_their_own_headers(tokenizer: Any) -> None:
    other = "name | price\n--- | ---:\n"
    lines = "".join(f"pump {n} | {n}\n" for n in range(200))
    passages = Splitter(tokenizer, 200).split(f"{HEADER}{rows(80)}\nPrices:\n\n{other}{lines}", markdown=True)
    check(passages, HEADER, rows(80), tokenizer, 200)
    check(passages, other, lines, tokenizer, 200)


@pytest.mark.parametrize(
    "text",
    [
        "| a | b |\n|---|---|\n| 1 | 2 |\n",
        "a | b\nno rule below\n" * 40,
        f"```\n{HEADER}{rows(60)}```\n",
        "# One\n\n" + "Text without tables, of some length. " * 60,
        "|" * 90 + "\n" + "-|" * 500,
    ],
)
def test_other_texts_are_cut_as_before(tokenizer: Any, text: str) -> None:
    from semantic_text_splitter import MarkdownSplitter

    stock = MarkdownSplitter.from_huggingface_tokenizer(tokenizer.backend_tokenizer, 100).chunks(text)
    assert Splitter(tokenizer, 100).split(text, markdown=True) == [each.strip() for each in stock]


@pytest.mark.parametrize("separator", [",", "\t", ";"])
@pytest.mark.parametrize("first", ["", "SEP={}\r\n"])
def test_of_values_in_lines(tokenizer: Any, separator: str, first: str) -> None:
    header = first.format(separator) + separator.join(["name", "amount", "remark"]) + "\n"
    table = "".join(f"pump {n}{separator}{n}{separator}fine\n" for n in range(200))
    check(Splitter(tokenizer, 100).split(header + table, table=True), header, table, tokenizer, 100)


def test_a_line_end_in_quotation_marks_cuts_no_row(tokenizer: Any) -> None:
    table = "".join(f'"pump {n}\nof hall {n}",{n}\n' for n in range(60))
    passages = Splitter(tokenizer, 100).split("name,amount\n" + table, table=True)
    assert len(passages) > 3 and all(each.startswith("name,amount\n") and each.count('"') % 2 == 0 for each in passages)


def test_rows_longer_than_a_passage_are_cut_with_the_header(tokenizer: Any) -> None:
    table = "1,short\n2," + "long words " * 300 + "\n3,short\n"
    passages = Splitter(tokenizer, 100).split("number,text\n" + table, table=True)
    assert all(each.startswith("number,text\n") for each in passages) and len(passages) > 5
    assert all(len(tokenizer(each, add_special_tokens=False)["input_ids"]) <= 100 for each in passages)
