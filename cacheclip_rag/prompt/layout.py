"""The layout of a prompt: each token's position, and the source of its KV (shared prefix, chunk cache, fresh)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..errors import PromptTooLongError
from .segments import Chunk, Segment

if TYPE_CHECKING:
    from ..runtime.base import Runtime, TokenizedText

__all__ = ["Layout", "Span", "check_least_length", "check_length", "lay_out", "question_slots"]


@dataclass(frozen=True, slots=True)
class Span:
    """One segment and its position in the prompt."""

    segment: Segment
    tokens: TokenizedText
    start: int
    """Position of the segment's first token."""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_chunk(self) -> bool:
        return isinstance(self.segment, Chunk)


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt's token ids and the source of each token's KV."""

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    num_prefix: int
    """Leading tokens that are the engine's shared prefix, exact as stored. 0 if the prompt begins differently."""
    opens_with_prefix: bool
    """Whether the prompt begins with the shared prefix; always True for an empty prefix."""
    exact_after_prefix: bool = True
    """Whether chunk caches were computed right after the shared prefix. A chunk right after the prefix is then
    exact."""
    num_cached: int = 0
    """Leading tokens taken from the prefix cache, which are exact. If not 0, they exceed the shared prefix."""

    @property
    def num_exact(self) -> int:
        """Leading tokens whose KV is available and equals plain prefill's. They are not computed again."""
        return max(self.num_prefix, self.num_cached)

    @property
    def ids(self) -> torch.Tensor:
        """The token ids as a new tensor, ``(num_tokens,)`` int64."""
        return torch.tensor(self.token_ids, dtype=torch.int64)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def chunks(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.is_chunk)

    def is_exact(self, span: Span) -> bool:
        """Whether a chunk's KV equals full prefill's: it comes right after the prefix it was computed with, or from the
        prefix cache."""
        after_prefix = self.exact_after_prefix and self.opens_with_prefix and span.start == self.num_prefix
        return span.is_chunk and (after_prefix or self.is_cached(span))

    def is_cached(self, span: Span) -> bool:
        """Whether all KV of a segment comes from the prefix cache."""
        return span.stop <= self.num_cached

    def cached_until(self, num_tokens: int, reused: Sequence[Span]) -> Layout:
        """This layout with ``num_tokens`` leading tokens from the prefix cache. If they end inside a reused chunk, they
        are cut to the chunk's start. If the shared prefix has as many tokens, the prefix cache is not used."""
        num_cached = min((span.start for span in reused if span.start < num_tokens < span.stop), default=num_tokens)
        return replace(self, num_cached=num_cached if num_cached > self.num_prefix else 0)


def lay_out(
    segments: Sequence[Segment], tokenize: Callable[[Segment], TokenizedText], prefix_ids: Sequence[int]
) -> Layout:
    """Tokenise each segment separately and concatenate the ids."""
    spans, position = [], 0
    for segment in segments:
        tokens = tokenize(segment)
        if not len(tokens):
            continue
        spans.append(Span(segment, tokens, position))
        position += len(tokens)
    ids = [token for span in spans for token in span.tokens.ids]
    first_chunk = next((span.start for span in spans if span.is_chunk), position)
    num_prefix = len(prefix_ids)
    # at least one token must be computed: its logits give the first new token
    opens_with_prefix = num_prefix <= min(first_chunk, position - 1) and ids[:num_prefix] == list(prefix_ids)
    return Layout(tuple(ids), tuple(spans), num_prefix if opens_with_prefix else 0, opens_with_prefix)


def check_least_length(segments: Sequence[Segment], runtime: Runtime) -> None:
    """Raise PromptTooLongError if the bytes of the prompt prove that it does not fit the model's context. Such prompts
    are not tokenised, which takes a second for a megabyte."""
    room = runtime.context_tokens - 1
    texts = [segment.text for segment in segments if not segment.control]
    if sum(map(len, texts)) <= room:
        return
    least = sum(map(runtime.least_tokens, texts))
    if least > room:
        raise PromptTooLongError(
            f"the prompt has at least {least} tokens, {least - room} more than the {room} that fit model "
            f"{runtime.name!r}: shorten it, or use a model with a longer context."
        )


def check_length(layout: Layout, context_tokens: int, model: str) -> None:
    """Raise PromptTooLongError unless the prompt and one new token fit the model's context."""
    room = context_tokens - 1  # one token must be generated
    excess = layout.num_tokens - room
    if excess <= 0:
        return
    dropped, count = 0, 0
    for span in reversed(layout.chunks):
        if dropped >= excess:
            break
        dropped, count = dropped + len(span.tokens), count + 1
    advice = (
        f"drop the last {count} of its {len(layout.chunks)} chunks"
        if dropped >= excess
        else "shorten the question or split the text"
    )
    raise PromptTooLongError(
        f"the prompt has {layout.num_tokens} tokens, {excess} more than the {room} that fit model "
        f"{model!r}: {advice}, or use a model with a longer context."
    )


def question_slots(layout: Layout, question: str | None = None) -> torch.Tensor:
    """Slots of the question's tokens, at least one.

    The question is ``question`` if it occurs after the last chunk, else all of the user's text after the last chunk,
    else the prompt's last token. Text of the chat template does not belong to the question.
    """
    chunks = layout.chunks
    behind = [s for s in layout.spans if not s.is_chunk and not s.segment.control and s.start >= chunks[-1].stop]
    found: list[int] = []
    for span in behind:
        at = span.segment.text.rfind(question.strip()) if question and question.strip() else -1
        if at >= 0:
            assert question is not None
            end = at + len(question.strip())
            found = [span.start + n for n, (a, b) in enumerate(span.tokens.offsets) if b > at and a < end and b > a]
    if not found:
        found = [
            span.start + n
            for span in behind
            for n, (a, b) in enumerate(span.tokens.offsets)
            if span.segment.text[a:b].strip()
        ]
    return torch.tensor(found or [layout.num_tokens - 1], dtype=torch.int64)
