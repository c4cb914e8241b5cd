"""Inputs and outputs of an engine: plans, answers, statistics. Imports no other module of this package.

A request (:class:`~cacheclip_rag.call_options.Request`) becomes a :class:`Plan` (decisions without tensors). The plan
becomes an :class:`Answer`, streamed as :class:`Event` objects. :class:`FusionStats` reports what happened;
:class:`Trace` reports it per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .methods.base import Method
    from .prompt.layout import Layout, Span
    from .prompt.tools import ToolCall

__all__ = [
    "PHASES",
    "Answer",
    "Documents",
    "Event",
    "FusionStats",
    "Message",
    "Plan",
    "Prediction",
    "Prompt",
    "Trace",
    "WarmUp",
]

Message = dict[str, Any]
"""A chat message: ``{"role": "user", "content": "…"}``. An assistant's message may have ``tool_calls``, and a tool's
message ``tool_call_id`` and ``name`` (:mod:`cacheclip_rag.prompt.tools`)."""
Prompt = str | Sequence[Message]
Documents = Iterable[str] | Mapping[str, Iterable[tuple[str, str]]]
"""Chunk texts known to be in a prompt. A mapping also gives each text's ``(source, document)`` pairs, as in
:meth:`CacheClipEngine.precompute` (the document may be empty). Texts stored after an answer get these sources."""

PHASES = ("lookup", "read", "select", "assemble", "recompute")
"""Phases of the time to the first token, in order: find and tokenise the chunks, read their KV, score and choose
tokens, write KV at true positions, run the primary (plain prefill counts here completely). Reading goes on beside the
others: only the time in which the request waits for it counts."""


@dataclass(frozen=True, slots=True)
class Reading:
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
    reading: Reading = Reading()
    """Of the chunks, if they are reused."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions for one request. A plan holds no tensors; :meth:`to_dict` is ready for JSON."""

    layout: Layout
    """The prompt's token ids and the source of each token's KV."""
    method: Method
    """The requested method."""
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
    not_found: int = 0
    """Given documents of which no part stands in the prompt."""
    bypass: str | None = None
    """Why the ``reused`` chunks are not used after all: plain prefill is predicted to be soon enough. Else None."""
    prediction: Prediction | None = None
    """Set if the recompute ratio was chosen by predicted time."""

    @property
    def missing(self) -> tuple[Span, ...]:
        """Spans of chunks that are computed as fresh text."""
        reused = set(self.reused)
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
        """Tokens of the reused chunks."""
        return sum(len(span.tokens) for span in self.reused)

    def reusing(self, spans: Sequence[Span]) -> Plan:
        """The plan without all reused chunks but ``spans``: the others could not be read."""
        keys = dict(zip(self.reused, self.keys, strict=False))
        return replace(self, reused=tuple(spans), keys=tuple(keys[span] for span in spans if span in keys))

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
            "prefix_tokens": self.layout.num_exact,
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


@dataclass(frozen=True, slots=True)
class FusionStats:
    """Tokens, ratios and seconds of one answer. Every answer has these statistics, also in each framework's response
    object and in the DEBUG log."""

    method: str
    """Method that produced the answer. If no chunk was reused: ``prefix`` if the prefix cache held first tokens of the
    prompt, else ``full``."""
    fallback: str | None
    """Why plain prefill was used although another method was requested; None otherwise."""
    prompt_tokens: int
    """Tokens of the whole prompt: the sum of prefix, fresh and chunk tokens."""
    prefix_tokens: int
    """Leading tokens reused exactly, from the shared prefix or the prefix cache, without tokens of stored chunks."""
    fresh_tokens: int
    """Computed tokens: text between chunks, question, and chunks that were not stored."""
    chunk_tokens: int
    """Tokens of the chunks found in the store."""
    exact_tokens: int
    """Chunk tokens whose KV is exact and never recomputed: the chunk comes right after the prefix it was computed with,
    or from the prefix cache."""
    recomputed_tokens: int
    """Chunk tokens that were recomputed."""
    nominal_ratio: float
    """The requested recompute ratio."""
    hits: int
    """Chunks of the prompt found in the store, whole or in part. A chunk that stands twice counts twice; pieces of one
    chunk, in any order, count once (:mod:`cacheclip_rag.prompt.occurrences`). With ``gated`` or ``bypassed``, none was
    reused."""
    misses: int
    """Chunks of the prompt not found in the store, counted alike: computed as fresh text. With ``on_miss="store"``,
    those of which half or more stands in the prompt are stored after the answer."""
    phases_s: dict[str, float]
    """Seconds per phase of the time to the first token, keys as in :data:`PHASES`."""
    ttft_s: float
    """Seconds from the call to the first new token, everything included."""
    charged_ratio: float = 0.0
    """Share of (layer, chunk token) pairs that got fresh KV, a method's cost. It exceeds the effective ratio if layers
    compute all tokens to choose some. 1.0 for plain prefill, more if a reusing pass was not sure enough before it."""
    cached_prefix_tokens: int = 0
    """Prompt tokens taken from the prefix cache. ``prefix_tokens`` and ``chunk_tokens`` include them."""
    missed_tokens: int = 0
    """Tokens of the chunks that were not found in the store."""
    unusable: int = 0
    """Texts among the misses that are stored, but for another model, dtype, system prompt or chunk context, or without
    the auxiliary model's KV that the method needs. ``fallback`` says which, if nothing was reused."""
    not_found: int = 0
    """Given documents of which no part stands in the prompt."""
    partial_hits: int = 0
    """Hits of which a tenth or more of the chunk's tokens does not stand in the prompt, or not with the same ids."""
    partial_share: float | None = None
    """Mean share of the chunk's tokens that stand in the prompt as they are stored, over the partial hits; None without
    one."""
    confidence: float | None = None
    """Probability of the likeliest first token minus that of the second; None for an answer made of several
    prompts."""
    gated: bool = False
    """True: the prompt was prefilled in full after a reusing pass, whose confidence was below ``min_confidence``. Hits,
    misses and partial hits are those of the reusing pass, whose KV was thrown away."""
    bypassed: bool = False
    """True: plain prefill although chunks are stored, because it was predicted to be soon enough. Hits, misses and
    partial hits are those of the plan."""
    predicted_ttft_s: float | None = None
    """``ttft_s`` without ``queued_s``, as it was predicted; None unless the recompute ratio was chosen by it. With
    ``gated``, the prediction is of the reusing pass alone."""
    queued_s: float = 0.0
    """Seconds of ``ttft_s`` in which the request waited for others that came before it."""
    left_to_read_s: float = 0.0
    """Seconds for which the store was still read after the recompute had begun, which took at least as long."""
    reading_s: float = 0.0
    """Seconds for which the store was read, most of them while models computed: what the question waited for is
    ``phases_s["read"]``."""
    generated_tokens: int = 0
    decode_s: float = 0.0
    """Seconds from the first new token to the end of the answer, ``verify_s`` included."""
    verified_tokens: int | None = None
    """Leading tokens of the answer that full prefill would choose too; None if the answer was not verified, because
    ``finish`` is off, the answer is sampled, its KV is exact already, or the runtime cannot."""
    diverged_at: int | None = None
    """Number of the first token, from 0, of the answer as first given that full prefill would not choose; None if there
    is none or the answer was not verified."""
    completed_at: int | None = None
    """Number of the token, from 0, before which the exact KV was completed because its confidence was below
    ``min_confidence``: it and all later ones were chosen from the exact KV. None if no token was unsure, or the first
    one was (``gated``)."""
    verify_s: float = 0.0
    """Seconds spent on completing the exact KV and on verifying."""

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens whose KV came from the store or the prefix cache and was not recomputed."""
        return self.prefix_tokens + self.chunk_tokens - self.recomputed_tokens

    @property
    def effective_ratio(self) -> float:
        """Recomputed tokens divided by chunk tokens. If no chunk was reused, the computed share of the prompt: 1.0 for
        plain prefill, less if the prefix cache held its first tokens."""
        if not self.chunk_tokens:
            return self.fresh_tokens / self.prompt_tokens
        return self.recomputed_tokens / self.chunk_tokens

    @property
    def effective_ratio_of_stale(self) -> float:
        """Recomputed tokens divided by chunk tokens that are not exact: 1.0 means that no stale token is left."""
        stale = self.chunk_tokens - self.exact_tokens
        return self.recomputed_tokens / stale if stale else 1.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and ratios, ready for JSON."""
        names = ("effective_ratio", "effective_ratio_of_stale")
        ratios = {name: getattr(self, name) for name in names}
        return {**asdict(self), "reused_tokens": self.reused_tokens, **ratios}


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What :meth:`~cacheclip_rag.engine.CacheClipEngine.warm_up` did."""

    seconds: float
    models: tuple[str, ...]
    """Names of the loaded models, the primary's first."""
    chunks_read: int
    """Chunk caches that were read, over all models: into the memory tier, or for the system's page cache."""
    bytes_read: int
    """Their bytes in the store."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Details of an answer's prefill, for requests with ``trace``."""

    token_ids: tuple[int, ...]
    """Token ids of the whole prompt."""
    chunks: tuple[tuple[int, int], ...]
    """``(start, stop)`` of each reused chunk, in tokens."""
    scores: tuple[tuple[float, ...], ...]
    """Scores per reused chunk, one per token; empty for exact chunks. An empty tuple if the method scores nothing."""
    recomputed: tuple[int, ...]
    """Positions of the recomputed chunk tokens."""
    layer_s: tuple[float, ...]
    """Seconds of each layer of the recompute; empty after plain prefill."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    """New token ids, including the token that ended the answer."""
    finish_reason: str
    """``stop`` (end of turn or a stop string) or ``length``."""
    stats: FusionStats
    trace: Trace | None = None
    """Set if the request has ``trace`` and chunks were reused."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that the model asks for, if the request has tools. ``text`` does not contain them."""


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a streamed answer."""

    text: str
    """New text since the last event. All texts joined are the answer, if no event is a revision."""
    answer: Answer | None = None
    """Set on the last event only."""
    revised_from: int | None = None
    """Set on a revision (``finish="revise"``), of which an answer has at most one: the text from this character of the
    answer on is withdrawn, and ``text`` takes its place. ``shown = shown[: event.revised_from] + event.text`` is right
    for all events, because ``shown[:None]`` is all of ``shown``."""
    is_final: bool = True
    """False: a later event may withdraw text of this event or of earlier events. True: none will."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that are complete since the last event, if the request has tools. They come after ``text``."""
