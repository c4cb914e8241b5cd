"""Answers: the prefilled prompt from which they are decoded, their text, their events while they are streamed, and what
is known about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..prompt.tools import ToolCall
from ..runtime.base import KVSource, State

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..plan.plan import Plan


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
    """Tokens reused from the shared prefix or from earlier prompts, without tokens of stored chunks."""
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
    chunk, in any order, count once (:func:`cacheclip_rag.prompt.layout.occurrences`). With ``gated`` or ``bypassed``,
    none was reused."""
    misses: int
    """Chunks of the prompt not found in the store, counted alike, and chunks of which half or more stands in the prompt
    in a form that has other tokens (escaped, or with accents apart): computed as fresh text. With ``on_miss="store"``,
    those of which half or more stands in the prompt are stored after the answer."""
    phases_s: dict[str, float]
    """Seconds per phase of the time to the first token, keys as in :data:`~cacheclip_rag.base.clock.PHASES`."""
    ttft_s: float
    """Seconds from the call to the first new token that stays, everything included. With ``finish="revise"`` that is
    when the answer was verified: what a stream gives before may be withdrawn."""
    charged_ratio: float = 0.0
    """Share of the chunk tokens that got fresh KV: 1.0 for plain prefill, more if a reusing pass was not sure enough
    before it."""
    cached_prefix_tokens: int = 0
    """Prompt tokens taken from the prefix cache. ``prefix_tokens`` and ``chunk_tokens`` include them."""
    continued_tokens: int = 0
    """Leading prompt tokens whose KV an earlier prompt and its answer left. It is approximate after the first
    ``cached_prefix_tokens``. ``prefix_tokens`` and ``chunk_tokens`` include them."""
    continued_turns: int = 0
    """Earlier answers, one after the other, whose KV the prompt continues."""
    moved_tokens: int = 0
    """Prompt tokens whose KV an earlier prompt or its answer left at another position, or behind other text. It is
    approximate. ``prefix_tokens`` and ``chunk_tokens`` include them."""
    moved_past: float | None = None
    """Mean share, 0 to 1, of what stood before these tokens there that stands before them here; None without any."""
    stale_from: int | None = None
    """Of a prompt that continues approximate KV: the first token, from 0, whose KV is a chunk's as it was stored; None
    if every token was recomputed by now. Later text, earlier answers too, is exact relative to that KV only."""
    missed_tokens: int = 0
    """Tokens of the missed chunks."""
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
    """Probability of the likeliest first token minus that of the second; None without logits."""
    gated: bool = False
    """True: the prompt was prefilled in full after a reusing pass, whose confidence was below ``min_confidence``. Hits,
    misses and partial hits are those of the reusing pass, whose KV was thrown away."""
    bypassed: bool = False
    """True: plain prefill although chunks are stored, because it computes less (the prefix cache holds so much of the
    prompt) or was predicted to be soon enough. Hits, misses and partial hits are those of the plan."""
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
    """Seconds from then to the end of the answer, with ``verify_s`` unless ``finish`` is ``revise``."""
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
class TraceText:
    """A known text of a prompt: stored, or given with it."""

    text: str
    """The whole text, of which the prompt may have a part."""
    num_tokens: int
    """Tokens of the whole text."""
    is_stored: bool
    """Whether its KV is stored for this engine."""
    medium: str | None = None
    """What its KV was read from: ``memory``, ``page cache``, ``disk``, ``s3`` …; None: it was not read."""
    sources: tuple[tuple[str, str], ...] = ()
    """Its sources, each with its document or an empty string; the source of learned texts is ``learned``."""
    is_altered: bool = False
    """Whether it stands in the prompt in another form only, which has other tokens."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Neighbouring tokens of a prompt whose KV has one source."""

    start: int
    stop: int
    kind: str
    """``fresh`` (computed), ``chunk`` (a stored text's), ``prefix`` (the shared prefix's, as stored), ``cached`` (the
    prefix cache's), ``continued`` or ``moved`` (an earlier prompt's)."""
    is_exact: bool
    """Whether this KV equals full prefill's before any token is computed again."""
    text: int | None = None
    """Number of the text, in :attr:`Trace.texts`, whose tokens these are."""
    is_control: bool = False
    """Whether the chat template wrote them."""
    scores: tuple[float, ...] = ()
    """Of each token, by which some were chosen to be computed again; empty: none was scored."""
    score_share: float | None = None
    """Share of the prompt's scores that these tokens have, 0 to 1."""
    past: float | None = None
    """Of moved and continued KV: mean share, 0 to 1, of what stood before these tokens that stands there again."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What the KV of a prompt was made of, for requests with ``trace``. With ``gated``: of the reusing pass."""

    token_ids: tuple[int, ...]
    """Token ids of the whole prompt."""
    chunks: tuple[tuple[int, int], ...]
    """``(start, stop)`` of each reused chunk, in tokens."""
    recomputed: tuple[int, ...]
    """Positions of the recomputed chunk tokens."""
    tokens: tuple[str, ...]
    """Text of each token, of a control token its name. A character of several tokens stands with the last of them."""
    spans: tuple[TraceSpan, ...]
    """All tokens, in order."""
    texts: tuple[TraceText, ...]
    """Stored texts that the prompt has, whole or in part, and given ones."""
    is_exact: bool
    """Whether all KV equals plain prefill's."""
    turns: int
    """Earlier answers whose approximate KV the prompt continues or moves."""

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model thought a token of the answer, whatever sampling settings or a schema made of it."""

    token: str
    """Its text; ``\ufffd`` for a part of a character."""
    logprob: float
    """Natural logarithm of its probability."""
    likeliest: tuple[tuple[str, float], ...] = ()
    """Texts and logarithms of the likeliest tokens at its place; of a control token, its name."""
    encoded: bytes | None = None
    """Its bytes, also those of a part of a character, so that they can be joined; None: not known."""
    likeliest_encoded: tuple[bytes | None, ...] = ()
    """The same for the likeliest tokens."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    """New token ids, including the token that ended the answer."""
    finish_reason: str
    """``stop`` (end of turn or a stop string) or ``length``; for observers also ``cancelled``: its reader has left."""
    stats: FusionStats
    trace: Trace | None = None
    """Set if the request has ``trace``."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that the model asks for, if the request has tools. ``text`` does not contain them."""
    reasoning: str = ""
    """What the model wrote for itself before ``text``, between markers such as ``<think>`` and ``</think>``. Calls and
    stop strings in it are none."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of each new token but the one that ended the answer, reasoning and calls included; None if the call did not ask.
    """
    stop_string: str | None = None
    """The stop string before which the answer ends; None: it ended by itself, or was cut off."""


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a streamed answer: an event a token at least, and a last one."""

    text: str
    """New text since the last event; empty while text waits. All texts joined are the answer, if no event is a
    revision."""
    answer: Answer | None = None
    """Set on the last event only."""
    revised_from: int | None = None
    """Set on a revision: the text from this character of the answer on is withdrawn, and ``text`` takes its place. An
    answer has one at most with ``finish="revise"``, and one if its text turns out to be reasoning. ``shown = shown[:
    event.revised_from] + event.text`` is right for all events, because ``shown[:None]`` is all of ``shown``."""
    is_final: bool = True
    """False: a later event may withdraw text of this event or of earlier events. True: none will, unless the model ends
    reasoning that it did not begin."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls of the answer, on its last event, if the request has tools. They come after ``text``."""
    reasoning: str = ""
    """New reasoning since the last event. It comes before ``text``, and is never withdrawn."""


def last_answer(events: Iterable[Event]) -> Answer:
    """The answer of a stream of events, which are read to the end."""
    answer = None
    for event in events:
        answer = event.answer or answer
    assert answer is not None, "a stream ends with its answer"
    return answer


@dataclass(frozen=True, slots=True)
class Fused:
    """Result of :meth:`Runtime.fuse`."""

    state: State
    """The prompt's KV, for :meth:`Runtime.decode_step`."""
    logits: torch.Tensor
    """Logits of the prompt's last token, ``(vocab_size,)``."""
    plan: Plan
    """The plan that was carried out. ``reused`` no longer lists chunks whose stored KV was missing or damaged."""
    recomputed: Sequence[int]
    """Positions of tokens of reused chunks that were computed again."""
    first_computed: int | None
    """Position of the first token that was computed; None if other prompts must not reuse this KV."""
    stale: np.ndarray[Any, Any] | None = None
    """``(num_tokens,)`` bool: tokens whose KV is a chunk's as it was stored, but for a correction; None if no prompt
    may continue this KV."""
    scores: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """``(num_tokens,)`` scores of the tokens of chunks, by the chunk's first position, where a method rated them."""

    @property
    def num_computed(self) -> int:
        """Number of tokens of the prompt that were computed."""
        rows = (self.plan.known.source == KVSource.COMPUTED) | self.plan.known.border
        rows[[*self.recomputed]] = True
        return int(rows.sum())
