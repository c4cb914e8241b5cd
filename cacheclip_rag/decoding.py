"""Choosing tokens and turning them into text: sampling, stop strings, streaming detokenisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .sampling import SamplingParams

__all__ = ["Sampler", "TextStream", "is_greedy"]


_GREEDY_BELOW = 1e-5
"""Temperatures below this overflow float32 logits, and choose the likeliest token anyway."""


def is_greedy(params: SamplingParams) -> bool:
    """Whether these settings always choose the likeliest token."""
    return params.temperature < _GREEDY_BELOW


class Sampler:
    """Picks the next token from logits."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

        self._greedy = is_greedy(params)
        self._warpers = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(params.top_p))
        self._generator = torch.Generator(device=device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def pick(self, logits: torch.Tensor) -> int:
        """Token id chosen from ``(vocab_size,)`` logits."""
        if self._greedy:
            return int(logits.argmax())
        scores = self._warpers(None, logits.float()[None])
        return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))


class TextStream:
    """Token ids in, text out, as soon as the text is certain.

    Held back are bytes of an unfinished character and characters that may begin a stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._sent = 0
        self.text = ""
        """All text so far, stop string excluded."""
        self.stopped = False
        """True once a stop string has appeared."""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is now certain (may be empty)."""
        self._ids.append(token_id)
        self.text = self._decode(self._ids)
        found = [at for s in self._stop if (at := self.text.find(s)) >= 0]
        if found:
            self.stopped = True
            self.text = self.text[: min(found)]
            return self._release(len(self.text))
        certain = self.text[: len(self.text.rstrip("\ufffd"))]  # an unfinished character decodes to U+FFFD
        return self._release(len(certain) - self._may_begin_stop(certain))

    def flush(self) -> str:
        """The rest, once no token follows."""
        return self._release(len(self.text))

    def _release(self, end: int) -> str:
        piece = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _may_begin_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-length:]) for s in self._stop):
                return length
        return 0
