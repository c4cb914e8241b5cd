"""Cold reads: how much of the time that a slow store takes is hidden behind computing.

    python benchmarks/cold_reads.py --json cold_reads.json

One prompt is answered up to the first token, in turns: from the system's page cache (warm), from a store of limited
speed (overlapped), and from the same store with everything read before anything is computed (in turn). The hidden share
is 1 - (overlapped - warm) / (in turn - warm). Other load changes these times, so that the share is also taken from the
seconds in which a request waited for the store, overlapped and in turn (not waited). Neither can be more than the share
of reading that computing lasts, which is printed as possible. Payloads of primary and auxiliary both count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.store import Catalog, ChunkStore, DiskBackend, ReadAhead, Tiers
from cacheclip_rag.testing import ThrottledBackend
from cacheclip_rag.timing import QUESTION, make_texts, processor_name

ALL_LAYERS = 1_000_000
WAYS = ("warm", "overlapped", "in turn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:smollm2-135m")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--method", default="cacheclip")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--codec")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--chunk-tokens", type=int, default=250)
    parser.add_argument("--speeds", default="20,50,200", help="of the store, in MB/s")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write seconds and statistics to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        slow = ThrottledBackend(DiskBackend(folder))
        engine = CacheClipEngine(
            primary=given.primary,
            auxiliary=given.auxiliary,
            dtype=given.dtype,
            codec=given.codec,
            method=given.method,
            prefix_cache_bytes=0,
            store=ChunkStore(Catalog(Path(folder)), Tiers([slow])),
        )
        count = max(1, given.tokens // given.chunk_tokens)
        texts = make_texts(engine.primary.tokenize, count, given.chunk_tokens, seed=1)
        engine.precompute(texts)
        prompt = "\n\n".join(texts) + f"\n\nQuestion: {QUESTION}"
        engine.generate(prompt, max_tokens=1, question=QUESTION)  # the first answer makes threads and buffers
        print(f"{processor_name()}, {torch.get_num_threads()} threads, {engine.parts.store.stats().bytes / 1e6:.0f} MB")
        print("| MB/s | warm | overlapped | in turn | hidden | not waited | possible |\n|---|---|---|---|---|---|---|")
        rows = [measure(engine, slow, prompt, float(speed), given.repeats) for speed in given.speeds.split(",")]
    if given.json:
        content = {"processor": processor_name(), "threads": torch.get_num_threads(), "rows": rows}
        given.json.write_text(json.dumps(content, indent=1))


def measure(
    engine: CacheClipEngine, slow: ThrottledBackend, prompt: str, megabytes_per_s: float, repeats: int
) -> dict[str, Any]:
    """Medians at one speed of the store, in interleaved repeats."""
    found: dict[str, list[Any]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            slow.bytes_per_s = None if way == "warm" else megabytes_per_s * 1e6
            with reading_first() if way == "in turn" else reading_ahead():
                stats = engine.generate(prompt, max_tokens=1, question=QUESTION).stats
            found[way].append(stats)
    slow.bytes_per_s = None
    assert all(stats.hits and not stats.misses for of_way in found.values() for stats in of_way), "the store is warm"
    warm, overlapped, in_turn = (statistics.median(stats.ttft_s for stats in found[way]) for way in WAYS)
    hidden = 1 - (overlapped - warm) / (in_turn - warm)
    reads = {way: statistics.median(stats.phases_s["read"] for stats in found[way]) for way in WAYS}
    not_waited = 1 - (reads["overlapped"] - reads["warm"]) / (reads["in turn"] - reads["warm"])
    computing = statistics.median(s.phases_s["select"] + s.phases_s["recompute"] for s in found["warm"])
    possible = min(1.0, computing / (reads["in turn"] - reads["warm"]))
    print(
        f"| {megabytes_per_s:g} | {warm:.2f} s | {overlapped:.2f} s | {in_turn:.2f} s | {hidden:.0%} "
        f"| {not_waited:.0%} | {possible:.0%} |",
        flush=True,
    )
    return {
        "megabytes_per_s": megabytes_per_s,
        "hidden": hidden,
        "not waited": not_waited,
        "possible": possible,
        **{f"{way} ttft_s": [stats.ttft_s for stats in found[way]] for way in WAYS},
        **{f"{way} phases_s": [stats.phases_s for stats in found[way]] for way in WAYS},
    }


@contextmanager
def reading_ahead() -> Iterator[None]:
    """As the engine does."""
    yield


@contextmanager
def reading_first() -> Iterator[None]:
    """Reading begins when KV is needed, and nothing is computed until all of it is there."""
    kv, start = ReadAhead.kv, ReadAhead.start

    def waiting(self: ReadAhead, number: int) -> Any:
        start(self)
        self.wait(ALL_LAYERS)
        return kv(self, number)

    ReadAhead.kv, ReadAhead.start = waiting, lambda self: None  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        ReadAhead.kv, ReadAhead.start = kv, start  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
