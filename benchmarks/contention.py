"""How much sooner the first token comes while other programs use the same cores.

    python benchmarks/contention.py
    python benchmarks/contention.py --quick

Measures the time to the first token of plain prefill and of a method, with k busy processes beside it. Methods take
turns in every run, and k changes from run to run, so that a slow minute hits all of them. Prints medians with the
smallest and largest value, and the ratio of the medians. Thread settings are those of the caller: nothing is set here
but what ``import cacheclip_rag`` sets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cacheclip_lab.timing.texts import QUESTION, make_texts

from cacheclip_rag import CacheClipEngine, EngineConfig, SamplingParams
from cacheclip_rag.measuring import processor_name
from cacheclip_rag.plugins import progress_bar

FULL = "full"
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(i * i for i in range(100_000))\n"
"""Keeps one core busy, and ends with the process that started it."""


def main() -> None:
    import torch  # after cacheclip_rag, whose import shortens the time for which idle threads spin

    args = parse()
    found: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        found += measure(args, dtype)
    name, cores, threads = processor_name(), len(usable_cores()), torch.get_num_threads()
    if args.json:
        machine = {"processor": name, "cores": cores, "threads": threads}
        print(json.dumps({**machine, "primary": args.primary, "auxiliary": args.auxiliary, "rows": found}, indent=2))
        return
    print(f"{name}, {cores} cores, {threads} threads; {args.primary} + {args.auxiliary}")
    print(f"{found[0]['prompt_tokens']} prompt tokens, {args.chunks} chunks, medians of {args.repeats} (min-max)")
    method = f"{args.method} at {args.ratio:g}"
    print(f"{'dtype':9} {'busy':>4}  {'full':>24}  {method:>24}  {'against full':>12}")
    for row in found:
        full, other = (shown(row[name]) for name in (FULL, "method"))
        print(f"{row['dtype']:9} {row['busy']:4}  {full:>24}  {other:>24}  {row['against_full']:11.2f}x")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", help="default packaged:qwen2.5-coder-0.5b; with --quick packaged:smollm2-135m")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--method", default="cacheclip")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--tokens", type=int, help="tokens of all chunks; default 4096, with --quick 1024")
    parser.add_argument("--chunks", type=int, help="default 36, with --quick 9")
    parser.add_argument("--busy", help="busy processes, comma-separated; default 0,1,2,4, with --quick 0,2")
    parser.add_argument("--dtypes", help="comma-separated; default float32,bfloat16")
    parser.add_argument("--repeats", type=int, help="default 5, with --quick 3")
    parser.add_argument("--quick", action="store_true", help="a small model and a short prompt: under two minutes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    quick = {"primary": "packaged:smollm2-135m", "tokens": 1024, "chunks": 9, "busy": "0,2", "repeats": 3}
    whole = {"primary": "packaged:qwen2.5-coder-0.5b", "tokens": 4096, "chunks": 36, "busy": "0,1,2,4", "repeats": 5}
    for name, value in (quick if args.quick else whole).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.busy = [int(number) for number in args.busy.split(",")]
    args.dtypes = (args.dtypes or "float32,bfloat16").split(",")
    if min(args.repeats, args.chunks, args.tokens // args.chunks // 16) < 1 or min(args.busy) < 0:
        parser.error("expected one repeat or more, chunks of 16 tokens or more, and no negative number of processes")
    return args


def measure(args: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """One row for each number of busy processes."""
    one_token = SamplingParams(max_tokens=1)
    with tempfile.TemporaryDirectory(prefix="cacheclip-contention-") as store:
        engine = CacheClipEngine(
            EngineConfig(primary=args.primary, auxiliary=args.auxiliary, dtype=dtype, store=store, prefix_cache_bytes=0)
        )
        texts = make_texts(engine.primary.tokenize, args.chunks, args.tokens // args.chunks)
        with progress_bar(f"precomputing ({dtype})", len(texts), "chunks") as advance:
            for number, text in enumerate(texts, 1):
                engine.precompute([text], method=args.method)
                advance(number)
        prompt = "\n\n".join(texts) + f"\n\nQuestion: {QUESTION}"
        methods = {FULL: engine.make_method(FULL), "method": engine.make_method(args.method, args.ratio)}
        times: dict[tuple[int, str], list[float]] = {(busy, name): [] for busy in args.busy for name in methods}
        stats = engine.generate(prompt, one_token, method=methods["method"], question=QUESTION).stats  # warms up
        assert stats.hits == args.chunks, f"{stats.hits} of {args.chunks} chunks were found"
        with progress_bar(f"measuring ({dtype})", args.repeats * len(times), "runs") as advance:
            done = 0
            for _ in range(args.repeats):
                for busy in args.busy:
                    with busy_processes(busy):
                        for name, method in methods.items():
                            answer = engine.generate(prompt, one_token, method=method, question=QUESTION)
                            times[busy, name].append(answer.stats.ttft_s)
                            done += 1
                            advance(done)
        engine.close()
    rows = []
    for busy in args.busy:
        full, other = (summary(times[busy, name]) for name in methods)
        ratio = full["median"] / other["median"]
        tokens = stats.prompt_tokens
        rows.append(
            {"dtype": dtype, "busy": busy, FULL: full, "method": other, "against_full": ratio, "prompt_tokens": tokens}
        )
    return rows


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """``count`` processes that each keep a core busy."""
    processes = [subprocess.Popen([sys.executable, "-P", "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def summary(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def shown(row: dict[str, float]) -> str:
    return f"{row['median']:.2f} s ({row['min']:.2f}-{row['max']:.2f})"


def usable_cores() -> set[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


if __name__ == "__main__":
    main()
