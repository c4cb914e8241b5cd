"""Where the contents of messages stand in what a chat template made of them.

Templates look at contents: many leave the reasoning of earlier answers out. Then the prompt is not the template's text
with contents put in, and the contents are found by rendering others like them, whose words tell where they come from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from ..runtime.base import Message
from ..runtime.markers import REASONING_MARKERS

_LOOKED_FOR = (
    *(marker for pair in REASONING_MARKERS for marker in pair),
    *("<tool_response>", "</tool_response>", "/no_think", "/think"),
)
"""What published templates look for in contents, beside white space."""
_KEPT = re.compile(r"(\s+|" + "|".join(map(re.escape, _LOOKED_FOR)) + ")")
_PLANES = ((0xF0000, 0xFFFD), (0x100000, 0xFFFD))
"""Characters for private use: where they begin, and how many there are."""
_STAND_IN = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")

Piece = tuple[str, bool]
"""Text of a prompt, and whether it is of a content."""


@dataclass(frozen=True, slots=True)
class _Word:
    """A word of a content."""

    message: int
    begin: int
    end: int


def escaped(text: str, times: int) -> str:
    """A text as it stands in JSON that stands in JSON …, without quotes."""
    for _ in range(times):
        text = json.dumps(text, ensure_ascii=False)[1:-1]
    return text


def find_contents(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], rendered: str, escapes: Mapping[int, int]
) -> list[Piece] | None:
    """The prompt that ``render`` made of the messages as pieces of the template and of contents; None if they cannot be
    told apart. ``escapes``: how many times a message's content is written as JSON, if it is."""
    return _by_words(render, messages, rendered, escapes) or _by_marks(render, messages, rendered)


def _by_words(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], rendered: str, escapes: Mapping[int, int]
) -> list[Piece] | None:
    """Every word is rendered as one character that stands for it alone."""
    contents = [message["content"] for message in messages]
    words: list[_Word] = []
    shown: list[str] = []
    for number, message in enumerate(messages):
        before = len(words)
        shown.append("")
        begin = 0
        for at, piece in enumerate(_KEPT.split(contents[number])):
            if at % 2 or not piece:
                shown[-1] += piece
            elif len(words) == sum(size for _, size in _PLANES):
                return None
            else:
                shown[-1] += _stand_in(len(words))
                words.append(_Word(number, begin, begin + len(piece)))
            begin += len(piece)
        # nothing would tell where such a content stands
        if len(words) == before and contents[number].strip() and message["role"] != "assistant":
            return None
    marked = render([{**message, "content": text} for message, text in zip(messages, shown, strict=True)])
    spans = []
    pieces, places = _STAND_IN.split(marked), _STAND_IN.findall(marked)
    parts: list[str] = []
    length = 0
    for number, piece in enumerate(pieces):
        parts.append(piece)
        length += len(piece)
        if number < len(places):
            index = _index_of(places[number])
            if index >= len(words):
                return None
            word = words[index]
            written = escaped(contents[word.message][word.begin : word.end], escapes.get(word.message, 0))
            spans.append((length, length + len(written), index))
            parts.append(written)
            length += len(written)
    text = "".join(parts)
    if text != rendered:
        return None
    return _joined(text, spans, words, contents, escapes)


def _joined(
    text: str,
    spans: Sequence[tuple[int, int, int]],
    words: Sequence[_Word],
    contents: Sequence[str],
    escapes: Mapping[int, int],
) -> list[Piece]:
    """Pieces of a text in which words have their places: words of a content with what stands between and around them in
    the content, too. ``spans``: per word its begin and end in the text, and its number."""

    def kept(first: int | None, second: int | None) -> str:
        """What stands between two words that follow one another in a content."""
        message = words[first if first is not None else second or 0].message
        begin = 0 if first is None else words[first].end
        end = len(contents[message]) if second is None else words[second].begin
        return escaped(contents[message][begin:end], escapes.get(message, 0))

    def neighbour(index: int, step: int) -> int | None:
        other = index + step
        is_one = 0 <= other < len(words) and words[other].message == words[index].message
        return other if is_one else None

    stretches: list[list[int]] = []
    before: tuple[int, int, int] | None = None
    for begin, end, index in spans:
        between = "" if before is None else text[before[1] : begin]
        if before is not None and neighbour(before[2], 1) == index and between == kept(before[2], index):
            stretches[-1][1] = end
        else:
            if before is not None:
                stretches[-1][1] += _common_length(between, kept(before[2], neighbour(before[2], 1)))
            room = text[stretches[-1][1] if stretches else 0 : begin]
            stretches.append([begin - _common_length(room[::-1], kept(neighbour(index, -1), index)[::-1]), end])
        before = begin, end, index
    if before is not None:
        stretches[-1][1] += _common_length(text[before[1] :], kept(before[2], neighbour(before[2], 1)))
    edges = [0, *(edge for span in stretches for edge in span), len(text)]
    return [(text[a:b], number % 2 == 1) for number, (a, b) in enumerate(pairwise(edges)) if b > a]


def _by_marks(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], rendered: str
) -> list[Piece] | None:
    """Every content is rendered as it is, between two characters that the prompt does not hold."""
    unused = (chr(code) for begin, size in _PLANES for code in range(begin, begin + size))
    first, last = islice((character for character in unused if character not in rendered), 2)
    shown: list[Message] = []
    for message in messages:
        text = message["content"]
        core = text.strip()
        lead, trail = text.split(core, 1) if core else (text, "")
        shown.append({**message, "content": f"{lead}{first}{core}{last}{trail}" if core else text})
    written = re.split(f"{first}(.*?){last}", render(shown), flags=re.DOTALL)
    # in a piece that holds one of them, the template has cut a content
    return [(piece, number % 2 == 1) for number, piece in enumerate(written)] if "".join(written) == rendered else None


def _common_length(first: str, second: str) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(map(len, (first, second)))
    )


def _stand_in(index: int) -> str:
    begin, size = _PLANES[0]
    return chr(begin + index if index < size else _PLANES[1][0] + index - size)


def _index_of(stand_in: str) -> int:
    begin, size = _PLANES[0]
    number = ord(stand_in)
    return number - begin if number < _PLANES[1][0] else size + number - _PLANES[1][0]
