"""Compares the time to the first token of several methods in one run.

Each round runs every method once, so that a change of the machine's speed affects all methods. Figures are medians.
Chunk caches are read from disk in every run, by default after the operating system's page cache was dropped for them.
A run asks two questions on the same chunks: the first finds nothing of earlier prompts, the second what the first left.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cacheclip_rag import CacheClipEngine, ConfigurationError, EngineConfig, FusionStats, SamplingParams
from cacheclip_rag.measuring import PHASES
from cacheclip_rag.methods import DEFAULT_METHOD, Method
from cacheclip_rag.models import concrete
from cacheclip_rag.plugins import progress_bar
from cacheclip_rag.selection import Budget
from cacheclip_rag.store import CAN_DROP_PAGE_CACHE

from ..timing.texts import QUESTION, SECOND_QUESTION, make_texts


def bench(
    config: EngineConfig,
    *,
    methods: Sequence[str] = ("full", "direct", DEFAULT_METHOD),
    variants: Mapping[str, Method] | None = None,
    context_tokens: int = 4096,
    chunk_tokens: int = 512,
    runs: int = 3,
    keep_page_cache: bool = False,
) -> dict[str, Any]:
    """Measure; returns the object that ``cacheclip bench --json`` prints.

    Args:
        methods: names of presets and variants.
        variants: methods of your own by name, at their own ratios
            (:func:`cacheclip_lab.variants.read_variants`); presets are measured at that of ``config``.

    Raises:
        ConfigurationError: unknown method, or numbers that make no sense.
    """
    _check(methods, context_tokens, chunk_tokens, runs)
    made = _made(config, methods, variants or {})
    if not any(method.needs_auxiliary for method in made.values()):
        config = replace(config, auxiliary=None)
    config = concrete(config)
    with tempfile.TemporaryDirectory(prefix="cacheclip-bench-") as folder:
        engine = CacheClipEngine(replace(config, store=folder))
        texts = make_texts(engine.primary.tokenize, max(1, round(context_tokens / chunk_tokens)), chunk_tokens)
        with progress_bar("precomputing", len(texts), "chunks") as advance:
            for number, text in enumerate(texts, 1):
                for method in made.values():
                    engine.precompute([text], method=method)
                advance(number)
        results = _measure(engine, texts, made, runs, keep_page_cache)
    return {
        "primary": config.primary,
        "auxiliary": config.auxiliary,
        "dtype": config.dtype,
        "context_tokens": context_tokens,
        "chunks": len(texts),
        "ratio": Budget().ratio if config.fixed_ratio is None else config.fixed_ratio,
        "runs": runs,
        "page_cache": "kept" if keep_page_cache or not CAN_DROP_PAGE_CACHE else "dropped",
        "methods": _summaries(results),
    }


def _made(config: EngineConfig, names: Sequence[str], variants: Mapping[str, Method]) -> dict[str, Method]:
    """Methods by name; ``auto`` gets the name of the method that it means."""
    choosing = CacheClipEngine(replace(config, store=None))
    found = {}
    for given in names:
        method = choosing.make_method(variants.get(given, given))
        if given == DEFAULT_METHOD:
            given, method = method.name, replace(method, min_confidence=0.0)  # texts without sense leave models unsure
        found[given] = method
    return found


def _check(methods: Sequence[str], context_tokens: int, chunk_tokens: int, runs: int) -> None:
    if not methods:
        raise ConfigurationError("name at least one method to measure.")
    if runs < 1 or chunk_tokens < 16 or context_tokens < chunk_tokens:
        raise ConfigurationError(
            "expected runs >= 1, chunk tokens >= 16 and context tokens >= chunk tokens, got "
            f"{runs}, {chunk_tokens} and {context_tokens}."
        )


class _TwoQuestions(NamedTuple):
    first: FusionStats
    second: FusionStats
    """Of another question on the same chunks."""
    peak_rss_bytes: int
    """Of the first question."""


def _measure(
    engine: CacheClipEngine, texts: Sequence[str], methods: Mapping[str, Method], runs: int, keep_page_cache: bool
) -> dict[str, list[_TwoQuestions]]:
    one_token = SamplingParams(max_tokens=1)
    context = "\n\n".join(texts)

    def ask(question: str, method: Method) -> FusionStats:
        return engine.generate(f"{context}\n\nQuestion: {question}", one_token, method=method, question=question).stats

    results: dict[str, list[_TwoQuestions]] = {name: [] for name in methods}
    engine.generate(
        texts[0] + f"\n\n{QUESTION}", one_token, method="direct"
    )  # warm up thread pools, allocator and code paths
    done = 0
    with progress_bar("measuring", runs * len(methods), "runs") as advance:
        for _ in range(runs):
            for name, method in methods.items():
                engine.prefixes.clear()  # otherwise methods would reuse each other's prefix
                if not keep_page_cache:
                    _drop_page_cache(engine)
                reset_peak_rss()
                first = ask(QUESTION, method)
                peak = peak_rss_bytes()
                results[name].append(_TwoQuestions(first, ask(SECOND_QUESTION, method), peak))
                done += 1
                advance(done)
    return results


def _summaries(results: Mapping[str, list[_TwoQuestions]]) -> dict[str, dict[str, Any]]:
    reference = statistics.median(run.first.ttft_s for run in results["full"]) if "full" in results else None
    return {name: _summary(runs, reference) for name, runs in results.items()}


def _summary(runs: Sequence[_TwoQuestions], reference_s: float | None) -> dict[str, Any]:
    seconds = _spread([run.first.ttft_s for run in runs])
    last = runs[-1].first
    return {
        "ttft_s": seconds,
        "second_ttft_s": _spread([run.second.ttft_s for run in runs]),
        "phases_s": {p: statistics.median(run.first.phases_s[p] for run in runs) for p in PHASES},
        "speedup_vs_full": reference_s / seconds["median"] if reference_s is not None else None,
        "nominal_ratio": last.nominal_ratio,
        "effective_ratio": last.effective_ratio,
        "effective_ratio_of_stale": last.effective_ratio_of_stale,
        "charged_ratio": last.charged_ratio,
        "prompt_tokens": last.prompt_tokens,
        "reused_tokens": last.reused_tokens,
        "recomputed_tokens": last.recomputed_tokens,
        "peak_rss_bytes": max(run.peak_rss_bytes for run in runs),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def _drop_page_cache(engine: CacheClipEngine) -> None:
    """Drop the payloads from the operating system's page cache, so that the next read comes from disk (Linux)."""
    for backend in engine.store.chunk_store.tiers.backends:
        if not backend.in_memory:
            backend.drop_cached(backend.list())


def reset_peak_rss() -> None:
    """Reset the kernel's peak RSS (Linux). On other systems the peak is that of the whole process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_rss_bytes() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
