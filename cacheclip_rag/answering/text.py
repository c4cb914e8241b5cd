"""Turns token ids into text as soon as the text is final: unfinished characters and stop strings wait, reasoning and
calls of tools are kept apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ..fusion.answer import Event
from ..prompt.calls import CallReader, Parameters, unopened_reasoning
from ..prompt.reasoning import OPENINGS, ReasoningReader, may_begin
from ..prompt.tools import ToolCall

_UNFINISHED = "\ufffd"
"""What an unfinished character decodes to."""
_FIRST = frozenset(opening[0] for opening in OPENINGS)


class TextStream:
    """Turns token ids into text as soon as the text is final.

    Bytes of an unfinished character, and characters that may begin a stop string, wait for the next token. A token
    costs the same however long the text is: only the tokens since the text was last whole, and the ones just before
    them, are decoded. The tokens before are there because some tokenizers write a text's first token in another way.

    Reasoning at the beginning is no text, and stop strings in it end nothing. Text turns out to be reasoning if a
    marker ends it that nothing opened, and is withdrawn.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str],
        prompt_end: str | None = None,
        ends: Sequence[str] = (),
    ) -> None:
        """``prompt_end``: what the chat template wrote before the answer; None: the answer holds no reasoning.
        ``ends``: markers that end reasoning, also without one that opens it."""
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        """Tokens that are decoded: some before, whose text is known, then those since the text was last whole."""
        self._before = 0
        self._known = ""
        """Text of the tokens before."""
        self._taken = 0
        """Characters after the known text that were taken."""
        self._unfinished = ""
        """Text after them."""
        self._pieces: list[str] = []
        """Text that became final."""
        self._held = ""
        """Text that waits: it may begin a stop string."""
        self._is_blank = prompt_end is not None
        """Whether no word has come yet, so that reasoning may."""
        self._blank = ""
        self._reasoning: ReasoningReader | None = None
        if prompt_end is not None and prompt_end.rstrip().endswith(OPENINGS):
            self._reasoning, self._is_blank = ReasoningReader(prompt_end), False
        self._ends = () if prompt_end is None else tuple(ends)
        self.reasoning = ""
        """Reasoning that became final. Who takes it empties it."""
        self.revised_from: int | None = None
        """Characters of the text that stay, if the rest was withdrawn. Who takes it sets it to None."""
        self._has_withdrawn = False
        self.stopped_by: str | None = None
        """The stop string that has appeared first."""

    @property
    def text(self) -> str:
        """All text so far, stop string excluded. It is put together each time."""
        return "".join(self._pieces) + self._blank + self._held + self._unfinished

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that became final (may be empty)."""
        self._ids.append(token_id)
        new = self._decode(self._ids)[len(self._known) :]
        certain = new.rstrip(_UNFINISHED)
        piece, self._unfinished = certain[self._taken :], new[len(certain) :]
        self._taken = max(self._taken, len(certain))
        if new and not self._unfinished:
            self._ids, self._before = self._ids[self._before :], len(self._ids) - self._before
            self._known, self._taken = self._decode(self._ids), 0
        return self._give(piece)

    def flush(self) -> str:
        piece, self._unfinished, self._is_blank = self._unfinished, "", False
        return self._give(piece, last=True)

    def _give(self, piece: str, *, last: bool = False) -> str:
        if self._is_blank or self._blank:
            piece, self._blank = self._blank + piece, ""
            first = piece.lstrip()[:1]
            if first in _FIRST:
                self._reasoning = ReasoningReader()
            if not first and self._is_blank:
                self._blank, piece = piece, ""
            self._is_blank = not first and self._is_blank
        self._held += piece if self._reasoning is None else self._read(self._reasoning, piece, last)
        is_sure = not any(end in self._held for end in self._ends) or self._split(last)
        waiting = self._held + (self._unfinished if self._reasoning is None or self._reasoning.has_ended else "")
        stops = [(at, s) for s in self._stop if (at := waiting.find(s)) >= 0]  # in final text, none can begin
        if stops:
            (end, self.stopped_by), last = min(stops), True
            self._held, self._unfinished = waiting[:end], ""
        waits_for = (*self._stop, *self._ends)
        end = len(self._held) - (may_begin(self._held, waits_for) if waits_for and not last else 0) if is_sure else 0
        final, self._held = self._held[:end], self._held[end:]
        self._pieces.append(final)
        return final

    def _read(self, reader: ReasoningReader, piece: str, last: bool) -> str:
        """The text of a piece, after its reasoning."""
        reasoning, text = reader.push(piece)
        self.reasoning += reasoning
        if last:
            reasoning, rest = reader.close()
            self.reasoning, text = self.reasoning + reasoning, text + rest
        return text

    def _split(self, last: bool) -> bool:
        """Take reasoning out of the text before a marker that ends it. Returns whether it is certain what it is."""
        if self._reasoning is not None and self._reasoning.has_reasoned:
            self._ends = ()
            return True
        parts = unopened_reasoning("".join(self._pieces) + self._held, self._ends, last)
        if not parts:
            return parts is None
        if any(self._pieces):
            self.revised_from, self._has_withdrawn = 0, True
        self._pieces, self._ends, self.reasoning = [], (), parts[0]
        self._reasoning = ReasoningReader()
        self._reasoning.has_reasoned = True
        self._held = self._read(self._reasoning, parts[1], last)
        return True

    def replay(self, token_ids: Sequence[int], shown: TextStream) -> None:
        """Take the first tokens of an answer in whose place ``shown`` was, with the text after them withdrawn."""
        for token in token_ids:
            self.push(token)
        if shown._has_withdrawn and not self._has_withdrawn:  # of what they say, nothing is shown
            self._held, self._pieces = "".join(self._pieces) + self._held, []
        self.revised_from = sum(map(len, self._pieces))


def read_calls(events: Iterable[Event], tools: Parameters) -> Iterator[Event]:
    """The events of an answer with its calls taken out of the text, into ``tool_calls`` of events and answer.

    Text that may still be withdrawn is held back, and calls until the answer ends: what stands before them may turn out
    to be reasoning. The number of events stays.
    """
    reader = CallReader(tools)
    waiting, passed = "", 0
    texts: list[str] = []
    calls: list[ToolCall] = []
    for event in events:
        revised_from = None
        if event.revised_from is not None and event.revised_from < passed:
            revised_from = 0 if any(texts) else None
            reader, waiting, passed, texts, calls = CallReader(tools), "", 0, [], []
        elif event.revised_from is not None:
            waiting = waiting[: event.revised_from - passed]
        waiting += event.text
        final = waiting if event.is_final else ""
        waiting, passed = waiting[len(final) :], passed + len(final)
        text, read = reader.push(final)
        if event.answer is not None:
            rest, others = reader.close()
            text, read = text + rest, [*read, *others]
        texts.append(text)
        calls += read
        answer = event.answer and replace(event.answer, text="".join(texts), tool_calls=tuple(calls))
        called = answer.tool_calls if answer else ()
        yield replace(event, text=text, answer=answer, tool_calls=called, revised_from=revised_from, is_final=True)
