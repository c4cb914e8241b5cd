"""What the KV of a prompt was made of, for answers with ``trace``."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import torch

from ..base.keys import text_digest
from ..fusion.answer import Trace, TraceSpan, TraceText
from ..plan.plan import KVSources, Plan
from ..prompt.known_kv import known_kv
from ..prompt.layout import Span
from ..runtime.base import KVRun, KVSource, Runtime

_KINDS = {KVSource.COMPUTED: "fresh", KVSource.STORED: "chunk", KVSource.OWN_CONTEXT: "chunk"}


def media_of(plan: Plan, kv_sources: KVSources) -> dict[str, str]:
    """What reading each reused text would take, without places; texts in memory are left out."""
    reads = kv_sources.primary.reads_of({span.whole for span in plan.reused})
    return {text: re.split(r" at |:", medium)[0] for text, (medium, _) in reads.items()}


def trace_of(
    plan: Plan,
    kv_sources: KVSources,
    recomputed: Sequence[int] = (),
    scores: Mapping[int, torch.Tensor] | None = None,
    media: Mapping[str, str] | None = None,
    is_exact: bool = True,
) -> Trace:
    """The trace of a plan that was carried out. ``scores``: as in :class:`~cacheclip_rag.fusion.answer.Fused`.
    ``media``: :func:`media_of` before the reused chunks were read; None: none was."""
    layout, caches = plan.layout, kv_sources.primary
    lengths = {span.whole: span.whole_tokens for span in layout.chunks} | dict(layout.altered)
    stored, read = caches.held(lengths), {span.whole for span in plan.reused if not plan.known.is_held(span)}
    store = caches.store
    texts = tuple(
        TraceText(
            text,
            num_tokens,
            text in stored,
            (media or {}).get(text, "memory") if text in read else None,
            tuple(store.catalog.sources.holders(store.namespace, text_digest(text))),
            text in layout.altered,
        )
        for text, num_tokens in lengths.items()
    )
    numbers = {text: number for number, text in enumerate(lengths)}
    total = float(sum(of_chunk.sum() for of_chunk in (scores or {}).values()))
    spans = (part for span in layout.spans for part in _parts(span, plan, scores or {}, total, numbers))
    return Trace(
        layout.token_ids,
        tuple((span.start, span.stop) for span in plan.reused),
        tuple(recomputed),
        tuple(_texts(caches.runtime, layout.token_ids)),
        tuple(spans),
        texts,
        is_exact,
        plan.known.turns,
    )


def trace_of_planned(
    plan: Plan, kv_sources: KVSources, computed: Iterable[tuple[int, int]] | None, num_cached: int = 0
) -> Trace:
    """The trace of a plan that another process carried out.

    Args:
        computed: runs of tokens that it computed, ``(start, stop)``; None: all behind the first ``num_cached``, whose
            exact KV it had, because it took plain prefill.
    """
    if computed is None:
        runs = [KVRun(KVSource.CACHED, 0, num_cached)] if num_cached else []
        plain = replace(plan.reusing(()), known=known_kv(replace(plan.layout, num_prefix=0), (), runs))
        return trace_of(plain, kv_sources)
    again = np.zeros(plan.layout.num_tokens, np.bool_)
    for start, stop in computed:
        again[start:stop] = True
    again &= plan.known.chunk
    other = plan.known.chunk & (plan.known.stale | kv_sources.primary.is_lossy) & ~again
    media = media_of(plan, kv_sources)
    return trace_of(plan, kv_sources, again.nonzero()[0].tolist(), None, media, not other.any())


def _parts(
    span: Span, plan: Plan, scores: Mapping[int, torch.Tensor], total: float, numbers: Mapping[str, int]
) -> Iterator[TraceSpan]:
    """The runs of a span whose KV has one source."""
    known, rated = plan.known, scores.get(span.start)
    sources = known.source[span.start : span.stop]
    edges = [0, *(np.flatnonzero(np.diff(sources)) + 1).tolist(), len(sources)]
    for first, stop in pairwise(edges):
        source, own = KVSource(int(sources[first])), slice(span.start + first, span.start + stop)
        values = () if rated is None else tuple(rated[first:stop].tolist())
        yield TraceSpan(
            own.start,
            own.stop,
            _KINDS.get(source, source.name.lower()),
            bool(known.exact[own].all()) or source == KVSource.COMPUTED,
            numbers[span.whole] if span.is_chunk else None,
            span.segment.control,
            values,
            sum(values) / total if values and total else None,
            float(known.past[own].mean()) if source >= KVSource.CONTINUED else None,
        )


def _texts(runtime: Runtime, ids: Sequence[int]) -> Iterator[str]:
    """Text of each token. Bytes that are a part of a character wait for the rest of it."""
    decoder, encoded = codecs.getincrementaldecoder("utf-8")("replace"), cache(runtime.token_bytes)
    for token in ids:
        own = encoded(token)
        yield "\ufffd" if own is None else decoder.decode(own)
