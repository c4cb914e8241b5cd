"""Cold reads: how much of the time that a slow store takes is hidden behind computing.

    python benchmarks/cold_reads.py --json cold_reads.json
    python benchmarks/cold_reads.py --lines 1:0.1,20:1,50:10 --method epic

One prompt is answered up to the first token, in turns: from the system's page cache (warm), from a store of limited
speed (overlapped), and from the same store with everything read before anything is computed (in turn). The hidden share
is 1 - (overlapped - warm) / (in turn - warm). Other load changes these times, so that the share is also taken from the
seconds in which a request waited for the store, overlapped and in turn (not waited). Neither can be more than the share
of reading that computing lasts, which is printed as possible. Payloads of primary and auxiliary both count.

With ``--lines`` (milliseconds of latency, gigabits a second), the first token is timed by plain prefill, with reads one
after the other and 16 at once, with the first quarters of the chunks computed in full meanwhile, and as the controller
chooses after it has measured the line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from cacheclip_lab.timing.controller import Controller
from cacheclip_lab.timing.fitting import fit_media
from cacheclip_lab.timing.reads import measure_reads
from cacheclip_lab.timing.texts import QUESTION, make_texts
from cacheclip_testing import ThrottledBackend

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.measuring import processor_name
from cacheclip_rag.store import Catalog, ChunkStore, DiskBackend, ReadAhead, Tiers

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
    parser.add_argument("--lines", help="to object storage, such as 1:0.1,20:1")
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
            min_confidence=0.0,  # texts without sense leave models unsure
            prefix_cache_bytes=0,
            store=ChunkStore(Catalog(Path(folder)), Tiers([slow])),
            recompute_ratio="auto" if given.lines else None,
        )
        count = max(1, given.tokens // given.chunk_tokens)
        texts = make_texts(engine.primary.tokenize, count, given.chunk_tokens, seed=1)
        engine.precompute(texts)
        prompt = "\n\n".join(texts) + f"\n\nQuestion: {QUESTION}"
        if given.lines:
            rows = measure_lines(engine, slow, prompt, texts, given.lines.split(","), given.repeats)
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1))
            return
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


def measure_lines(
    engine: CacheClipEngine,
    slow: ThrottledBackend,
    prompt: str,
    texts: Sequence[str],
    lines: Sequence[str],
    repeats: int,
) -> list[dict[str, Any]]:
    """Medians of the seconds to the first token over each line, in interleaved repeats."""
    profile, method, rows = engine.profile_machine(), engine.make_method(None, "auto"), list[dict[str, Any]]()
    codec = engine.parts.models.primary_caches(engine.parts.context_of(method)).codec
    sizes = [size for size in (64, 256) for _ in range(3)]
    kv = [torch.randn(engine.primary.kv_shape(size)).to(engine.primary.dtype) for size in sizes]
    groups, quarter = [[0], [0, 1, 2], [3], [3, 4, 5]], max(1, len(texts) // 4)
    shares = {f"{count} of {len(texts)} in full": count for count in range(quarter, len(texts), quarter)}
    ways = ("plain", "one by one", "at once", *shares, "chosen")
    print("| ms | Gb/s |", " | ".join(ways), "| the choice | best / chosen |\n" + "|---" * (len(ways) + 4) + "|")
    for line in lines:
        milliseconds, gigabits = map(float, line.split(":"))
        slow.latency_s, slow.bytes_per_s = milliseconds / 1000, gigabits * 1e9 / 8
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        with parallel(engine, 16):
            media = fit_media(measure_reads(engine.store.chunk_store, kv, groups, codec))
        for _ in range(repeats):
            for way in ways:
                engine.parts.controllers.use_profile(method, replace(profile, media=media))
                options: dict[str, Any] = {"plain": {"method": "full"}, "chosen": {}}.get(
                    way, {"recompute_ratio": method.nominal_ratio}
                )
                if way in shares:
                    options = {}
                with parallel(engine, 1 if way == "one by one" else 16), computing(texts[: shares.get(way, 0)]):
                    plan = engine.plan(prompt, question=QUESTION, **options) if way == "chosen" else None
                    stats = engine.generate(prompt, max_tokens=1, question=QUESTION, **options).stats
                seconds[way].append(stats.ttft_s)
        medians = {way: statistics.median(each) for way, each in seconds.items()}
        assert plan is not None
        choice = "plain" if plan.bypass else f"{len(plan.in_full)} in full, ratio {plan.method.nominal_ratio:.2f}"
        best = min(medians.values()) / medians["chosen"]
        rows.append({"line": line, "choice": choice, "media": {name: asdict(each) for name, each in media.items()}})
        rows[-1] |= {"ttft_s": seconds, "predicted_s": plan.prediction.seconds if plan.prediction else None}
        print(
            f"| {milliseconds:g} | {gigabits:g} |",
            " | ".join(f"{medians[way]:.2f} s" for way in ways),
            f"| {choice} | {best:.0%} |",
            flush=True,
        )
    return rows


@contextmanager
def parallel(engine: CacheClipEngine, at_once: int) -> Iterator[None]:
    """Reads as from a disk, one after the other, or as from object storage."""
    tiers = engine.store.chunk_store.tiers
    for each in (tiers, tiers.last):
        each.reads_at_once, each.least_read = at_once, 1 << 20 if at_once > 1 else 1 << 18
    yield


@contextmanager
def computing(texts: Sequence[str]) -> Iterator[None]:
    """The controller has no choice but to compute these texts in full."""
    decide = Controller.decide
    if texts:
        Controller.decide = lambda self, plan, *_: plan.computing(set(texts))  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Controller.decide = decide  # type: ignore[method-assign]


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
