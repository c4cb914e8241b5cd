"""Turns token ids into text as soon as the text is final: unfinished characters and stop strings wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["TextStream"]

_UNFINISHED = "\ufffd"
"""What an unfinished character decodes to."""


class TextStream:
    """Turns token ids into text as soon as the text is final.

    Bytes of an unfinished character, and characters that may begin a stop string, wait for the next token. A token
    costs the same however long the text is: only the tokens since the text was last whole, and the ones just before
    them, are decoded. The tokens before are there because some tokenizers write a text's first token in another way.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._longest = max((len(s) for s in self._stop), default=0)
        self._ids: list[int] = []
        """Tokens that are decoded: some before, whose text is known, then those since the text was last whole."""
        self._before = 0
        self._known = ""
        """Text of the tokens before."""
        self._held = ""
        """Text that was whole when it was last looked at, and waits: it may begin a stop string."""
        self._pieces: list[str] = []
        """Text that became final."""
        self._rest = ""
        """What was held, and the text of the tokens after it."""
        self._sent = 0
        """Characters of the rest that became final."""
        self.stopped = False
        """True once a stop string has appeared."""

    @property
    def text(self) -> str:
        """All text so far, stop string excluded. It is put together each time."""
        return "".join(self._pieces) + self._rest[self._sent :]

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that became final (may be empty)."""
        self._ids.append(token_id)
        new = self._decode(self._ids)[len(self._known) :]
        self._rest = self._held + new
        found = [at for s in self._stop if (at := self._rest.find(s)) >= 0]  # in final text, none can begin
        if found:
            self.stopped = True
            self._rest = self._rest[: min(found)]
            return self.flush()
        certain = new.rstrip(_UNFINISHED)
        end = len(self._rest) - len(new) + len(certain)
        piece = self._release(end - self._may_begin_stop(end))
        if new and len(certain) == len(new):
            self._held = self._rest = self._rest[self._sent :]
            self._sent = 0
            self._ids, self._before = self._ids[self._before :], len(self._ids) - self._before
            self._known = self._decode(self._ids)
        return piece

    def flush(self) -> str:
        """The remaining text, after the last token."""
        return self._release(len(self._rest))

    def _release(self, end: int) -> str:
        piece = self._rest[self._sent : end]
        self._pieces.append(piece)
        self._sent = max(self._sent, end)
        return piece

    def _may_begin_stop(self, end: int) -> int:
        """Length of the longest piece of the rest before ``end`` that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, end), 0, -1):
            if any(s.startswith(self._rest[end - length : end]) for s in self._stop):
                return length
        return 0
