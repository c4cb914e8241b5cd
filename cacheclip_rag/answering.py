"""How a request is answered, from top to bottom::

    request -> segments -> plan (no tensors) -> prefill (fused, or plain if nothing is stored) -> first token -> decode

After the answer, missing chunks are stored. Several requests take turns (:mod:`cacheclip_rag.runtime.turns`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from .chunks.sources import Sources
from .chunks.writer import ChunkWriter
from .clock import PhaseClock
from .errors import ConfigurationError
from .guards.base import Answered, Observer
from .methods.base import Method
from .methods.composition import Composition, count_chunks
from .parts import PREFIX, Parts
from .plan.controller import Controller
from .plan.planner import count_absent, make_plan
from .prompt.calls import parameters_of, read_calls
from .prompt.segments import Chunk, Segment, as_segments, given_texts
from .runtime.decoding import LogitsObserver, Watch, decode, is_greedy, room_for
from .runtime.prefill import Keeping, Prefilled, prefill
from .runtime.turns import Turns, turns_of
from .runtime.verification import Verification
from .sampling import SamplingParams
from .types import Event, Plan, Request

__all__ = ["Answering"]


@dataclass(frozen=True, slots=True)
class Answering:
    """Answers the requests of one engine."""

    parts: Parts
    writer: ChunkWriter
    observers: Sequence[Observer]

    @property
    def turns(self) -> Turns:
        """The turns of the primary model, which are those of all engines that use it. Loads the model."""
        return turns_of(self.parts.prefix_caches.runtime)

    def stream(self, request: Request) -> Iterator[Event]:
        """Stream the answer; the last event carries the whole answer."""
        _check(request)
        events = self._stream(request)
        return read_calls(events, parameters_of(request.tools)) if request.tools else events

    @torch.inference_mode()
    def _stream(self, request: Request) -> Iterator[Event]:
        assert request.method is not None, "an engine chooses a method before it answers"
        if request.method.composes:
            yield from self._compose(request)
            return
        sources = self.parts.sources(request.method)  # weights are loaded before the clock starts
        runtime, schema = sources.primary.runtime, request.params.json_schema
        constraint = runtime.constrain(schema) if schema else None
        text_of = runtime.decode_calls if request.tools else None
        clock = PhaseClock()
        with self.turns.prompt():  # until the first token is there
            plan, prefilled = self._prefill(request, sources, clock, self.observers)
            exact = _exact(request, plan.method, sources, prefilled)
            finishes = request.finish != "none"
            logits, missing = prefilled.logits, prefilled.missing
            events = decode(
                runtime,
                prefilled,
                request.params,
                verification=exact if finishes else None,
                turn=self.turns.token,
                constraint=constraint,
                text_of=text_of,
                watch=None if exact is None or finishes else Watch(exact, plan.method.min_confidence),
            )
            del prefilled  # decoding drops its KV once it goes on from the exact KV
            events = _begun(events)
        for event in events:
            if event.answer is not None:
                verified = None if exact is None else exact.result
                self._observe(Answered(plan, event.answer, request.params, logits, verified))
            yield event
        self.writer.store_missing(missing, request.documents, sources.primary.context)

    def plan(self, request: Request, sources: Sources, clock: PhaseClock) -> Plan:
        """Decide how to answer. Computes no tensor."""
        with clock.phase("lookup"):
            given = given_texts(request.documents)
            segments = self._segments(request, given, parts=not sources.primary.context.isolated)
            plan = make_plan(segments, request.method, sources, question=_question(request), given=given)
            controller = self._controller(request)
            if controller is None or not plan.reused:
                return plan
            known = sources.known_tokens(plan)
            reading = controller.profile.reading(plan, sources, known)
            return controller.decide(plan, known, request.max_ttft_s, reading)

    def _controller(self, request: Request) -> Controller | None:
        """What chooses the recompute ratio of a request that asks for it; None without a profile."""
        if not request.auto_ratio or request.method is None or not request.method.reuses_chunks:
            return None
        return None if request.method.captures else self.parts.controller(request.method)

    @torch.inference_mode()
    def prefill(self, request: Request, clock: PhaseClock | None = None) -> Prefilled:
        """Prefill up to the first token's logits. Calls no observer and stores nothing. ``clock``: default a new
        one."""
        sources = self.parts.sources(request.method)  # weights are loaded before the clock starts
        clock = clock or PhaseClock()
        with self.turns.prompt():
            return self._prefill(request, sources, clock, ())[1]

    def _prefill(
        self, request: Request, sources: Sources, clock: PhaseClock, observers: Sequence[Observer]
    ) -> tuple[Plan, Prefilled]:
        queued_s = clock.elapsed()
        plan = self.plan(request, sources, clock)
        for observer in observers:
            observer.on_plan(plan, sources)
        room = room_for(request.params)
        found = prefill(plan, sources, params_tokens=room, clock=clock, trace=request.trace)
        if plan.prediction is not None and (controller := self._controller(request)) is not None:
            controller.observe(plan, found.stats)
            found = replace(found, stats=replace(found.stats, predicted_ttft_s=plan.prediction.seconds))
        return plan, replace(found, stats=replace(found.stats, queued_s=queued_s))

    def _segments(self, request: Request, given: Sequence[str], *, parts: bool = True) -> list[Segment]:
        segments = as_segments(request.prompt)
        if segments is not None:
            return segments
        return self.parts.segment(request.prompt, given, tools=request.tools, parts=parts)  # type: ignore[arg-type]

    def _compose(self, request: Request) -> Iterator[Event]:
        """Answer by a composing method: several prompts, each answered exactly."""
        sources = self.parts.sources(None)  # weights are loaded before the clock starts
        runtime = sources.primary.runtime
        missing: dict[str, None] = {}

        def ask(
            segments: Sequence[Segment], params: SamplingParams, observe: LogitsObserver | None = None
        ) -> Iterator[Event]:
            came = PhaseClock()
            with self.turns.prompt():
                _, prefilled = self._prefill(Request(segments, params, None), sources, came, self.observers)
                missing.update(dict.fromkeys(prefilled.missing))
                prefilled = replace(prefilled, stats=count_chunks(prefilled.stats, prefilled.layout))
                events = _begun(decode(runtime, prefilled, params, observe, turn=self.turns.token))
            yield from events

        clock = PhaseClock()
        given = given_texts(request.documents)
        segments = self._segments(request, given, parts=not given)  # each given text is one chunk to answer from
        if given and not any(isinstance(segment, Chunk) for segment in segments):
            segments = self._segments(request, given)
        absent = count_absent(given, segments, segments)
        composition = Composition(segments, request.params, ask, clock, not_found=absent)
        assert request.method is not None
        for event in request.method.compose(composition) if composition.chunks else composition.plain():
            if event.answer is not None:
                self._observe(Answered(None, event.answer, request.params))
            yield event
        self.writer.store_missing(tuple(missing), request.documents, PREFIX)

    def _observe(self, answered: Answered) -> None:
        for observer in self.observers:
            observer.on_answer(answered)


def _begun(events: Iterator[Event]) -> Iterator[Event]:
    """The events; returns when the first one is there."""
    return chain((next(events),), events)


def _check(request: Request) -> None:
    """Raise ConfigurationError for what cannot be combined."""
    schema, method = request.params.json_schema, request.method
    if schema and request.finish != "none":
        raise ConfigurationError(
            f"json_schema cannot be combined with finish={request.finish!r}, which compares the answer with what full "
            "prefill would choose without a schema. Set finish='none' for this call."
        )
    if (schema or request.tools) and method is not None and method.composes:
        raise ConfigurationError(
            f"method {method.name!r} answers by several prompts, and takes neither tools nor a json_schema. Choose "
            "another method for this call."
        )


def _question(request: Request) -> str | None:
    """The text that scores the chunks. After results of tools there is no question: it is the user's last message."""
    if request.question is not None or isinstance(request.prompt, str):
        return request.question
    messages = [message for message in request.prompt if isinstance(message, dict)]
    if not messages or messages[-1]["role"] != "tool":
        return None
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), None)


def _exact(request: Request, method: Method, sources: Sources, prefilled: Prefilled) -> Verification | None:
    """What completes the exact KV while the answer is decoded; None if neither ``finish`` nor a confidence gate asks
    for it, the KV is exact already, or the runtime cannot."""
    runtime, layout = sources.primary.runtime, prefilled.layout
    asked = request.finish != "none" or method.min_confidence > 0
    if not asked or not runtime.can_extend or prefilled.is_exact:
        return None
    # the exact KV is that of plain prefill: the prefix cache takes and gives it even if the method uses no prefixes
    keeps = runtime.keeps_prefixes
    known = list(layout.token_ids[:-1]) if keeps else []
    return Verification(
        runtime,
        layout.ids,
        capacity=layout.num_tokens + room_for(request.params),
        find_match=lambda: sources.prefixes.match(known),
        keeping=Keeping(sources.prefixes, runtime.reuse_tokens) if keeps else None,
        is_greedy=is_greedy(request.params),
        revises=request.finish == "revise",
    )
