"""Why was this text not a hit? Each thing that must hold for a chunk to be reused, checked in turn."""

from __future__ import annotations

import html
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..chunks.context import CONTEXTS
from ..prompt.segments import Chunk, normalise_chunk
from ..store.texts import WINDOW

if TYPE_CHECKING:
    from ..engine import CacheClipEngine
    from ..types import Prompt

__all__ = ["MissReport", "explain_miss"]

_SHOWN = 30
"""Characters of a text that are shown around the place where it departs."""


@dataclass(frozen=True, slots=True)
class MissReport:
    """What was found out about one text and one prompt."""

    text: str
    """Its beginning."""
    is_hit: bool
    reason: str
    """One of ``hit``, ``too_short``, ``not_in_prompt``, ``not_precomputed``, ``evicted``,
    ``inside_another``, ``cannot_reuse``."""
    explanation: str
    """For people: what was expected, what was found, what to do."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def explain_miss(engine: CacheClipEngine, prompt: Prompt, text: str) -> MissReport:
    """Say why ``text`` is, or is not, reused in ``prompt`` by this engine. Loads its models; answers nothing.

    Args:
        prompt: as it reaches the engine: a string or chat messages.
        text: the chunk as it was, or should have been, precomputed.

    Raises:
        ConfigurationError: something that is no prompt or no text.
    """
    chunk = normalise_chunk(text)
    written = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)

    def report(reason: str, explanation: str) -> MissReport:
        return MissReport(chunk[:80], reason == "hit", reason, explanation)

    if len(chunk) < WINDOW:
        return report(
            "too_short",
            f"the text has {len(chunk)} characters; those under {WINDOW} are not looked for, since reusing them saves "
            "nothing.",
        )
    primary = engine.primary
    if primary.unsupported:
        return report("cannot_reuse", f"{primary.unsupported} Every answer of this model is plain prefill.")
    if chunk not in written:
        return report("not_in_prompt", _departure(chunk, written))
    found = [segment.text for segment in engine.segment(prompt) if isinstance(segment, Chunk)]
    stored = _stored(engine, chunk)
    if chunk in found:
        if all(stored.values()):
            return report("hit", "the text is in the prompt, known, and its KV is stored: it is reused.")
        return report("evicted", _missing(engine, chunk, stored))
    around = [other for other in found if chunk in other]
    if around:
        return report(
            "inside_another",
            f"it stands inside a longer stored text, which is reused in its place: {around[0][:_SHOWN]!r}...",
        )
    if any(stored.values()):
        return report(
            "not_precomputed",
            "its KV is in the store, and the index of texts does not list it (another program removed it there). "
            "Precompute it again: it costs a look-up.",
        )
    return report(
        "not_precomputed",
        "the text stands in the prompt as it is, and was never precomputed in namespace "
        f"{engine.config.namespace!r} of store {engine.config.store or 'in memory'!r}: what was precomputed differs "
        "from it, or went elsewhere. Compare the store, the namespace, and the text as it is when precomputed (the "
        "metadata that a framework adds is part of it).",
    )


def _stored(engine: CacheClipEngine, chunk: str) -> dict[str, bool]:
    """By model, whether the KV is there as the engine's method wants it."""
    needs_auxiliary = bool(engine.config.auxiliary) and engine.make_method().needs_auxiliary
    caches = engine.chunk_caches(with_auxiliary=needs_auxiliary)
    return {each.runtime.name: chunk in each for each in caches}


def _missing(engine: CacheClipEngine, chunk: str, stored: dict[str, bool]) -> str:
    absent = [name for name, there in stored.items() if not there]
    others = [
        name
        for name, context in CONTEXTS.items()
        if name != engine.config.chunk_context and chunk in engine.chunk_caches(context, with_auxiliary=False)[0]
    ]
    if others:
        return (
            f"it was precomputed with chunk_context={others[0]!r}, and this engine reads chunks of "
            f"chunk_context={engine.config.chunk_context!r}. Use the same setting, or precompute it again."
        )
    limit = engine.config.max_bytes
    evicted = f", evicted to stay below max_bytes={limit}" if limit else ""
    return (
        f"the text is known, and its KV is not there for {', '.join(map(repr, absent))}{evicted}: deleted, damaged, or "
        "precomputed for other models, another system prompt or another dtype. The next answer with it stores it "
        "again; or precompute it now."
    )


def _departure(chunk: str, written: str) -> str:
    """Where the prompt stops being like the text, and what may have changed it."""
    for change, what, advice in (
        (html.escape, "HTML-escaped", "Give the prompt the text as it is, or precompute it escaped."),
        (html.unescape, "with its HTML entities resolved", "Precompute the text as the prompt has it."),
    ):
        if change(chunk) != chunk and change(chunk) in written:
            return f"the prompt has the text {what}. {advice}"
    if _words(chunk) in _words(written):
        return (
            "the prompt has all its words, with other blanks or line ends between them. Precompute the text after the "
            "step that changes them, or leave that step out."
        )
    if chunk.casefold() in written.casefold():
        return "the prompt has the text in other letter case. Precompute it as the prompt has it."
    length = _longest_start(chunk, written)
    if length >= WINDOW:
        end = written.index(chunk[:length]) + length
        cut = "goes on otherwise" if written[end : end + 1].strip() else "is cut off there"
        return (
            f"the prompt has its first {length} of {len(chunk)} characters and {cut}: expected "
            f"{chunk[length : length + _SHOWN]!r}, got {written[end : end + _SHOWN]!r}. A splitter that runs after "
            "precomputing, or a synthesizer whose prompts are full, cuts chunks: keep them whole."
        )
    return (
        "neither the text nor its beginning is in the prompt: it was not retrieved, was summarised or rewritten, or "
        "begins otherwise (a title or metadata before it, say). Precompute the text as the prompt has it."
    )


def _longest_start(chunk: str, written: str) -> int:
    """Characters of the longest beginning of ``chunk`` that is somewhere in ``written``."""
    low, high = 0, len(chunk)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if chunk[:middle] in written else (low, middle - 1)
    return low


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text)
