"""Whether selectors find needles: which share of the tokens that hold an answer, and of whole values, is recomputed.

    python benchmarks/needle_recall.py --haystack ESSAYS --methods cacheclip,cacheclip-paper,epic [--variants FILE]

RULER's niah_multivalue and niah_multiquery (arXiv:2404.06654) of 4,096 tokens in chunks of 1,000, and the package's own
questions over two hops and over two keys, of 8 chunks of about 128. Nothing is trained on any of them. ``ESSAYS`` is a
UTF-8 text to hide needles in; without one there is no RULER. The digest of the head set that scored is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from cacheclip_rag import CacheClipEngine, EngineConfig
from cacheclip_rag.base.progress import progress_bar
from cacheclip_rag.lab.evaluation.ruler import generate
from cacheclip_rag.lab.training.families import Sample, Span, synthetic_samples
from cacheclip_rag.lab.training.given import sample_of_record
from cacheclip_rag.lab.training.prompts import segments_of
from cacheclip_rag.lab.variants import read_variants
from cacheclip_rag.methods import Method, preset
from cacheclip_rag.testing.methods import Observed

RULER = ("niah_multivalue", "niah_multiquery")
FAMILIES = ("multiquery", "two_hop")
Offsets = Sequence[tuple[int, int]]
"""Where tokens begin and end, in characters."""


def chosen_by(engine: CacheClipEngine, sample: Sample, method: Method) -> list[tuple[torch.Tensor, Offsets]]:
    """Per chunk the tokens that a method recomputes, ``(num_tokens,)`` bool of the primary's tokens, and the tokens'
    character offsets. Exact chunks, and chunks computed with the prompt, count as recomputed."""
    engine.prefixes.clear()
    observed = Observed(method)
    engine.prefill(segments_of(engine, sample), method=observed, question=sample.question)
    found = {}
    for chunk in sample.chunks:
        offsets = engine.primary.tokenize(chunk).offsets
        found[chunk] = torch.ones(len(offsets), dtype=torch.bool), offsets
    if observed.seen:
        for span, mask in zip(observed.seen["view"].spans, observed.seen["masks"], strict=True):
            found[span.whole][0][span.first : span.first + len(mask)] = mask
    return [found[chunk] for chunk in sample.chunks]


def covered(chosen: list[tuple[torch.Tensor, Offsets]], span: Span) -> tuple[int, int]:
    """Tokens of a stretch of text, and how many of them are recomputed."""
    number, start, end = span
    mask, offsets = chosen[number]
    inside = [n for n, (first, stop) in enumerate(offsets) if first < end and stop > start and stop > first]
    return len(inside), int(mask[inside].sum())


def measured(chosen: list[tuple[torch.Tensor, Offsets]], sample: Sample) -> tuple[float, float]:
    """Share of the tokens of sentences that hold an answer, and of values recomputed to the last token."""
    counts = [covered(chosen, span) for span in sample.evidence]
    values = [covered(chosen, span) for span in sample.values]
    tokens = sum(found for _, found in counts) / sum(count for count, _ in counts)
    return tokens, statistics.fmean(count == found for count, found in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--haystack", type=Path)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--limit", type=int, default=4, help="questions of each kind")
    parser.add_argument("--ratios", default="0.1,0.2")
    parser.add_argument("--methods", default="cacheclip,cacheclip-paper,epic")
    parser.add_argument("--variants", type=Path, help="TOML file of methods of your own, as of 'cacheclip eval'")
    given = parser.parse_args()

    # in memory: what is looked at is no one's store
    config = EngineConfig(primary=given.primary, auxiliary=given.auxiliary)
    engine = CacheClipEngine(config, store=None, max_bytes=None)
    samples = synthetic_samples("test", given.limit * len(FAMILIES), families=FAMILIES, num_chunks=8)
    if given.haystack:
        for task in RULER:
            records = generate(
                task,
                num_tokens=given.length,
                count=given.limit,
                offsets=lambda text: engine.primary.tokenize(text).offsets,
                haystack=given.haystack.read_text(encoding="utf-8"),
            )
            samples += [sample for record in records if (sample := sample_of_record(record)) is not None]
    variants = read_variants(given.variants)
    methods = {name: variants.get(name) or preset(name) for name in given.methods.split(",")}
    runs = [(name, float(ratio)) for name in methods for ratio in given.ratios.split(",")]
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with progress_bar("choosing", len(samples), "questions") as advance:
        for done, sample in enumerate(samples, 1):
            for name, ratio in runs:
                of_run = found.setdefault(f"{name}@{ratio:g}", {})
                engine.precompute(sample.chunks, method=methods[name])
                chosen = chosen_by(engine, sample, methods[name].at(ratio))
                of_run.setdefault(sample.family, []).append(measured(chosen, sample))
            engine.release(sample.chunks)
            advance(done)
    recall = {
        run: {
            family: {
                "questions": len(pairs),
                "tokens": round(statistics.fmean(tokens for tokens, _ in pairs), 3),
                "whole_values": round(statistics.fmean(values for _, values in pairs), 3),
            }
            for family, pairs in of_run.items()
        }
        for run, of_run in found.items()
    }
    print(json.dumps({"heads_sha256": engine.head_set.digest() if engine.head_set else None, **recall}, indent=1))


if __name__ == "__main__":
    main()
