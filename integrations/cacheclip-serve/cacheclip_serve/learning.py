"""Learned texts: what recurs in prompts is stored as chunks, with nothing ingested (``learn = "texts"``).

Applications split, wrap and move texts by themselves, so that no chunk that was stored beforehand stands in their
prompts. Of what neither the store nor an earlier prompt's KV serves, fingerprints are remembered: hashes with a random
key of this process, which reveal nothing. What is seen a second time is cut at natural borders (a tag, a paragraph, a
line, a sentence, a message) near the place where the two prompts part, and stored as a chunk of the source
:data:`LEARNED`. A text that its application marks as retrieved (``<source …>…</source>``) is stored at first sight, as
``documents`` of a request are. All of that is done in turns while no answer is under way.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheclip_rag import CacheClipError
from cacheclip_rag.guards import Observer
from cacheclip_rag.runtime import SIZE, KVSource, fingerprints
from cacheclip_rag.store import LEARNED

if TYPE_CHECKING:
    from cacheclip_rag import CacheClipEngine, Plan
    from cacheclip_rag.measuring import KVSources
    from cacheclip_rag.methods import Method
    from cacheclip_rag.plugins import Span

logger = logging.getLogger(__name__)

LEAST_TOKENS = 64
"""Shortest text that is learned."""
MOST_TOKENS = 384
"""Longest one; a question that comes meanwhile waits until its KV is computed. A splitter's 1,000 characters are 200 to
300 tokens."""
_LEAST_PART = 32
"""Shortest part of a stored text that is reused. A shorter overlap of two texts stays in both."""
_MOST_FINGERPRINTS = 1 << 17
"""Of the latest prompts, 16 bytes each: of about a million tokens."""
_MOST_PROMPTS, _MOST_TEXTS = 16, 256
"""That wait until no answer is under way, the latest ones."""
_INSIDE = 2
"""Tokens of recurring text that are given up for a border: such as the full stop before it, which recurs too."""
_LONGEST_TAG = 1100
"""Characters."""
_RETRIEVED = re.compile(r"<(/?)(source|document|document_content|passage|chunk|doc)(?=[\s>])[^<>]{0,1000}>")
"""Tags around texts that an application retrieved."""
_STRONG = re.compile(r"</?[A-Za-z][^<>\n]{0,300}>|```|\n[ \t\r]*\n")
_WRAPPER = r"(?:</?[A-Za-z][^<>\n]{0,80}>|```)"
_AROUND = re.compile(rf"\A(?:\s*{_WRAPPER})+|(?:{_WRAPPER}\s*)+\Z")
"""What wraps a text recurs too, often with another number. Longer tags name a resource and are stored with its text:
Open WebUI's has 60 tokens, the same before each of a document's."""
_WEAK = re.compile(r"\n|(?<=[.!?])[ \t]")

Array = np.ndarray[Any, Any]


class Sights:
    """Fingerprints of the latest prompts, at most ``most`` of them."""

    def __init__(self, most: int = _MOST_FINGERPRINTS) -> None:
        self._most, self._key = most, np.int64(secrets.randbits(62))
        self._hashes, self._prompts = np.zeros((2, 0), np.int64)
        """Ascending hashes, and the number of the latest prompt that each stands in."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def num_bytes(self) -> int:
        return self._hashes.nbytes + self._prompts.nbytes

    def of(self, ids: Array) -> tuple[Array, Array]:
        """First token and hash of each fingerprint of ``(num_tokens,)`` ids."""
        return fingerprints(ids ^ self._key)

    def known(self, hashes: Array) -> Array:
        """Which of these hashes earlier prompts had, bool."""
        if not len(self):
            return np.zeros(len(hashes), np.bool_)
        places = np.searchsorted(self._hashes, hashes)
        equal: Array = self._hashes[np.minimum(places, len(self) - 1)] == hashes
        return equal

    def add(self, hashes: Array) -> None:
        """Add those of one prompt; those that were seen longest ago go."""
        self._count += 1
        new = np.unique(hashes)
        is_known = self.known(new)
        self._prompts[np.searchsorted(self._hashes, new[is_known])] = self._count
        new = new[~is_known]
        places = np.searchsorted(self._hashes, new)
        self._hashes = np.insert(self._hashes, places, new)
        self._prompts = np.insert(self._prompts, places, self._count)
        if len(self) > self._most:
            kept = np.sort(np.argsort(self._prompts, kind="stable")[-self._most :])
            self._hashes, self._prompts = self._hashes[kept], self._prompts[kept]


class LearnedTexts(Observer):
    """Learns the texts of one engine. Add it to an engine's observers::

    engine.observers.append(LearnedTexts(engine))
    """

    def __init__(self, engine: CacheClipEngine, max_bytes: int = 2**30, quiet_s: float = 1.0) -> None:
        """``max_bytes``: of KV of learned texts; above it, those go that were used longest ago. ``quiet_s``: seconds
        without an answer before anything is computed. Applications let the model write a query, search, and ask."""
        self._engine, self._max_bytes, self._quiet_s = engine, max_bytes, quiet_s
        self._lock = threading.Lock()
        self._forget()
        self._has_failed = False

    def _forget(self) -> None:
        self.sights = Sights()
        self._prompts: deque[tuple[Plan, int]] = deque(maxlen=_MOST_PROMPTS)
        """Plans, each with the number of leading tokens whose KV an earlier prompt left."""
        self._texts: deque[tuple[str, Method]] = deque(maxlen=_MOST_TEXTS)
        self._generation = self._engine.prefixes.generation

    def _follow_erasures(self) -> None:
        """Texts may have been released: nothing that was seen before counts any more."""
        if self._generation != self._engine.prefixes.generation:
            self._forget()

    def close(self) -> None:
        with self._lock:
            self._forget()

    def on_plan(self, plan: Plan, kv_sources: KVSources) -> None:
        if self._engine.store.chunk_store.wants is not None:
            return  # what a shared store holds is decided by ingest
        config = self._engine.config
        if not plan.moves and config.moved != "off" and not config.require_certificate:
            return  # the request wants nothing of earlier prompts, and leaves nothing to later ones
        for key in plan.keys:
            self._engine.store.record_use(key)  # chunks that are not read, because their KV is moved, are used too
        with self._lock:
            self._follow_erasures()
            self._prompts.append((plan, self._engine.prefixes.known(plan.layout.token_ids[:-1])))
        self._engine.when_idle(self._step, self._quiet_s)

    def _step(self) -> bool:
        """Look at a prompt, or store a text; whether nothing is left to do."""
        self._engine.store.chunk_store.erasures.look()  # of other processes, too
        with self._lock:
            self._follow_erasures()
            prompt = self._prompts.popleft() if self._prompts else None
            text = self._texts.popleft() if prompt is None and self._texts else None
            if prompt is not None:
                self._texts += [(each, prompt[0].method) for each in self._recurring(*prompt)]
            generation = self._generation
        try:
            if text is not None:
                for piece in self._unknown(text[0]):
                    self._store(piece, text[1], generation)
        except CacheClipError as error:  # the catalog is busy, the disk is full, or it does not fit the model
            level = logging.DEBUG if self._has_failed else logging.WARNING
            logger.log(level, "texts that recur could not be stored, which is said once: %s", error)
            self._has_failed = True
            with self._lock:
                self._texts.clear()
        return not (self._prompts or self._texts)

    def _recurring(self, plan: Plan, served: int) -> list[str]:
        """Texts of a prompt that are to be stored. Remembers its fingerprints."""
        texts, hashes = list[str](), [np.zeros(0, np.int64)]
        is_free = plan.known.source == KVSource.COMPUTED
        is_free[:served] = False
        before = ""
        for span in plan.layout.spans:
            text_before, before = before, span.segment.text[-_LONGEST_TAG:]
            part = is_free[span.start : span.stop]
            if span.is_chunk or span.segment.control or part.sum() < LEAST_TOKENS:
                continue
            ids, _ = span.tokens.columns
            places, of_span = self.sights.of(ids)
            texts += _texts_of(span, part, places[self.sights.known(of_span)], text_before)
            hashes.append(of_span[part[places]])
        self.sights.add(np.concatenate(hashes))
        return texts

    def _unknown(self, text: str) -> list[str]:
        """The pieces of a text of which no part is stored."""
        offsets = self._engine.primary.tokenize(text).columns[1]
        is_new = np.ones(len(offsets), np.bool_)
        for match in self._engine.texts.index.find(text):
            first, stop = np.searchsorted(offsets[:, 0], (match.start, match.stop))
            if stop - first >= _LEAST_PART:
                is_new[first:stop] = False
        if is_new.all():
            return [text] if len(offsets) >= LEAST_TOKENS else []
        return [text[offsets[a, 0] : offsets[b - 1, 1]].strip() for a, b in _runs(is_new, LEAST_TOKENS)]

    def _store(self, text: str, method: Method, generation: int) -> None:
        engine = self._engine
        engine.store.check_writable()  # before anything is computed
        engine.precompute([text], method=method, source=LEARNED)
        engine.store.chunk_store.erasures.look()
        learned = engine.texts.learned()
        with self._lock:
            if text not in learned:  # there is no room, or it was ingested meanwhile
                engine.texts.forget_learned([text])
            elif engine.prefixes.generation != generation:  # released meanwhile
                engine.texts.evict(text)
            else:
                engine.metrics.record_learned()
                excess = sum(learned.values()) - self._max_bytes
                for oldest in [each for each in learned if each != text]:
                    if excess <= 0:
                        break
                    engine.texts.evict(oldest)
                    excess -= learned[oldest]


def _texts_of(span: Span, is_free: Array, seen: Array, before: str) -> Iterator[str]:
    """Texts of fresh tokens to store. ``is_free``: nothing serves the token; ``seen``: first tokens of fingerprints
    that earlier prompts had; ``before``: the end of the text before, which may be a tag that is stored."""
    text, offsets = span.segment.text, span.tokens.columns[1]
    recurs = np.zeros(len(offsets), np.bool_)
    for place, following in zip(seen, np.append(seen[1:], len(offsets) + SIZE), strict=False):
        recurs[place : following if following - place <= SIZE + 1 else place + SIZE] = True
    recurs &= is_free
    tags = [*[*_RETRIEVED.finditer(before)][-1:], *_RETRIEVED.finditer(text)]
    edges_of_tags = list[int]()
    strong = sorted({0, len(text), *(edge for match in _STRONG.finditer(text) for edge in match.span())})
    weak = sorted({*strong, *(edge for match in _WEAK.finditer(text) for edge in match.span())})
    for tag, closing in zip(tags, tags[1:], strict=False):
        if tag[2] == closing[2] and (tag[1], closing[1]) == ("", "/"):
            is_own = tag.string is text
            edges_of_tags += [*(tag.span() if is_own else ()), *closing.span()]
            begin = (tag.end() if _AROUND.fullmatch(tag[0]) else tag.start()) if is_own else 0
            first, stop = np.searchsorted(offsets[:, 0], (begin, closing.start()))
            if is_free[first:stop].sum() >= LEAST_TOKENS:
                yield from _cut(text, offsets, begin, closing.start(), strong, weak)
            recurs[first:stop] = False
    for first, stop in _runs(recurs, LEAST_TOKENS - 2 * SIZE):
        begin = _border(strong, weak, *offsets[[max(0, first - SIZE), first + _INSIDE], 0], last=True)
        end = _border(strong, weak, *offsets[[stop - 1 - _INSIDE, min(stop + SIZE, len(offsets)) - 1], 1], last=False)
        inside = edges_of_tags[bisect_right(edges_of_tags, begin) : bisect_left(edges_of_tags, end)]
        edges: list[int] = [begin, *inside, end]
        for left, right in zip(edges, edges[1:], strict=False):
            yield from _cut(text, offsets, left, right, strong, weak)


def _runs(marks: Array, least: int) -> list[tuple[int, int]]:
    """Where ``least`` or more neighbours are True: first, and one after the last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marks, [False]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2) if b - a >= least]


def _border(strong: list[int], weak: list[int], low: int, high: int, *, last: bool) -> int:
    """The strongest border between two places in a text, of several the nearest to the recurring text; without one,
    where that ends as far as it is known."""
    for borders in (strong, weak):
        between = borders[bisect_left(borders, low) : bisect_right(borders, high)]
        if between:
            return between[-1] if last else between[0]
    return int(high if last else low)


def _cut(text: str, offsets: Array, begin: int, end: int, strong: list[int], weak: list[int]) -> Iterator[str]:
    """A part of a text in pieces of :data:`MOST_TOKENS` at most, cut at borders."""
    starts = offsets[:, 0]
    while begin < end:
        first, stop = np.searchsorted(starts, (begin, end))
        cut = end
        if stop - first > MOST_TOKENS:
            cut = _border(
                strong, weak, int(starts[first + MOST_TOKENS // 2]), int(starts[first + MOST_TOKENS]), last=True
            )
        if np.searchsorted(starts, cut) - first >= LEAST_TOKENS:
            yield _AROUND.sub("", text[begin:cut]).strip()
        begin = cut
