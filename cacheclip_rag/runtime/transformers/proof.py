"""The proof that reuse is exact on a model's own weights: what the runtime computes against the unmodified class.

It is made when a model is loaded for the first time, and takes passes over some 250 tokens. Its verdict is kept.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from ...base.errors import CacheClipError, UnsupportedModelError, first_line
from ...base.keys import json_digest
from ...base.paths import cache_home, write_json
from ...base.version import __version__
from .attention import ATTENTION_NAME
from .attention_pattern import AttentionPattern, Block, causal_pattern
from .packed_weights import weights_kept
from .quantised_weights import check_rows, is_quantised
from .structure import check_numbers, is_out_of_memory, ordinary_tokens

logger = logging.getLogger(__name__)

_NUM_TOKENS, _HALF = 48, 24
_FAR = 1 << 15
"""A position, or a length, at which what depends on it beside the rotation shows."""
_PLANTED, _NOISE = "planted", "noise"
_SEEDS = (7, 8, 9, 10)
"""Each but the first decides what failed before: routers of experts may be tied by chance, in 16 bits often."""
_CHECKS = ("prefill", "steps", "decoding", "recompute", "stored", "moved", "length")
_LIMIT = 1e-4
"""Largest gap in float32, as a share of the root mean square of the numbers that it is compared with."""
_ROUNDED = 0.1
_TIMES = 2
"""The same in 16 bits, whose rounding is as large as some mistakes: a number, or as many times what rounding does to
the unmodified model, if that is more (it chooses experts), and at most half of what wrong positions do. Where
activations are quantised, this takes the place of the limit in float32, too."""
_NOTICED = 1e-3
"""Least gap that wrong positions must make, and twice that of the right ones."""


def prove(runtime: Any) -> None:
    """Prove a loaded model, unless that was done before with the same weights and versions. Raises
    UnsupportedModelError: what the runtime computes differs from the unmodified model."""
    memo = _memo(runtime)
    verdict = _remembered(memo, runtime)
    if verdict is None:
        started = time.perf_counter()
        with weights_kept(runtime.model):  # a model that only scores chunks never uses its vocabulary
            verdict = _verdict(runtime)
        seconds = time.perf_counter() - started
        logger.info("%s was proven exact in %.1f s: %s", runtime.name, seconds, verdict)
        try:
            write_json(memo, verdict)
        except OSError as error:
            logger.debug("the proof of %s is not kept: %s", runtime.name, error)
    runtime.rotary.hands_tables = verdict["hands_tables"]


def _memo(runtime: Any) -> Path:
    """Where the verdict is kept: everything that it depends on is in its name."""
    devices = [(str(each), each.type == "cuda" and torch.cuda.get_device_name(each)) for each in runtime.layer_devices]
    versions = __version__, _sources(), transformers.__version__, torch.__version__
    identity = type(runtime.model).__name__, runtime.fingerprint, devices, runtime.is_offloaded, versions
    return cache_home() / "proofs" / f"{hashlib.sha256(repr(identity).encode()).hexdigest()}.json"


@functools.cache
def _sources() -> str:
    """Digest of what is proven: this folder's modules."""
    return json_digest([file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))])


def _remembered(memo: Path, runtime: Any) -> dict[str, Any] | None:
    """The verdict; None if there is none, it is damaged, or its numbers prove nothing."""
    try:
        verdict = json.loads(memo.read_text())
        is_whole = isinstance(verdict["hands_tables"], bool) and not _failures(runtime, verdict["gaps"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return verdict if is_whole else None


def _verdict(runtime: Any) -> dict[str, Any]:
    check_rows(runtime.model, runtime.name)
    gaps: dict[str, float] = {}
    why = ""
    for seed in _SEEDS:
        try:
            _take_least(gaps, _gaps(runtime, seed))
        except CacheClipError:
            raise
        except Exception as error:  # a class of any form
            if is_out_of_memory(error):
                raise
            why = f"a pass failed ({type(error).__name__}: {first_line(error)})"
            continue
        failures = _failures(runtime, gaps)
        if not failures:
            return {"model": runtime.name, "gaps": gaps, "hands_tables": _hands_tables(runtime)}
        sizes = ", ".join(f"{what} by {gap:.2g}" for what, gap in failures.items() if what != _PLANTED)
        why = f"it differs from the unmodified model in {sizes}" if sizes else "wrong positions do not show"
    raise UnsupportedModelError(
        f"model {runtime.name!r} ({runtime.model.config.model_type!r}) failed the proof that its KV can be reused "
        f"exactly: {why}. Choose another model, such as Llama, Qwen3 or Gemma 3, or run this one with transformers "
        "itself, without reuse."
    )


def _take_least(gaps: dict[str, float], others: dict[str, float]) -> None:
    """Keep the least gap of each check. What wrong positions make is measured beside the right ones."""
    for what in _CHECKS:
        if others[what] < gaps.get(what, math.inf):
            gaps[what] = others[what]
            if what == "recompute" and _PLANTED in others:
                gaps[_PLANTED] = others[_PLANTED]
    if _NOISE in others:
        gaps[_NOISE] = max(others[_NOISE], gaps.get(_NOISE, 0.0))


def _failures(runtime: Any, gaps: dict[str, float]) -> dict[str, float]:
    """Gaps that are missing or too large, and that of wrong positions if it is too small."""
    turns = any(runtime.rotary.readings)
    planted = gaps.get(_PLANTED, math.nan if turns else math.inf)
    moved = max(_LIMIT if runtime.dtype == torch.float32 else _ROUNDED, _TIMES * gaps.get(_NOISE, 0.0))
    logits = max(_LIMIT, min(moved, planted / 2))
    limits = {what: moved if what == "moved" else logits for what in _CHECKS}  # KV, whose gaps are other ones
    failures = {what: gap for what in _CHECKS if not 0 <= (gap := gaps.get(what, math.nan)) <= limits[what]}
    shows = planted >= max(_NOTICED, 2 * gaps.get("recompute", math.nan))
    return failures if shows else {**failures, _PLANTED: planted}


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Root mean square of the difference, as a share of that of the second."""
    other = other.to(one.device, torch.float32)
    return float((one.float() - other).norm() / other.norm().clamp(min=1e-9))


@torch.inference_mode()
def _gaps(runtime: Any, seed: int) -> dict[str, float]:
    """How far each way to compute KV is from the unmodified model."""
    make = torch.Generator().manual_seed(seed)
    ids = _ordinary_ids(runtime)
    ids = ids[torch.randint(len(ids), (_NUM_TOKENS,), generator=make)]
    last, capacity = _NUM_TOKENS - 1, _NUM_TOKENS + 4
    expected = _unmodified(runtime, ids)
    exact, logits = runtime.prefill(ids[:last], capacity)
    gaps = {"prefill": _gap(logits, expected[last - 1])}
    if runtime.dtype != torch.float32 or any(map(is_quantised, runtime.model.modules())):
        signs = torch.randint(2, (_NUM_TOKENS, 1), generator=make).to(runtime.device, runtime.dtype) * 2 - 1
        near = 1 + signs * torch.finfo(runtime.dtype).eps
        hook = runtime.model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output * near)
        try:
            gaps[_NOISE] = _gap(_unmodified(runtime, ids), expected)
        finally:
            hook.remove()
    short = _copied(runtime, exact, _HALF)
    steps = runtime.decode_steps([exact, short], [int(ids[last]), int(ids[_HALF])])
    gaps["steps"] = max(_gap(steps[0], expected[last]), _gap(steps[1], expected[_HALF]))
    gaps["decoding"] = _gap(runtime.decode_step(short, int(ids[_HALF + 1])), expected[_HALF + 1])

    rows = torch.unique(torch.cat((torch.randint(last, (_NUM_TOKENS // 3,), generator=make), torch.tensor([last]))))

    num_kept = len(rows) // 2  # the others leave before the last layer

    def recomputed(positions: torch.Tensor) -> torch.Tensor:
        """Logits after rows whose KV was wrong, among others whose KV is exact."""
        cache = _copied(runtime, exact, _NUM_TOKENS)
        for layer in cache.layers:
            layer.keys[:, :, rows], layer.values[:, :, rows] = 3.0, -3.0
        pattern = causal_pattern(rows, runtime.device)
        logits: torch.Tensor = runtime.run_rows(
            cache, ids[rows], positions, pattern, slots=rows, logits_to_keep=num_kept
        )
        return logits

    gaps["recompute"] = _gap(recomputed(rows), expected[rows[-num_kept:]])
    if any(runtime.rotary.readings):
        gaps[_PLANTED] = _gap(recomputed((rows - 3 * (rows % 2)).clamp(min=0)), expected[rows[-num_kept:]])
    # stored behind a context, in a batch, and read again
    context = runtime.encode(ids[:_HALF].tolist())
    tail, _ = runtime.encode_many([ids[_HALF:last].tolist(), ids[:9].tolist()], context)
    cache = runtime.new_cache(capacity)
    cache.fill_all([(0, context), (_HALF, tail)])
    gaps["stored"] = _gap(runtime.extend(cache, ids[last:], last), expected[last])
    gaps["moved"] = _gap_of_moved(runtime, ids[:_HALF], context)
    gaps["length"] = _gap_of_lengths(runtime, ids[:6])
    return gaps


def _ordinary_ids(runtime: Any) -> torch.Tensor:
    """Tokens of text: none that stands for an image or the end of a turn."""
    size = min(runtime.vocab_size, len(runtime.tokenizer))
    special = {*runtime.control_ids, *runtime.eos_ids}
    return torch.tensor(
        [each for each in ordinary_tokens(runtime.model).tolist() if each < size and each not in special]
    )


def _unmodified(runtime: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``(num_tokens, vocab_size)`` by the attention that the class has itself."""
    runtime.model.set_attn_implementation("eager")
    try:
        output = runtime.model(input_ids=ids[None].to(runtime.device), use_cache=False)
        logits: torch.Tensor = output.logits
        check_numbers(logits, runtime.name)
        return logits[0]
    finally:
        runtime.model.set_attn_implementation(ATTENTION_NAME)


def _copied(runtime: Any, exact: Any, num_tokens: int) -> Any:
    cache = runtime.new_cache(_NUM_TOKENS + 4)
    for mine, own in zip(cache.layers, exact.layers, strict=True):
        mine.write(0, own.keys[0, :, :num_tokens], own.values[0, :, :num_tokens])
    return cache


def _gap_of_moved(runtime: Any, ids: torch.Tensor, kv: torch.Tensor) -> float:
    """The KV of a text that was computed at position 0, moved, against that computed where it is moved to."""
    here = torch.arange(_HALF, 2 * _HALF)
    block = Block.of(slice(0, _HALF), slice(_HALF, 2 * _HALF), here - _HALF, runtime.device)
    cache = runtime.new_cache(2 * _HALF)
    cache.fill(kv, slot=0, position=0)
    cache.extend_to(2 * _HALF)
    runtime.run_rows(cache, ids, here, AttentionPattern([block]), slots=here, head=False)
    computed = [(layer.keys[0, :, here], layer.values[0, :, here]) for layer in cache.layers]
    cache.fill(kv, slot=_HALF, position=_HALF)
    pairs = zip(cache.layers, computed, strict=True)
    gaps = (
        (_gap(layer.keys[0, :, here], keys), _gap(layer.values[0, :, here], values)) for layer, (keys, values) in pairs
    )
    return max(map(max, gaps))


def _gap_of_lengths(runtime: Any, ids: torch.Tensor) -> float:
    """What a long cache changes beside the keys in it: rows have positions, and a model that counts the tokens of the
    cache instead would be wrong for scattered rows of long prompts."""
    slots = torch.arange(len(ids))
    logits = []
    for length in (0, _FAR):
        cache = runtime.new_cache(len(ids))
        for counting in (cache, *cache.layers):
            counting.get_seq_length = lambda *args, length=length: length
        logits.append(runtime.run_rows(cache, ids, slots, causal_pattern(slots, runtime.device)))
    return _gap(logits[1], logits[0])


@torch.inference_mode()
def _hands_tables(runtime: Any) -> bool:
    """Whether layers that are given their tables compute the same: they may ask for them in another way, or use
    positions for more than the rotation."""
    ids = _ordinary_ids(runtime)[:6]
    slots = torch.arange(len(ids))
    positions = slots + min(_FAR, runtime.reuse_tokens) - len(ids)
    if not any(runtime.rotary.readings) or int(positions[0]) < 0:
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
