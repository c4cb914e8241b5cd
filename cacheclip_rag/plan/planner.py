"""From a request's segments to a plan: reused chunks, exact chunks, or the reason for plain prefill. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..base.checks import check_ratio_and_limit
from ..config import EngineConfig
from ..finding.common_parts import standing_in
from ..methods import DEFAULT_METHOD, check_auxiliary, check_method, preset
from ..methods.base import Method
from ..prompt.layout import check_least_length, check_length, lay_out
from ..prompt.segments import Chunk, Segment
from .plan import Plan
from .sources import Sources

__all__ = ["choose_method", "make_plan"]


def make_plan(
    segments: Sequence[Segment],
    method: Method,
    sources: Sources,
    *,
    question: str | None = None,
    given: Sequence[str] = (),
) -> Plan:
    """Decide how a prompt is answered. The pipeline may then take plain prefill, or another ratio, instead.

    Args:
        question: text that scores the chunks; default the text after the last chunk.
        given: texts that should stand in the prompt.

    Raises:
        PromptTooLongError: the prompt does not fit the model's context.
        ConfigurationError: the method cannot take this prompt.
    """
    runtime = sources.primary.runtime
    context = sources.primary.context
    check_least_length([segment.text for segment in segments if not segment.control], runtime)
    layout = lay_out(segments, runtime, sources.primary.tokenize, sources.prefix.prefix_ids, isolated=context.isolated)
    layout = replace(layout, exact_after_prefix=not context.isolated and not context.text)
    check_length(layout, runtime.context_tokens)
    looked_for = set(given) - set(layout.altered)
    absent = count_absent(looked_for, segments, (span.segment for span in layout.chunks))
    plan = Plan(layout, method, question=question, not_found=absent)
    if not method.reuses_chunks:
        return plan
    if layout.num_tokens > runtime.reuse_tokens:
        obstacle = (
            f"the prompt has {layout.num_tokens} tokens, and the rotary frequencies of model {runtime.name!r} change "
            f"above {runtime.reuse_tokens}: reuse would not be exact"
        )
        return replace(plan, fallback=obstacle, obstructed=True)
    found = sources.held(layout.chunks)
    missing = dict.fromkeys(span.whole for span in replace(plan, reused=found).missing)
    plan = replace(plan, unusable=sum(map(sources.primary.is_known, missing)))
    if not found:
        return replace(plan, fallback=_nothing_found(plan, sources))
    keys = tuple(sources.primary.key(span.whole) for span in found)
    return replace(plan, reused=found, keys=keys)


def count_absent(given: Iterable[str], segments: Iterable[Segment], found: Iterable[Segment]) -> int:
    """Number of given texts of which no part stands in a prompt.

    Args:
        segments: the prompt.
        found: chunks found in it, and parts of chunks.
    """
    absent = set(given)
    for chunk in found if absent else ():
        if isinstance(chunk, Chunk):
            absent = {text for text in absent if not _overlaps(chunk, text)}
    if not absent:
        return 0  # most prompts: the whole prompt need not be compared
    written = "".join(segment.text for segment in segments if not segment.control)
    return len(absent - standing_in(written, absent))


def _overlaps(chunk: Chunk, text: str) -> bool:
    """Whether a part of a chunk holds a part of ``text``, which may itself be a part of the chunk."""
    at = chunk.whole.find(text)
    return at >= 0 and at < chunk.at + len(chunk.text) and chunk.at < at + len(text)


def _nothing_found(plan: Plan, sources: Sources) -> str:
    """Why nothing of a prompt is in the store for this plan."""
    missing = list(dict.fromkeys(span.whole for span in plan.missing))
    if not missing and plan.layout.altered:
        return (
            f"{len(plan.layout.altered)} chunks stand in the prompt in another form (escaped, with a mark in each "
            "line, or with accents apart), which has other tokens: write them as they were precomputed, or precompute "
            "them as the prompt has them"
        )
    if not missing:
        return "no stored chunk found in the prompt"
    why = f"none of the prompt's {len(missing)} chunks is in the store"
    if not plan.unusable:
        return why
    scored = sources.auxiliary is not None and len(sources.primary.held(missing))
    others = plan.unusable - scored
    reasons = []
    if scored:
        assert sources.auxiliary is not None
        name = sources.auxiliary.runtime.name
        reasons.append(f"{scored} are stored for the primary model, but not for the auxiliary model {name!r}")
    if others > 0:
        reasons.append(f"{others} are for another model, dtype, system prompt or chunk context")
    return f"{why} for these settings; {', '.join(reasons)}"


def choose_method(
    config: EngineConfig,
    method: str | Method | None,
    recompute_ratio: float | str | None,
    default: Callable[[], str],
    promised: Callable[[Method, bool], Method],
) -> Method:
    """The method for a call, at its recompute ratio.

    Args:
        method: a preset's name or an instance; default the engine's method.
        recompute_ratio: default the engine's ratio for names and for the engine's method, and the instance's own ratio
            for an instance. Presets without a ratio ignore it. ``auto``: the method's own, until a controller chooses.
        default: says which preset ``auto`` means; called for ``auto`` only, because it loads the models.
        promised: the method with the confidence gate that its certificate promises, at its ratio (True) or at the
            cheapest one; called for a gate of ``auto`` only.

    Raises:
        ConfigurationError: an unknown name; a ratio out of range, or for an instance without a ratio; a method that
            needs an auxiliary model and an engine without one.
    """
    given = config.method if method is None else method
    check_method(given)
    check_ratio_and_limit(recompute_ratio, None)
    by_name = method is None or isinstance(method, str)
    wanted = config.recompute_ratio if recompute_ratio is None and by_name else recompute_ratio
    ratio = None if isinstance(wanted, str) else wanted
    if given == DEFAULT_METHOD:
        given = default()
    chosen = preset(given) if isinstance(given, str) else given
    if ratio is not None and (chosen.has_ratio or (recompute_ratio is not None and not isinstance(given, str))):
        chosen = chosen.at(ratio)
    check_auxiliary(chosen, config.auxiliary)
    least = config.min_confidence
    if least is None or not by_name or not chosen.reuses_chunks:
        return chosen
    return promised(chosen, ratio is not None) if isinstance(least, str) else replace(chosen, min_confidence=least)
