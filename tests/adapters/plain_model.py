"""The least that an adapter does: a model of the shared fields, and no framework."""

from typing import Any

from cacheclip_rag import Answer
from cacheclip_rag.adapters import EngineFields, ServedFields, final_events, last_answer


class PlainComponent(EngineFields):
    """A component that does not answer."""


class PlainModel(ServedFields):
    """A language model."""

    def events(self, prompt: Any, **options: Any) -> Any:
        return final_events(self._answering().stream(prompt, options=self._call_options(options)))

    def ask(self, prompt: Any, **options: Any) -> Answer:
        return last_answer(self.events(prompt, **options))

    def pieces(self, prompt: Any, **options: Any) -> list[str]:
        return [event.text for event in self.events(prompt, **options)]
