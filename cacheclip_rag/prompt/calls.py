"""Reads the calls of tools out of an answer while it is written, in the formats that models are trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..runtime.markers import REASONING_MARKERS
from .reasoning import may_begin
from .tools import ToolCall, as_object, check_tools, is_name

_JSON = json.JSONDecoder(strict=False)
"""Models write line ends and tabs into strings as they are."""
_FIRST = " to=functions."
"""Before a call at the beginning of an answer in channels, whose prompt ends with what else stands before it."""
_IN_CHANNELS = (
    "<|channel|>commentary to=functions.",
    *(
        f"{end}<|start|>assistant{to}functions."
        for end in ("", "<|end|>")
        for to in (" to=", "<|channel|>commentary to=")
    ),
)
_OPENINGS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>", *_IN_CHANNELS)
_MAY_BE_CALL = re.compile(r"\{\s*(\"|$)|\[\s*(\{|$)|$")
"""Beginning of an answer that may be a call without a marker."""
_FENCE = re.compile(r"(?:[\s>]|[*+-]\s|\d{1,9}[.)]\s)*+(`{3,}+|~{3,}+)(?!.*```)")
"""A line that opens a block of code, perhaps in a list or a quotation."""
_LATE_FENCE = re.compile(r"(?<![`~])(`{3,}+|~{3,}+)[^\s`~]*+\s*$")
"""The end of a line of text that opens one."""
_CODE = re.compile(r"(?<!`)(`++).*?(?<!`)\1(?!`)")
"""Code in backticks within a line."""
_TICKS = re.compile(r"`+")
_QUOTES = (("“", "”"), ("„", "“"), ("‘", "’"), ("«", "»"), ("‹", "›"), ("「", "」"), ("『", "』"), ("《", "》"))
"""Quotation marks that open and close."""
_TAG = re.compile(r"<(pre|code)\b[^<>]*>|Here(?: is|'s) my thought process:", re.IGNORECASE)
"""HTML's code, of which the closing tag has the same name; and Granite's reasoning, which others may write as text."""
_INDENTED = re.compile(r" {4}| {0,3}\t")
"""The beginning of a line of Markdown's indented code."""
_ITEM = re.compile(r"\s*(?:[*+-]|\d{1,9}[.)])\s")
"""That of an item of a list, whose other paragraphs are indented, too."""
_WRAPPINGS = ("```json", "```", "<tools>")
"""What models without markers of their own may put before such a call."""
_BETWEEN = re.compile(r"(?:```(?:json)?|</?tools>|</?tool_call>|[\s;,])*")
"""What may stand before, between and after such calls."""
_NAMED = re.compile(r"([A-Za-z0-9_.:/-]{1,256})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]{1,64}\s*)?(?:\[ARGS\])?\s*(?=\{)")
_HEADER = re.compile(
    r"([A-Za-z0-9_.:/-]{1,256})\s*(?:<\|channel\|>commentary\s*)?(?:<\|constrain\|>\s*)?(?:json)?\s*<\|message\|>\s*(?=\{)"
)
_FUNCTION = re.compile(r"\s*<function=([A-Za-z0-9_.:/-]{1,256})>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,256})>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL)
Parameters = Mapping[str, Mapping[str, Any]]
"""Names of tools, each with the JSON schema of its arguments; empty if it has none."""
_Found = tuple[list[ToolCall], int]
"""Calls, and where the text after them begins."""


class CallReader:
    """Separates calls from an answer's text while it is written.

    Formats: ``<tool_call>{…}</tool_call>`` (Hermes, Qwen); ``<function=name><parameter=key>value</parameter>…
    </function>``, usually between the same markers (Qwen 3 Coder); ``[TOOL_CALLS] [{…}]`` and
    ``[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`` with or without the id (Mistral); messages to ``functions.name`` in the
    channel of commentary (GPT-OSS); and an answer that is nothing but
    ``{"name": …, "parameters": {…}}``, a list of these, or several with ``;`` between them, perhaps after
    ``<|python_tag|>`` (Llama 3), in a fenced block or between ``<tools>`` and ``</tools>`` (Qwen 2.5 Coder).
    ``arguments`` and ``parameters`` mean the same. Without a marker, the name must be that of a known tool. What cannot
    be read as a call stays text, and so does what only shows one: in a block of code beside other text, in backticks
    or quotation marks, or in reasoning. Every call gets a new id.

    Args:
        tools: the known tools. Values that are not written as JSON get their types from the schema of the arguments.
    """

    def __init__(self, tools: Parameters) -> None:
        self._tools = tools
        self._held = ""
        self._began = False
        """Whether text or a call was given out."""
        self._after_call = False
        self._shown = _Shown()

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text; returns what is certain: text, and the calls after it."""
        return self._read(text, last=False)

    def close(self) -> tuple[str, list[ToolCall]]:
        return self._read("", last=True)

    def _read(self, text: str, *, last: bool) -> tuple[str, list[ToolCall]]:
        self._held += text
        texts: list[str] = []
        calls: list[ToolCall] = []
        while True:
            if not self._began and _may_be_calls(self._held):
                if not last:
                    break
                plain = _plain_calls(self._held, self._tools)
                if plain is not None:
                    calls, self._held = plain, ""
                    break
            places = [(at, opening) for opening in _OPENINGS if (at := self._held.find(opening)) >= 0]
            if not self._began and self._held.startswith(_FIRST):
                places = [(0, _FIRST)]
            if not places and not self._began and not last and _FIRST.startswith(self._held):
                break
            if not places:
                self._give(texts, len(self._held) - (0 if last else may_begin(self._held, _OPENINGS)))
                break
            at, opening = min(places)
            self._give(texts, at)
            after = self._held[len(opening) :]
            if self._shown.holds_no_calls or (self._shown.is_code and after.startswith("`")):
                self._give(texts, len(opening))
                continue
            read = _calls_after(opening, after, last, self._tools)
            if read is None and not last:
                break
            if read is None:
                self._give(texts, len(opening))
                continue
            is_shown = self._shown.is_closed_by(after[read[1] :], last)
            if is_shown is None:
                break
            if is_shown:
                self._give(texts, len(opening) + read[1])
                continue
            calls += read[0]
            self._held = after[read[1] :]
            self._began = self._after_call = True
        return "".join(texts), calls

    def _give(self, texts: list[str], length: int) -> None:
        piece, self._held = self._held[:length], self._held[length:]
        if self._after_call:
            piece = piece.lstrip()
        if piece:
            self._after_call = False
            self._began = self._began or not piece.isspace()
            self._shown.add(piece)
            texts.append(piece)


def _may_be_calls(text: str) -> bool:
    """Whether an answer that begins so may consist of calls without markers."""
    text = text.lstrip()
    if any(wrapping.startswith(text) for wrapping in _WRAPPINGS):
        return True  # also if there is no text yet
    wrapping = next(filter(text.startswith, _WRAPPINGS), "")
    rest = text[len(wrapping) :].lstrip()
    in_fence = bool(wrapping) and (rest.startswith("<tool_call>") or "<tool_call>".startswith(rest))
    return in_fence or bool(_MAY_BE_CALL.match(rest))


class _Shown:
    """Whether text stands where calls are only shown: in a block of code, in backticks or HTML's code, in
    reasoning."""

    def __init__(self) -> None:
        self._line = ""
        """The last line, as far as it is written."""
        self._before = _Open()
        """What the lines before it leave open."""
        self._found: _Open | None = None
        """The same with the last line, once somebody asked."""

    def add(self, text: str) -> None:
        self._found = None
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._before = _open_after(line, self._before)
            late = None if self._before.end else _LATE_FENCE.search(self._before.text)
            if late is not None:
                self._before = replace(self._before, end=late[1])

    @property
    def _now(self) -> _Open:
        if self._found is None:
            self._found = _open_after(self._line, self._before)
        return self._found

    @property
    def holds_no_calls(self) -> bool:
        """Whether a call that comes next is certainly none."""
        return bool(self._now.end) or self._now.is_indented

    @property
    def is_code(self) -> bool:
        """Whether backticks stand directly before what comes next."""
        return self._now.text.endswith("`")

    def is_closed_by(self, rest: str, last: bool) -> bool | None:
        """Whether the text after a call shows that it was none: that it closes the backticks, the quotation or the
        reasoning, opened in the middle of a line, before the call. None if this is not certain yet. Without it, they
        are mere signs."""
        now = self._now
        if now.text.endswith("`") or now.text.lstrip().startswith(">") or (now.perhaps and now.perhaps in rest):
            return True
        line, ended, _ = rest.partition("\n")
        runs = {*_TICKS.findall(now.text)}
        whole = line if ended or last else line.rstrip("`")  # more of them may come
        quotes = _open_quotes(now.text)
        if runs.intersection(_TICKS.findall(whole)) or any(quote in line for quote in quotes):
            return True
        if now.text.rstrip().endswith("'"):  # within a line, it is an apostrophe
            if line.lstrip().startswith("'"):
                return True
            quotes += "" if line.strip() else "'"
        is_certain = last or not (now.perhaps or ((runs or quotes) and not ended))
        return False if is_certain else None


def _open_quotes(line: str) -> str:
    """What closes the quotations that a line leaves open."""
    straight = '"' if line.count('"') % 2 else ""
    return straight + "".join(end for begin, end in _QUOTES if line.rfind(begin) > line.rfind(end))


def unopened_reasoning(text: str, ends: Sequence[str], last: bool) -> tuple[str, ...] | None:
    """Reasoning that ends with one of the markers ``ends``, although none opened it, and the text after it. None if
    there is none: where an opening marker stands before, or the end is only shown, it is text. Empty if this is not
    certain yet."""
    places = sorted((match.start(), end) for end in ends for match in re.finditer(re.escape(end), text))
    for at, end in places:
        before, after = text[:at], text[at + len(end) :]
        if any(opening in before for opening, closing in REASONING_MARKERS if closing == end):
            continue
        shown = _Shown()
        shown.add(before)
        is_shown = shown.holds_no_calls or shown.is_closed_by(after, last)
        if is_shown is None:
            return ()
        if not is_shown:
            return before.strip(), after.lstrip()
    return None


@dataclass(frozen=True, slots=True)
class _Open:
    """What a text leaves open."""

    end: str = ""
    """What ends the block of code, or the reasoning; empty outside."""
    perhaps: str = ""
    """What ends reasoning that began in the middle of a line, if it is reasoning; empty outside."""
    text: str = ""
    """The last line without its code in backticks."""
    has_begun: bool = False
    """Whether there is more than white space."""
    after_blank: bool = False
    """Whether it is blank, and text stands before it."""
    is_indented: bool = False
    """Whether it is indented code."""
    in_list: bool = False
    """Whether it belongs to a list."""


def _open_after(line: str, before: _Open) -> _Open:
    """What a line leaves open, after what the lines before it did."""
    is_blank, is_deep = not line.strip(), _INDENTED.match(line) is not None
    in_list = bool(_ITEM.match(line)) or (before.in_list and (is_blank or line[:1].isspace()))
    is_indented = is_deep and (before.after_blank or before.is_indented) and not in_list
    now = replace(
        before,
        text="",
        has_begun=before.has_begun or not is_blank,
        after_blank=is_blank and before.has_begun,
        is_indented=is_indented,
        in_list=in_list,
    )
    end, perhaps = before.end, before.perhaps
    if end.startswith(("`", "~")):
        bare = line.strip(" \t\r>")
        closes = len(bare) >= len(end) and not bare.strip(end[0])
        return replace(now, end="" if closes else end)
    fence = None if end else _FENCE.match(line)
    if fence is not None:
        return replace(now, end=fence[1])
    for closing in filter(None, (end, perhaps)):
        _, is_there, rest = line.partition(closing)
        if is_there:
            line, end, perhaps = rest, "" if closing == end else end, "" if closing == perhaps else perhaps
    text = "" if end else _CODE.sub(" ", line)
    while not end:
        places = [(at, *pair) for pair in REASONING_MARKERS if (at := text.find(pair[0])) >= 0]
        if tag := _TAG.search(text):
            places.append((tag.start(), tag[0], f"</{tag[1]}>" if tag[1] else "my response:"))
        if not places:
            break
        at, opening, closing = min(places)
        _, is_there, rest = text[at:].partition(closing)
        if not is_there and (text[:at].strip() or _TAG.match(opening)):
            perhaps, text = closing, text[:at] + text[at + len(opening) :]
            break
        end, text = ("", rest) if is_there else (closing, "")
    return replace(now, end=end, perhaps=perhaps, text=text)


def _calls_after(opening: str, text: str, last: bool, tools: Parameters) -> _Found | None:
    """Calls at the beginning of the text after a marker; None if there are none, or not yet."""
    if opening == "<|python_tag|>":
        calls = _plain_calls(text, None) if last else None
        return None if calls is None else (calls, len(text))
    if opening == "[TOOL_CALLS]":
        return _named_call(text, _NAMED) or _json_calls(text)
    if opening in (_FIRST, *_IN_CHANNELS):
        return _named_call(text, _HEADER)
    if opening == "<function=":
        read = _xml_call(opening + text, tools)
        if read is None or read[0][0].name not in tools:
            return None
        read = read[0], read[1] - len(opening)
    else:
        read = _xml_call(text, tools) or _json_calls(text)
    return read and _closed(read, text, last)


def _closed(read: _Found, text: str, last: bool) -> _Found | None:
    """Calls with the closing marker after them, if there is one; None if it may still come."""
    calls, end = read
    rest = text[end:].lstrip()
    if not last and "</tool_call>".startswith(rest) and rest != "</tool_call>":
        return None
    if rest.startswith("</tool_call>"):
        end = text.index("</tool_call>", end) + len("</tool_call>")
    return calls, end


def _json_calls(text: str) -> _Found | None:
    """A call as a JSON object, or several as a list."""
    value, end = _value_at(text, 0)
    each_or_none = [_call_of(each, None) for each in (value if isinstance(value, list) else [value])]
    calls = [call for call in each_or_none if call is not None]
    return (calls, end) if calls and len(calls) == len(each_or_none) else None


def _named_call(text: str, pattern: re.Pattern[str]) -> _Found | None:
    """A name, what the pattern has after it, and arguments as a JSON object."""
    named = pattern.match(text, len(text) - len(text.lstrip()))
    if named is None:
        return None
    value, end = _value_at(text, named.end())
    call = _call_of({"name": named[1], "arguments": value}, None) if isinstance(value, dict) else None
    return None if call is None else ([call], end)


def _xml_call(text: str, tools: Parameters) -> _Found | None:
    """A call whose arguments are written one by one."""
    head = _FUNCTION.match(text)
    if head is None or "</function>" not in text:
        return None
    schema, end = tools.get(head[1]) or {}, head.end()
    properties = schema.get("properties")
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(text, end)) is not None:
        arguments[parameter[1]] = _typed(parameter[2], _types(_inside(properties, parameter[1]), schema))
        end = parameter.end()
    call = _call_of({"name": head[1], "arguments": arguments}, None)
    return ([call], end + len("</function>")) if call and text.startswith("</function>", end) else None


_JSON_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}


_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""What models write for JSON's words."""


def _typed(text: str, types: frozenset[str]) -> Any:
    """The JSON value that ``text`` stands for, if it has one of the ``types``; else the text."""
    try:
        value = json.loads(_PYTHON.get(text, text), strict=False)
    except (ValueError, RecursionError):
        return text
    return value if types.intersection(_JSON_TYPES.get(type(value), ())) else text


def _types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON types other than text that a schema allows. What is no schema allows nothing: clients send null for what
    they leave out."""
    types: set[str] = set()
    waiting, seen = [schema], set()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping) or id(each) in seen:  # references may go round
            continue
        seen.add(id(each))
        types.update(name for name in [each.get("type"), *_listed(each, "type")] if isinstance(name, str))
        for value in [*_listed(each, "enum"), *([each["const"]] if "const" in each else ())]:
            types.update(_JSON_TYPES.get(type(value), ()))
        waiting += [other for key in ("anyOf", "oneOf", "allOf") for other in _listed(each, key)]
        reference = str(each.get("$ref")).split("/")
        if reference[0] == "#" and len(reference) == 3:
            waiting.append(_inside(_inside(root, reference[1]), reference[2]))
    return frozenset(types)


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _inside(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _value_at(text: str, begin: int) -> tuple[Any, int]:
    """The JSON value at ``begin``, and its end; None for what is no JSON."""
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    try:
        return _JSON.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, begin


def _plain_calls(text: str, names: Collection[str] | None) -> list[ToolCall] | None:
    """The calls that a text consists of; None if it holds anything else."""
    calls: list[ToolCall] = []
    at = _after_wrapping(text, 0)
    while at < len(text):
        value, end = _value_at(text, at)
        for each in value if isinstance(value, list) and value else [value]:
            call = _call_of(each, names)
            if call is None:
                return None
            calls.append(call)
        at = _after_wrapping(text, end)
    return calls or None


def _after_wrapping(text: str, begin: int) -> int:
    match = _BETWEEN.match(text, begin)
    assert match is not None, "the pattern matches nothing, too"
    return match.end()


def _call_of(value: Any, names: Collection[str] | None) -> ToolCall | None:
    """A call from its JSON object; None if it is none, or not of a known tool."""
    if not isinstance(value, dict):
        return None
    name, written = value.get("name"), value.get("arguments", value.get("parameters"))
    if not is_name(name) or (names is not None and name not in names):
        return None
    if written is None and names is None and set(value) <= {"name", "id", "type"}:
        written = {}  # between markers, a call without arguments is certain
    arguments = as_object(written)
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # half a character
        return None
    return None if arguments is None else ToolCall(name, arguments)


def parameters_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Names of definitions, checked, each with the schema of its arguments."""
    functions = [tool["function"] for tool in check_tools(tools)]
    return {function["name"]: function.get("parameters") or {} for function in functions}
