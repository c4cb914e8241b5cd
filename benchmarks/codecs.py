"""What a codec of stored KV costs in answers: distance from full prefill, per codec.

    python benchmarks/codecs.py --dataset 2wikimqa.jsonl.gz --limit 50 --log codecs.jsonl

Every question's chunks are computed once and stored with each codec. Questions in the log are not asked again.
Prints means of KL to full prefill along full's own answer, and ratios to the first codec with 95 % intervals (paired
bootstrap).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from cacheclip_lab.evaluation.questions import ask
from cacheclip_lab.evaluation.records import Record, read_records
from cacheclip_lab.evaluation.reference import Reference
from cacheclip_lab.evaluation.statistics import paired_ratio
from resumed import ask_each

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.methods import preset

CODECS = ("bfloat16", "int8")
"""The first is what the others are compared with."""


@torch.inference_mode()
def measure(finest: CacheClipEngine, engines: dict[str, CacheClipEngine], record: Record, args: Any) -> dict[str, Any]:
    """KL, agreement and answer of each codec and method at one question."""
    asked = ask(finest, record)
    reference = Reference.of(finest, finest.prefill(asked.segments, method=preset("full")), asked.max_tokens)
    found: dict[str, Any] = {"id": record.id, "answer": reference.answer}
    finest.precompute(asked.chunks)
    for name, engine in engines.items():
        for source, target in zip(finest.chunk_caches(), engine.chunk_caches(), strict=True):
            for text in asked.chunks:
                kv = source.read(text)
                assert kv is not None, "it was precomputed"
                engine.store.put(target.key(text), kv.tensor(), target.codec, text=text, shape=kv.shape)
        for method in args.methods.split(","):
            prefilled = engine.prefill(asked.segments, method=engine.make_method(method, args.ratio))
            assert prefilled.stats.hits == len(asked.chunks)
            followed = reference.follow(prefilled)
            found[f"{method} {name}"] = {
                "kl": followed.fidelity.answer_kl,
                "agreement": followed.fidelity.agreement,
                "answer": followed.answer,
                "bytes": engine.store.stats().bytes,
            }
        engine.release(asked.chunks)
    finest.release(asked.chunks)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--methods", default="cacheclip")
    parser.add_argument("--log", type=Path, required=True, help="answers, one JSON object a line; read again at start")
    args = parser.parse_args()
    records = read_records(args.dataset, limit=args.limit).records
    options = {"primary": args.primary, "auxiliary": args.auxiliary, "prefix_cache_bytes": 0}
    finest = CacheClipEngine(**options, codec="float32")
    engines = {codec: CacheClipEngine(**options, codec=codec) for codec in CODECS}
    by_id = {record.id: record for record in records}
    items = ask_each(args.log, by_id, lambda record: measure(finest, engines, record, args))
    for method in args.methods.split(","):
        first, *others = CODECS
        base = [item[f"{method} {first}"]["kl"] for item in items]
        for name in (first, *others):
            rows = [item[f"{method} {name}"] for item in items]
            kl = [row["kl"] for row in rows]
            same = sum(
                row["answer"] == item[f"{method} {first}"]["answer"] for row, item in zip(rows, items, strict=True)
            )
            print(
                f"{method:12} {name:20} KL mean {statistics.fmean(kl):.4f} median {statistics.median(kl):.4f} "
                f"of {first}: {paired_ratio(kl, base)}; {same} of {len(items)} answers as with {first}; "
                f"{statistics.fmean(row['bytes'] for row in rows) / 1e6:.1f} MB a question"
            )


if __name__ == "__main__":
    main()
