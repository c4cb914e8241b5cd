"""Ingestion into a shared store by one worker of Ray and by two, in one run: texts a second once the workers have their
models, and what commits cost.

    python benchmarks/ingestion.py --workers 1,2 --rounds 3

In turns, each time into a new store of an S3 server on this machine, on a model of random weights (36 million).
Medians; the ratio is that of the same round.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cacheclip_ingest import LibrarySettings, shared
from cacheclip_testing import build_model, tiny_spec
from store_attack import ray_cluster, storage, store_command, text_of

from cacheclip_rag.measuring import processor_name

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "head_dim": 64,
}


def measure(url: str, folder: Path, settings: LibrarySettings, workers: int) -> dict[str, float]:
    """One ingestion."""
    together, commit = shared._together, shared.Commit.__call__
    batches, commits = list[tuple[float, int]](), list[float]()

    def timed(tables: Iterator[Any]) -> Iterator[Any]:
        def noted() -> Iterator[Any]:
            for table in tables:
                batches.append((time.perf_counter(), table.num_rows))
                yield table

        return together(noted())

    def timed_commit(self: Any, table: Any) -> Any:
        began = time.perf_counter()
        try:
            return commit(self, table)
        finally:
            commits.append(time.perf_counter() - began)

    shared._together, shared.Commit.__call__ = timed, timed_commit  # type: ignore[method-assign]
    began = time.perf_counter()
    try:
        config = settings.engine_config(url, device="cpu", codec="int8")
        report = shared.ingest_shared([str(folder)], config, settings, engine="ray", workers=workers)
    finally:
        shared._together, shared.Commit.__call__ = together, commit  # type: ignore[method-assign]
    assert report.computed == report.texts == report.documents and not report.failed, report
    seconds = time.perf_counter() - began
    first, last = batches[0][0], batches[-1][0]
    rate = sum(rows for _, rows in batches[1:]) / (last - first)
    return {"seconds": seconds, "start_s": first - began, "texts_per_s": rate, "commits": len(commits)} | {
        "commit_s": sum(commits),
        "commit_share": sum(commits) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--characters", type=int, default=500, help="of each text")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("ray").setLevel(logging.ERROR)
    counts, rng = [int(each) for each in args.workers.split(",")], random.Random(1)
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory() as root, storage(Path(root) / "home"), ray_cluster("ray"):
        primary = str(build_model(Path(root) / "model", tiny_spec("llama", **SIZES)))
        settings = LibrarySettings(primary=primary, auxiliary=None, dtype="float32")
        folder = Path(root) / "documents"
        folder.mkdir()
        for number in range(args.texts):
            (folder / f"{number}.txt").write_text(text_of(rng, args.characters))
        for number in range(args.rounds):
            for count in counts:
                url = f"s3://bucket/{number}-{count}"
                store_command("create", url)
                found[count].append(measure(url, folder, settings, count))
    medians = {
        count: {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        for count, rounds in found.items()
    }
    first, *others = counts
    ratios = {
        count: statistics.median(
            a["texts_per_s"] / b["texts_per_s"] for a, b in zip(found[count], found[first], strict=True)
        )
        for count in others
    }
    print(processor_name())
    for count, median in medians.items():
        said = ", ".join(f"{name} {value:.3g}" for name, value in median.items())
        print(f"{count} workers: {said}" + (f"; {ratios[count]:.2f} times as fast" if count in ratios else ""))
    if args.json:
        args.json.write_text(json.dumps({"medians": medians, "ratios": ratios, "rounds": found}, indent=1))


if __name__ == "__main__":
    main()
