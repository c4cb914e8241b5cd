"""What a server needs of the engine behind it. vLLM is no such backend: its own server answers
(:mod:`cacheclip_vllm`)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from cacheclip_rag import CallOptions, ConfigurationError, Event
from cacheclip_rag.runtime import Message


@dataclass(frozen=True, slots=True)
class ServedQuestion:
    """One question, checked."""

    prompt: str | Sequence[Message]
    """A text, which is read as it stands, or messages for the chat template."""
    tenant: str
    options: CallOptions
    min_confidence: float | None = None
    """The client's least confidence of the first token."""
    one_call: bool = False
    """Whether calls of tools after the first are left out."""
    in_background: bool = False
    """Whether it waits behind other questions."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What ``/v1/models`` says of the model."""

    context_tokens: int
    uses_tools: bool
    """Whether its chat template writes tools."""
    can_constrain: bool
    """Whether answers can follow a JSON schema."""
    variables: frozenset[str] = frozenset()
    """Variables that the chat template reads, beside messages and tools."""
    most_kv_bytes: float = math.inf
    """Bytes of KV that running answers may hold together."""


class ServingBackend(ABC):
    """Answers questions. All methods but :meth:`answer` block."""

    @abstractmethod
    def start(self) -> ModelCard:
        """Load what the first answer needs."""

    @abstractmethod
    def answer(self, question: ServedQuestion) -> AsyncGenerator[Event, None]:
        """Events of an answer, none of which withdraws text; the last one has the whole answer. Closing the generator
        stops the answer."""

    def kv_bytes(self, question: ServedQuestion) -> int:
        """About how many bytes of KV the answer needs. 0: the backend sees to it itself."""
        return 0

    def work_tokens(self, question: ServedQuestion) -> int:
        """About how many tokens the question's prompt has, by which short ones pass long ones. 0: the first that comes
        is the first."""
        return 0

    @abstractmethod
    def count_tokens(self, question: ServedQuestion) -> int:
        """Tokens of the question's prompt."""

    def why(self, question: ServedQuestion, text: str) -> str:
        """Why a text of the question's prompt was not found in the store."""
        return "This backend does not say why."

    def learn(self, tenant: str, text: str) -> None:
        """Store a text for a tenant. Raises ConfigurationError: the backend cannot."""
        raise ConfigurationError("this backend stores no texts that are not given with a request.")

    @abstractmethod
    def metrics(self) -> str:
        """Counters in Prometheus' text format."""

    @abstractmethod
    def close(self) -> None:
        """Free what :meth:`start` took. No answer is running."""
