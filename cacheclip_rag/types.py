"""What goes into an engine and what comes out: requests, plans, answers, statistics. It imports nothing of ours.

A :class:`Request` becomes a :class:`Plan` (decisions, no tensors), and the plan becomes an :class:`Answer`, piece by
piece as :class:`Event` objects. :class:`FusionStats` says what happened, :class:`Trace` shows it token by token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .methods.base import Method
    from .prompt.layout import Layout, Span
    from .prompt.segments import Segment
    from .sampling import SamplingParams

__all__ = ["PHASES", "Answer", "Documents", "Event", "FusionStats", "Message", "Plan", "Prompt", "Request", "Trace"]

Message = dict[str, str]
"""A chat message: ``{"role": "user", "content": "…"}``."""
Prompt = str | Sequence[Message]
Documents = Iterable[str] | Mapping[str, Iterable[tuple[str, str]]]
"""Chunk texts known to be in a prompt. A mapping also says where each comes from, as ``(source, document)`` pairs (see
:meth:`CacheClipEngine.precompute`; the document may be empty): what is stored after an answer goes with its sources."""

PHASES = ("lookup", "read", "select", "assemble", "recompute")
"""Parts of the time to the first token, in order: find and tokenise the chunks, read their KV, score and choose tokens
with the auxiliary model, write KV at true positions, run the primary (for plain prefill all of it)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One question to an engine. Fields as the arguments of :meth:`CacheClipEngine.generate`."""

    prompt: Prompt | Sequence[Segment]
    params: SamplingParams
    method: Method | None
    """None: whichever exact method costs least, for the parts of a composed answer."""
    question: str | None = None
    """Text that scores the chunks; None: the text after the last chunk."""
    documents: Documents = ()
    trace: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be done for one request. It holds no tensors; :meth:`to_dict` is ready for JSON."""

    layout: Layout
    """The prompt as token ids, and where each comes from."""
    method: Method
    """What was asked for."""
    reused: tuple[Span, ...] = ()
    """Chunks whose stored KV will be used, in prompt order; empty for plain prefill."""
    fallback: str | None = None
    """Why nothing is reused although the method reuses chunks; None otherwise."""
    captures: bool = False
    """True: plain prefill whose chunks are kept for later prompts (Cache-Craft)."""
    obstructed: bool = False
    """True: nothing could be reused exactly, whatever the store holds; ``fallback`` says why."""
    question: str | None = None
    keys: tuple[str, ...] = ()
    """Store keys of the ``reused`` chunks."""

    @property
    def missing(self) -> tuple[Span, ...]:
        """Chunks that are computed as fresh text."""
        return tuple(span for span in self.layout.chunks if span not in self.reused)

    @property
    def exact(self) -> tuple[Span, ...]:
        """Reused chunks whose KV is that of full prefill, so that none of their tokens is recomputed."""
        return tuple(span for span in self.reused if self.layout.is_exact(span))

    @property
    def chunk_tokens(self) -> int:
        """Tokens of the reused chunks."""
        return sum(len(span.tokens) for span in self.reused)

    @property
    def budget_tokens(self) -> int:
        """Chunk tokens that the method's ratio allows to recompute."""
        return round(self.method.nominal_ratio * self.chunk_tokens) if self.reused else 0

    def to_dict(self) -> dict[str, Any]:
        """Decisions in plain values: method, ratio, token ids, and one piece per segment with its place and origin."""
        keys = dict(zip(self.reused, self.keys, strict=False))
        return {
            "method": self.method.name,
            "recompute_ratio": self.method.nominal_ratio,
            "fallback": self.fallback,
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
    """What happened while answering: tokens, ratios and seconds. On every answer, in each framework's response object
    and in the DEBUG log."""

    method: str
    """Method that produced the answer. Where chunks could not be reused: ``prefix`` if the prefix cache had a start of
    the prompt, else ``full``."""
    fallback: str | None
    """Why the answer came by plain prefill although another method was asked for; None otherwise."""
    prompt_tokens: int
    """Tokens of the whole prompt = prefix + fresh + chunk tokens."""
    prefix_tokens: int
    """Leading tokens reused exactly: the shared prefix, or what the prefix cache had, but for stored chunks in it."""
    fresh_tokens: int
    """Tokens of glue, question and chunks that were not stored: computed."""
    chunk_tokens: int
    """Tokens of the chunks found in the store."""
    exact_tokens: int
    """Chunk tokens among these right behind the very prefix they were computed behind, or taken from the prefix cache:
    exact, never computed again."""
    recomputed_tokens: int
    """Chunk tokens among these that were computed again."""
    nominal_ratio: float
    """Recompute ratio that was asked for."""
    hits: int
    """Chunks found in the store."""
    misses: int
    """Chunks not found: computed as fresh text for this answer and (``on_miss="store"``) stored after it."""
    phases_s: dict[str, float]
    """Seconds per phase of the time to the first token, keys as in :data:`PHASES`."""
    ttft_s: float
    """Seconds from the call to the first new token, everything included."""
    charged_ratio: float = 0.0
    """Share of (layer, chunk token) pairs given fresh KV: what a method costs. Above the effective ratio where layers
    run in full only to choose; 1.0 for plain prefill."""
    cached_prefix_tokens: int = 0
    """Prompt tokens taken from the prefix cache. They count among ``prefix_tokens`` and ``chunk_tokens`` too."""
    missed_tokens: int = 0
    """Tokens of the chunks that were not found."""
    generated_tokens: int = 0
    decode_s: float = 0.0
    """Seconds from the first to the last new token."""

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens whose KV came from the store or the prefix cache and was kept as it is."""
        return self.prefix_tokens + self.chunk_tokens - self.recomputed_tokens

    @property
    def effective_ratio(self) -> float:
        """Recomputed over chunk tokens. Where no chunk was reused, the share of the prompt that was computed: 1.0 for
        plain prefill, less if the prefix cache had its start."""
        if not self.chunk_tokens:
            return self.fresh_tokens / self.prompt_tokens
        return self.recomputed_tokens / self.chunk_tokens

    @property
    def effective_ratio_of_stale(self) -> float:
        """Recomputed over the chunk tokens that are not exact anyway: 1.0 means that nothing stale is left."""
        stale = self.chunk_tokens - self.exact_tokens
        return self.recomputed_tokens / stale if stale else 1.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and ratios, ready for JSON."""
        names = ("effective_ratio", "effective_ratio_of_stale")
        ratios = {name: getattr(self, name) for name in names}
        return {**asdict(self), "reused_tokens": self.reused_tokens, **ratios}


@dataclass(frozen=True, slots=True)
class Trace:
    """An answer's prefill token by token; only where the request asked for it."""

    token_ids: tuple[int, ...]
    """The whole prompt."""
    chunks: tuple[tuple[int, int], ...]
    """``(start, stop)`` of each reused chunk, in tokens."""
    scores: tuple[tuple[float, ...], ...]
    """Per reused chunk one score a token, those of exact chunks empty; empty where the method scores nothing."""
    recomputed: tuple[int, ...]
    """Positions of the chunk tokens that were computed again."""
    layer_s: tuple[float, ...]
    """Seconds of each layer of the recompute; empty after plain prefill."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    """New tokens, the ending one included."""
    finish_reason: str
    """``stop`` (end of turn or a stop string) or ``length``."""
    stats: FusionStats
    trace: Trace | None = None
    """Set where the request asked for it and chunks were reused."""


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a streamed answer."""

    text: str
    """New text since the last event; joined over all events it is the answer."""
    answer: Answer | None = None
    """Set on the last event only."""
