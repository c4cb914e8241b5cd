"""Chunk caches captured from answered prompts, with statistics of each chunk's attention to earlier chunks.

Source: Cache-Craft (arXiv:2502.15734), sections 3 and 4, with equations as restated by its reimplementations. A chunk's
attention to earlier chunks (inter), relative to its attention to itself (intra), says how much its KV depends on them.
The overlap of old and new predecessors says how many of them are missing. Departure: caches are captured from plain
prefills only, so that a variant is never an approximation of an approximation.
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
from ..runtime.transformers.attention_plan import Probe, causal_plan
from ..runtime.transformers.cache import FusedCache

if TYPE_CHECKING:
    from ..runtime.transformers.model import ModelRuntime

__all__ = ["CapturedChunks", "Variant", "capture", "context_overlap", "digest_before", "order_distance"]


@dataclass(eq=False, slots=True)
class Variant:
    """The KV of one chunk, captured from one prompt."""

    kv: torch.Tensor
    """``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, keys before RoPE."""
    before: tuple[str, ...]
    """Texts of the chunks before it, in order."""
    start_digest: bytes
    """:func:`digest_before` of the chunk at capture. After the same tokens, the variant is exact."""
    attention_by_text: dict[str, float]
    """Attention to each earlier chunk: sum over this chunk's tokens, mean over heads and layers."""
    token_attention: torch.Tensor
    """``(num_tokens,)`` float32: attention of each token to all earlier chunks."""
    impact: float
    """Cache context impact, from 0.5 (the chunk attended to itself) to 1 (it attended to earlier chunks)."""
    hits: int = 0
    used: int = 0
    """Number of the look-up that used the variant last."""

    def overhead(self, before: Sequence[str], start_digest: bytes, alpha: float) -> float:
        """Share of the tokens to recompute after other chunks (CFO), 0 to 1; 0 after the same tokens."""
        if start_digest == self.start_digest:
            return 0.0
        overlap = context_overlap(self.attention_by_text, self.before, before)
        return min(1.0, max(0.0, alpha * self.impact * (1.0 - overlap)))

    @property
    def num_bytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()


def digest_before(layout: Layout, span: Span) -> bytes:
    """SHA-256 of the prompt's token ids before a chunk."""
    return hashlib.sha256(array("q", layout.ids[: span.start].tolist()).tobytes()).digest()


def order_distance(old: Sequence[str], new: Sequence[str]) -> float:
    """Kendall's tau distance of the texts in both lists, 0 (same order) to 1 (reversed)."""
    common = [text for text in old if text in new]
    ranks = [list(new).index(text) for text in common]
    pairs = [(a, b) for n, a in enumerate(ranks) for b in ranks[n + 1 :]]
    return sum(a > b for a, b in pairs) / len(pairs) if pairs else 0.0


def context_overlap(attention_by_text: dict[str, float], old: Sequence[str], new: Sequence[str]) -> float:
    """Share of the attended chunks that are present again and in order, 0 (none) to 1 (all).

    For a chunk that had no chunk before it, 1 if again no chunk is before it, else 0.
    """
    if not old:
        return 0.0 if new else 1.0
    total = sum(attention_by_text.values())
    kept = sum(attention_by_text[text] for text in set(old) & set(new))
    share = kept / total if total > 0.0 else float(set(old) <= set(new))
    return share * (1.0 - order_distance(old, new))


@torch.inference_mode()
def capture(
    runtime: ModelRuntime, layout: Layout, capacity: int
) -> tuple[FusedCache, torch.Tensor, list[tuple[str, Variant]]]:
    """Plain prefill that reads its own attention. Returns the cache, the last logits, and each chunk's text with its
    variant."""
    chunks = layout.chunks
    slots = torch.arange(layout.num_tokens)
    plan = causal_plan(slots)
    membership = torch.zeros(layout.num_tokens, len(chunks))
    of_devices: dict[torch.device, torch.Tensor] = {}
    for number, span in enumerate(chunks):
        membership[span.start : span.stop, number] = 1.0
    on_device = torch.zeros(layout.num_tokens, len(chunks), device=runtime.device)

    def record(layer: int, number: int, weights: torch.Tensor) -> None:
        block = plan.blocks[number]
        if weights.device not in of_devices:
            of_devices[weights.device] = membership.to(weights.device)
        share = weights.mean(0) @ of_devices[weights.device][block.keys]  # (num_rows, num_chunks)
        on_device[block.rows] += (share / runtime.num_layers).to(on_device.device)

    cache = runtime.new_cache(capacity)
    probe = Probe(frozenset(range(runtime.num_layers)), plan.blocks, record)
    logits = runtime.run_slots(cache, layout.ids, slots, probe=probe)
    assert logits is not None
    attended = on_device.cpu()
    variants: list[tuple[str, Variant]] = []
    for number, span in enumerate(chunks):
        mine = attended[span.start : span.stop]
        totals = mine.sum(0).tolist()
        length = len(span.tokens)
        earlier = chunks[:number]
        inter = sum(totals[n] / (length * len(other.tokens)) for n, other in enumerate(earlier))
        intra = totals[number] / length**2
        attention_by_text: dict[str, float] = {}
        for n, other in enumerate(earlier):
            attention_by_text[other.segment.text] = attention_by_text.get(other.segment.text, 0.0) + totals[n]
        variant = Variant(
            kv=runtime.extract(cache, span.start, span.stop),
            before=tuple(other.segment.text for other in earlier),
            start_digest=digest_before(layout, span),
            attention_by_text=attention_by_text,
            token_attention=mine[:, :number].sum(1),
            impact=1.0 / (1.0 + math.exp(-inter / intra)),
        )
        variants.append((span.segment.text, variant))
    return cache, logits, variants


@dataclass(slots=True)
class CapturedChunks:
    """Variants of chunks, a few each, in memory. Safe to share between threads."""

    max_bytes: int = 1 << 30
    max_variants: int = 5
    """Most variants of one chunk. The variant with the fewest hits for its age is dropped first."""
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
        """The variant that needs the least recompute, or None.

        Args:
            before: texts of the chunks before it now.
            start_digest: :func:`digest_before` of the chunk now.
        """
        with self._lock:
            self._clock += 1
            known = self._variants.get(text)
            if not known:
                return None
            best = min(known, key=lambda v: (v.start_digest != start_digest, v.overhead(before, start_digest, 1.0)))
            best.hits, best.used = best.hits + 1, self._clock
            return best

    def add(self, variants: Iterable[tuple[str, Variant]]) -> None:
        """Keep variants, and drop the least used. A variant captured after the same tokens is replaced."""
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
        """Drop a chunk's variants, and variants that attended to it; True if there were any."""
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
