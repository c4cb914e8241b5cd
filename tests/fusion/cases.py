"""Engines with stored chunks, laid open, and references from a transformers model that this library never touched."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.measuring import FusedCache, cache_argument, choose_rows, known_kv, lay_out
from cacheclip_rag.methods import Method, preset
from cacheclip_rag.prompt.layout import Layout
from cacheclip_rag.runtime.transformers.attention_pattern import AttentionPattern, Block
from tests.conftest import CACHECLIP

KINDS = ("llama", "qwen2-sliding", "gemma3", "gpt-oss", "mixtral")
"""One of each kind: plain, with windows, with layers of two kinds and caps, with sinks, with experts."""
EXACT = 1e-4
BROKEN = 1e-2


@cache
def reference_model(folder: str) -> Any:
    """The same weights in an unmodified transformers model, eager attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def run_reference(folder: str, ids: torch.Tensor) -> Cache:
    """The KV of ``ids``. A cache made without the config keeps all keys of sliding layers."""
    model, computed = reference_model(folder), DynamicCache()
    model(input_ids=ids[None], **cache_argument(model, computed))
    return computed


@torch.inference_mode()
def reference_logits(folder: str, ids: torch.Tensor) -> torch.Tensor:
    return reference_model(folder)(input_ids=ids[None], use_cache=False).logits[0, -1]


@torch.inference_mode()
def reference_greedy(folder: str, ids: torch.Tensor, count: int) -> list[int]:
    """Greedy decoding the slow way: the whole sequence again for each token."""
    new: list[int] = []
    for _ in range(count):
        logits = reference_logits(folder, torch.cat((ids, torch.tensor(new, dtype=torch.int64))))
        new.append(int(logits.argmax()))
    return new


@dataclass
class Case:
    """One engine with three stored chunks in a prompt, and the pieces of its fusion laid open."""

    folder: str
    engine: CacheClipEngine
    layout: Layout
    kv: dict[int, torch.Tensor] = field(default_factory=dict)
    """Stored KV by start position, the prefix's included."""

    @property
    def runtime(self) -> Any:
        return self.engine.primary

    def masks(self, ratio: float) -> list[tuple[Any, torch.Tensor]]:
        """A random selection in every chunk."""
        generator = torch.Generator().manual_seed(0)
        return [(s, torch.rand(len(s.tokens), generator=generator) < ratio) for s in self.layout.chunks]

    def rows(self, ratio: float) -> torch.Tensor:
        return choose_rows(known_kv(self.layout, self.layout.chunks), self.masks(ratio))

    def assembled(self, shift: int = 0, kv: dict[int, torch.Tensor] | None = None) -> Any:
        """The cache before recompute; with ``shift`` the chunks' keys are rotated to wrong positions."""
        cache = self.runtime.new_cache(self.layout.num_tokens + 64)
        pieces = kv or self.kv
        if not shift:
            cache.fill_all(pieces.items())
        for start, piece in pieces.items() if shift else ():
            cache.fill(piece, slot=start, position=start + (shift if start else 0))
        return cache

    def run(
        self, cache: Any, rows: torch.Tensor, plan: AttentionPattern, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        ids = self.layout.ids if ids is None else ids
        logits = self.runtime.run_rows(cache, ids[rows], rows, plan)
        assert logits is not None
        return logits


def bottom_right_plan(rows: torch.Tensor, num_tokens: int) -> AttentionPattern:
    """The mistake of the published implementations: row i of R sees keys up to T - R + i, whatever its position."""
    visible = torch.arange(num_tokens - len(rows), num_tokens)
    return AttentionPattern([Block.of(slice(0, len(rows)), slice(0, num_tokens), visible)])


def make_engine(folder: str, auxiliary: str, store: Any = None, **options: Any) -> CacheClipEngine:
    return CacheClipEngine(**{"primary": folder, "auxiliary": auxiliary, "store": store, **CACHECLIP, **options})


def make_case(
    folder: str, auxiliary: str, texts: Sequence[str], opening: str = "Read this first.\n\n", **options: Any
) -> Case:
    """The texts precomputed and in a prompt together."""
    engine = make_engine(folder, auxiliary, **options)
    engine.precompute(texts)
    prompt = opening + "\n\n".join(texts) + "\n\nQuestion: What is the magic number?"
    caches = engine.parts.models.caches_after_prefix
    layout = lay_out(engine.segment(prompt), caches.runtime, caches.tokenize, caches.prefix_ids, is_after_prefix=True)
    kv = {0: caches.prefix.kv} | {span.start: stored_kv(caches, span) for span in layout.chunks}
    assert layout.num_prefix and len(layout.chunks) == len(texts) and all(v is not None for v in kv.values())
    return Case(folder, engine, layout, kv)


def stored_kv(caches: Any, span: Any) -> torch.Tensor:
    """The stored KV of a chunk's tokens in a prompt."""
    return caches.read(span.whole).tensor()[:, :, :, span.first : span.first + len(span.tokens)]


def prefilled(engine: CacheClipEngine, prompt: Any, method: str | Method, ratio: float = 0.2) -> Any:
    """The engine's own prefill, up to the logits that its public answer is sampled from."""
    chosen = preset(method) if isinstance(method, str) else method
    with torch.inference_mode():
        chosen = chosen.at(ratio) if chosen.has_ratio else chosen
        return engine.prefill(prompt, SamplingParams(max_tokens=64), method=chosen)


def gap(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


class ScatterLayer(DynamicLayer):
    """The reference's cache: whole tensors in, chosen rows replaced by indexing, whole tensors out."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.rows = keys.clone(), values.clone(), rows
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.keys[:, :, self.rows] = key_states
        self.values[:, :, self.rows] = value_states
        return self.keys, self.values


def scatter_cache(start: FusedCache, num_tokens: int, rows: torch.Tensor) -> Cache:
    """The reference's cache with the KV of an assembled one, zeros where that has none."""
    layers = []
    for layer in start.layers:
        kv = [torch.zeros(1, each.shape[1], num_tokens, each.shape[3]) for each in layer.in_order_of_class()]
        kv[0][:, :, : layer.length], kv[1][:, :, : layer.length] = layer.in_order_of_class()
        layers.append(ScatterLayer(*kv, rows))
    return Cache(layers=layers)


def scatter_reference(case: Case, rows: torch.Tensor) -> tuple[Cache, torch.Tensor]:
    """Recompute by an unmodified eager model with a 4-D additive mask: its cache and its last logits."""
    return scatter(case.folder, case.assembled(), case.layout.ids, rows)


@torch.inference_mode()
def scatter(folder: str, start: FusedCache, ids: torch.Tensor, rows: torch.Tensor) -> tuple[Cache, torch.Tensor]:
    """:func:`scatter_reference` for any ids, from any assembled cache."""
    num_tokens = len(ids)
    model = reference_model(folder)
    past = scatter_cache(start, num_tokens, rows)
    output = model(
        input_ids=ids[rows][None],
        position_ids=rows[None],
        attention_mask=reference_mask(model.config, rows, num_tokens),
        **cache_argument(model, past),
    )
    return past, output.logits[0, -1]


def reference_mask(config: Any, rows: torch.Tensor, num_tokens: int) -> Any:
    """The additive 4-D mask that transformers takes as it is: one for all layers, or one for each type of layer."""
    distance = rows[:, None] - torch.arange(num_tokens)[None]
    hidden = {"full_attention": distance < 0}
    if window := getattr(config, "sliding_window", None):
        hidden["sliding_attention"] = (distance < 0) | (distance >= window)
    if span := getattr(config, "attention_chunk_size", None):
        hidden["chunked_attention"] = (distance < 0) | (torch.arange(num_tokens) // span != rows[:, None] // span)
    lowest = torch.finfo(torch.float32).min
    masks = {k: torch.zeros(h.shape).masked_fill(h, lowest)[None, None] for k, h in hidden.items()}
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return {kind: masks[kind] for kind in set(layer_types)}
    return masks["sliding_attention" if window else "full_attention"]
