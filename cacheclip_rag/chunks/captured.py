"""Chunk caches captured from answered prompts, with what each chunk owed to the chunks before it.

Source: Cache-Craft (arXiv:2502.15734), sections 3 and 4, equations as restated by its reimplementations: how much a
chunk attended to earlier chunks (inter) against itself (intra) says how far its cache can travel, and the overlap of
old and new predecessors how far it has to. Departure: caches are captured from plain prefills alone, so that a
variant is never an approximation of an approximation.
"""

from __future__ import annotations

import hashlib
import math
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigurationError
from ..prompt.layout import Layout, Span
from ..runtime.transformers.attention import Probe, causal_plan
from ..runtime.transformers.cache import FusedCache

if TYPE_CHECKING:
    from ..runtime.transformers.model import ModelRuntime

__all__ = ["CapturedChunks", "Variant", "capture", "context_overlap", "digest_before", "order_distance"]


@dataclass(eq=False, slots=True)
class Variant:
    """One chunk as it was computed in one prompt."""

    kv: torch.Tensor
    """``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, keys before RoPE."""
    before: tuple[str, ...]
    """Texts of the chunks before it, in order."""
    start_digest: bytes
    """Of all token ids before it, see :func:`digest_before`: behind the same ones it is exact."""
    owed: dict[str, float]
    """Attention that went to each of these, summed over the chunk's tokens, mean over heads and layers."""
    token_owed: torch.Tensor
    """``(num_tokens,)`` float32: attention of each token to all earlier chunks."""
    impact: float
    """Cache context impact, from 0.5 (it read itself) to 1 (it read the others)."""
    hits: int = 0
    used: int = 0
    """When it was last used, in look-ups."""

    def overhead(self, before: Sequence[str], start_digest: bytes, alpha: float) -> float:
        """Share of its tokens to recompute behind other chunks (CFO), 0 to 1; 0 behind the very same tokens."""
        if start_digest == self.start_digest:
            return 0.0
        overlap = context_overlap(self.owed, self.before, before)
        return min(1.0, max(0.0, alpha * self.impact * (1.0 - overlap)))

    @property
    def num_bytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()


def digest_before(layout: Layout, span: Span) -> bytes:
    """SHA-256 of the prompt's token ids before a chunk."""
    return hashlib.sha256(array("q", layout.ids[: span.start].tolist()).tobytes()).digest()


def order_distance(old: Sequence[str], new: Sequence[str]) -> float:
    """Kendall's tau distance of what both hold, 0 (same order) to 1 (reversed)."""
    common = [text for text in old if text in new]
    places = [list(new).index(text) for text in common]
    pairs = [(a, b) for n, a in enumerate(places) for b in places[n + 1 :]]
    return sum(a > b for a, b in pairs) / len(pairs) if pairs else 0.0


def context_overlap(owed: dict[str, float], old: Sequence[str], new: Sequence[str]) -> float:
    """How much of what a chunk attended to is there again, and in order: 0 (nothing) to 1 (all of it).

    A chunk that had nothing before it overlaps with nothing else: 1 if again nothing is before it, else 0.
    """
    if not old:
        return 0.0 if new else 1.0
    total = sum(owed.values())
    kept = sum(owed[text] for text in set(old) & set(new))
    share = kept / total if total > 0.0 else float(set(old) <= set(new))
    return share * (1.0 - order_distance(old, new))


@torch.inference_mode()
def capture(
    runtime: ModelRuntime, layout: Layout, capacity: int
) -> tuple[FusedCache, torch.Tensor, list[tuple[str, Variant]]]:
    """Plain prefill that looks at its own attention: the cache, the last logits, and a variant of every chunk, beside
    its text."""
    chunks = layout.chunks
    slots = torch.arange(layout.num_tokens)
    plan = causal_plan(slots)
    membership = torch.zeros(layout.num_tokens, len(chunks))
    for number, span in enumerate(chunks):
        membership[span.start : span.stop, number] = 1.0
    attended = torch.zeros(layout.num_tokens, len(chunks))

    def record(layer: int, number: int, weights: torch.Tensor) -> None:
        block = plan.blocks[number]
        share = weights.mean(0).cpu() @ membership[block.keys]  # (num_rows, num_chunks)
        attended[block.rows] += share / runtime.num_layers

    cache = runtime.new_cache(capacity)
    probe = Probe(frozenset(range(runtime.num_layers)), plan.blocks, record)
    logits = runtime.run_slots(cache, layout.ids, slots, probe=probe)
    assert logits is not None
    variants: list[tuple[str, Variant]] = []
    for number, span in enumerate(chunks):
        mine = attended[span.start : span.stop]
        totals = mine.sum(0).tolist()
        length = len(span.tokens)
        earlier = chunks[:number]
        inter = sum(totals[n] / (length * len(other.tokens)) for n, other in enumerate(earlier))
        intra = totals[number] / length**2
        owed: dict[str, float] = {}
        for n, other in enumerate(earlier):
            owed[other.segment.text] = owed.get(other.segment.text, 0.0) + totals[n]
        variant = Variant(
            kv=runtime.extract(cache, span.start, span.stop),
            before=tuple(other.segment.text for other in earlier),
            start_digest=digest_before(layout, span),
            owed=owed,
            token_owed=mine[:, :number].sum(1),
            impact=1.0 / (1.0 + math.exp(-inter / intra)),
        )
        variants.append((span.segment.text, variant))
    return cache, logits, variants


@dataclass(slots=True)
class CapturedChunks:
    """Variants of chunks, a few each, in memory. Safe to share between threads."""

    max_bytes: int = 1 << 30
    max_variants: int = 5
    """Of one chunk; the one with the fewest hits for its age goes first."""
    _variants: dict[str, list[Variant]] = field(default_factory=dict)
    _clock: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.max_bytes < 0 or self.max_variants < 1:
            raise ConfigurationError(
                f"expected max_bytes >= 0 and max_variants >= 1, got {self.max_bytes} and {self.max_variants}."
            )

    def __contains__(self, text: object) -> bool:
        with self._lock:
            return text in self._variants

    def find(self, text: str, before: Sequence[str], start_digest: bytes) -> Variant | None:
        """The variant that needs the least recomputing behind the chunks ``before`` (and, to be exact, behind the very
        tokens of ``start_digest``); None if there is none."""
        with self._lock:
            self._clock += 1
            known = self._variants.get(text)
            if not known:
                return None
            best = min(known, key=lambda v: (v.start_digest != start_digest, v.overhead(before, start_digest, 1.0)))
            best.hits, best.used = best.hits + 1, self._clock
            return best

    def add(self, variants: Iterable[tuple[str, Variant]]) -> None:
        """Keep variants, letting go of what is used least; one behind the very same tokens is replaced."""
        with self._lock:
            self._clock += 1
            for text, variant in variants:
                variant.used = self._clock
                known = [other for other in self._variants.get(text, []) if other.start_digest != variant.start_digest]
                if len(known) >= self.max_variants:
                    known.remove(min(known, key=self._worth))
                self._variants[text] = [*known, variant]
            while self.num_bytes > self.max_bytes:
                text, worst = min(
                    ((text, variant) for text, known in self._variants.items() for variant in known),
                    key=lambda pair: self._worth(pair[1]),
                )
                self._variants[text].remove(worst)
                if not self._variants[text]:
                    del self._variants[text]

    def remove(self, text: str) -> bool:
        """Forget a chunk, and what others read of it; True if there was something to forget."""
        with self._lock:
            found = self._variants.pop(text, None) is not None
            for other, known in list(self._variants.items()):
                apart = [variant for variant in known if text not in variant.before]
                found = found or len(apart) < len(known)
                self._variants[other] = apart
                if not apart:
                    del self._variants[other]
            return found

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._variants.clear()

    @property
    def num_bytes(self) -> int:
        return sum(variant.num_bytes for known in self._variants.values() for variant in known)

    def _worth(self, variant: Variant) -> float:
        return (1 + variant.hits) / (1 + self._clock - variant.used)
