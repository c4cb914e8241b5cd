"""The proof that reuse is exact: what the runtime computes against the unmodified class.

It is made when a model is loaded for the first time. All ways to compute KV are compared on a tiny model of its class
in float32 (:mod:`.twin`), and three of them on the model's own weights, to see that these take the same ways, and that
their keys turn as they were seen to. Without a tiny model, its own weights are compared in all. Verdicts are kept.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from ...base.errors import CacheClipError, UnsupportedModelError, first_line, is_out_of_memory
from .attention_pattern import AttentionPattern, Block, Probe, causal_pattern
from .kept import device_name, kept, kept_file
from .packed_weights import weights_kept
from .quantised_weights import check_rows, is_quantised
from .structure import check_numbers, ordinary_tokens
from .twin import described, make_twin

logger = logging.getLogger(__name__)

_BRIEF = ("prefill", "recompute", "moved")
_WHOLE = (*_BRIEF, "steps", "decoding", "stored", "length", "scores")
_NUM_TOKENS = {_BRIEF: 24, _WHOLE: 96}
"""Of a probe: those of a tiny model are four times a window of it, and few enough for large weights."""
_FAR = 1 << 15
"""A position, or a length, at which what depends on it beside the rotation shows."""
_MOVED = 15
"""Tokens whose KV is moved behind them: where a tiny model scales its queries, KV depends on the position itself."""
_PLANTED, _NOISE = "planted", "noise"
_SEEDS = (7, 8, 9, 10)
"""Each but the first decides what failed before: routers of experts may be tied by chance, in 16 bits often."""
_LIMIT = 1e-4
"""Largest gap in float32, as a share of the root mean square of the numbers that it is compared with."""
_ROUNDED = 0.1
"""The same in 16 bits, whose rounding is as large as some mistakes. For logits it is also at most half of what wrong
positions do."""
_TIMES = 2
"""Or as many times what rounding does to the unmodified model, if that is more: where it chooses experts, in 16 bits,
and where activations are quantised."""
_DEEP = 3
"""And as many times that for moved KV in 16 bits, of which the worst layer counts: of 30 layers it is several times as
far as logits are. A wrong form is more than 0.4 off in most layers of Qwen2.5 and SmolLM2."""
_NOTICED = 1e-3
"""Least gap that wrong positions must make, and twice that of the right ones."""
_OWN_NAME = "cacheclip-own"
_FOLDER = "proofs"


def prove(runtime: Any) -> None:
    """Prove a loaded model, unless that was done before with the same weights and versions. Raises
    UnsupportedModelError: what the runtime computes differs from the unmodified model."""

    def make() -> dict[str, Any]:
        started = time.perf_counter()
        with weights_kept(runtime.model):  # a model that only scores chunks never uses its vocabulary
            check_rows(runtime.model, runtime.name)
            twin = verdict_of_twin(runtime)
            verdict = _verdict(runtime, _WHOLE if twin is None else _BRIEF)
            if twin is not None:
                alike = runtime.rotary.writes_what_is_made(_far_positions(runtime))
                verdict["hands_tables"] = twin["hands_tables"] and alike
        seconds = time.perf_counter() - started
        logger.info("%s was proven exact in %.1f s: %s", runtime.name, seconds, verdict)
        return verdict

    runtime.rotary.hands_tables = _kept(_memo(runtime), runtime.dtype, make)["hands_tables"]


def verdict_of_twin(runtime: Any, kind: Any = None) -> dict[str, Any] | None:
    """Of a tiny model of the same class and config, run by a runtime of ``kind`` (default its own); None if none can be
    made."""

    def make() -> dict[str, Any]:
        twin = make_twin(runtime.model).to(runtime.device)
        tiny = (kind or type(runtime))(twin, runtime.tokenizer, name=runtime.name, fingerprint="", like=runtime)
        return _verdict(tiny, _WHOLE)

    try:
        return _kept(kept_file(_FOLDER, described(runtime.model), device_name(runtime.device)), torch.float32, make)
    except ValueError as error:
        logger.info("%s is proven on its own weights alone: its config makes no tiny model (%s)", runtime.name, error)
        return None


def _kept(memo: Path, dtype: torch.dtype, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A verdict that is kept; a new one if there is none, or its numbers prove nothing."""

    def read(verdict: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(verdict["hands_tables"], bool) or _failures(verdict, dtype):
            raise ValueError("it proves nothing")
        return verdict

    return kept(memo, read, make, dict)


def _memo(runtime: Any) -> Path:
    """Where the verdict is kept."""
    devices = [*map(device_name, runtime.layer_devices)]
    return kept_file(_FOLDER, type(runtime.model).__name__, runtime.fingerprint, devices, runtime.is_offloaded)


def _verdict(runtime: Any, checks: tuple[str, ...]) -> dict[str, Any]:
    verdict = {"model": runtime.name, "checks": len(checks), "turns": any(runtime.rotary.readings), "gaps": {}}
    why = ""
    for seed in _SEEDS:
        try:
            _take_least(verdict["gaps"], _gaps(runtime, seed, checks))
        except CacheClipError:
            raise
        except Exception as error:  # a class of any form
            if is_out_of_memory(error):
                raise
            why = f"a pass failed ({type(error).__name__}: {first_line(error)})"
            continue
        failures = _failures(verdict, runtime.dtype)
        if not failures:
            return {**verdict, "hands_tables": checks is _WHOLE and _hands_tables(runtime)}
        sizes = ", ".join(f"{what} by {gap:.2g}" for what, gap in failures.items() if what != _PLANTED)
        why = f"it differs from the unmodified model in {sizes}" if sizes else "wrong positions do not show"
    raise UnsupportedModelError(
        f"model {runtime.name!r} ({runtime.model.config.model_type!r}) failed the proof that its KV can be reused "
        f"exactly: {why}. Choose another model, such as Llama, Qwen3 or Gemma 3, or run this one with transformers "
        "itself, without reuse."
    )


def _take_least(gaps: dict[str, float], others: dict[str, float]) -> None:
    """Keep the least gap of each check. What wrong positions make is measured beside the right ones."""
    for what in others.keys() - {_PLANTED, _NOISE}:
        if others[what] < gaps.get(what, math.inf):
            gaps[what] = others[what]
            if what == "recompute" and _PLANTED in others:
                gaps[_PLANTED] = others[_PLANTED]
    if _NOISE in others:
        gaps[_NOISE] = max(others[_NOISE], gaps.get(_NOISE, 0.0))


def _failures(verdict: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """Gaps that are missing or too large, and that of wrong positions if it is too small."""
    gaps, checks = verdict["gaps"], (_BRIEF, _WHOLE)[[*map(len, (_BRIEF, _WHOLE))].index(verdict["checks"])]
    planted = gaps.get(_PLANTED, math.nan if verdict["turns"] else math.inf)
    others = max(_LIMIT if dtype == torch.float32 else _ROUNDED, _TIMES * gaps.get(_NOISE, 0.0))
    logits = max(_LIMIT, min(others, planted / 2))
    limits = {**dict.fromkeys(checks, logits), "moved": others, "scores": others}
    if dtype != torch.float32:
        limits["moved"] *= _DEEP
    failures = {what: gap for what in checks if not 0 <= (gap := gaps.get(what, math.nan)) <= limits[what]}
    shows = planted >= max(_NOTICED, 2 * gaps.get("recompute", math.nan))
    return failures if shows else {**failures, _PLANTED: planted}


def gap_between(one: torch.Tensor, other: torch.Tensor) -> float:
    """Root mean square of the difference, as a share of that of the second."""
    other = other.to(one.device, torch.float32)
    return float((one.float() - other).norm() / other.norm().clamp(min=1e-9))


@torch.inference_mode()
def _gaps(runtime: Any, seed: int, checks: tuple[str, ...]) -> dict[str, float]:
    """How far each way to compute KV is from the unmodified model."""
    make, count = torch.Generator().manual_seed(seed), _NUM_TOKENS[checks]
    ids = ordinary_ids(runtime)
    ids = ids[torch.randint(len(ids), (count,), generator=make)]
    last = count - 1
    expected = unmodified_logits(runtime, ids)
    exact, logits = runtime.prefill(ids[:last], count + 4)
    gaps = {"prefill": gap_between(logits, expected[last - 1])}
    kv = runtime.extract(exact, 0, last)
    rows = torch.unique(torch.cat((torch.randint(last, (count // 3,), generator=make), torch.tensor([last]))))
    num_kept = len(rows) // 2  # the others leave before the last layer

    asked = ids, kv, rows, num_kept
    gaps["recompute"] = gap_between(_recomputed(runtime, *asked, rows)[0], expected[rows[-num_kept:]])
    wrong, cache = _recomputed(runtime, *asked, (rows - 3 * (rows % 2)).clamp(min=0), num_alone=_MOVED)
    gaps["moved"] = _gap_of_moved(cache, kv[:, :, :, :_MOVED], count)
    if any(runtime.rotary.readings):
        gaps[_PLANTED] = gap_between(wrong, expected[rows[-num_kept:]])
    if checks is _WHOLE:
        gaps |= _gaps_of_decoding(runtime, ids, exact, expected) | _gaps_of_stored(runtime, ids, expected[last])
        gaps |= {"length": _gap_of_lengths(runtime, ids[:6]), "scores": _gap_of_scores(runtime, ids)}
    rounds = runtime.dtype != torch.float32 or any(map(is_quantised, runtime.model.modules()))
    limit = _LIMIT if runtime.dtype == torch.float32 else _ROUNDED
    if rounds and max(gaps[what] for what in checks) > limit:
        gaps[_NOISE] = noise_of(runtime, ids, expected, make)
    return gaps


def _recomputed(
    runtime: Any,
    ids: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    num_kept: int,
    positions: torch.Tensor,
    *,
    num_alone: int = 0,
) -> tuple[torch.Tensor, Any]:
    """Logits of the last ``num_kept`` of some rows whose KV was wrong, among others whose KV was stored; and the cache.
    As each pass reads all weights, this one also computes the first ``num_alone`` tokens again, in the slots behind, at
    as many positions further, where they see only themselves."""
    count, first = len(ids), torch.arange(num_alone)
    cache = runtime.new_cache(count + num_alone)
    cache.fill(kv, slot=0, position=0)
    cache.extend_to(count + num_alone)
    for layer in cache.layers:
        layer.keys[:, :, rows], layer.values[:, :, rows] = 3.0, -3.0
    blocks = [Block.of(slice(num_alone, num_alone + len(rows)), slice(0, count), rows, runtime.device)]
    if num_alone:
        blocks.insert(0, Block.of(slice(0, num_alone), slice(count, count + num_alone), first, runtime.device))
    logits: torch.Tensor = runtime.run_rows(
        cache,
        torch.cat((ids[first], ids[rows])),
        torch.cat((num_alone + first, positions)),
        AttentionPattern(blocks),
        slots=torch.cat((count + first, rows)),
        logits_to_keep=num_kept,
    )
    return logits, cache


def ordinary_ids(runtime: Any) -> torch.Tensor:
    """Tokens of text: none that stands for an image or the end of a turn."""
    size = min(runtime.vocab_size, len(runtime.tokenizer))
    special = {*runtime.control_ids, *runtime.eos_ids}
    return torch.tensor(
        [each for each in ordinary_tokens(runtime.model).tolist() if each < size and each not in special]
    )


def unmodified_logits(runtime: Any, ids: torch.Tensor, weights: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
    """Logits ``(num_tokens, vocab_size)`` by the attention that the class has itself, whose ``weights`` of each layer,
    ``(num_heads, num_rows, num_keys)``, are kept there."""
    kept, own = {} if weights is None else {"cacheclip_weights": weights}, runtime.model.config._attn_implementation
    runtime.model.set_attn_implementation(_OWN_NAME if kept else "eager")
    try:
        logits: torch.Tensor
        logits = runtime.model(input_ids=ids[None].to(runtime.device), use_cache=False, **kept).logits
        check_numbers(logits, runtime.name)
        return logits[0]
    finally:
        runtime.model.set_attn_implementation(own)


def _own_attention(module: Any, *inputs: Any, cacheclip_weights: dict[int, torch.Tensor], **settings: Any) -> Any:
    """The eager attention of a module's class."""
    own = getattr(
        sys.modules[type(module).__module__], "eager_attention_forward", modeling_llama.eager_attention_forward
    )
    attended, weights = own(module, *inputs, **settings)
    cacheclip_weights[module.layer_idx] = weights[0]
    return attended, weights


def noise_of(runtime: Any, ids: torch.Tensor, expected: torch.Tensor, make: torch.Generator) -> float:
    """What rounding does to the unmodified model."""
    signs = torch.randint(2, (len(ids), 1), generator=make).to(runtime.device, runtime.dtype) * 2 - 1
    near = 1 + signs * torch.finfo(runtime.dtype).eps
    hook = runtime.model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output * near)
    try:
        return gap_between(unmodified_logits(runtime, ids), expected)
    finally:
        hook.remove()


def _gaps_of_decoding(runtime: Any, ids: torch.Tensor, exact: Any, expected: torch.Tensor) -> dict[str, float]:
    """Of tokens that follow others, in two texts at once, and alone."""
    last, half = len(ids) - 1, len(ids) // 2
    short = runtime.new_cache(len(ids))
    for mine, own in zip(short.layers, exact.layers, strict=True):
        mine.write(0, own.keys[0, :, :half], own.values[0, :, :half])
    steps = runtime.decode_steps([exact, short], [int(ids[last]), int(ids[half])])
    return {
        "steps": max(gap_between(steps[0], expected[last]), gap_between(steps[1], expected[half])),
        "decoding": gap_between(runtime.decode_step(short, int(ids[half + 1])), expected[half + 1]),
    }


def _gaps_of_stored(runtime: Any, ids: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Of KV that was stored, behind a context and in a batch."""
    last, half = len(ids) - 1, len(ids) // 2
    context = runtime.encode(ids[:half].tolist())
    tail, _ = runtime.encode_many([ids[half:last].tolist(), ids[:9].tolist()], context)
    cache = runtime.new_cache(len(ids))
    cache.fill_all([(0, context), (half, tail)])
    return {"stored": gap_between(runtime.extend(cache, ids[last:], last), expected)}


def _gap_of_moved(cache: Any, kv: torch.Tensor, slot: int) -> float:
    """The KV of a text that was computed at position 0, moved by its length, against that computed there, which begins
    at ``slot``."""
    num_tokens = kv.shape[3]
    parts = [array[0, :, slot : slot + num_tokens] for array in cache.arrays]
    computed = [part.clone() for part in parts]
    cache.fill(kv, slot=slot, position=num_tokens)
    return max(map(gap_between, parts, computed))


def _gap_of_lengths(runtime: Any, ids: torch.Tensor) -> float:
    """What a long cache changes beside the keys in it: rows have positions, and a model that counts the tokens of the
    cache instead would be wrong for scattered rows of long prompts."""
    slots = torch.arange(len(ids))
    logits = []
    for length in (0, max(0, min(_FAR, runtime.reuse_tokens) - len(ids))):
        cache = runtime.new_cache(len(ids))
        for counting in (cache, *cache.layers):
            counting.get_seq_length = lambda *args, length=length: length
        logits.append(runtime.run_rows(cache, ids, slots, causal_pattern(slots, runtime.device)))
    return gap_between(logits[1], logits[0])


def _gap_of_scores(runtime: Any, ids: torch.Tensor) -> float:
    """Of the attention weights of which scores are made."""
    AttentionInterface.register(_OWN_NAME, _own_attention)
    AttentionMaskInterface.register(_OWN_NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    own: dict[int, torch.Tensor] = {}
    unmodified_logits(runtime, ids, own)
    slots = torch.arange(len(ids))
    pattern, gaps = causal_pattern(slots, runtime.device), list[float]()

    def record(layer: int, number: int, weights: torch.Tensor) -> None:
        block = pattern.blocks[number]
        pair = weights, own[layer][:, block.rows, block.keys]  # which leaves out sinks in some classes
        gaps.append(gap_between(*(each / each.sum(-1, keepdim=True) for each in pair)))

    pattern.probe = Probe(frozenset(own), pattern.blocks, record)
    runtime.run_rows(runtime.new_cache(len(ids)), ids, slots, pattern)
    return max(gaps)


def _far_positions(runtime: Any) -> torch.Tensor:
    """Six, or fewer, as far as reuse goes."""
    stop = min(_FAR, runtime.reuse_tokens)
    return torch.arange(max(0, stop - 6), stop)


@torch.inference_mode()
def _hands_tables(runtime: Any) -> bool:
    """Whether layers that are given their tables compute the same: they may ask for them in another way, or use
    positions for more than the rotation."""
    positions = _far_positions(runtime)
    ids, slots = ordinary_ids(runtime)[: len(positions)], torch.arange(len(positions))
    if not any(runtime.rotary.readings) or len(ids) < len(slots):
        return False

    def computed(handed: bool) -> Iterator[torch.Tensor]:
        cache, pattern = runtime.new_cache(len(ids)), causal_pattern(slots, runtime.device)
        if handed:
            pattern.position_embeddings = runtime.rotary.embeddings(runtime.rotary.tables(positions))
        yield runtime.run_rows(cache, ids, positions, pattern, slots=slots)
        yield from (layer.keys for layer in cache.layers)

    try:
        return all(itertools.starmap(torch.equal, zip(computed(True), computed(False), strict=True)))
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        return False  # a class that makes something else of them
