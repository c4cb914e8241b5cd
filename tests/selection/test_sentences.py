"""Where sentences end, in scripts with and without spaces."""

from __future__ import annotations

import pytest

from cacheclip_rag.selection.sentences import sentence_numbers


def cut(text: str) -> list[str]:
    """The sentences of a text whose tokens are its characters."""
    numbers = sentence_numbers(text, [(n, n + 1) for n in range(len(text))]).tolist()
    return ["".join(c for c, of in zip(text, numbers, strict=True) if of == n) for n in range(max(numbers) + 1)]


@pytest.mark.parametrize(
    "sentences",
    [
        ["One is 3.14 long. ", "Is two? ", "Yes! ", "And three"],
        ['He said "no." ', "She (too) left.) ", "Then... ", "the end."],
        ["A title without an end\n\n", "A line\n", "- an item of v1.2"],
        ["灯塔建于1847年。", "谁住在那里？", "「没有人。」", "最后"],
        ["魔法の数字は7316042です。", "理由は不明！", " Mixed text. ", "終わり"],
        ["No end at all"],
    ],
)
def test_ends(sentences: list[str]) -> None:
    assert "".join(cut("".join(sentences))) == "".join(sentences)
    assert [s.strip() for s in cut("".join(sentences))] == [s.strip() for s in sentences]


def test_tokens_that_reach_over_an_end() -> None:
    text = "One. Two. 好。"
    offsets = [(0, 3), (3, 4), (4, 8), (8, 9), (9, 11), (10, 11), (11, 12), (12, 12)]
    assert sentence_numbers(text, offsets).tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    assert sentence_numbers("", []).tolist() == []
