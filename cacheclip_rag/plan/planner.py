"""From a request's segments to a plan: reused chunks, exact chunks, or the reason for plain prefill. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..checks import check_ratio
from ..chunks.context import ChunkContext
from ..chunks.sources import Sources
from ..config import EngineConfig
from ..methods import DEFAULT_METHOD, check_auxiliary, check_method, preset
from ..methods.base import Method
from ..methods.composition import exact_method
from ..prompt.layout import Layout, Span, check_least_length, check_length, lay_out
from ..prompt.segments import Segment, without_parts
from ..store.excerpts import standing_in
from ..types import Plan

__all__ = ["choose_method", "context_of", "make_plan"]


def make_plan(
    segments: Sequence[Segment],
    method: Method | None,
    sources: Sources,
    *,
    question: str | None = None,
    given: Sequence[str] = (),
) -> Plan:
    """Decide how a prompt is answered.

    Args:
        method: None for the cheapest exact method.
        question: text that scores the chunks; default the text after the last chunk.
        given: texts that should stand in the prompt.

    Raises:
        PromptTooLongError: the prompt does not fit the model's context.
        ConfigurationError: the method cannot take this prompt.
    """
    runtime = sources.primary.runtime
    apart = sources.primary.context.isolated
    if apart:
        segments = without_parts(segments)
    if method is not None:
        segments = method.arrange(segments, runtime)
    check_least_length(segments, runtime)
    layout = lay_out(segments, runtime, sources.primary.tokenize, sources.prefix.prefix_ids, apart=apart)
    exact = sources.primary.is_exact_after_prefix and sources.captured is None
    layout = replace(layout, exact_after_prefix=exact)
    check_length(layout, runtime.context_tokens, runtime.name)
    chosen = method or exact_method(layout)
    plan = Plan(layout, chosen, question=question, not_found=_num_absent(given, layout, segments))
    if not chosen.reuses_chunks:
        return plan
    obstacle = _obstacle(sources, layout)
    if obstacle is not None:
        return replace(plan, fallback=obstacle, obstructed=True)
    found = sources.held(layout.chunks)
    if sources.captured is not None and len(found) < len(layout.chunks):
        why = f"not all of the prompt's {len(layout.chunks)} chunks were captured before; this answer captures them"
        return replace(plan, fallback=why, captures=True)
    if sources.captured is None:
        missing = replace(plan, reused=found).missing_texts
        plan = replace(plan, unusable=sum(map(sources.primary.is_known, missing)))
    if not found:
        return replace(plan, fallback=_nothing_found(plan))
    obstacle = _obstacle_of_positions(chosen, layout, found, sources)
    if obstacle is not None:
        return replace(plan, fallback=obstacle, obstructed=True)
    keys = () if sources.captured is not None else tuple(sources.primary.key(span.whole) for span in found)
    return replace(plan, reused=found, keys=keys)


def _num_absent(given: Sequence[str], layout: Layout, segments: Sequence[Segment]) -> int:
    """How many given texts are not in the prompt, neither as chunks nor within longer ones."""
    spans = layout.chunks
    absent = set(given).difference(span.whole for span in spans)
    if not absent:
        return 0
    absent -= standing_in("".join(segment.text for segment in segments if not segment.control), absent)
    return len([text for text in absent if not any(_shows(span, text) for span in spans)])


def _shows(span: Span, text: str) -> bool:
    """Whether a span of a longer chunk has a part of a text."""
    start = span.whole.find(text)
    return 0 <= start < span.at + len(span.segment.text) and span.at < start + len(text)


def _nothing_found(plan: Plan) -> str:
    texts = len(plan.missing_texts)
    if not texts:
        return "no stored chunk found in the prompt"
    if plan.unusable:
        others = "for another model, dtype, system prompt or chunk context"
        return f"none of the prompt's {texts} chunks is in the store for these settings; {plan.unusable} are {others}"
    return f"none of the prompt's {texts} chunks is in the store"


def _obstacle(sources: Sources, layout: Layout) -> str | None:
    """Why reuse would not be exact for this model or prompt; None if it would."""
    for caches in (sources.primary, sources.auxiliary.caches if sources.auxiliary else None):
        if caches is not None and caches.runtime.unsupported:
            return caches.runtime.unsupported
    runtime = sources.primary.runtime
    if sources.captured is not None and not runtime.can_score:
        return f"captured chunk caches need attention weights, which {runtime.name!r} does not show"
    if layout.num_tokens > runtime.reuse_tokens:
        return (
            f"the prompt has {layout.num_tokens} tokens, and the rotary frequencies of model {runtime.name!r} change "
            f"above {runtime.reuse_tokens}: reuse would not be exact"
        )
    return None


def _obstacle_of_positions(method: Method, layout: Layout, found: Sequence[Span], sources: Sources) -> str | None:
    """Why the method's positions do not fit the model; None if they fit or the method does not change positions."""
    geometry = method.positions(layout, found)
    if geometry is None:
        return None
    runtime, last = sources.primary.runtime, int(geometry.positions.max())
    if last < min(runtime.reuse_tokens, runtime.context_tokens - 1):
        return None
    return (
        f"method {method.name!r} puts the prompt's {layout.num_tokens} tokens at positions up to {last}, "
        f"and model {runtime.name!r} has {runtime.context_tokens}"
    )


def choose_method(
    config: EngineConfig, method: str | Method | None, recompute_ratio: float | None, has_head_set: Callable[[], bool]
) -> Method:
    """The method for a call, at its recompute ratio.

    Args:
        method: a preset's name or an instance; default the engine's method. ``auto`` means ``cacheclip`` if the
            auxiliary model is available and has a head set, else ``anchored``.
        recompute_ratio: default the engine's ratio for names and for the engine's method, and the instance's own ratio
            for an instance. Presets without a ratio ignore it.
        has_head_set: called for ``auto`` only, because it loads the models.

    Raises:
        ConfigurationError: an unknown name; a ratio out of range, or for an instance without a ratio; a method that
            needs an auxiliary model and an engine without one.
    """
    given = config.method if method is None else method
    check_method(given)
    ratio = recompute_ratio
    if ratio is None and (method is None or isinstance(method, str)):
        ratio = config.recompute_ratio
    if given == DEFAULT_METHOD:
        given = "cacheclip" if has_head_set() else "anchored"
    chosen = preset(given) if isinstance(given, str) else given
    if ratio is not None:
        check_ratio(ratio)
        if chosen.has_ratio or (recompute_ratio is not None and not isinstance(given, str)):
            chosen = chosen.at(ratio)
    if config.min_confidence is not None and (method is None or isinstance(method, str)):
        chosen = replace(chosen, min_confidence=config.min_confidence)
    check_auxiliary(chosen, config.auxiliary)
    return chosen


def context_of(config: EngineConfig, method: str | Method | None) -> ChunkContext | str | None:
    """The chunk context of a method (default the engine's method), or its name; None: the engine's setting decides.
    :meth:`~cacheclip_rag.parts.Parts.context` makes a chunk context of it."""
    given = config.method if method is None else method
    check_method(given)
    if given == DEFAULT_METHOD:
        return None  # both methods that auto can mean use the engine's setting
    return (preset(given) if isinstance(given, str) else given).context
