"""How a request is answered, from top to bottom::

    request -> segments -> plan (no tensors) -> prefill (fused, or plain if nothing is stored) -> first token -> decode

After the answer, missing chunks are stored. Several requests take turns (:mod:`cacheclip_rag.answering.turns`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import torch

from ..base.clock import PhaseClock
from ..base.database import ANSWER_WAIT_S, waiting_at_most
from ..base.errors import ConfigurationError
from ..base.sampling import is_greedy
from ..fusion.answer import Event
from ..guards.base import ObservedAnswer, Observer
from ..plan.plan import ROWS_FOR_EXACT_KV, Plan, least_computed, make_plan
from ..prompt.calls import parameters_of
from ..prompt.segments import Segment, as_segments, given_texts
from .completion import IdleCompletion
from .decoding import decode, room_for
from .options import Request
from .parts import Parts
from .prefill import Prefilled, Prefilling
from .text import read_calls
from .turns import Pause, turns_of
from .verification import CALL_CONFIDENCE, Gate, Verification
from .writer import ChunkWriter


class _PromptSegments(NamedTuple):
    """A request whose prompt was searched for stored texts."""

    request: Request
    prefilling: Prefilling
    segments: list[Segment]
    question: str | None
    """Text that scores the chunks; None: what stands after the last one."""
    documents: list[str]
    """Those of the call, normalised."""


@dataclass(frozen=True, slots=True)
class Answering:
    """Answers the requests of one engine."""

    parts: Parts
    writer: ChunkWriter
    observers: Sequence[Observer]
    completion: IdleCompletion = field(default_factory=IdleCompletion)

    def stream(self, request: Request) -> Iterator[Event]:
        """Stream the answer; the last event carries the whole answer. Raises ConfigurationError: options that cannot be
        combined."""
        options = request.options
        if options.params.json_schema and options.finishes:
            raise ConfigurationError(
                f"json_schema cannot be combined with finish={options.finish!r}, which compares the answer with what "
                "full prefill would choose without a schema. Set finish='none' for this call."
            )
        if options.logprobs is not None and options.finish == "revise":
            raise ConfigurationError(
                "logprobs cannot be combined with finish='revise', which replaces tokens of an answer. Set "
                "finish='none' for this call."
            )
        events = self._stream(request)
        return read_calls(events, parameters_of(options.tools)) if options.tools else events

    @torch.inference_mode()
    def _stream(self, request: Request) -> Iterator[Event]:
        with waiting_at_most(ANSWER_WAIT_S):
            # weights are loaded before the clock starts
            runtime, options = self.parts.kv_sources(request.method).primary.runtime, request.options
            schema = options.params.json_schema
            constraint = runtime.constrain(schema) if schema else None
            text_of = runtime.decode_calls if options.tools or runtime.marks_reasoning else runtime.decode_ids
            turns = turns_of(runtime)
            prompt = self._segment(request)  # before the turn: a long prompt holds up no other one
            kv_sources, generation = prompt.prefilling.kv_sources, prompt.prefilling.generation
        with turns.answer():
            # until the first token is there, whether or not its text waits
            with turns.prompt(lambda: self._work(prompt)) as pause:
                with waiting_at_most(ANSWER_WAIT_S):
                    plan, prefilled = self._plan_and_prefill(prompt, self.observers, pause)
                verification = _verification(prompt, prefilled)
                # finish completes the exact KV in any case, so that it needs no gate
                beside = (
                    verification
                    if verification is None or options.finishes
                    else Gate(verification, prefilled.min_confidence, plan.method.min_confidence)
                )
                logits, missing = prefilled.logits, prefilled.missing
                shares = kv_sources.shares_prefixes(plan.method, plan.layout)
                completes = options.finish == "idle" and not prefilled.is_exact and shares
                events = decode(
                    runtime,
                    prefilled,
                    options,
                    beside=beside,
                    turns=turns,
                    constraint=constraint,
                    text_of=text_of,
                    observers=self.observers,
                )
                del prefilled  # decoding drops its KV once it goes on from the exact KV
                events = chain((next(events),), events)
            for event in events:
                if event.answer is not None:
                    verified = None if verification is None else verification.result
                    answered = ObservedAnswer(plan, event.answer, options.params, logits, verified)
                    for observer in self.observers:
                        observer.on_answer(answered)
                    ids = [*plan.layout.token_ids, *event.answer.token_ids]
                    if completes:
                        self.completion.add(runtime, kv_sources.prompt_cache, ids, generation)
                    if kv_sources.stored_prompts is not None and shares:
                        kv_sources.stored_prompts.add(ids[:-1])
                        self.completion.add_step(runtime, kv_sources.stored_prompts.step)
                yield event
            if missing or self.writer.late:
                self.writer.store_missing(missing, request.prompt, options.documents, kv_sources.primary.context)

    def _work(self, prompt: _PromptSegments) -> int:
        """Number of tokens to compute of a prompt, as far as is known before others have left their KV. A few take as
        long as one."""
        with waiting_at_most(ANSWER_WAIT_S):
            plan, prompt_cache = self._plan(prompt), prompt.prefilling.kv_sources.prompt_cache
        plain = plan.layout.num_tokens - prompt_cache.known(plan.layout.token_ids[:-1])
        return max(ROWS_FOR_EXACT_KV, plain if plan.work is None else plan.work)

    def plan(self, request: Request) -> Plan:
        """Decide how to answer. Computes no tensor."""
        return self._plan(self._segment(request))

    def _plan(self, prompt: _PromptSegments) -> Plan:
        options, kv_sources = prompt.request.options, prompt.prefilling.kv_sources
        with prompt.prefilling.clock.phase("lookup"):
            plan = make_plan(
                prompt.segments,
                prompt.request.method,
                kv_sources,
                question=prompt.question,
                documents=prompt.documents,
                moves=options.moved != "off" and not self.parts.config.require_certificate,
            )
            if not plan.reused and not plan.moves:
                return plan
            timed = bool(options.auto_ratio and plan.reused)
            with kv_sources.match(plan.method, plan.layout, continued=True, moves=plan.moves and not timed) as match:
                plan, known = least_computed(plan, match.runs), match.num_exact
            if not timed or plan.continues or plan.bypass is not None:
                return plan
            decided = self.parts.controllers.decide(prompt.request.method, plan, kv_sources, known, options.max_ttft_s)
            if decided.bypass is None:  # an earlier prompt may have left KV at the ratio that is chosen now
                with kv_sources.match(decided.method, decided.layout, continued=True, moves=plan.moves) as match:
                    shorter = least_computed(decided, match.runs)
                if shorter.continues or shorter.bypass is not None:
                    return replace(shorter, prediction=None)
            return decided

    def _segment(self, request: Request) -> _PromptSegments:
        """Search a prompt for stored texts. Loads the method's models first, if they are not loaded."""
        options, prompt = request.options, request.prompt
        kv_sources = self.parts.kv_sources(request.method)
        generation, room = kv_sources.prompt_cache.generation, room_for(options.params)
        has_calls = bool(options.tools or options.params.json_schema) and self.parts.config.min_confidence is None
        least = CALL_CONFIDENCE if has_calls else 0.0
        prefilling = Prefilling(kv_sources, PhaseClock(), generation, room, options.trace, least)
        with prefilling.clock.phase("lookup"):
            documents, segments = given_texts(options.documents), as_segments(prompt)
            if segments is None:
                segments = self.parts.segment(
                    prompt,  # type: ignore[arg-type]
                    documents,
                    tools=options.tools,
                    variables=options.chat_template_kwargs,
                )
            question = options.question
            if question is None and not isinstance(prompt, str):
                messages = [message for message in prompt if isinstance(message, dict)]
                if messages and messages[-1]["role"] == "tool":
                    # after results of tools there is no question: it is the user's last message
                    question = next((m["content"] for m in reversed(messages) if m["role"] == "user"), None)
            return _PromptSegments(request, prefilling, segments, question, documents)

    @torch.inference_mode()
    def prefill_only(self, request: Request) -> Prefilled:
        """Prefill up to the first token's logits. Calls no observer and stores nothing."""
        prompt = self._segment(request)
        with turns_of(prompt.prefilling.kv_sources.primary.runtime).prompt():
            return self._plan_and_prefill(prompt, ())[1]

    def _plan_and_prefill(
        self, prompt: _PromptSegments, observers: Sequence[Observer], pause: Pause | None = None
    ) -> tuple[Plan, Prefilled]:
        clock = prompt.prefilling.clock
        clock.queued_s = clock.elapsed() - clock.seconds["lookup"]
        plan = self._plan(prompt)
        with clock.phase("lookup"):
            for observer in observers:
                plan = observer.on_plan(plan, prompt.prefilling.kv_sources) or plan
        prefilled = replace(prompt.prefilling, pause=pause).run(plan)
        if plan.prediction is not None:
            self.parts.controllers.observe(prompt.request.method, plan, prefilled.stats)
            prefilled = replace(prefilled, stats=replace(prefilled.stats, predicted_ttft_s=plan.prediction.seconds))
        return plan, prefilled


def _verification(prompt: _PromptSegments, prefilled: Prefilled) -> Verification | None:
    """What completes the exact KV while the answer is decoded; None if neither ``finish`` nor a confidence gate asks
    for it, the KV is exact already, or the runtime cannot."""
    kv_sources, options, layout = prompt.prefilling.kv_sources, prompt.request.options, prefilled.layout
    runtime = kv_sources.primary.runtime
    asked = options.finishes or prefilled.min_confidence > 0
    if not asked or not runtime.can_extend or prefilled.is_exact:
        return None
    # the exact KV is that of plain prefill: the prefix cache takes and gives it even if the method uses no prefixes
    known = list(layout.token_ids[:-1]) if runtime.keeps_prefixes else []
    return Verification(
        runtime=runtime,
        ids=layout.ids,
        capacity=layout.num_tokens + prompt.prefilling.answer_tokens,
        find_match=lambda: kv_sources.prompt_cache.match(known),
        keeping=prompt.prefilling.keep_exact() if runtime.keeps_prefixes else None,
        is_greedy=is_greedy(options.params),
        revises=options.finish == "revise",
    )
