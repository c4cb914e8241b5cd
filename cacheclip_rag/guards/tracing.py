"""OpenTelemetry spans of answers: one an answer, with GenAI attributes, and one for each phase within it.

A program sets up tracing before it makes an engine (``opentelemetry-instrument cacheclip serve`` does so without
code). Where it does not, nothing is imported and nothing recorded. An answer's spans are written when it is complete,
from its statistics: phases follow one another in the order of :data:`~cacheclip_rag.base.clock.PHASES`, although
reading goes on beside the others.

Source of the names: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans
"""

from __future__ import annotations

import sys
import time

from ..base.version import __version__
from ..fusion.answer import FusionStats
from .base import ObservedAnswer, Observer

_NANOSECONDS = 1e9
_COUNTS = (
    "hits misses chunk_tokens recomputed_tokens cached_prefix_tokens continued_tokens charged_ratio gated bypassed"
).split()
"""Statistics that become attributes of an answer's span."""


def is_traced() -> bool:
    """Whether the program has set up tracing."""
    if "opentelemetry.trace" not in sys.modules:  # whoever sets it up imports it
        return False
    from opentelemetry import trace

    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


class Tracing(Observer):
    """Writes the spans of an engine's answers."""

    def __init__(self, model: str) -> None:
        self._model = model

    def on_answer(self, answered: ObservedAnswer) -> None:
        record_spans(answered.answer.stats, self._model, finish_reasons=(answered.answer.finish_reason,))


def record_spans(stats: FusionStats, model: str, *, finish_reasons: tuple[str, ...] = ()) -> None:
    """Write the spans of an answer that is complete now, within the caller's current span."""
    if not is_traced():
        return
    from opentelemetry import trace

    tracer = trace.get_tracer("cacheclip_rag", __version__)
    end = time.time_ns()
    begin = end - int((stats.ttft_s + stats.decode_s) * _NANOSECONDS)
    answer = tracer.start_span(f"chat {model}", start_time=begin)
    if answer.is_recording():
        answer.set_attributes(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "cacheclip_rag",
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": stats.prompt_tokens,
                "gen_ai.usage.output_tokens": stats.generated_tokens,
                "gen_ai.response.finish_reasons": finish_reasons,
                "cacheclip.method": stats.method,
                "cacheclip.fallback": stats.fallback or "",
                **{f"cacheclip.{name}": getattr(stats, name) for name in _COUNTS},
            }
        )
        within = trace.set_span_in_context(answer)
        seconds = {"queue": stats.queued_s, **stats.phases_s}
        rest, decode_s, verify_s = max(0.0, stats.ttft_s - sum(seconds.values())), stats.decode_s, stats.verify_s
        if 0 < verify_s <= rest:  # finish="revise": no token stays before it was verified
            spans = [*seconds.items(), ("verify", rest), ("decode", decode_s)]
            rest = 0.0
        else:
            spans = [*seconds.items(), ("decode", decode_s - verify_s), ("verify", verify_s)]
        at = begin + int(rest * _NANOSECONDS)  # the last phase ends at the first token
        for name, length in spans:
            if length > 0:
                span = tracer.start_span(f"cacheclip {name}", context=within, start_time=at)
                at += int(length * _NANOSECONDS)
                span.end(min(at, end))
    answer.end(end)
