"""The layout of a prompt: each token's position, and whether it is the shared prefix's, a chunk's or fresh.

A prompt's text is tokenised as a whole, as by every other engine, so that ``full`` computes what anyone else computes.
A stored chunk was tokenised by itself. Where its tokens stand in the prompt, with the same ids over the same
characters, its KV can be reused; where a token differs (usually the first or the last one, which the text around it
can change), the token is fresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..base.errors import PromptTooLongError
from ..finding.folding import code_points, fold
from ..runtime.base import Runtime, TokenizedText
from .segments import Chunk, Fresh, Segment

LEAST_PART = 32
"""Least tokens of a chunk that are reused if only a part of it stands in the prompt."""
MOST_PARTIAL = 0.9
"""Largest share of a chunk's tokens in a partial hit."""
_LEAST_RUN = 2
"""Least neighbouring tokens that are reused, if the chunk has more."""
_NEAR = 16
"""Most tokens between two runs of a chunk that are one piece of text: a quotation mark and a line end, not a cut."""


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring tokens of one segment, and their position in the prompt."""

    segment: Segment
    """Its text is the text of these tokens."""
    tokens: TokenizedText = field(compare=False)
    start: int
    """Position of the first token."""
    first: int = 0
    """Number of the first token among the tokens of the whole chunk."""
    continues: bool = False
    """Whether the chunk goes on here after the span before, with only a few other tokens between them."""
    whole_tokens: int = 0
    """Tokens of the whole chunk; 0 for fresh text."""
    stop: int = field(init=False, compare=False, repr=False)
    is_chunk: bool = field(init=False, compare=False, repr=False)
    whole: str = field(init=False, compare=False, repr=False)
    """The text that is stored, of which these tokens are a part."""
    at: int = field(init=False, compare=False, repr=False)
    """Where the segment's text begins in :attr:`whole`, in characters."""

    def __post_init__(self) -> None:
        chunk = self.segment if isinstance(self.segment, Chunk) else None
        whole, at = (self.segment.text, 0) if chunk is None else (chunk.whole, chunk.at)
        values = {"stop": self.start + len(self.tokens), "is_chunk": chunk is not None, "whole": whole, "at": at}
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt's token ids, and what they are tokens of."""

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    num_prefix: int
    """Leading tokens that are those of the engine's shared prefix, exact as stored."""
    exact_from: int | None = None
    """Where a whole chunk is exact as it was stored: after the whole shared prefix, if chunk caches were computed right
    behind that. None: nowhere."""
    altered: Mapping[str, int] = field(default_factory=dict)
    """Texts of which half or more stands in the prompt, but in another form (escaped, with a mark in each line, or
    with accents apart), so that no part of 32 or more tokens is alike; and how many tokens they have as chunks."""
    generation_prompt: str | None = None
    """What the chat template wrote before the answer; None if the prompt does not end with text of a template."""
    num_tokens: int = field(init=False, compare=False, repr=False)
    chunks: tuple[Span, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", len(self.token_ids))
        object.__setattr__(self, "chunks", tuple(span for span in self.spans if span.is_chunk))

    @property
    def ids(self) -> torch.Tensor:
        return torch.tensor(self.token_ids, dtype=torch.int64)


def lay_out(
    segments: Sequence[Segment],
    runtime: Runtime,
    tokenize_chunk: Callable[[str], TokenizedText],
    prefix_ids: Sequence[int],
    *,
    is_after_prefix: bool = False,
) -> Layout:
    """Tokenise a prompt and find the tokens of its chunks, as ``tokenize_chunk`` gives those of a whole stored chunk.
    ``is_after_prefix``: chunk caches were computed right behind the shared prefix."""
    spans: list[Span] = []
    for group in _groups(segments):
        stored = [
            (tokenize_chunk(each.whole), each.at)
            if isinstance(each, Chunk) and each.whole.startswith(each.text, each.at)
            else None
            for each in group
        ]
        start = spans[-1].stop if spans else 0
        spans += _spans(group, runtime.tokenize_prompt(group, stored), tokenize_chunk, start)
    columns = [span.tokens.columns[0] for span in spans]
    ids: list[int] = np.concatenate(columns).tolist() if columns else []
    first_chunk = next((span.start for span in spans if span.is_chunk), len(ids))
    # at least one token must be computed: its logits give the first new token
    most = max(0, min(len(prefix_ids), first_chunk, len(ids) - 1))
    num_prefix = next((n for n in range(most) if ids[n] != prefix_ids[n]), most)
    end = segments[-1].text if segments and segments[-1].control else None
    exact_from = num_prefix if is_after_prefix and num_prefix == len(prefix_ids) else None
    layout = Layout(tuple(ids), tuple(spans), num_prefix, exact_from, generation_prompt=end)
    placed = {span.whole for span in spans if span.is_chunk}
    lost = [segment for segment in segments if isinstance(segment, Chunk) and segment.whole not in placed]
    return replace(layout, altered=_altered(lost, tokenize_chunk)) if lost else layout


def _altered(lost: Iterable[Chunk], tokenize_chunk: Callable[[str], TokenizedText]) -> dict[str, int]:
    """See :attr:`Layout.altered`. ``lost``: segments of which no token is that of the chunk."""
    there: dict[str, int] = {}
    for segment in lost:
        there[segment.whole] = there.get(segment.whole, 0) + len(fold(segment.text)[0])
    half = [text for text, count in there.items() if 2 * count >= len(fold(text)[0])]
    return {text: num_tokens for text in half if (num_tokens := len(tokenize_chunk(text)))}


def _groups(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Segments that are tokenised together."""
    group: list[Segment] = []
    for segment in segments:
        group.append(segment)
        if segment.apart:
            yield group
            group = []
    if group:
        yield group


class _TokenRun(NamedTuple):
    """Tokens ``[start, stop)`` of a text that are those of a chunk from token ``first`` on."""

    start: int
    stop: int
    first: int
    chunk: Chunk
    begin: int
    """Where the chunk's segment begins in the text."""
    whole_tokens: int
    """Tokens of the whole chunk."""
    is_all: bool
    """Whether these are all of them."""


def _spans(
    group: Sequence[Segment], tokens: TokenizedText, tokenize_chunk: Callable[[str], TokenizedText], start: int
) -> Iterator[Span]:
    """The tokens of a group as spans, from position ``start`` on: runs of chunks, and fresh text between them."""
    text = "".join(segment.text for segment in group)
    edges = np.cumsum([0, *(len(segment.text) for segment in group)])
    offsets = tokens.columns[1]
    runs = _runs(group, edges, tokens, tokenize_chunk)
    owners = np.maximum(np.searchsorted(edges, offsets[:, 0], side="right") - 1, 0)
    control = np.array([segment.control for segment in group])[np.minimum(owners, len(group) - 1)]
    position, before = 0, None
    for run in [*runs, None]:
        stop = len(tokens) if run is None else run.start
        while position < stop:
            other = np.flatnonzero(control[position:stop] != control[position])
            end = position + int(other[0]) if len(other) else stop
            begin, last = int(offsets[position, 0]), int(offsets[position:end, 1].max())
            fresh = Fresh(text[begin:last], control=bool(control[position]))
            yield Span(fresh, tokens.part(position, end, -begin), start + position)
            position = end
        if run is None:
            return
        chunk = run.chunk
        begin, last = int(offsets[run.start, 0]), int(offsets[run.start : run.stop, 1].max())
        if not run.is_all:
            chunk = Chunk(text[begin:last], chunk.whole, begin - run.begin + chunk.at)
        continues = (
            before is not None
            and before.chunk.whole == chunk.whole
            and 0 <= run.first - (before.first + before.stop - before.start) <= _NEAR
            and run.start - before.stop <= _NEAR
        )
        part = tokens.part(run.start, run.stop, -(run.begin if run.is_all else begin))
        yield Span(chunk, part, start + run.start, run.first, continues, run.whole_tokens)
        position, before = run.stop, run


def _runs(
    group: Sequence[Segment],
    edges: np.ndarray[Any, Any],
    tokens: TokenizedText,
    tokenize_chunk: Callable[[str], TokenizedText],
) -> list[_TokenRun]:
    """Runs of all chunks of a group, in order."""
    runs: list[_TokenRun] = []
    for number, segment in enumerate(group):
        if not isinstance(segment, Chunk):
            continue
        begin, end = int(edges[number]), int(edges[number + 1])
        source = tokenize_chunk(segment.whole)
        is_whole = segment.of is None
        stretches = [(begin, end)] if is_whole else _alike(segment, begin, end)
        for start, stop, first in (
            run for a, b in stretches for run in _equal_runs(tokens, a, b, source, segment.at + a - begin)
        ):
            is_all = is_whole and stop - start == len(source)
            if is_all or stop - start >= _LEAST_RUN:
                runs.append(_TokenRun(start, stop, first, segment, begin, len(source), is_all))
    parts: dict[str, int] = {}
    for run in runs:
        if run.chunk.of is not None:
            parts[run.chunk.of] = parts.get(run.chunk.of, 0) + run.stop - run.start
    return [run for run in runs if run.chunk.of is None or parts[run.chunk.of] >= LEAST_PART]


def _alike(part: Chunk, begin: int, end: int) -> list[tuple[int, int]]:
    """Characters ``[begin, end)`` of a text are a part of a chunk: where they are those of the chunk."""
    stored = part.whole[part.at : part.at + len(part.text)]
    if stored == part.text:
        return [(begin, end)]
    alike = np.zeros(len(stored) + 2, dtype=bool)
    alike[1:-1] = code_points(stored) == code_points(part.text[: len(stored)])
    edges = (np.flatnonzero(alike[1:] != alike[:-1]) + begin).tolist()
    return [*zip(edges[::2], edges[1::2], strict=True)]


def _equal_runs(
    tokens: TokenizedText, begin: int, end: int, source: TokenizedText, at: int
) -> Iterator[tuple[int, int, int]]:
    """Where tokens of ``source`` stand in a text, whose characters ``[begin, end)`` are those of the source from ``at``
    on: first token, token after the last one, first token in ``source``."""
    ids, offsets = tokens.columns
    own_ids, own = source.columns
    low = int(np.searchsorted(offsets[:, 0], begin))
    high = int(np.searchsorted(offsets[:, 1], end, side="right"))
    shift = at - begin
    while low < high:
        other = int(np.searchsorted(own[:, 0], offsets[low, 0] + shift))
        while other < len(own_ids) and own[other, 0] == offsets[low, 0] + shift:
            count = min(high - low, len(own_ids) - other)
            same = (ids[low : low + count] == own_ids[other : other + count]) & (
                offsets[low : low + count] + shift == own[other : other + count]
            ).all(1)
            length = count if same.all() else int(same.argmin())
            if length:
                yield low, low + length, other
                low += length
                break
            other += 1
        else:
            low += 1


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A chunk, or what there is of it, in a prompt."""

    spans: tuple[Span, ...]
    """Its pieces, in prompt order."""
    share: float
    """Share of the chunk's tokens that stand here, each counted once."""


def occurrences(spans: Iterable[Span]) -> list[Occurrence]:
    """The chunks of a prompt, in the order in which they begin.

    A chunk may stand in a prompt in several pieces: quoted line by line, split again, or in another order. Its pieces
    count as one chunk. A piece of which half or more stood before, since the chunk last began, begins the chunk once
    more: a text that stands twice counts twice.
    """
    chunks: list[tuple[list[Span], np.ndarray[Any, Any]]] = []
    last: dict[str, int] = {}
    for span in spans:
        number = last.get(span.whole)
        own = slice(span.first, span.first + len(span.tokens))
        if number is None or not (span.continues or 2 * int(chunks[number][1][own].sum()) < len(span.tokens)):
            number = last[span.whole] = len(chunks)
            chunks.append(([], np.zeros(span.whole_tokens, np.bool_)))
        pieces, there = chunks[number]
        pieces.append(span)
        there[own] = True
    return [Occurrence(tuple(pieces), _share(there)) for pieces, there in chunks]


def share_of(spans: Sequence[Span]) -> float:
    """Share of a chunk's tokens in spans of this chunk, each counted once."""
    there = np.zeros(spans[0].whole_tokens, np.bool_)
    for span in spans:
        there[span.first : span.first + len(span.tokens)] = True
    return _share(there)


def _share(there: np.ndarray[Any, Any]) -> float:
    """The token at either end does not count as missing: the text around a chunk often changes it."""
    tokens = int(there.sum())
    return 1.0 if tokens + 2 >= len(there) else tokens / len(there)


def check_least_length(texts: Sequence[str], runtime: Runtime) -> None:
    """Raise PromptTooLongError if the bytes of a prompt's texts prove that it does not fit the model's context. Such
    prompts are neither searched nor tokenised, which takes seconds for a megabyte."""
    room = runtime.context_tokens - 1
    if sum(map(len, texts)) <= room:
        return
    least = sum(map(runtime.least_tokens, texts))
    if least > room:
        raise PromptTooLongError(
            f"the prompt has at least {least} tokens, {least - room} more than the {room} that fit the "
            f"model: shorten it, or use a model with a longer context."
        )


def check_length(layout: Layout, context_tokens: int) -> None:
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
        f"the prompt has {layout.num_tokens} tokens, {excess} more than the {room} that fit the model: "
        f"{advice}, or use a model with a longer context."
    )


def question_text(layout: Layout) -> str:
    """The text that the auxiliary model reads as the question if none is given: the user's text after the last chunk;
    if there is none, the text before the first one."""
    own = [span for span in layout.spans if isinstance(span.segment, Fresh) and not span.segment.control]
    first, last = (layout.chunks[0].start, layout.chunks[-1].stop) if layout.chunks else (0, 0)
    after = "".join(span.segment.text for span in own if span.start >= last).strip()
    return after or "".join(span.segment.text for span in own if span.stop <= first).strip()
