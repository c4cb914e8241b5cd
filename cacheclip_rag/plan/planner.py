"""From a request's segments to a plan: reused chunks, exact chunks, or the reason for plain prefill. No tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..finding.common_parts import standing_in
from ..methods.base import Method
from ..prompt.layout import check_least_length, check_length, lay_out
from ..prompt.segments import Chunk, Segment
from .kv_sources import KVSources
from .plan import ROWS_FOR_EXACT_KV, Plan


def make_plan(
    segments: Sequence[Segment],
    method: Method,
    kv_sources: KVSources,
    *,
    question: str | None = None,
    documents: Sequence[str] = (),
) -> Plan:
    """Decide how a prompt is answered. The pipeline may then take plain prefill, or another ratio, instead.
    ``question``: text that scores the chunks; default the text after the last chunk. ``documents``: texts that should
    stand in the prompt. Raises PromptTooLongError."""
    runtime = kv_sources.primary.runtime
    context = kv_sources.primary.context
    check_least_length([segment.text for segment in segments if not segment.control], runtime)
    layout = lay_out(
        segments, runtime, kv_sources.primary.tokenize, kv_sources.prefix_caches.prefix_ids, isolated=context.isolated
    )
    layout = replace(layout, exact_after_prefix=not context.isolated and not context.text)
    check_length(layout, runtime.context_tokens)
    absent = count_absent(set(documents) - set(layout.altered), segments, (span.segment for span in layout.chunks))
    plan = Plan(layout, method, question=question, not_found=absent)
    if not method.reuses_chunks:
        return plan
    if layout.num_tokens > runtime.reuse_tokens:
        obstacle = (
            f"the prompt has {layout.num_tokens} tokens, and the rotary frequencies of model {runtime.name!r} change "
            f"above {runtime.reuse_tokens}: reuse would not be exact"
        )
        return replace(plan, fallback=obstacle, obstructed=True)
    reused = kv_sources.held(layout.chunks)
    missing = dict.fromkeys(span.whole for span in replace(plan, reused=reused).missing)
    plan = replace(plan, unusable=sum(map(kv_sources.primary.store.holds_text, missing)))
    if not reused:
        return replace(plan, fallback=_nothing_found(plan, kv_sources))
    keys = tuple(kv_sources.primary.key(span.whole) for span in reused)
    return replace(plan, reused=reused, keys=keys)


def least_computed(plan: Plan, known: int, continued: int) -> Plan:
    """The plan, or what computes fewer rows: plain prefill after ``known`` exact tokens, or the recompute after
    ``continued`` ones, of which those after ``known`` are approximate. Exact KV is worth a few rows."""
    plain, fused = plan.layout.num_tokens - known, plan.computed_after(known)
    shorter = plan.computed_after(known, continued) if continued > known else fused
    if plain < fused and plain <= shorter + ROWS_FOR_EXACT_KV:
        return replace(plan, bypass=f"the prefix cache holds {known} tokens of the prompt: plain prefill computes less")
    return replace(plan, continues=shorter + ROWS_FOR_EXACT_KV < fused)


def count_absent(documents: Iterable[str], segments: Iterable[Segment], chunks: Iterable[Segment]) -> int:
    """Number of documents of which no part stands in a prompt, which has these chunks and parts of chunks."""
    absent = set(documents)
    for chunk in chunks if absent else ():
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


def _nothing_found(plan: Plan, kv_sources: KVSources) -> str:
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
    scored = kv_sources.auxiliary is not None and len(kv_sources.primary.held(missing))
    others = plan.unusable - scored
    reasons = []
    if scored:
        assert kv_sources.auxiliary is not None
        name = kv_sources.auxiliary.runtime.name
        reasons.append(f"{scored} are stored for the primary model, but not for the auxiliary model {name!r}")
    if others > 0:
        reasons.append(f"{others} are for another model, dtype, system prompt or chunk context")
    return f"{why} for these settings; {', '.join(reasons)}"
