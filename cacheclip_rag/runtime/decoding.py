"""From the first logits to the end of the answer: sampling, stop strings, streaming detokenisation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..clock import PhaseClock
from ..sampling import SamplingParams
from ..types import Answer, Event

if TYPE_CHECKING:
    from .base import Constraint, Runtime
    from .prefill import Prefilled
    from .verification import Verification

__all__ = ["LogitsObserver", "Sampler", "TextStream", "decode", "is_greedy", "room_for"]

logger = logging.getLogger(__name__)

_RESERVED_TOKENS = 512
"""Answer tokens for which a new cache has room. The cache grows if the answer gets longer."""
LogitsObserver = Callable[[torch.Tensor, int], None]
"""Called with ``(vocab_size,)`` logits and the token id chosen from them."""

_UNFINISHED = "\ufffd"
"""What an unfinished character decodes to."""
_GREEDY_BELOW = 1e-5
"""Lower temperatures would overflow float32 logits; they choose the likeliest token anyway."""


def is_greedy(params: SamplingParams) -> bool:
    """Whether these settings always choose the likeliest token."""
    return params.temperature < _GREEDY_BELOW


class Sampler:
    """Picks the next token from logits."""

    def __init__(
        self,
        params: SamplingParams,
        device: torch.device,
        observe: LogitsObserver | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

        self._observe = observe
        self._constraint = constraint
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
        token = self._choose(logits if self._constraint is None else self._constraint.allowed(logits))
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._observe is not None:
            self._observe(logits, token)
        return token

    def _choose(self, logits: torch.Tensor) -> int:
        if self._greedy:
            return int(logits.argmax())
        scores = self._warpers(None, logits.float()[None])
        return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))


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
        self._whole = ""
        """All text up to where it was last whole."""
        self._sent = 0
        self.text = ""
        """All text so far, stop string excluded."""
        self.stopped = False
        """True once a stop string has appeared."""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that became final (may be empty)."""
        self._ids.append(token_id)
        new = self._decode(self._ids)[len(self._known) :]
        start = max(0, len(self._whole) - self._longest + 1)
        self.text = self._whole + new
        found = [at for s in self._stop if (at := self.text.find(s, start)) >= 0]
        if found:
            self.stopped = True
            self.text = self.text[: min(found)]
            return self._release(len(self.text))
        certain = new.rstrip(_UNFINISHED)
        if new and len(certain) == len(new):
            self._whole = self.text
            self._ids, self._before = self._ids[self._before :], len(self._ids) - self._before
            self._known = self._decode(self._ids)
        end = len(self.text) - len(new) + len(certain)
        return self._release(end - self._may_begin_stop(end))

    def flush(self) -> str:
        """The remaining text, after the last token."""
        return self._release(len(self.text))

    def _release(self, end: int) -> str:
        piece = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _may_begin_stop(self, end: int) -> int:
        """Length of the longest piece of the text before ``end`` that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, end), 0, -1):
            if any(s.startswith(self.text[end - length : end]) for s in self._stop):
                return length
        return 0


def room_for(params: SamplingParams) -> int:
    """Answer tokens for which a new cache gets room."""
    return min(params.max_tokens, _RESERVED_TOKENS)


def decode(
    runtime: Runtime,
    prefilled: Prefilled,
    params: SamplingParams,
    observe: LogitsObserver | None = None,
    verification: Verification | None = None,
    turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    constraint: Constraint | None = None,
    text_of: Callable[[Sequence[int]], str] | None = None,
) -> Iterator[Event]:
    """Decode the answer of a prefilled prompt; the last event carries the whole answer.

    Args:
        verification: completes the prompt's exact KV between two tokens, and verifies the answer.
        turn: taken for each computation of the model, and given back before an event is yielded.
        constraint: says which tokens may come next; not with ``verification``, which compares free choices.
        text_of: the answer's text from its token ids; default the runtime's ``decode_ids``.
    """
    cache, num_tokens = prefilled.cache, prefilled.layout.num_tokens
    started = PhaseClock()
    prefilled.keep_prefix(cache)  # before decoding, so that concurrent requests can use it
    most = min(params.max_tokens, runtime.context_tokens - cache.position_of(num_tokens))
    text_of = text_of or runtime.decode_ids
    sampler = Sampler(params, prefilled.logits.device, observe, constraint)
    stream = TextStream(text_of, params.stop)
    token = sampler.pick(prefilled.logits)
    stats = replace(prefilled.stats, ttft_s=prefilled.stats.ttft_s + started.elapsed())
    ids = [token]
    revised_from = None
    while True:
        ended = token in runtime.eos_ids
        if not ended:
            piece = stream.push(token)
            ended = stream.stopped
            if piece or revised_from is not None:
                yield Event(piece, None, revised_from, verification is None or not verification.may_revise)
                revised_from = None
        is_over = ended or len(ids) >= most
        # the model's rotary frequencies change at this length
        repeats = runtime.pinned_rope and cache.position_of(cache.get_seq_length()) == runtime.reuse_tokens
        if verification is not None and not verification.is_settled:
            if (ended or len(ids) >= params.max_tokens) and (rest := stream.flush()):
                yield Event(rest, is_final=not verification.may_revise)
            is_last_chance = runtime.pinned_rope and num_tokens + len(ids) > runtime.reuse_tokens
            with turn():
                resumed = verification.advance(ids, completely=is_over or is_last_chance)
            if resumed is not None:
                cache = resumed.state
                prefilled = replace(prefilled, cache=cache, keeping=verification.keeping)  # frees the approximate KV
                most = min(params.max_tokens, runtime.context_tokens - num_tokens)
                if resumed.ids != ids:
                    ids = resumed.ids
                    token, stream = ids[-1], TextStream(text_of, params.stop)
                    revised_from = sum(len(stream.push(each)) for each in ids[:-1])
                    continue
                is_over = ended or len(ids) >= most
                repeats = runtime.pinned_rope and cache.get_seq_length() == runtime.reuse_tokens
        if is_over:
            break
        with turn():
            if repeats:  # prefill again, as transformers' generate does
                read = torch.cat((prefilled.layout.ids, torch.tensor(ids)))
                cache, logits = runtime.prefill(read, num_tokens + room_for(params))
            else:
                logits = runtime.decode_step(cache, token)
        token = sampler.pick(logits)
        ids.append(token)
    rest = stream.flush()
    prefilled.keep_prefix(cache, ids)
    if verification is not None:
        verification.finish(ids)
        stats = replace(stats, **verification.stats(ids))
    stats = replace(stats, generated_tokens=len(ids), decode_s=started.elapsed())
    logger.debug("answered: %s", stats)
    answer = Answer(stream.text, tuple(ids), "stop" if ended else "length", stats, prefilled.trace)
    yield Event(rest, answer, revised_from)
