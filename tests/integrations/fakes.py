"""A runtime without a model that records what it is asked, waits where it is told to, and says what it is told."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.models.load import register_runtime
from cacheclip_rag.runtime.base import Message, TokenizedText
from cacheclip_rag.testing.fake import FakeRuntime

_numbers = itertools.count()


class Gate:
    """Holds whoever comes until it is opened; afterwards nobody."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self._opened.wait(10.0), "nobody opened the gate"

    def open(self) -> None:
        self._opened.set()


class Watched(FakeRuntime):
    """Attributes may be changed at any time: they hold for the next call."""

    def __init__(self, name: str = "fake", **options: Any) -> None:
        super().__init__(name, **options)
        self.prompts: list[str] = []
        """Text of every prompt that was answered, in order."""
        self.says: list[str] = []
        """Answers to the next prompts; without one, it answers as the fake does."""
        self.error: Exception | None = None
        """Raised by every prefill."""
        self.steps = 0
        """Tokens decoded after the first of each answer."""
        self.decoding, self.encoding = Gate(), Gate()
        """Before every such token, and before every chunk."""
        self.answering_threads: list[threading.Thread] = []
        self.encoding_threads: list[threading.Thread] = []
        self.tokenized: list[tuple[threading.Thread, str]] = []
        self.let_pass()

    def let_pass(self) -> None:
        self.decoding.open()
        self.encoding.open()

    def tokenize(self, text: str, *, control: bool = False) -> TokenizedText:
        self.tokenized.append((threading.current_thread(), text))
        return super().tokenize(text, control=control)

    def encode(self, ids: Sequence[int], context: torch.Tensor | None = None) -> torch.Tensor:
        self.encoding_threads.append(threading.current_thread())
        self.encoding.wait()
        return super().encode(ids, context)

    def prefill(self, ids: torch.Tensor, capacity: int) -> Any:
        self.answering_threads.append(threading.current_thread())
        self.prompts.append(self.decode_ids(ids.tolist()))
        if self.error is not None:
            raise self.error
        return super().prefill(ids, capacity)

    def answer_to(self, ids: Sequence[int]) -> str:
        return self.says.pop(0) if self.says else super().answer_to(ids)

    def decode_step(self, state: Any, token_id: int) -> torch.Tensor:
        self.steps += 1
        self.decoding.wait()
        return super().decode_step(state, token_id)


def watched(engine: CacheClipEngine) -> Watched:
    """The primary of an engine on fake models."""
    assert isinstance(engine.primary, Watched)
    return engine.primary


def turns(prompt: str) -> list[Message]:
    """The messages of a prompt, as the fake's chat template wrote them."""
    return [{"role": role, "content": text} for role, text in re.findall(r"\[(\w+)\] (.*?) \[end\]", prompt, re.DOTALL)]


def fake_models() -> dict[str, Any]:
    """A primary and an auxiliary of this call alone."""
    register_runtime("fake", Watched)
    number = next(_numbers)
    return {"primary": f"fake:model{number}", "auxiliary": f"fake:small{number}"}


def join_workers(before: set[threading.Thread]) -> None:
    """Wait for the threads that were not there before."""
    for thread in set(threading.enumerate()) - before - {threading.current_thread()}:
        while thread.ident is None:  # it is being started, and cannot be joined yet
            time.sleep(0.001)
        thread.join(10.0)
