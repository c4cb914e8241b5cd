"""The controller: how well times to the first token are predicted, and whether ``auto`` is ever slower than ``full``.

    python benchmarks/latency.py --dtype bfloat16 --json latency.json

Prompts of growing length, each with few long chunks and with many short ones, are answered with
``recompute_ratio="auto"``, with a time limit of half of full prefill's, and with ``full``, in turns. A profile is
measured first if this machine has none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from cacheclip_lab.timing.controller import find_profile
from cacheclip_lab.timing.texts import QUESTION, make_texts

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.measuring import processor_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", default="200,500,1000,2000,4000,8000,16000")
    parser.add_argument("--chunk-tokens", default="64,120,480")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the answers' statistics to this file")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        models = {name: getattr(given, name) for name in ("primary", "auxiliary", "dtype", "device")}
        others: dict[str, Any] = {"recompute_ratio": "auto", "min_confidence": 0.0, "prefix_cache_bytes": 0}
        engine = CacheClipEngine(**models, store=folder, **others)
        method = engine.make_method(None, "auto")
        profile = find_profile(engine.parts.controllers.profile_identity(method)) or engine.profile_machine()
        print(f"{processor_name()}, {torch.get_num_threads()} threads; {profile.path}")
        print(
            "| tokens | chunks | full | auto | predicted | limited | ratio | limit |\n|---|---|---|---|---|---|---|---|"
        )
        for tokens in map(int, given.tokens.split(",")):
            for length in map(int, given.chunk_tokens.split(",")):
                if length <= tokens:
                    rows += measure(engine, tokens, length, given.rounds)
    report(rows)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


def measure(engine: CacheClipEngine, tokens: int, length: int, rounds: int) -> list[dict[str, Any]]:
    """One prompt, answered in three ways in turn."""
    texts = make_texts(engine.primary.tokenize, max(1, tokens // length), length, seed=tokens + length)
    engine.precompute(texts)
    prompt = "\n\n".join(texts) + f"\n\nQuestion: {QUESTION}"
    predicted = engine.plan(prompt).prediction
    assert predicted is not None
    limit = predicted.plain_s / 2
    ways: dict[str, dict[str, Any]] = {"full": {"method": "full"}, "auto": {}, "limited": {"max_ttft_s": limit}}
    found = [
        {"way": way, "tokens": tokens, "chunks": len(texts), "limit": limit, **asdict(answer.stats)}
        for _ in range(rounds)
        for way, options in ways.items()
        for answer in [engine.generate(prompt, max_tokens=1, question=QUESTION, **options)]
    ]

    def median(way: str, name: str = "ttft_s") -> float:
        return statistics.median(row[name] for row in found if row["way"] == way)

    print(
        f"| {found[0]['prompt_tokens']:,} | {len(texts)} | {median('full'):.2f} s | {median('auto'):.2f} s "
        f"| {median('auto', 'predicted_ttft_s'):.2f} s | {median('limited'):.2f} s "
        f"| {median('limited', 'nominal_ratio'):.2f} | {limit:.2f} s |",
        flush=True,
    )
    return found


def report(rows: list[dict[str, Any]]) -> None:
    predicted = [row for row in rows if row["predicted_ttft_s"] is not None]
    errors = sorted(abs(row["predicted_ttft_s"] / row["ttft_s"] - 1) for row in predicted)
    print(
        f"error of the prediction: median {statistics.median(errors):.0%}, 90th percentile "
        f"{errors[int(0.9 * len(errors))]:.0%}, {len(errors)} answers"
    )
    cases = {(row["tokens"], row["chunks"]) for row in rows}
    gains = {}
    for case in cases:
        of_case = [row for row in rows if (row["tokens"], row["chunks"]) == case]
        full, auto = (statistics.median(r["ttft_s"] for r in of_case if r["way"] == way) for way in ("full", "auto"))
        gains[case] = full / auto
    worst = min(gains, key=lambda case: gains[case])
    print(
        f"full over auto: least {gains[worst]:.2f} ({worst[0]} tokens, {worst[1]} chunks), median "
        f"{statistics.median(gains.values()):.2f}"
    )
    limited = [row for row in rows if row["way"] == "limited" and row["nominal_ratio"] > 0.2]
    over = [row["ttft_s"] / row["limit"] for row in limited]
    if over:
        print(f"time over the limit, where a ratio was chosen by it: median {statistics.median(over):.2f}")


if __name__ == "__main__":
    main()
