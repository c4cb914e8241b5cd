"""From a request's segments to a plan: reused chunks, exact chunks, or the reason for plain prefill. No tensors.

:class:`KVSources` are what KV may come from: stored chunks, the auxiliary model, the prefix cache.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..finding.common_parts import standing_in
from ..methods.base import Method
from ..prompt.known_kv import LEAST_END, KnownKV, known_kv
from ..prompt.layout import Layout, Span, check_least_length, check_length, lay_out
from ..prompt.segments import Chunk, Segment
from ..runtime.base import KVRun, KVSource

if TYPE_CHECKING:
    from ..chunks.caches import ChunkCaches
    from ..chunks.stored_prompts import StoredPrompts
    from ..runtime.base import KVMatch
    from ..runtime.prompt_cache import PromptCache
    from ..selection.auxiliary_pass import AuxiliaryPass


@dataclass(frozen=True, slots=True, weakref_slot=True)
class KVSources:
    """Where the KV of one method's prompts may come from."""

    primary: ChunkCaches
    """Chunk caches of the primary model with the method's chunk context."""
    prefix_caches: ChunkCaches
    """Chunk caches of the primary model with context ``prefix``; they hold the shared prefix's KV."""
    auxiliary: AuxiliaryPass | None
    """None if the method needs no auxiliary model."""
    prompt_cache: PromptCache
    """KV of earlier prompts: exact of first tokens, and approximate, continued and moved."""
    stored_prompts: StoredPrompts | None = None
    """Exact KV of earlier prompts in the store; None: it is not stored."""

    def held(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """The chunk spans whose KV is stored for every model that the method needs."""
        first, last = self.primary.runtime.computed_edges
        if first:  # chunks with something between their edges
            spans = [
                span
                for span in spans
                if span.first <= first < span.whole_tokens - last <= span.first + len(span.tokens)
            ]
        caches = [self.primary, *([self.auxiliary.caches] if self.auxiliary is not None else [])]
        held = {span.whole for span in spans}
        for each in caches:
            held = each.held(held)
        return tuple(span for span in spans if span.whole in held)

    def shares_prefixes(self, method: Method, layout: Layout) -> bool:
        """Whether the method shares prefixes, and its KV is valid for every prompt with the same first tokens."""
        runtime = self.primary.runtime
        is_same = runtime.keeps_prefixes and layout.num_tokens <= runtime.reuse_tokens
        return is_same and method.reuses_prefixes

    def match(self, method: Method, layout: Layout, *, continued: bool = False, moves: bool = False) -> KVMatch:
        """What earlier prompts left of the prompt, without its last token, whose logits are needed: its longest
        beginning in the prefix cache; with ``continued``, also the continued KV, which is approximate, where that goes
        on further; with ``moves``, also KV of other places."""
        ids = layout.token_ids[:-1] if self.shares_prefixes(method, layout) else ()
        if self.stored_prompts is not None:
            self.stored_prompts.restore(ids)
        if not continued:
            return self.prompt_cache.match(ids)
        can_move = moves and self.primary.runtime.can_move
        computes_all = not method.reuses_chunks or (method.exact_at_one and method.nominal_ratio >= 1.0)
        stop = max(layout.num_tokens - LEAST_END, 0) if can_move and not computes_all else 0
        return self.prompt_cache.match(ids, method, moves=range(layout.num_prefix, stop))


ROWS_FOR_EXACT_KV = 64
"""Rows that may be computed more if the KV is exact then. Few, because a pass over them takes little longer than one
over a single row: the weights are read once."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted for a plan; whoever predicts adds what it was made of."""

    seconds: float
    """To the first token, without waiting for other requests."""
    plain_s: float
    """By plain prefill."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for one request. A plan holds no tensors; :meth:`to_dict` is ready for JSON."""

    layout: Layout
    """The prompt's token ids, and what they are tokens of."""
    method: Method
    """The method, at the ratio that is used."""
    known: KnownKV = field(compare=False, repr=False)
    """The source of each token's KV: what is stored, and what earlier prompts left once that is held."""
    fallback: str | None = None
    """Why nothing is reused although the method reuses chunks; None otherwise."""
    obstructed: bool = False
    """True: the model or the prompt does not allow exact reuse; ``fallback`` says why."""
    question: str | None = None
    keys: tuple[str, ...] = ()
    """Store keys of the ``reused`` chunks."""
    unusable: int = 0
    """Missing texts that are stored, but for another model, dtype, system prompt or chunk context, or without the
    auxiliary model's KV."""
    in_full: tuple[Span, ...] = ()
    """Chunks that are stored, and computed in full all the same, while the ``reused`` ones are read."""
    not_found: int = 0
    """Given documents of which no part stands in the prompt."""
    moves: bool = False
    """Whether the request lets KV be moved that earlier prompts left of the same tokens at other places."""
    bypass: str | None = None
    """Why the ``reused`` chunks are not used after all: plain prefill is predicted to be soon enough, or computes less.
    Else None."""
    continues: bool = False
    """Whether approximate KV of earlier prompts is used, continued or moved: chunks in it are not read, and fewer of
    their tokens are recomputed."""
    work: int | None = None
    """Number of tokens to compute; None if neither stored nor moved KV is looked for."""
    prediction: Prediction | None = None
    """Set if the recompute ratio was chosen by predicted time."""

    @property
    def reused(self) -> tuple[Span, ...]:
        """Chunks whose stored KV will be used, in prompt order; empty for plain prefill."""
        return self.known.reused

    @property
    def missing(self) -> tuple[Span, ...]:
        reused = {*self.reused, *self.in_full}
        return tuple(span for span in self.layout.chunks if span not in reused)

    @property
    def missing_texts(self) -> tuple[str, ...]:
        """Texts to store after the answer, each once: the whole texts of the missing chunks of which half or more
        stands in the prompt. A smaller part, such as boilerplate, would not pay for computing the whole text."""
        tokens: dict[str, list[int]] = {}
        for span in self.missing:
            tokens.setdefault(span.whole, [span.whole_tokens]).append(len(span.tokens))
        return tuple(text for text, (whole, *parts) in tokens.items() if 2 * sum(parts) >= whole)

    @property
    def exact(self) -> tuple[Span, ...]:
        """Reused chunks whose KV equals full prefill's, so that none of their tokens is recomputed."""
        return tuple(span for span in self.reused if self.known.is_exact(span))

    @property
    def chunk_tokens(self) -> int:
        return int(self.known.chunk.sum())

    def reusing(self, spans: Sequence[Span]) -> Plan:
        """The plan without all reused chunks but ``spans``: the others could not be read."""
        kept = {span.start for span in spans}
        keys = tuple(key for span, key in zip(self.reused, self.keys, strict=True) if span.start in kept)
        gone = [(span.start, span.stop) for span in self.reused if span.start not in kept]
        return replace(self, known=self.known.without(gone), keys=keys)

    def computing(self, texts: Collection[str]) -> Plan:
        """The plan that computes chunks of these texts in full."""
        in_full = tuple(span for span in self.reused if span.whole in texts)
        return replace(self.reusing([span for span in self.reused if span.whole not in texts]), in_full=in_full)

    @property
    def budget_tokens(self) -> int:
        """Number of chunk tokens that the method's ratio allows to recompute."""
        used = self.reused and self.bypass is None
        return round(self.method.nominal_ratio * self.chunk_tokens) if used else 0

    def to_dict(self) -> dict[str, Any]:
        """The decisions as plain values: method, ratio, token ids, and each segment's position and source."""
        used = self.reused if self.bypass is None else ()
        keys = dict(zip(used, self.keys, strict=False))
        return {
            "method": self.method.name,
            "recompute_ratio": self.method.nominal_ratio,
            "fallback": self.fallback or self.bypass,
            "predicted_ttft_s": None if self.prediction is None else self.prediction.seconds,
            "predicted_plain_ttft_s": None if self.prediction is None else self.prediction.plain_s,
            "prompt_tokens": self.layout.num_tokens,
            "prefix_tokens": self.known.count(KVSource.PREFIX, KVSource.CACHED, KVSource.CONTINUED),
            "chunk_tokens": self.chunk_tokens,
            "budget_tokens": self.budget_tokens,
            "token_ids": list(self.layout.token_ids),
            "pieces": [
                {
                    "start": span.start,
                    "stop": span.stop,
                    "kind": "chunk" if span.is_chunk else "fresh",
                    "reused": span in keys,
                    "exact": span in keys and self.known.is_exact(span),
                    "key": keys.get(span),
                }
                for span in self.layout.spans
            ],
        }


def make_plan(
    segments: Sequence[Segment],
    method: Method,
    kv_sources: KVSources,
    *,
    question: str | None = None,
    documents: Sequence[str] = (),
    moves: bool = False,
) -> Plan:
    """Decide how a prompt is answered. The pipeline may then take plain prefill, or another ratio, instead.
    ``question``: text that scores the chunks; default the text after the last chunk. ``documents``: texts that should
    stand in the prompt. ``moves``: KV of earlier prompts may be moved. Raises PromptTooLongError."""
    runtime = kv_sources.primary.runtime
    check_least_length([segment.text for segment in segments if not segment.control], runtime)
    layout = lay_out(
        segments,
        runtime,
        kv_sources.primary.tokenize,
        kv_sources.prefix_caches.prefix_ids,
        is_after_prefix=not kv_sources.primary.context.text,
    )
    check_length(layout, runtime.context_tokens)
    absent = count_absent(set(documents) - set(layout.altered), segments, (span.segment for span in layout.chunks))
    is_short = layout.num_tokens <= runtime.reuse_tokens
    reused = kv_sources.held(layout.chunks) if method.reuses_chunks and is_short else ()
    plan = Plan(layout, method, known_kv(layout, reused), question=question, not_found=absent)
    if not method.reuses_chunks:
        return plan
    plan = replace(plan, moves=moves)
    if not is_short:
        obstacle = (
            f"the prompt has {layout.num_tokens} tokens, and the rotary frequencies of model {runtime.name!r} change "
            f"above {runtime.reuse_tokens}: reuse would not be exact"
        )
        return replace(plan, fallback=obstacle, obstructed=True)
    missing = dict.fromkeys(span.whole for span in plan.missing)
    plan = replace(plan, unusable=sum(map(kv_sources.primary.store.holds_text, missing)))
    if not plan.reused:
        return replace(plan, fallback=_nothing_found(plan, kv_sources))
    return replace(plan, keys=tuple(kv_sources.primary.key(span.whole) for span in plan.reused))


def least_computed(plan: Plan, runs: Sequence[KVRun]) -> Plan:
    """The plan, or what computes fewer rows after ``runs`` of earlier prompts' KV: plain prefill after the exact ones,
    or the recompute after all of them. It may reuse no chunk."""
    exact = [run for run in runs if run.source == KVSource.CACHED]
    known, ratio = sum(run.stop - run.start for run in exact), plan.method.nominal_ratio
    plain = plan.layout.num_tokens - known
    fused = known_kv(plan.layout, plan.reused, exact).computed_tokens(ratio)
    shorter = known_kv(plan.layout, plan.reused, runs).computed_tokens(ratio) if len(exact) < len(runs) else fused
    if is_plain_better(plain, fused, shorter):
        why = f"the prefix cache holds {known} tokens of the prompt: plain prefill computes less"
        return replace(plan, bypass=why, work=plain)
    continues = shorter + ROWS_FOR_EXACT_KV < fused
    work = shorter if continues else fused
    return replace(plan, continues=continues, work=work, fallback=None if continues else plan.fallback)


def is_plain_better(plain: int, fused: int, continuing: int) -> bool:
    """Whether plain prefill after exact KV, which computes ``plain`` rows, is better than a recompute after it, and
    than one after approximate KV. Exact KV is worth a few rows."""
    return plain < fused and plain <= continuing + ROWS_FOR_EXACT_KV


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
