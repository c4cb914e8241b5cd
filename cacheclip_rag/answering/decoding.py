"""From the first logits to the end of an answer: one token after the other is chosen, and their text is given as it
becomes final."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite

import torch

from ..base.clock import PhaseClock
from ..base.database import ANSWER_WAIT_S, waiting_at_most
from ..base.errors import ModelError, StoreError
from ..base.sampling import GREEDY_BELOW, NO_PENALTIES, SamplingParams
from ..fusion.answer import Answer, Event, TokenLogprob, Trace
from ..guards.base import Observer
from ..runtime.base import Constraint, Runtime
from .options import CallOptions
from .prefill import NextToken, Prefilled
from .text import TextStream
from .turns import Turns
from .verification import Beside, Continuation

logger = logging.getLogger(__name__)

_LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which is no number in JSON."""
_RESERVED_TOKENS = 512
"""Answer tokens for which a new cache has room. The cache grows if the answer gets longer."""


def decode(
    runtime: Runtime,
    prefilled: Prefilled,
    options: CallOptions,
    *,
    beside: Beside | None,
    turns: Turns,
    constraint: Constraint | None,
    text_of: Callable[[Sequence[int]], str],
    observers: Sequence[Observer],
) -> Iterator[Event]:
    """Decode the answer of a prefilled prompt; the last event carries the whole answer.

    Args:
        options: with ``logprobs``, what goes on beside the answer withdraws no token.
        beside: what goes on beside the answer; None: nothing.
        turns: one is taken for each computation of the model, and given back before an event is yielded.
        constraint: says which tokens may come next; not with verified finishing, which compares free choices.
        text_of: the answer's text from its token ids.
        observers: are told what there is of the answer if its reader leaves.

    An answer to a chat may begin with reasoning, unless a constraint says otherwise.
    """
    started, params, logprobs, stats = PhaseClock(), options.params, options.logprobs, prefilled.stats
    prefilled.keep_prefix(prefilled.cache)  # before decoding, so that concurrent requests can use it
    sampler = Sampler(params, prefilled.logits.device, constraint, prefilled.layout.ids, logprobs)
    prompt_end = prefilled.layout.generation_prompt if constraint is None else None
    streams = partial(TextStream, text_of, params.stop, prompt_end, runtime.reasoning_ends)
    answer = _Decoding(runtime, prefilled, params, sampler, beside or Beside(), turns, streams, started)
    del prefilled  # the answer drops its KV once it goes on from the exact KV
    has_left = False
    try:
        yield from answer.events()
    except GeneratorExit:  # its reader often asks the same again
        has_left = True
    assert has_left or answer.first_s is not None, "text stays at the latest when the answer was verified"
    first_s = started.elapsed() if answer.first_s is None else answer.first_s
    phases_s = {**stats.phases_s, "first": stats.phases_s["first"] + first_s}
    rest = answer.stream.flush()
    answer.prefilled.keep_prefix(answer.cache, answer.ids)
    if beside is not None and not has_left:
        stats = replace(stats, **beside.end(answer.ids))
    stats = replace(stats, ttft_s=stats.ttft_s + first_s, decode_s=started.elapsed() - first_s)
    stats = replace(stats, phases_s=phases_s, generated_tokens=len(answer.ids))
    logger.debug("answered: %s", stats)
    reason = "cancelled" if has_left else "stop" if answer.has_ended else "length"
    whole = Answer(
        answer.stream.text,
        tuple(answer.ids),
        reason,
        stats,
        None if answer.prefilled.trace is None else _traced(answer.prefilled.trace),
        reasoning=answer.reasoning + answer.stream.reasoning,
        logprobs=None if logprobs is None else _logprobs(sampler, runtime, text_of),
        stop_string=answer.stream.stopped_by,
    )
    for observer in observers if has_left else ():
        observer.on_cancelled(whole)
    if not has_left:
        yield Event(rest, whole, answer.stream.revised_from, reasoning=answer.stream.reasoning)


def _traced(trace: Callable[[], Trace]) -> Trace | None:
    """The trace; None if the store cannot say in time which texts it has: the answer is not lost."""
    try:
        with waiting_at_most(ANSWER_WAIT_S):
            return trace()
    except StoreError as error:
        logger.warning("an answer has no trace: %s", error)
        return None


def _logprobs(sampler: Sampler, runtime: Runtime, text_of: Callable[[Sequence[int]], str]) -> tuple[TokenLogprob, ...]:
    """What the sampler recorded, with texts and bytes."""
    recorded, before, known = list[TokenLogprob](), list[int](), ""
    for (token, logprob), *others in sampler.recorded:
        if token in runtime.eos_ids:
            break
        added = [text_of([*before, each]).removeprefix(known) for each in (token, *(each for each, _ in others))]
        text, encoded = _token_text(runtime, token, added[0])
        named = [_token_text(runtime, each, own, names=True) for (each, _), own in zip(others, added[1:], strict=True)]
        likeliest = tuple((each, value) for (each, _), (_, value) in zip(named, others, strict=True))
        recorded.append(TokenLogprob(text, logprob, likeliest, encoded, tuple(own for _, own in named)))
        before, known = [token], text_of([token])
    return tuple(recorded)


def _token_text(runtime: Runtime, token: int, text: str, *, names: bool = False) -> tuple[str, bytes | None]:
    """Text and bytes of a token. ``text``: what it adds to the token before it, because some tokenizers write the first
    token of a text in another way. A part of a character adds its bytes. ``names``: a token without text has its
    name."""
    encoded = runtime.token_bytes(token)
    is_part = encoded is None or "\ufffd" in (own := encoded.decode(errors="replace"))
    if is_part or (names and not text):
        return ("\ufffd" if encoded is None else own), encoded
    return text, text.encode()


@dataclass(eq=False)
class _Decoding:
    """An answer while it is decoded."""

    _runtime: Runtime
    prefilled: Prefilled
    _params: SamplingParams
    _sampler: Sampler
    _beside: Beside
    _turns: Turns
    _new_stream: Callable[[], TextStream]
    _clock: PhaseClock
    reasoning: str = ""
    """Reasoning that events have given."""
    has_ended: bool = False
    """Whether the last token, or a stop string, ends the answer."""

    def __post_init__(self) -> None:
        self.cache = self.prefilled.cache
        self.ids = [self._sampler.pick(self.prefilled.logits, self.prefilled.following)]
        self.stream = self._new_stream()
        self.first_s = None if self._beside.may_withdraw else self._clock.elapsed()
        """Seconds until there was a token that stays; None: none yet."""
        self._num_prompt = self.prefilled.layout.num_tokens
        self._most = min(self._params.max_tokens, self._runtime.context_tokens - self._num_prompt)

    def events(self) -> Iterator[Event]:
        """An event a token: the answer's text as it becomes final, but for what :meth:`TextStream.flush` holds."""
        while True:
            is_end = self.ids[-1] in self._runtime.eos_ids
            piece = "" if is_end else self.stream.push(self.ids[-1])
            self.has_ended = is_end or self.stream.stopped_by is not None
            may_withdraw = self._beside.may_withdraw
            reasoning = "" if may_withdraw else self.stream.reasoning
            revised_from, self.stream.revised_from = self.stream.revised_from, None
            if reasoning:
                self.reasoning, self.stream.reasoning = self.reasoning + reasoning, ""
            # also if the text waits: the first event ends the turn of a prompt, and at each one the reader may leave
            yield Event(piece, None, revised_from, not may_withdraw, reasoning=reasoning)
            if self._beside.asks_after:
                is_last = self.has_ended or len(self.ids) >= self._params.max_tokens
                if is_last and ((rest := self.stream.flush()) or self.stream.revised_from is not None):
                    yield Event(rest, None, self.stream.revised_from, not self._beside.may_withdraw)
                    self.stream.revised_from = None
                if self._settle():
                    continue
            if self.has_ended or len(self.ids) >= self._most:
                return
            self.ids.append(self._sampler.pick(self._next_logits()))

    def _settle(self) -> bool:
        """Let what is beside the answer go on. Returns whether the last token is another one now."""
        pinned = self._runtime.pinned_rope and self._num_prompt + len(self.ids) > self._runtime.reuse_tokens
        is_over = self.has_ended or len(self.ids) >= self._most
        with self._turns.token():
            exact = self._beside.after(self.ids, completely=is_over or pinned)
        if self.first_s is None and not self._beside.may_withdraw:
            self.first_s = self._clock.elapsed()
        if exact is None:
            return False
        self._go_on_from(exact)
        if exact.ids == self.ids:
            return False
        shown, self.ids, self.stream = self.stream, exact.ids, self._new_stream()
        self.stream.replay(self.ids[:-1], shown)
        return True

    def _go_on_from(self, exact: Continuation) -> None:
        self.cache = exact.state
        # frees the approximate KV
        self.prefilled = replace(self.prefilled, cache=exact.state, keeping=exact.keeping, continuing=None)
        self._most = min(self._params.max_tokens, self._runtime.context_tokens - self._num_prompt)

    def _next_logits(self) -> torch.Tensor:
        runtime, cache = self._runtime, self.cache
        # above this length, the model's rotary frequencies change: prefill again, as transformers' generate does
        if runtime.pinned_rope and cache.get_seq_length() == runtime.reuse_tokens:
            read = torch.cat((self.prefilled.layout.ids, torch.tensor(self.ids)))
            with self._turns.token():
                self.cache, logits = runtime.prefill(read, self._num_prompt + room_for(self._params))
            self._beside = Beside()  # all KV is exact now
            self.prefilled = replace(self.prefilled, continuing=None)  # and that of a longer prompt
            return logits
        logits = self._turns.step(runtime, cache, self.ids[-1])
        if not self._beside.asks_before or not self._beside.before(self.ids, self._sampler.allowed(logits)):
            return logits
        with self._turns.token():
            exact = self._beside.complete(self.ids)
        if exact is None:
            return logits
        self._go_on_from(exact[0])
        return exact[1]


class Sampler:
    """Picks the next token from logits."""

    def __init__(
        self,
        params: SamplingParams,
        device: torch.device,
        constraint: Constraint | None = None,
        prompt_ids: torch.Tensor | None = None,
        logprobs: int | None = None,
    ) -> None:
        """``prompt_ids``, ``(num_tokens,)``, count for ``repetition_penalty``. ``logprobs``: as in a call's options."""
        from transformers import (
            LogitsProcessorList,
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self._constraint, self._logprobs = constraint, logprobs
        self.recorded: list[list[tuple[int, float]]] = []
        """Of each token that was picked, if ``logprobs`` is set: the token and the likeliest ones, with logarithms of
        their probabilities."""
        self._greedy = params.temperature < GREEDY_BELOW or params.top_p == 0
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._params, self._has_penalty = params, penalties != NO_PENALTIES
        self._of_repetition = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
        self._read = torch.empty(0, dtype=torch.int64) if prompt_ids is None else prompt_ids
        self._num_prompt = len(self._read)
        self._warpers = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k:
            self._warpers.append(TopKLogitsWarper(params.top_k))
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

    def pick(self, logits: torch.Tensor, following: NextToken | None = None) -> int:
        """Token id chosen from ``(vocab_size,)`` logits. ``following``: what is known of them."""
        allowed = self.allowed(logits)
        if self._has_penalty:
            allowed = self._penalised(allowed.float())
        if following is not None and allowed is logits:
            likeliest, logit = following[1:]
        else:
            place = allowed.argmax(keepdim=True)
            number, logit = torch.cat((place, allowed.gather(0, place).float())).tolist()
            likeliest = int(number)
        if not isfinite(logit):  # the maximum of numbers of which one is none is none
            raise ModelError(
                "the model's logits are no numbers, or none is finite: weights or stored KV are damaged, or overflow "
                "in this dtype. Fetch the model again, run cacheclip store verify, or use dtype='float32'."
            )
        if self._greedy:
            token = likeliest
        else:
            scores = self._warpers(None, allowed.float()[None])
            token = int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))
        if self._logprobs is not None:
            self._record(logits, token, self._logprobs)
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._has_penalty:
            self._read = torch.cat((self._read, torch.tensor([token])))
        return token

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        """As vLLM does it: of the penalties, only that for repetition counts the prompt, and it is the first."""
        read = self._read.to(logits.device)
        logits = self._of_repetition(read[None], logits[None])[0]
        tokens, counts = read[self._num_prompt :].unique(return_counts=True)
        penalty = self._params.frequency_penalty * counts + self._params.presence_penalty
        return logits.index_add(0, tokens, -penalty.to(logits.dtype))

    def _record(self, logits: torch.Tensor, token: int, count: int) -> None:
        row = logits.float().log_softmax(-1).clamp(min=_LEAST_LOGPROB)
        likeliest = row.topk(min(count, len(row)))
        others = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        self.recorded.append([(token, float(row[token])), *others])


def room_for(params: SamplingParams) -> int:
    return min(params.max_tokens, _RESERVED_TOKENS)
