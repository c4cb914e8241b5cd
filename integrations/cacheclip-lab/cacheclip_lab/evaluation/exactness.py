"""Checks that reuse is exact on a loaded model, by comparison with the same weights in unmodified transformers.

Each check has a figure and a limit. In float32 the limit is absolute. In half precision, two correct computations
differ; the limit is twice their difference, measured on the same model and prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from cacheclip_rag import CacheClipEngine, ConfigurationError
from cacheclip_rag.measuring import (
    FusedCache,
    ModelRuntime,
    Prefilled,
    cache_argument,
    choose_rows,
    greedy,
    kl_divergence,
    known_kv,
    prefix_caches,
    read_along,
    stock_attention,
)
from cacheclip_rag.methods import preset
from cacheclip_rag.runtime import Runtime

from ..models import extending_model, transformers_model
from .prompts import EvaluationPrompt

_GREEDY_TOKENS = 64
_LIMIT, _LIMIT_DEEP, _DEEP = 1e-4, 1e-3, 24
"""Largest difference of float32 logits, for models with fewer than ``_DEEP`` layers and for deeper models."""
SHIFTS = (0, 3, 17)
"""Positions of the first token for the noise floor."""
DIRECT = replace(preset("direct"), chunk_context="prefix")
"""Direct reuse with chunk context ``prefix``: a chunk right after the shared prefix is exact."""
EVERYTHING = replace(preset("epic").at(1.0), chunk_context="prefix")
"""All chunk tokens are computed, which no choice of tokens changes."""
_UNCHANGED = 1e-5
"""Largest allowed change of KV before a changed token: rounding of differently shaped matrix products."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check."""

    figure: float
    limit: float
    passed: bool
    says: str
    """Description of the figure, for people."""
    direction: str = "at most"
    """What the figure must be of the limit: ``at most`` or ``at least``."""


def check_exactness(engine: CacheClipEngine, prompt: EvaluationPrompt) -> dict[str, Any]:
    """All checks on one prompt whose chunks are precomputed: ``{"passed", "noise_floor", "checks": {name: …}}``."""
    if not engine.primary.reads_kv:
        return _check_by_itself(engine, prompt)
    runtime = transformers_model(engine.primary)
    full = engine.prefill(prompt.text, method=preset("full"))
    ids = full.layout.ids
    expected = reference_logits(runtime, ids)
    precise = runtime.dtype == torch.float32
    floor = noise_floor(runtime, ids)
    limit = (_LIMIT_DEEP if runtime.num_layers >= _DEEP else _LIMIT) if precise else 2 * floor["logits"]
    everything = check_reuse(engine.prefill(prompt.text, method=EVERYTHING))
    nothing = DIRECT
    single = f"{prompt.chunks[0]}\n\nQuestion: {prompt.question}"
    behind_prefix = check_reuse(engine.prefill(single, method=nothing))
    checks = {
        "full_prefill": _gap(full.logits, expected, limit, "logits of our full prefill against plain transformers"),
        "ratio_1": _gap(everything.logits, expected, limit, "logits at ratio 1.0 against plain transformers"),
        "ratio_0": _gap(
            _reference_direct(engine, prompt),
            engine.prefill(prompt.text, method=nothing).logits,
            limit,
            "logits of direct reuse against plain transformers on the same cache",
        ),
        "first_chunk": _gap(
            behind_prefix.logits,
            reference_logits(runtime, behind_prefix.layout.ids),
            limit,
            "logits of one chunk after the shared prefix, nothing recomputed, against plain transformers",
        ),
        "no_future": _no_future(engine, prompt),
        "greedy": _same_text(runtime, full, everything, required=precise),
    }
    return _found(floor, ids, checks)


def _found(floor: dict[str, float], ids: torch.Tensor, checks: Mapping[str, Check]) -> dict[str, Any]:
    return {
        "passed": all(check.passed for check in checks.values()),
        "noise_floor": floor,
        "prompt_tokens": len(ids),
        "checks": {name: asdict(check) for name, check in checks.items()},
    }


def _check_by_itself(engine: CacheClipEngine, prompt: EvaluationPrompt) -> dict[str, Any]:
    """Checks of a runtime whose KV is opaque, against its own full prefill: no other program computes with its
    weights."""
    runtime = extending_model(engine.primary)
    full = engine.prefill(prompt.text, method=preset("full"))
    everything = check_reuse(engine.prefill(prompt.text, method=EVERYTHING))
    single = f"{prompt.chunks[0]}\n\nQuestion: {prompt.question}"
    behind_prefix = check_reuse(engine.prefill(single, method=DIRECT))
    ids = full.layout.ids
    floor = _floor_of_blocks(runtime, ids)
    limit, says = 2 * floor["logits"], f"against full prefill by {runtime.backend}"
    plain = runtime.prefill(behind_prefix.layout.ids, behind_prefix.layout.num_tokens)[1]
    checks = {
        "ratio_1": _gap(everything.logits, full.logits, limit, f"logits at ratio 1.0 {says}"),
        "first_chunk": _gap(
            behind_prefix.logits,
            plain,
            limit,
            f"logits of one chunk after the shared prefix, nothing recomputed, {says}",
        ),
        "greedy": _same_text(runtime, full, everything, required=False),
    }
    return {**_found(floor, ids, checks), "not_measured": ["full prefill against transformers", "KV of single tokens"]}


def _floor_of_blocks(runtime: Runtime, ids: torch.Tensor) -> dict[str, float]:
    """Differences between correct computations of the same logits: at once, and read in two blocks. As
    :func:`noise_floor`."""
    found = [runtime.prefill(ids, len(ids))[1]]
    for length in (len(ids) // 3, len(ids) // 2, len(ids) - 1):
        state, _ = runtime.prefill(ids[:length], len(ids))
        logits = runtime.extend(state, ids[length:], length)
        assert logits is not None, "the last token's logits were asked for"
        found.append(logits)
    gaps = [float((left - right).abs().max()) for n, left in enumerate(found) for right in found[:n]]
    return {"logits": max(gaps), "kl": max(float(kl_divergence(found[0], other)) for other in found[1:])}


def check_reuse(prefilled: Prefilled) -> Prefilled:
    """Return ``prefilled`` if it reused all chunks; a plain prefill would pass every check without testing anything.

    Raises:
        ConfigurationError: a chunk was not reused; the message gives the reason.
    """
    stats = prefilled.stats
    if stats.fallback is not None or stats.misses:
        why = stats.fallback or f"{stats.misses} chunks were not found in the store"
        raise ConfigurationError(f"these models cannot be certified, since a bundled prompt was not reused: {why}.")
    return prefilled


@torch.inference_mode()
def reference_logits(
    runtime: ModelRuntime, ids: torch.Tensor, *, implementation: str = "eager", shift: int = 0
) -> torch.Tensor:
    """Logits of the last of ``ids`` by the unmodified model, with its own attention and masks and without our cache.

    Args:
        implementation: one of transformers' own attention functions.
        shift: position of the first token. Rotary embedding is relative, so only rounding changes.
    """
    positions = torch.arange(shift, shift + len(ids), device=runtime.device)[None]
    with stock_attention(runtime, implementation) as model:
        logits: torch.Tensor = model(
            input_ids=ids[None].to(runtime.device), position_ids=positions, use_cache=False, logits_to_keep=1
        ).logits
    return logits[0, -1]


def noise_floor(runtime: ModelRuntime, ids: torch.Tensor) -> dict[str, float]:
    """Differences between correct computations of the same logits by plain transformers: with two attention functions
    (if the model has both), and with all positions shifted.

    Returns:
        ``logits``: largest absolute difference between two computations; ``kl``: largest KL from the first, nats.
    """
    room = max(0, runtime.reuse_tokens - len(ids))
    found = [reference_logits(runtime, ids, shift=min(shift, room)) for shift in SHIFTS]
    # transformers 5.0 runs sdpa on Gemma 2 too, without its soft capping.
    if runtime.model._supports_sdpa and getattr(runtime.model.config, "attn_logit_softcapping", None) is None:
        found.append(reference_logits(runtime, ids, implementation="sdpa"))
    gaps = [float((left - right).abs().max()) for n, left in enumerate(found) for right in found[:n]]
    return {"logits": max(gaps), "kl": max(float(kl_divergence(found[0], other)) for other in found[1:])}


@torch.inference_mode()
def _reference_direct(engine: CacheClipEngine, prompt: EvaluationPrompt) -> torch.Tensor:
    """Direct reuse by the unmodified model: the assembled KV in transformers' own cache, then the question token by
    token with the model's own attention and masks. The KV of text between chunks is ours."""
    runtime = transformers_model(engine.primary)
    prefilled = engine.prefill(prompt.text, method=DIRECT)
    assert isinstance(prefilled.cache, FusedCache)
    end = prefilled.layout.chunks[-1].stop
    cache = DynamicCache()
    for number, layer in enumerate(prefilled.cache.layers):
        cache.update(*(numbers[:, :, :end].clone() for numbers in layer.in_order_of_class()), number)
    with stock_attention(runtime) as model:
        for position in range(end, prefilled.layout.num_tokens):
            output = model(
                input_ids=prefilled.layout.ids[position][None, None].to(runtime.device),
                position_ids=torch.tensor([[position]], device=runtime.device),
                use_cache=True,
                **cache_argument(model, cache),
            )
    logits: torch.Tensor = output.logits[0, -1]
    return logits


def _gap(left: torch.Tensor, right: torch.Tensor, limit: float, says: str) -> Check:
    figure = float((left.float() - right.float()).abs().max())
    return Check(figure, limit, figure <= limit, f"largest difference of {says}")


@torch.inference_mode()
def _no_future(engine: CacheClipEngine, prompt: EvaluationPrompt) -> Check:
    """Recompute a third of each chunk twice; the second time, last chunk and question are replaced."""
    runtime = transformers_model(engine.primary)
    caches = prefix_caches(engine)
    layout = engine.prefill(prompt.text, method=DIRECT).layout
    border = layout.chunks[-1].start
    pieces = {0: caches.prefix.kv} if layout.num_prefix else {}
    for span in layout.chunks:
        kv = caches.read(span.whole)
        assert kv is not None, "its chunks were precomputed"
        pieces[span.start] = kv.tensor()[:, :, :, span.first : span.first + len(span.tokens)]
    masks = [(span, torch.arange(len(span.tokens)) % 3 == 0) for span in layout.chunks]
    rows = choose_rows(known_kv(layout, layout.chunks), masks)
    generator = torch.Generator().manual_seed(0)
    changed = layout.ids.clone()
    changed[border:] = torch.randint(0, runtime.vocab_size, changed[border:].shape, generator=generator)
    noise = torch.randn(pieces[border].shape, generator=generator)
    results = []
    for ids, last in ((layout.ids, pieces[border]), (changed, pieces[border] + noise.to(pieces[border].dtype))):
        cache = runtime.new_cache(layout.num_tokens)
        cache.fill_all({**pieces, border: last}.items())
        runtime.run_slots(cache, ids[rows], rows)
        results.append(cache)
    figure = 0.0
    for left, right in zip(results[0].layers, results[1].layers, strict=True):
        for before, after in ((left.keys, right.keys), (left.values, right.values)):
            figure = max(figure, float((before[:, :, :border] - after[:, :, :border]).abs().max()))
    return Check(
        figure, _UNCHANGED, figure <= _UNCHANGED, "largest change of KV before a position after which all tokens change"
    )


def _same_text(runtime: Runtime, full: Prefilled, everything: Prefilled, *, required: bool) -> Check:
    """Whether greedy decoding after ratio 1.0 gives full prefill's 64 tokens, ends of turn ignored: it does if reading
    them gives the same choice at each."""
    ids, _ = greedy(runtime, full.cache, full.logits, _GREEDY_TOKENS, stop=False)
    chosen = read_along(runtime, everything.cache, everything.logits, ids).argmax(-1).tolist()
    equal = sum(left == right for left, right in zip(chosen, ids, strict=True)) / _GREEDY_TOKENS
    return equal_tokens(equal, required=required)


def equal_tokens(share: float, *, required: bool) -> Check:
    """The check of a share of greedy tokens. In 16 bits, rounding may choose between two likely tokens, so that all
    equal ones are not ``required``."""
    least, why = (1.0, "") if required else (0.0, "; none must be, because 16-bit rounding may choose another token")
    says = f"share of {_GREEDY_TOKENS} greedy tokens at ratio 1.0 that are full prefill's{why}"
    return Check(share, least, share >= least, says, "at least")
