"""What messages quote of other libraries' errors."""

import pytest

from cacheclip_rag.base.errors import first_line

SENTENCE = "a sentence of 25 letters!"


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("Gone.", "Gone"),
        ("", "no details"),
        ("One.\nTwo.", "One"),
        (SENTENCE * 12, SENTENCE * 12),
        (f"{SENTENCE * 11}. Set 'A_LONG_NAME_OF_A_VARIABLE'.", SENTENCE * 11),
        (SENTENCE * 12 + ".", SENTENCE * 11 + "a sentence of 25 …"),
        ("x" * 400, "x" * 300 + " …"),
    ],
)
def test_an_error_is_quoted_in_whole_sentences(text: str, quoted: str) -> None:
    assert first_line(ValueError(text)) == quoted
