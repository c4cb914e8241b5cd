"""From the first logits to the end of the answer: sampling, stop strings, streaming detokenisation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..clock import PhaseClock
from ..sampling import SamplingParams
from ..types import Answer, Event

if TYPE_CHECKING:
    from .base import Constraint, Runtime, State
    from .prefill import Prefilled
    from .verification import Verification

__all__ = ["LogitsObserver", "Sampler", "TextStream", "Watch", "confidence", "decode", "is_greedy", "room_for"]

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


def confidence(logits: torch.Tensor) -> float:
    """How sure a model is of its next token, from ``(vocab_size,)`` logits: probability of the likeliest token minus
    that of the second, 0 to 1."""
    first, second = logits.float().softmax(-1).topk(2).values
    return float(first - second)


@dataclass(frozen=True, slots=True)
class Watch:
    """Has the exact KV completed before the first token of which the model is unsure."""

    verification: Verification
    """Completes it. Must not have been used."""
    min_confidence: float
    """As in :class:`~cacheclip_rag.methods.base.Method`."""


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

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of tokens that may come next; others are at minus infinity."""
        return logits if self._constraint is None else self._constraint.allowed(logits)

    def pick(self, logits: torch.Tensor) -> int:
        """Token id chosen from ``(vocab_size,)`` logits."""
        token = self._choose(self.allowed(logits))
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
    watch: Watch | None = None,
) -> Iterator[Event]:
    """Decode the answer of a prefilled prompt; the last event carries the whole answer.

    Args:
        verification: completes the prompt's exact KV between two tokens, and verifies the answer.
        turn: taken for each computation of the model, and given back before an event is yielded.
        constraint: says which tokens may come next; not with ``verification``, which compares free choices.
        text_of: the answer's text from its token ids; default the runtime's ``decode_ids``.
        watch: looks at every token after the first; not with ``verification``, which completes the exact KV in any
            case.
    """
    started = PhaseClock()
    prefilled.keep_prefix(prefilled.cache)  # before decoding, so that concurrent requests can use it
    sampler = Sampler(params, prefilled.logits.device, observe, constraint)
    answer = _Answer(runtime, prefilled, params, sampler, verification, turn, text_of or runtime.decode_ids, watch)
    del prefilled  # the answer drops its KV once it goes on from the exact KV
    stats = replace(answer.prefilled.stats, ttft_s=answer.prefilled.stats.ttft_s + started.elapsed())
    yield from answer.events()
    rest = answer.stream.flush()
    answer.prefilled.keep_prefix(answer.cache, answer.ids)
    if verification is not None:
        verification.finish(answer.ids)
        stats = replace(stats, **verification.stats(answer.ids))
    elif watch is not None:
        stats = replace(stats, completed_at=answer.completed_at, verify_s=watch.verification.seconds)
    stats = replace(stats, generated_tokens=len(answer.ids), decode_s=started.elapsed())
    logger.debug("answered: %s", stats)
    reason = "stop" if answer.has_ended else "length"
    whole = Answer(answer.stream.text, tuple(answer.ids), reason, stats, answer.prefilled.trace)
    yield Event(rest, whole, answer.revised_from)


class _Answer:
    """An answer while it is decoded."""

    def __init__(
        self,
        runtime: Runtime,
        prefilled: Prefilled,
        params: SamplingParams,
        sampler: Sampler,
        verification: Verification | None,
        turn: Callable[[], AbstractContextManager[None]],
        text_of: Callable[[Sequence[int]], str],
        watch: Watch | None,
    ) -> None:
        self.prefilled = prefilled
        self.cache = prefilled.cache
        self.ids = [sampler.pick(prefilled.logits)]
        self.stream = TextStream(text_of, params.stop)
        self.has_ended = False
        """Whether the last token, or a stop string, ends the answer."""
        self.revised_from: int | None = None
        """Characters of the text that stay, if the rest was withdrawn and no event has said so yet."""
        self.completed_at: int | None = None
        """Number of the token before which the watch had the exact KV completed."""
        self._runtime, self._params, self._sampler = runtime, params, sampler
        self._watch = watch
        self._verification, self._turn, self._text_of = verification, turn, text_of
        self._num_prompt = prefilled.layout.num_tokens
        self._most = min(params.max_tokens, runtime.context_tokens - self.cache.position_of(self._num_prompt))

    def events(self) -> Iterator[Event]:
        """The answer's text as it becomes final, but for what :meth:`TextStream.flush` holds."""
        while True:
            yield from self._read_last()
            if self._verification is not None and not self._verification.is_settled:
                if self._is_last_token and (rest := self.stream.flush()):
                    yield Event(rest, is_final=not self._verification.may_revise)
                if self._verify(self._verification):
                    continue
            if self.has_ended or len(self.ids) >= self._most:
                return
            self._choose_next()

    @property
    def _is_last_token(self) -> bool:
        return self.has_ended or len(self.ids) >= self._params.max_tokens

    def _read_last(self) -> Iterator[Event]:
        """Turn the last token into text."""
        self.has_ended = self.ids[-1] in self._runtime.eos_ids
        if self.has_ended:
            return
        piece = self.stream.push(self.ids[-1])
        self.has_ended = self.stream.stopped
        if piece or self.revised_from is not None:
            is_final = self._verification is None or not self._verification.may_revise
            yield Event(piece, None, self.revised_from, is_final)
            self.revised_from = None

    def _verify(self, verification: Verification) -> bool:
        """Complete the exact KV by a block, or wholly if no token waits for it. Returns whether the last token is
        another one now."""
        pinned = self._runtime.pinned_rope and self._num_prompt + len(self.ids) > self._runtime.reuse_tokens
        is_over = self.has_ended or len(self.ids) >= self._most
        with self._turn():
            resumed = verification.advance(self.ids, completely=is_over or pinned)
        if resumed is None:
            return False
        self._go_on_from(resumed.state, verification)
        if resumed.ids == self.ids:
            return False
        self.ids, self.stream = resumed.ids, TextStream(self._text_of, self._params.stop)
        self.revised_from = sum(len(self.stream.push(token)) for token in self.ids[:-1])
        return True

    def _go_on_from(self, exact: State, verification: Verification) -> None:
        self.cache = exact
        self.prefilled = replace(self.prefilled, cache=exact, keeping=verification.keeping)  # frees approximate KV
        self._most = min(self._params.max_tokens, self._runtime.context_tokens - self._num_prompt)

    def _watched(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of the next token: those of the exact KV if the model is unsure, and from then on."""
        watch = self._watch
        if watch is None or confidence(self._sampler.allowed(logits)) >= watch.min_confidence:
            return logits
        self._watch = None
        completed = watch.verification.complete(self.ids)
        if completed is None:
            return logits
        exact, logits = completed
        self._go_on_from(exact, watch.verification)
        self.completed_at = len(self.ids)
        return logits

    def _choose_next(self) -> None:
        runtime, cache = self._runtime, self.cache
        with self._turn():
            # above this length, the model's rotary frequencies change: prefill again, as transformers' generate does
            if runtime.pinned_rope and cache.position_of(cache.get_seq_length()) == runtime.reuse_tokens:
                read = torch.cat((self.prefilled.layout.ids, torch.tensor(self.ids)))
                self.cache, logits = runtime.prefill(read, self._num_prompt + room_for(self._params))
                self._watch = None
            else:
                logits = self._watched(runtime.decode_step(cache, self.ids[-1]))
        self.ids.append(self._sampler.pick(logits))
