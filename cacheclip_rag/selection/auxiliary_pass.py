"""The auxiliary model's pass: reads its chunk caches, scores all chunks packed into one cache, and maps the scores to
the primary's tokens.

Source: CacheClip (arXiv:2510.10129v1), section 3.2. The question reads each chunk separately, after the shared prefix.
The paper's score is the last layer's attention on the chunk's tokens, averaged over the question's tokens; it does not
name its head reduction, and we take the mean. Our additions: one softmax over all chunks, single heads with weights
(:mod:`cacheclip_rag.selection.heads`; the default has them), and no score for sinks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from ..base.clock import PhaseClock
from ..chunks.caches import ChunkCaches
from ..prompt.layout import Span
from ..runtime.base import Runtime, TokenizedText
from ..runtime.transformers.attention_pattern import AttentionPattern, Probe, SideBySide
from ..runtime.transformers.cache import FusedCache
from ..runtime.transformers.model import ModelRuntime
from ..store import KV, ReadAhead, StoredKV, part_of, upload
from .heads import HeadSet
from .scorers import AuxiliaryAttention, pick_layers

logger = logging.getLogger(__name__)

MAX_QUESTION_TOKENS = 96
"""If the question is longer, only its last tokens score the chunks. Each token is one row in the auxiliary model."""
_LEAST_QUESTION_TOKENS = 16
"""Least room for the question, in tokens. Chunks that leave the auxiliary model less room are not scored."""


@dataclass(frozen=True, slots=True)
class AuxiliaryPass:
    """An auxiliary model with its chunk caches and head sets."""

    caches: ChunkCaches
    heads: HeadSet | None = None
    """The engine's head set, for methods that name neither layers nor a head set."""
    named: Mapping[str, HeadSet] = field(default_factory=dict)
    """Head sets that the method's scorer names, by name."""

    @property
    def runtime(self) -> ModelRuntime:
        assert self.caches.runtime.can_score, "an auxiliary model must have can_score"
        return cast("ModelRuntime", self.caches.runtime)

    def score(
        self,
        spans: Sequence[Span],
        question: str,
        scorer: AuxiliaryAttention,
        clock: PhaseClock,
        when_read: Callable[[], None] | None = None,
    ) -> list[torch.Tensor]:
        """Per span ``(num_tokens,)`` scores of the primary's tokens. Called within the clock's phase ``select``; time
        spent on waiting for the store counts for ``read``. ``when_read``: called when all KV is read, while it is still
        being scored."""
        runtime, caches = self.runtime, self.caches
        asked = question_ids(runtime, question)
        least = min(len(asked), _LEAST_QUESTION_TOKENS)
        pieces = self._pieces(spans)
        room = {s: runtime.reuse_tokens - len(caches.prefix_ids) - len(pieces[s.whole].tokens) for s in spans}
        scorable = [span for span in spans if room[span] >= least]
        if len(scorable) < len(spans):
            logger.warning(
                "%d of %d chunks leave the auxiliary model %r no room for the question and get no scores",
                len(spans) - len(scorable),
                len(spans),
                runtime.name,
            )
        if not scorable or not asked:
            return [torch.zeros(len(span.tokens)) for span in spans]
        asked = asked[-min(room[span] for span in scorable) :]
        # shortest first, because chunks of similar length are computed together
        texts = sorted(dict.fromkeys(span.whole for span in scorable), key=lambda text: len(pieces[text].tokens))
        heads = self.heads if scorer.heads == "auto" else self.named.get(scorer.heads)
        heads = heads if scorer.layers == "tuned" else None
        unset = "last" if scorer.layers == "tuned" else scorer.layers
        layers = pick_layers(unset, runtime.num_layers, runtime.without_attention) if heads is None else heads.layers
        chosen = [pieces[text] for text in texts]
        with caches.read_ahead(texts, num_layers=max(layers) + 1, once=True, when_read=when_read) as reading:
            raw = reading.until_whole(partial(self._scores, chosen, asked, heads, layers, clock))
            clock.reading_s += reading.busy_s()
        return _mapped(spans, dict(zip(texts, raw, strict=True)), pieces)

    def _pieces(self, spans: Sequence[Span]) -> dict[str, _Piece]:
        """By whole text, what the auxiliary reads of it: its tokens from the first span's characters to the last's."""
        edges: dict[str, tuple[int, int]] = {}
        for span in spans:
            start, stop = edges.get(span.whole, (span.at, 0))
            edges[span.whole] = min(start, span.at), max(stop, span.at + len(span.segment.text))
        pieces = {}
        for text, (start, stop) in edges.items():
            tokens = self.caches.tokenize(text)
            first, last = 0, len(tokens)
            if (start, stop) != (0, len(text)):  # those that share a character with it
                offsets = tokens.columns[1]
                inside = ((offsets[:, 0] < stop) & (offsets[:, 1] > start)).nonzero()[0]
                first, last = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (first, last)
            pieces[text] = _Piece(text, tokens.part(first, last), first)
        return pieces

    def _scores(
        self,
        pieces: Sequence[_Piece],
        asked: Sequence[int],
        heads: HeadSet | None,
        layers: Sequence[int],
        clock: PhaseClock,
        reading: ReadAhead,
    ) -> list[torch.Tensor]:
        """Per piece ``(num_tokens,)`` scores of the auxiliary's tokens in these layers: of the head set, if there is
        one."""
        runtime, caches = self.runtime, self.caches

        def chunks() -> Iterator[KV]:
            for number, piece in enumerate(pieces):
                with clock.phase("read", within="select"):
                    kv: KV | None = reading.kv(number)
                if kv is None:  # damaged or evicted since the look-up: the auxiliary is small, so compute it here
                    kv = runtime.encode(caches.tokenize(piece.text).ids, caches.prefix.kv)
                yield part_of(kv, piece.first, piece.first + len(piece.tokens))

        def before_layer(layer: int) -> None:
            with clock.phase("read", within="select"):
                reading.wait(layer)

        read = [*chunks()]
        # between chunks that are not in the arena, a prefix that is would cut them into as many groups
        are_there = all(isinstance(kv, StoredKV) and kv.resident is not None for kv in read)
        return score_chunks(
            runtime,
            caches.prefix.piece if are_there else caches.prefix.kv,
            read,
            asked,
            layers=layers,
            heads=heads,
            before_layer=before_layer,
            after_layer=reading.done,
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring tokens of a text."""

    text: str
    tokens: TokenizedText
    """Offsets are those in the whole text."""
    first: int
    """Number of the first token."""


def question_ids(auxiliary: Runtime, text: str) -> tuple[int, ...]:
    """A question's last :data:`MAX_QUESTION_TOKENS` tokens, as the auxiliary model reads them."""
    return tuple(auxiliary.tokenize(text).columns[0][-MAX_QUESTION_TOKENS:].tolist())


def _mapped(
    spans: Sequence[Span], scores: Mapping[str, torch.Tensor], pieces: Mapping[str, _Piece]
) -> list[torch.Tensor]:
    """Scores of the tokens of all spans, from those of the pieces by whole text; zeros for a span whose text has no
    scores."""
    sources, targets, end = [], [], 0  # as if the texts were one text
    at: dict[str, int] = {}
    for text in scores:
        at[text] = end
        sources.append(pieces[text].tokens.columns[1] + end)
        end += len(text)
    if not sources:
        return [torch.zeros(len(span.tokens)) for span in spans]
    for span in spans:
        offsets = span.tokens.columns[1]
        targets.append(offsets + (at[span.whole] + span.at) if span.whole in at else np.zeros_like(offsets))
    values = torch.cat([*scores.values()]).numpy()
    joined = map_scores(values, np.concatenate(sources), np.concatenate(targets))
    return list(torch.from_numpy(joined).split([len(span.tokens) for span in spans]))


def map_scores(
    scores: np.ndarray[Any, Any], source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Score of each target token: the largest score among the source tokens that share a character with it.

    The largest, not the mean: a long number must not lose the piece that one tokenizer splits off. The paper does not
    state its rule. With identical tokenizers the mapping is the identity.

    Args:
        scores: ``(num_source_tokens,)`` float, 0 or more.
        source, target: ``(num_tokens, 2)`` start and end in characters of the same text; the source in order.

    Returns:
        ``(num_target_tokens,)``; 0, the lowest possible attention, for tokens that share no character.
    """
    wide = source[:, 1] > source[:, 0]
    scores, source = scores[wide], source[wide]
    mapped = np.zeros(len(target), scores.dtype)
    if not len(scores):
        return mapped
    # those that end after the target's start, and begin before its end
    first = np.searchsorted(np.maximum.accumulate(source[:, 1]), target[:, 0], side="right")
    stop = np.searchsorted(np.minimum.accumulate(source[::-1, 0])[::-1], target[:, 1], side="left")
    shared = (first < stop) & (target[:, 1] > target[:, 0])
    bounds = np.stack((first[shared], stop[shared]), 1).flatten()
    if len(bounds):
        padded = np.append(scores, scores.dtype.type(0))  # a bound may be the end
        mapped[shared] = np.maximum(np.maximum.reduceat(padded, bounds)[::2], 0)
    return mapped


_WIDER = 1.5
"""Most times that one chunk's segment may be as wide as another one's with which it is computed: padding costs as much
as tokens."""


@torch.inference_mode()
def score_chunks(
    auxiliary: ModelRuntime,
    prefix: KV,
    chunks: Sequence[KV],
    question_ids: Sequence[int],
    *,
    layers: Sequence[int] | None = None,
    heads: HeadSet | None = None,
    before_layer: Callable[[int], None] | None = None,
    after_layer: Callable[[int], None] | None = None,
) -> list[torch.Tensor]:
    """Attention mass of the question on every token of every chunk, in one packed forward pass.

    The cache holds ``prefix | chunk | question`` once per chunk, side by side. All copies of the question run together,
    and each sees only its own segment. Only the question's rows are computed; chunks and prefix come from the store.
    Neighbouring chunks of similar length are computed together: sorted by length, more cost no more tensor operations.

    Args:
        prefix: KV of the auxiliary's shared prefix, ``(num_layers, 2, num_kv_heads, num_prefix_tokens, head_dim)``.
        chunks: KV of each chunk after that prefix, same layout; each must stay valid.
        question_ids: token ids of the question, at least one.
        layers: layers whose scores are averaged; default the last. Ignored for a head set, which names its layers.
        heads: a head set: one softmax over the tokens of all chunks, so that scores are comparable between chunks; its
            ``sinks`` score 0, but in a chunk without other tokens. Default: the mean over the heads of each layer, with
            one softmax per chunk, over everything that the question sees there.
        before_layer: called with each layer's number before the KV of the layer is used.
        after_layer: called with each layer's number when ``chunks`` of that layer are not needed any more.

    Returns:
        Per chunk ``(num_chunk_tokens,)`` float32, each between 0 and 1.
    """
    last = pick_layers("last", auxiliary.num_layers, auxiliary.without_attention)
    chosen = frozenset(heads.layers if heads else layers or last)
    packed = pack_chunks(auxiliary, prefix, chunks, question_ids, before_layer, max(chosen) + 1)
    hidden = None if heads is None else upload(packed.sinks(heads.sinks), auxiliary.device)
    shares = {} if heads is None else heads.by_layer(upload(heads.weights, auxiliary.device))
    scores = torch.zeros(sum(packed.lengths), device=auxiliary.device)
    waiting: list[torch.Tensor] = []

    def record(layer: int, number: int, attention: torch.Tensor) -> None:
        waiting.append(packed.of_tokens(number, attention))
        if len(waiting) < len(packed.blocks):
            return
        weights = torch.cat(waiting, dim=-1)  # (num_heads, num_question_tokens, num_tokens of all chunks)
        waiting.clear()
        if heads is None or hidden is None:
            reduced = weights.mean(0) / len(chosen)
        else:
            weights = weights.masked_fill_(hidden.to(weights.device), float("-inf")).softmax(-1)
            counts = shares[layer].to(weights.device)
            reduced = (weights.nan_to_num() * counts[:, None, None]).sum(0)  # a window may hide all from a row
        scores.add_(reduced.mean(0).to(scores.device))

    probe = Probe(chosen, packed.blocks, record, stop=max(chosen), logits=heads is not None)
    if heads is not None:
        probe.heads = heads.by_layer(upload(torch.tensor([head for _, head in heads.heads]), auxiliary.device))
    packed.run(auxiliary, probe, after_layer)
    return list(scores.cpu().split(packed.lengths))


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """A cache with ``padding | prefix | chunk | question`` once per chunk, side by side. The questions have not run
    yet."""

    cache: FusedCache
    blocks: list[SideBySide]
    """Neighbouring chunks of similar length: they are padded to one width."""
    places: list[torch.Tensor]
    """Of each block ``(num_tokens,)`` int64: where the tokens of its chunks stand among its keys."""
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    lengths: list[int]
    """Tokens of each chunk."""
    fills: list[Callable[[int], None]]
    """Together they write the KV of one layer into the cache. :meth:`run` calls them."""

    def run(
        self,
        auxiliary: ModelRuntime,
        probe: Probe,
        after_layer: Callable[[int], None] | None = None,
    ) -> None:
        """Run the questions, once, up to the last layer that the probe needs. Arguments are as in
        :func:`score_chunks`."""

        def fill(layer: int) -> None:
            for write in self.fills:
                write(layer)
            if after_layer is not None:
                after_layer(layer)

        pattern = AttentionPattern(self.blocks, probe, before_layer=fill)
        auxiliary.run_rows(self.cache, self.ids, self.positions, pattern, slots=self.slots, head=False)

    def of_tokens(self, number: int, attention: torch.Tensor) -> torch.Tensor:
        """The chunks' tokens of a block's attention, ``(num_heads, num_question_tokens, num_tokens)``."""
        flat = attention.permute(1, 2, 0, 3).flatten(2)
        return flat.index_select(2, self.places[number].to(flat.device))

    def sinks(self, count: int) -> torch.Tensor:
        """``(num_tokens,)`` bool over all chunks: the first ``count`` tokens of each that has others."""
        firsts = [np.arange(n) < (count if n > count else 0) for n in self.lengths]
        return torch.from_numpy(np.concatenate(firsts))


def pack_chunks(
    auxiliary: ModelRuntime,
    prefix: KV,
    chunks: Sequence[KV],
    question_ids: Sequence[int],
    wait: Callable[[int], None] | None = None,
    num_layers: int | None = None,
) -> PackedChunks:
    """Lay out stored KV in one cache. Arguments are as in :func:`score_chunks`, and in :meth:`FusedCache.filling`."""
    assert question_ids, "scoring needs at least one question token"
    num_prefix, num_question = prefix.shape[3], len(question_ids)
    lengths = [chunk.shape[3] for chunk in chunks]
    sizes = np.array(lengths)
    around = num_prefix + num_question
    blocks, places, stops, start, row = [], [], [], 0, 0
    for first, stop in _alike([around + length for length in lengths]):
        count, width = stop - first, int(sizes[first:stop].max()) + around
        rows = slice(row, row := row + count * num_question)
        stops_within = width * np.arange(1, count + 1) - num_question
        stops.append(start + stops_within)
        tokens = zip(stops_within, sizes[first:stop], strict=True)
        of_tokens = torch.from_numpy(np.concatenate([np.arange(end - length, end) for end, length in tokens]))
        places.append(upload(of_tokens, auxiliary.layer_devices[0]))
        padding = torch.from_numpy(width - around - sizes[first:stop])
        blocks.append(SideBySide(rows, slice(start, start := start + count * width), padding))
    cache = auxiliary.new_cache(start, one_layer=True)
    ends = np.concatenate(stops)
    begins = ends - sizes  # slots of the chunks' first tokens

    position_of_slot = np.zeros(start, np.int64)
    for begin, end in zip(begins, ends, strict=True):
        position_of_slot[begin - num_prefix : end] = np.arange(end - begin + num_prefix)
    cache.positions = torch.from_numpy(position_of_slot)
    placed = zip(begins.tolist(), chunks, strict=True)
    if isinstance(prefix, StoredKV):  # in the arena: all are gathered at once
        both = (piece for begin, kv in placed for piece in ((begin - num_prefix, prefix), (begin, kv)))
        fills = [cache.filling(both, wait, num_layers)]
    else:
        copies = torch.from_numpy(begins[:, None] + np.arange(-num_prefix, 0))
        fills = [cache.filling(placed, wait, num_layers), cache.repeating(prefix, copies, position=0)]
    ids = torch.tensor(list(question_ids) * len(lengths))
    of_question = np.arange(num_question)
    positions = torch.from_numpy((sizes[:, None] + num_prefix + of_question).flatten())
    slots = torch.from_numpy((ends[:, None] + of_question).flatten())
    return PackedChunks(cache, blocks, places, ids, positions, slots, lengths, fills)


def _alike(widths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of neighbours of which the widest is at most half wider than the narrowest."""
    first = 0
    while first < len(widths):
        low = high = widths[first]
        stop = first + 1
        while stop < len(widths) and max(high, widths[stop]) <= _WIDER * min(low, widths[stop]):
            low, high = min(low, widths[stop]), max(high, widths[stop])
            stop += 1
        yield first, stop
        first = stop
