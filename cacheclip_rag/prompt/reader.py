"""From what a user wrote to segments: chat template, system prompt, stored chunks found inside."""

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
"""Date in the shared prefix of a chat template that states today's: else every night would make all chunks misses."""


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads prompts for one model behind one system prompt."""

    runtime: Runtime
    system_prompt: str | None = None
    """None takes the chat template's default."""

    def segments(
        self, prompt: Prompt, texts: TextIndex, documents: Iterable[str] = (), *, date: str | None = None
    ) -> list[Segment]:
        """Cut a prompt into chunks and fresh text.

        Args:
            prompt: a string (one user message if the model has a chat template) or a list of messages. The system
                prompt comes before messages that hold none.
            texts: stored texts to look for.
            documents: chunk texts known to be in the prompt, stored or not.
            date: what a chat template that states the date writes, default today's.
        """
        runtime, own = self.runtime, self.system_prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else check_messages(prompt)
        if not runtime.has_chat_template:
            text = "\n\n".join(message["content"] for message in messages)
            return self._opening() + segment_text(text, texts, documents)
        if all(message["role"] != "system" for message in messages):
            messages = [*self._system_messages(), *messages]
        # the system prompt is prefix, whatever of it the store may hold
        return segment_chat(messages, self._render(date), texts, documents, verbatim=(own,) if own else ())

    def prefix_ids(self) -> list[int]:
        """Token ids of the shared prefix: the chat template's opening, up to the first word of the user."""
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
        """How the prompt of a model without a chat template opens: its BOS, then the system prompt."""
        opening = [Fresh(self.runtime.opening, control=True), Fresh(self.system_prompt or "")]
        return [segment for segment in opening if segment.text]
