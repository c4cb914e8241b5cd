"""Turns token ids into text as soon as the text is final: unfinished characters and stop strings wait, reasoning and
calls of tools are kept apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ..fusion.answer import Event
from ..prompt.calls import CallReader, Parameters
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

    Reasoning at the beginning is no text, and stop strings in it end nothing.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str], prompt_end: str | None = None
    ) -> None:
        """``prompt_end``: what the chat template wrote before the answer; None: the answer holds no reasoning."""
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
        self.reasoning = ""
        """Reasoning that became final. Who takes it empties it."""
        self.stopped = False
        """True once a stop string has appeared."""

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
        if self._reasoning is not None:
            reasoning, piece = self._reasoning.push(piece)
            self.reasoning += reasoning
            if last:
                reasoning, rest = self._reasoning.close()
                self.reasoning, piece = self.reasoning + reasoning, piece + rest
        self._held += piece
        is_text = self._reasoning is None or self._reasoning.has_ended
        waiting = self._held + self._unfinished if is_text else self._held
        found = [at for s in self._stop if (at := waiting.find(s)) >= 0]  # in final text, none can begin
        if found:
            self.stopped, last = True, True
            self._held, self._unfinished = waiting[: min(found)], ""
        end = len(self._held) - (may_begin(self._held, self._stop) if self._stop and not last else 0)
        final, self._held = self._held[:end], self._held[end:]
        self._pieces.append(final)
        return final


def read_calls(events: Iterable[Event], tools: Parameters) -> Iterator[Event]:
    """The events of an answer with its calls taken out of the text, into ``tool_calls`` of events and answer.

    Text that may still be withdrawn is held back, because a call cannot be withdrawn. The number of events stays.
    """
    reader = CallReader(tools)
    waiting, passed = "", 0
    texts: list[str] = []
    calls: list[ToolCall] = []
    for event in events:
        if event.revised_from is not None:
            waiting = waiting[: event.revised_from - passed]
        waiting += event.text
        final = waiting if event.is_final else ""
        waiting, passed = waiting[len(final) :], passed + len(final)
        text, found = reader.push(final)
        if event.answer is not None:
            rest, others = reader.close()
            text, found = text + rest, [*found, *others]
        texts.append(text)
        calls += found
        answer = event.answer and replace(event.answer, text="".join(texts), tool_calls=tuple(calls))
        yield replace(event, text=text, answer=answer, tool_calls=tuple(found), revised_from=None, is_final=True)
