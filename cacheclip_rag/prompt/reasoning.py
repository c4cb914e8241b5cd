"""Reasoning in an answer: what a model writes for itself, between markers, before it says something."""

from __future__ import annotations

import re

from ..runtime.markers import REASONING_MARKERS

_NEXT, _TEXT = "<|start|>assistant", "<|channel|>final<|message|>"
"""Between messages of an answer in channels, and before the one that is its text."""
OPENINGS = tuple(opening for opening, _ in REASONING_MARKERS)
"""Markers before reasoning."""


def may_begin(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of ``text`` that may begin one of the ``markers``, but is none."""
    longest = max(map(len, markers), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(marker.startswith(text[-n:]) for marker in markers)), 0)


def split_channels(text: str) -> tuple[str, str]:
    """Reasoning and text of an earlier answer in channels, whose template refuses their markers; an answer without them
    is text."""
    if not text.lstrip().removeprefix(_NEXT).startswith("<|channel|>"):
        return "", text
    reader = ReasoningReader()
    (reasoning, said), (last, rest) = reader.push(text), reader.close()
    return reasoning + last, (said + rest).removesuffix(_NEXT)


class ReasoningReader:
    """Separates reasoning from an answer's text while it is written.

    Reasoning stands at the beginning of an answer. The chat template may have written its opening marker. White space
    around reasoning belongs to neither. Markers after the first word of the text are text: models explain them. What a
    model of channels says before its calls, in the channel of commentary, is reasoning. A closing marker in backticks
    closes nothing.
    """

    def __init__(self, prompt_end: str = "") -> None:
        """``prompt_end``: what the chat template wrote before the answer."""
        self._held = ""
        self._closing = ""
        """The marker that ends the reasoning; empty outside."""
        self._opening = ""
        """The marker before the reasoning whose first word has not come yet."""
        self._last = ""
        """The last character of the reasoning so far."""
        self.has_ended = False
        """Whether the text has begun."""
        self.has_reasoned = False
        """Whether reasoning has ended."""
        prompt_end = prompt_end.rstrip()
        for opening, closing in REASONING_MARKERS:
            if prompt_end.endswith(opening):
                self._opening, self._closing = opening, closing

    def push(self, text: str) -> tuple[str, str]:
        """Add text; returns the reasoning and the text that are certain."""
        return self._read(text, last=False)

    def close(self) -> tuple[str, str]:
        return self._read("", last=True)

    def _read(self, text: str, *, last: bool) -> tuple[str, str]:
        self._held += text
        reasoning = ""
        while not self.has_ended:
            if self._closing:
                piece, goes_on = self._inside(last)
            else:
                piece, goes_on = "", self._outside(last)
            reasoning += piece
            if not goes_on:
                return reasoning, ""
        text, self._held = self._held, ""
        return reasoning, text

    def _inside(self, last: bool) -> tuple[str, bool]:
        """Reasoning up to its closing marker, and whether the marker has come."""
        lead = ""
        if self._opening:
            self._held = self._held.lstrip()
            while self._held.startswith(self._opening):  # written once more, after the template's
                self._held = self._held.removeprefix(self._opening).lstrip()
            if not last and self._opening.startswith(self._held):
                return "", False
            if self._held:
                lead, self._opening = "\n\n" if self.has_reasoned else "", ""
        closing = re.escape(self._closing)
        closed = re.search(f"(?<!`){closing}|{closing}(?!`)", self._last + self._held)
        end = len(self._held) - (0 if last else may_begin(self._held, (self._closing,)))
        if closed is not None:
            end = closed.start() - len(self._last)
            if not last and closed.string.endswith(f"`{self._closing}") and closed.end() == len(closed.string):
                closed = None  # another backtick may come
        piece = self._held[:end].rstrip()
        self._last = piece[-1:] or self._last
        if closed is not None:
            self._held, self._closing, self._opening = closed.string[closed.end() :], "", ""
            self._last, self.has_reasoned = "", True
        else:
            self._held = "" if last else self._held[len(piece) :]
        return lead + piece if piece else "", closed is not None

    def _outside(self, last: bool) -> bool:
        """Look for an opening marker. Returns whether it is certain what the answer goes on with."""
        rest = self._held.lstrip()
        after = rest.removeprefix(_NEXT)
        if after.startswith(_TEXT):
            self._held = after[len(_TEXT) :]
            self.has_ended = True
            return True
        for opening, closing in REASONING_MARKERS:
            if after.startswith(opening):
                self._held, self._opening, self._closing = after[len(opening) :], opening, closing
                return True
        if not last and any(text.startswith(after) for text in (*OPENINGS, _TEXT)):  # also if there is no text yet
            return False
        if not last and _NEXT.startswith(rest):
            return False
        self._held = rest if self.has_reasoned else self._held
        self.has_ended = True
        return True
