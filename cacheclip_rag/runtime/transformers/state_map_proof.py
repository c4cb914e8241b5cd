"""The proof that state maps are exact: what the runtime of hybrids computes against the unmodified class.

As :mod:`.proof`, on a tiny model of the class in float32, and then on the model's own weights. On the tiny model two
mistakes are planted, which must show: a map without A, and keys at wrong positions.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import torch

from ...base.errors import UnsupportedModelError
from .kept import device_name, kept, kept_file
from .packed_weights import weights_kept
from .proof import gap_between, noise_of, ordinary_ids, unmodified_logits
from .quantised_weights import check_rows
from .state_map_model import StateMapRuntime, keys_and_values
from .stored_state_map import StoredSpans
from .twin import described, make_twin

logger = logging.getLogger(__name__)

_CHECKS = ("prefill", "decoding", "stored", "moved")
_WITHOUT, _ELSEWHERE = _PLANTED = ("a map without A", "a wrong position")
_CONTEXT, _CHUNK, _AFTER = 26, 30, 4
"""Tokens of a probe: before a chunk, of it, and after it. The first two have some between their edges."""
_MOVED, _WRONG = 15, 3
"""Positions by which a text is moved, and by how many that is wrong in the planted mistake."""
_SEEDS = (7, 8, 9)
"""Each but the first decides what failed before: routers of experts may be tied by chance."""
_LIMITS = {torch.float32: 1e-4}
_ROUNDED = 0.1
"""Largest gap, as a share of the root mean square of what it is compared with; for 16 bits."""
_TIMES = 2
"""Or as many times what rounding does to the unmodified model, in 16 bits."""
_DEEP = 3
"""And as many times that for moved KV, of which the worst layer counts."""
_NOTICED = 1e-3
"""Least gap that a planted mistake must make."""


def prove_state_maps(runtime: StateMapRuntime) -> None:
    """Prove a loaded hybrid, unless that was done before with the same weights and versions. Raises
    UnsupportedModelError: what the runtime computes differs from the unmodified model."""

    def of_weights() -> dict[str, float]:
        started = time.perf_counter()
        with weights_kept(runtime.model):
            check_rows(runtime.model, runtime.name)
            _kept(torch.float32, of_twin, described(runtime.model), device_name(runtime.device))
            gaps = _proven(runtime, planted=False)
        logger.info("%s was proven exact in %.1f s: %s", runtime.name, time.perf_counter() - started, gaps)
        return gaps

    def of_twin() -> dict[str, float]:
        try:
            twin = make_twin(runtime.model).to(runtime.device)
        except ValueError as error:
            raise UnsupportedModelError(
                f"model {runtime.name!r} has recurrent layers, and its config makes no tiny model to prove them on "
                f"({error}). Run it with transformers itself, without reuse."
            ) from error
        tiny = StateMapRuntime(twin, runtime.tokenizer, name=runtime.name, fingerprint="", like=runtime)
        return _proven(tiny, planted=True)

    devices = [*map(device_name, runtime.layer_devices)]
    _kept(runtime.dtype, of_weights, type(runtime.model).__name__, runtime.fingerprint, devices)


def _kept(dtype: torch.dtype, make: Callable[[], dict[str, float]], *identity: object) -> None:
    def read(gaps: dict[str, float]) -> dict[str, float]:
        if _failure(gaps, dtype):
            raise ValueError("it proves nothing")
        return gaps

    kept(kept_file("state-maps", *identity), read, make, dict)


def _failure(gaps: dict[str, float], dtype: torch.dtype) -> str:
    """Why the gaps prove nothing; empty: they prove it."""
    limit = max(_LIMITS.get(dtype, _ROUNDED), _TIMES * gaps.get("noise", 0.0))
    limits = {**dict.fromkeys(_CHECKS, limit), "moved": limit if dtype == torch.float32 else _DEEP * limit}
    differs = {what: gap for what in limits if not (gap := gaps.get(what, math.nan)) <= limits[what]}
    if differs:
        sizes = ", ".join(f"{what} by {gap:.2g}" for what, gap in differs.items())
        return f"it differs from the unmodified model in {sizes}"
    unseen = [what for what in _PLANTED if not gaps.get(what, math.inf) >= _NOTICED]
    return f"{unseen[0]} does not show" if unseen else ""


def _proven(runtime: StateMapRuntime, *, planted: bool) -> dict[str, float]:
    why = ""
    for seed in _SEEDS:
        gaps = _gaps(runtime, seed, planted)
        if not (why := _failure(gaps, runtime.dtype)):
            return gaps
    raise UnsupportedModelError(
        f"model {runtime.name!r} ({runtime.model.config.model_type!r}) failed the proof that its state maps are exact: "
        f"{why}. Choose another model, such as Llama, Qwen3 or Gemma 3, or run this one with transformers itself, "
        "without reuse."
    )


@torch.inference_mode()
def _gaps(runtime: StateMapRuntime, seed: int, planted: bool) -> dict[str, float]:
    make, count = torch.Generator().manual_seed(seed), _CONTEXT + _CHUNK + _AFTER
    ids = ordinary_ids(runtime)
    ids = ids[torch.randint(len(ids), (count,), generator=make)]
    last, expected = count - 1, unmodified_logits(runtime, ids)
    state, logits = runtime.prefill(ids[:last], count)
    gaps = {"prefill": gap_between(logits, expected[last - 1])}
    gaps["decoding"] = gap_between(runtime.decode_step(state, int(ids[last])), expected[last])
    spans = _stored(runtime, ids)
    gaps["stored"] = gap_between(_after(runtime, ids, spans), expected[last])
    if planted:
        gaps[_WITHOUT] = gap_between(_after(runtime, ids, spans.without_factors()), expected[last])
    gaps |= _gaps_of_moved(runtime, ids[:_CONTEXT])
    if runtime.dtype != torch.float32:
        gaps["noise"] = noise_of(runtime, ids, expected, make)
    return gaps


def _stored(runtime: StateMapRuntime, ids: torch.Tensor) -> StoredSpans:
    """What is stored of the first tokens, and of the next ones behind them."""
    context = runtime.encode(ids[:_CONTEXT].tolist())
    chunk = runtime.encode(ids[_CONTEXT : _CONTEXT + _CHUNK].tolist(), context)
    parts = ((context, _CONTEXT, 0), (chunk, _CHUNK, _CONTEXT))
    return StoredSpans(span for kv, count, at in parts for span in runtime.layout.read(kv.flatten(), count, at)[1])


def _after(runtime: StateMapRuntime, ids: torch.Tensor, spans: StoredSpans) -> torch.Tensor:
    """Logits of the last token, where all but the spans is computed."""
    logits = runtime.run_all(runtime.new_state(len(ids)), ids.tolist(), spans)
    assert logits is not None
    return logits


def _gaps_of_moved(runtime: StateMapRuntime, ids: torch.Tensor) -> dict[str, float]:
    """What a text leaves at some positions against what it leaves further on: keys without their rotation, values and
    states. And against keys that are turned back to other positions."""
    slots = range(len(ids))
    here, there = runtime.new_state(len(ids)), runtime.new_state(len(ids))
    runtime.run(here, ids.tolist(), head=False)
    runtime.run(there, ids.tolist(), head=False, moved=_MOVED)
    states = [
        [state.cache.layers[number].recurrent_states[mixer.index] for number, mixer in runtime.mixers.items()]
        for state in (here, there)
    ]
    kept_here, kept_there = keys_and_values(runtime, here, slots), keys_and_values(runtime, there, slots, moved=_MOVED)
    pairs = zip(kept_there + states[1], kept_here + states[0], strict=True)
    gaps = {"moved": max(gap_between(*pair) for pair in pairs)}
    if any(runtime.rotary.readings):
        wrong = keys_and_values(runtime, there, slots, moved=_MOVED - _WRONG)
        gaps[_ELSEWHERE] = max(gap_between(*pair) for pair in zip(wrong, kept_here, strict=True))
    return gaps
