"""Explains why a text was not a hit: checks every condition of reuse in turn."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cacheclip_rag.adapters import (
    CONTEXTS,
    MOST_PARTIAL,
    WINDOW,
    check_messages,
    context_name,
    normalise_chunk,
    share_of,
    standing_in,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheclip_rag import CacheClipEngine, Plan
    from cacheclip_rag.adapters import Prompt
    from cacheclip_rag.plugins import Span

_HEADER = re.compile(r"(?:[\w .-]{1,40}:[^\n]*\n?)+")
"""Lines of metadata that frameworks put before a text: ``file_name: a.md``."""
_RUN = 4
_MOST_SHARING = 3
_PLAUSIBLE = 0.3
_SHOWN = 30
"""Characters of a text that are shown where prompt and text begin to differ."""


@dataclass(frozen=True, slots=True)
class MissReport:
    """Result of :func:`explain_miss` for one text and one prompt."""

    text: str
    """Its beginning."""
    is_hit: bool
    reason: str
    """One of ``hit``, ``part``, ``too_short``, ``not_in_prompt``, ``not_precomputed``, ``evicted``,
    ``other_settings``, ``no_auxiliary``, ``inside_another``, ``cannot_reuse``."""
    explanation: str
    """Message for people: expected, found, what to do."""
    share: float = 0.0
    """Share of the text's tokens that stand in the prompt as they are stored."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def explain_miss(engine: CacheClipEngine, prompt: Prompt, text: str) -> MissReport:
    """Explain why this engine does, or does not, reuse ``text`` in ``prompt``. Loads the engine's models.

    Args:
        prompt: the prompt as it reaches the engine, a string or chat messages.
        text: the chunk's text as it was precomputed, or should have been.

    Raises:
        ConfigurationError: an invalid prompt or text.
    """
    chunk = normalise_chunk(text)
    messages = [] if isinstance(prompt, str) else check_messages(prompt)
    written = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in messages)

    def report(reason: str, explanation: str, share: float = 0.0) -> MissReport:
        return MissReport(chunk[:80], reason in ("hit", "part"), reason, explanation, share)

    if len(chunk) < WINDOW:
        return report(
            "too_short",
            f"the text has {len(chunk)} characters; those under {WINDOW} are not looked for, since reusing them saves "
            "nothing.",
        )
    stored = _stored(engine, chunk)
    plan = engine.plan(prompt)
    chunks = plan.layout.chunks
    spans = [span for span in chunks if span.whole == chunk]
    if spans:
        share = share_of(spans)
        obstacle = _obstacle(plan)
        if obstacle is not None:
            return report("cannot_reuse", obstacle, share)
        if not all(each.is_stored for each in stored):
            return report(*_missing(engine, chunk, stored), share)
        if share > MOST_PARTIAL:
            return report("hit", "the text is in the prompt, known, and its KV is stored: it is reused.", share)
        return report("part", _partly(chunk, spans, share), share)
    if chunk not in written:
        return report("not_in_prompt", _departure(chunk, written))
    known = [span.whole for span in chunks]
    around = [other for other in known if chunk in other]
    if around:
        return report(
            "inside_another",
            f"the text is part of a longer stored text, which is reused instead: {around[0][:_SHOWN]!r}...",
        )
    if any(each.is_stored for each in stored):
        return report(
            "not_precomputed",
            "the text's KV is stored, but the text is missing from the index (another program removed it). "
            "Precompute the text again: this costs a look-up only.",
        )
    return report(
        "not_precomputed",
        "the text is in the prompt, but it was never precomputed in namespace "
        f"{engine.config.namespace!r} of store {engine.config.store or 'in memory'!r}: the precomputed text is "
        "different, or is in another store. Compare store and namespace, and compare the text with the one that was "
        "precomputed (it includes metadata that a framework adds).",
    )


def _partly(chunk: str, spans: Sequence[Span], share: float) -> str:
    reused = f"{share:.0%} of the text's tokens are in the prompt as they are stored, and are reused."
    first = min(span.at for span in spans)
    if first and _HEADER.fullmatch(chunk[:first].strip()):
        return (
            f"{reused} Its metadata header is not in the prompt: {chunk[:first].strip()[:_SHOWN]!r}... To store texts "
            "without it, precompute what the prompt shows."
        )
    rest = max(_between(chunk, spans), key=len).strip()[:_SHOWN]
    return (
        f"{reused} The rest, such as {rest!r}..., is not in the prompt, or is written otherwise there: escaped, or "
        "with other blanks, marks or accents. Precompute the text as the prompt has it. A splitter that runs after "
        "precomputing, or a synthesizer whose prompts are full, cuts chunks: give it their size."
    )


def _between(chunk: str, spans: Sequence[Span]) -> Iterator[str]:
    """The stretches of a text that no span covers; an empty one if there is none."""
    stop = 0
    for span in sorted(spans, key=lambda span: span.at):
        yield chunk[stop : max(stop, span.at)]
        stop = max(stop, span.at + len(span.segment.text))
    yield chunk[stop:]


def _obstacle(plan: Plan) -> str | None:
    """Why the engine's method reuses none of the prompt's chunks, wherever they are stored; None if it reuses them."""
    method = plan.method
    if not method.reuses_chunks:
        return (
            f"the text is in the prompt and known, but method {method.name!r} reuses no chunk. Choose another method, "
            "such as 'auto'."
        )
    if plan.bypass is not None:
        return f"the text is stored, but not used: {plan.bypass}."
    return f"{plan.fallback}. This prompt is answered by plain prefill." if plan.obstructed else None


@dataclass(frozen=True, slots=True)
class _Stored:
    """Whether a model's KV of a text is stored."""

    role: str
    """``primary`` or ``auxiliary``."""
    name: str
    is_stored: bool


def _stored(engine: CacheClipEngine, chunk: str) -> list[_Stored]:
    """What is stored of a text with the chunk context of the engine's method, for the models that the method needs."""
    needs_auxiliary = bool(engine.config.auxiliary) and engine.make_method().needs_auxiliary
    caches = engine.chunk_caches(with_auxiliary=needs_auxiliary)
    return [
        _Stored(role, each.runtime.name, chunk in each)
        for role, each in zip(("primary", "auxiliary"), caches, strict=False)
    ]


def _missing(engine: CacheClipEngine, chunk: str, stored: Sequence[_Stored]) -> tuple[str, str]:
    others = [
        each
        for each in CONTEXTS.values()
        if each != engine.context_of() and chunk in engine.parts.models.primary_caches(each)
    ]
    primary, *auxiliary = stored
    if primary.is_stored:
        name = auxiliary[0].name
        return "no_auxiliary", (
            f"the text's KV is stored for the primary model, but not for the auxiliary model {name!r}, with which "
            f"method {engine.make_method().name!r} scores tokens: it was precomputed without it, or evicted. "
            "Precompute the text again: only what is missing is computed."
        )
    if others:
        return "other_settings", (
            f"the text was precomputed with chunk_context={context_name(others[0])!r}, but this engine reads chunks "
            f"with chunk_context={context_name(engine.context_of())!r}. Use the same setting, or precompute the text "
            "again."
        )
    if engine.store.holds_text(chunk):
        return "other_settings", (
            f"the text's KV is stored, but not for primary model {primary.name!r} with these settings: it was "
            "precomputed for another model, system prompt, dtype or codec. Use the same settings, or precompute the "
            "text again."
        )
    limit = engine.config.max_bytes
    why = f"it was evicted to stay below max_bytes={limit}" if limit else "it was evicted, deleted or damaged"
    return "evicted", (
        f"the text is known, but no KV of it is stored: {why}. Precompute it again; an answer whose prompt has half of "
        "the text or more stores it too (on_miss='store')."
    )


def _departure(chunk: str, written: str) -> str:
    """Where prompt and text begin to differ, and a possible reason."""
    if _words(chunk) in _words(written) or standing_in(written, [chunk]):
        return (
            "the prompt has the words of the text, written otherwise: escaped, in other letter case, or with other "
            "blanks, punctuation or accents. Precompute the text as the prompt has it."
        )
    length = _longest_start(chunk, written)
    if length >= WINDOW:
        end = written.index(chunk[:length]) + length
        cut = "continues differently" if written[end : end + 1].strip() else "is cut off there"
        return (
            f"the prompt has the text's first {length} of {len(chunk)} characters and {cut}: expected "
            f"{chunk[length : length + _SHOWN]!r}, got {written[end : end + _SHOWN]!r}. A splitter that runs after "
            "precomputing, or a synthesizer whose prompts are full, cuts chunks. Parts of 32 or more tokens are reused."
        )
    return (
        "neither the text nor its beginning is in the prompt: it was not retrieved, it was summarised or rewritten, or "
        "it begins differently (for instance with a title or metadata). Precompute the text as the prompt has it."
    )


def _longest_start(chunk: str, written: str) -> int:
    low, high = 0, len(chunk)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if chunk[:middle] in written else (low, middle - 1)
    return low


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def plausible(texts: Iterable[str], written: str) -> list[str]:
    """The texts that may have been meant to stand in a prompt, the likeliest first: three tenths or more of their runs
    of four words are there. Runs that more than a few texts share, such as a common header, do not count."""
    there = _word_runs(written)
    runs: dict[str, set[tuple[str, ...]]] = {}
    for text in texts:  # as few as possible are kept: there may be a million
        if text not in runs and not there.isdisjoint(of_text := _word_runs(text)):
            runs[text] = of_text
    sharing = Counter(run for of_text in runs.values() for run in of_text)
    shares = {}
    for text, of_text in runs.items():
        own = [run for run in of_text if sharing[run] <= _MOST_SHARING] or list(of_text)
        if own and (share := sum(run in there for run in own) / len(own)) >= _PLAUSIBLE:
            shares[text] = share
    return sorted(shares, key=lambda text: -shares[text])


def _word_runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.casefold())
    size = min(_RUN, len(words))
    return {tuple(words[n : n + size]) for n in range(len(words) - size + 1)} if words else set()
