"""From a user's prompt to segments: applies the chat template and system prompt, and finds stored chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..types import Message, Prompt
from .segments import Fresh, Segment, check_messages, segment_chat, segment_text

if TYPE_CHECKING:
    from ..runtime.base import Runtime
    from ..store import TextIndex

__all__ = ["PromptReader"]

_PREFIX_DATE = "01 Jan 2025"
"""Date in the shared prefix, for chat templates that state the date. With today's date, all chunks would become misses
every night."""


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads prompts for one model and one system prompt."""

    runtime: Runtime
    system_prompt: str | None = None
    """None: the chat template's default system prompt."""

    def segments(
        self, prompt: Prompt, texts: TextIndex, documents: Iterable[str] = (), *, date: str | None = None
    ) -> list[Segment]:
        """Cut a prompt into chunks and fresh text.

        Args:
            prompt: a string (one user message if the model has a chat template) or a list of messages. The system
                prompt is added to messages without one.
            texts: stored texts to find.
            documents: chunk texts known to be in the prompt, stored or not.
            date: for chat templates that state the date; default today.
        """
        runtime, own = self.runtime, self.system_prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else check_messages(prompt)
        if not runtime.has_chat_template:
            text = "\n\n".join(message["content"] for message in messages)
            return self._opening() + segment_text(text, texts, documents)
        if all(message["role"] != "system" for message in messages):
            messages = [*self._system_messages(), *messages]
        # the system prompt belongs to the prefix: do not search it for chunks
        return segment_chat(messages, self._render(date), texts, documents, verbatim=(own,) if own else ())

    def prefix_ids(self) -> list[int]:
        """Token ids of the shared prefix: the chat template's text up to the user's first word."""
        content = "\u2063"
        opening = self._opening()
        if self.runtime.has_chat_template:
            messages = [*self._system_messages(), {"role": "user", "content": content}]
            segments = segment_chat(messages, self._render(_PREFIX_DATE), None)  # stored texts do not change it
            opening = segments[: segments.index(Fresh(content))]
        return [token for s in opening for token in self.runtime.tokenize(s.text, control=s.control).ids]

    def _render(self, date: str | None) -> Callable[[Iterable[Message]], str]:
        return lambda messages: self.runtime.render_chat(list(messages), date=date)

    def _system_messages(self) -> list[Message]:
        return [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []

    def _opening(self) -> list[Segment]:
        """First segments of a prompt without a chat template: BOS, then the system prompt."""
        opening = [Fresh(self.runtime.opening, control=True), Fresh(self.system_prompt or "")]
        return [segment for segment in opening if segment.text]
