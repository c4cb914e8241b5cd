"""The decisions for one request, without tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..methods.base import Method
    from ..prompt.layout import Layout, Span

FOLLOW_UP_SHARE = 0.5
"""Share of the recompute ratio that a prompt which continues the KV of an earlier one spends on its own question, among
the tokens that no question has recomputed yet. The least that is shown to answer no worse than a fresh plan: on 100
later questions F1 minus a fresh plan's is -0.11 at 0, -0.00 [-0.05, +0.04] at 0.25, +0.02 [-0.01, +0.06] at 0.5."""

ROWS_FOR_EXACT_KV = 64
"""Rows that may be computed more if the KV is exact then. Few, because a pass over them takes little longer than one
over a single row: the weights are read once."""


class PayloadRead(NamedTuple):
    """One payload that a plan reads."""

    text: str
    is_primary: bool
    medium: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReadTime:
    """Seconds that a plan's KV takes to be read, as it was measured for the tiers that hold it."""

    medium: str = ""
    """Where most of them are spent, as :meth:`~cacheclip_rag.store.Backend.medium` calls it. Empty: reading is not
    predicted, because all is in memory, or nothing was measured."""
    auxiliary_s: float = 0.0
    """Before the primary's KV."""
    primary_s: float = 0.0
    beside: str = ""
    """What goes on while the KV is read, layer by layer or chunk by chunk: ``recompute`` (all that is computed),
    ``scoring`` (by the auxiliary, while the primary's is read), or nothing."""
    reads: tuple[PayloadRead, ...] = field(default=(), repr=False)
    """What is read, in prompt order, as far as its medium was measured."""

    @property
    def seconds(self) -> float:
        return self.auxiliary_s + self.primary_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds that a plan is predicted to take to the first token, without waiting for other requests."""

    seconds: float
    """As planned."""
    plain_s: float
    """By plain prefill."""
    known_tokens: int
    """Leading tokens of the prompt in the prefix cache, when it was predicted."""
    reading: ReadTime = ReadTime()
    """Of the chunks, if they are reused."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for one request. A plan holds no tensors; :meth:`to_dict` is ready for JSON."""

    layout: Layout
    """The prompt's token ids and the source of each token's KV."""
    method: Method
    """The method, at the ratio that is used."""
    reused: tuple[Span, ...] = ()
    """Chunks whose stored KV will be used, in prompt order; empty for plain prefill."""
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
    bypass: str | None = None
    """Why the ``reused`` chunks are not used after all: plain prefill is predicted to be soon enough, or computes less.
    Else None."""
    continues: bool = False
    """Whether the prompt continues the KV of an earlier fused prompt, which is approximate: chunks in it are not read,
    and fewer of their tokens are recomputed."""
    prediction: Prediction | None = None
    """Set if the recompute ratio was chosen by predicted time."""

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
        return tuple(span for span in self.reused if self.layout.is_exact(span))

    @property
    def chunk_tokens(self) -> int:
        return sum(len(span.tokens) for span in self.reused)

    def computed_after(self, known: int, continued: int = 0) -> int:
        """Number of prompt tokens that are computed if earlier prompts left the exact KV of ``known`` leading tokens,
        and approximate KV up to ``continued``: fresh tokens, and as many of the reused chunks as the ratio allows."""
        layout = self.layout.cached_until(known, self.reused, continued=continued)
        unread = [span for span in self.reused if not layout.is_cached(span)]
        of_any = self.reused if layout.is_continued else unread
        stale = sum(span.stop - max(span.start, layout.num_exact) for span in of_any if not layout.is_exact(span))
        budget = round(self.method.nominal_ratio * replace(self, layout=layout).rated_tokens)
        unread_tokens = sum(len(span.tokens) for span in unread)
        return layout.num_tokens - layout.num_known - unread_tokens + min(stale, budget)

    @property
    def rated_tokens(self) -> int:
        """Chunk tokens of which the ratio is a share: all, but of those in continued KV none that are exact by now, and
        :data:`FOLLOW_UP_SHARE` of the others."""
        layout = self.layout
        cached = [span for span in self.reused if layout.is_continued and layout.is_cached(span)]
        continued = sum(len(span.tokens) for span in cached)
        as_stored = replace(layout, num_exact=0)  # a chunk that is exact as stored counts as in a first question
        approximate = sum(
            len(span.tokens) if as_stored.is_exact(span) else max(0, span.stop - max(span.start, layout.num_exact))
            for span in cached
        )
        # the same prompt again has the same answer
        share = FOLLOW_UP_SHARE if layout.num_cached < layout.num_tokens - 1 else 0
        return self.chunk_tokens - continued + round(share * approximate)

    def reusing(self, spans: Sequence[Span]) -> Plan:
        """The plan without all reused chunks but ``spans``: the others could not be read."""
        keys = dict(zip(self.reused, self.keys, strict=False))
        return replace(self, reused=tuple(spans), keys=tuple(keys[span] for span in spans if span in keys))

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
            "prefix_tokens": self.layout.num_known,
            "chunk_tokens": self.chunk_tokens,
            "budget_tokens": self.budget_tokens,
            "token_ids": list(self.layout.token_ids),
            "pieces": [
                {
                    "start": span.start,
                    "stop": span.stop,
                    "kind": "chunk" if span.is_chunk else "fresh",
                    "reused": span in keys,
                    "exact": span in keys and self.layout.is_exact(span),
                    "key": keys.get(span),
                }
                for span in self.layout.spans
            ],
        }
