"""Methods as tests make and observe them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_lab.variants import read_variants
from cacheclip_testing.methods import Observed

from cacheclip_rag import SamplingParams
from cacheclip_rag.methods import PRESET_NAMES, Method, preset, vary
from tests.fusion.cases import Case

plain = pytest.mark.parametrize("primary", ["llama", "qwen3"], indirect=True)
"""The two plainest models, for tests with references written out by hand."""
few = pytest.mark.parametrize("primary", ["llama", "gemma3", "qwen3", "gpt-oss"], indirect=True)
"""Plain attention, sliding windows, a norm on queries and keys, and sinks with YaRN."""

REUSING = [name for name in PRESET_NAMES if preset(name).reuses_chunks and not preset(name).min_confidence]
"""By one prefill, from chunk caches that all methods share. A preset with a gate is another one until the gate
decides."""
VARIANTS = read_variants(Path(__file__).parents[2] / "benchmarks/variants.toml")
"""What the laboratory compares beside the presets: ``random``, ``epic-paper`` and others."""


def made(method: Method | str, ratio: float | None = None, **changes: Any) -> Any:
    """A preset, a variant of the laboratory, or a method, with changes."""
    if isinstance(method, str):
        method = VARIANTS.get(method) or preset(method)
    method = vary(method, changes)
    return method if ratio is None or not method.has_ratio else method.at(ratio)


def run(case: Case, method: Method | str, ratio: float | None = None, **changes: Any) -> Any:
    with torch.inference_mode():
        segments = [span.segment for span in case.layout.spans]
        return case.engine.prefill(segments, SamplingParams(max_tokens=16), method=made(method, ratio, **changes))


class Spied:
    """What a method saw and chose in one prefill."""

    def __init__(self, method: Any, seen: dict[str, Any]) -> None:
        self.method, self.view, self.masks = method, seen["view"], seen["masks"]


def spied(case: Case, method: Method | str, ratio: float | None = 0.3, **changes: Any) -> tuple[Any, Spied]:
    observed = Observed(made(method, ratio, **changes))
    result = run_as_it_is(case, observed)
    return result, Spied(observed.inner, observed.seen)


def run_as_it_is(case: Case, method: Method) -> Any:
    with torch.inference_mode():
        segments = [span.segment for span in case.layout.spans]
        return case.engine.prefill(segments, SamplingParams(max_tokens=16), method=method)


def same(left: Any, right: Any) -> bool:
    """Whether two selections, or lists of scores, are equal."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
