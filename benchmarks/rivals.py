"""What else could one do in the same time? Gold F1 and seconds of ours beside full prefill of fewer chunks.

    python benchmarks/rivals.py --dataset 2wikimqa.jsonl.gz,hotpotqa.jsonl.gz --half test --limit 200 --log FILE

    full      ordinary prefill of all chunks
    METHOD    at --ratio: the time that the others are compared with
    prune K   ordinary prefill of the K best chunks, in their order; the table names the K whose mean time is nearest
    both K    the K best chunks, by METHOD at --ratio
    ordered   ordinary prefill, the chunks ordered so that the prompt begins as an earlier one did (as ContextPilot
              does), and the prefix cache holds earlier prompts; the other ways find nothing there

The best chunks are those that an embedder (``--ranker``) finds nearest to the question, or a cross-encoder of
sentence-transformers (``--cross-encoder``). Seconds are to the first token, ranking included; chunks' embeddings are
there before, as in an index. Questions in the log are not asked again, but what ``ordered`` finds then is less:
the prefix cache begins empty.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from cacheclip_ingest import Embedder
from cacheclip_lab.evaluation.questions import ask
from cacheclip_lab.evaluation.records import Record
from cacheclip_lab.evaluation.scores import METRICS
from cacheclip_lab.evaluation.statistics import paired_ratio
from resumed import ask_each, spread

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.measuring import processor_name
from cacheclip_rag.methods import Method, preset

INSTRUCTION = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
Ranker = Callable[[str, Sequence[str]], tuple[list[int], float]]
"""Question and texts to the numbers of the texts, the best first, and the seconds that a question takes."""


def by_embedding(name: str) -> Ranker:
    embedder = Embedder(name)

    def rank(question: str, texts: Sequence[str]) -> tuple[list[int], float]:
        vectors, started = embedder.embed(list(texts)), time.perf_counter()
        near = vectors @ embedder.embed([question])[0]
        return sorted(range(len(texts)), key=lambda n: -float(near[n])), time.perf_counter() - started

    return rank


def by_cross_encoder(name: str) -> Ranker:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(name)

    def rank(question: str, texts: Sequence[str]) -> tuple[list[int], float]:
        started = time.perf_counter()
        found = model.predict([(question, text) for text in texts], show_progress_bar=False)
        return sorted(range(len(texts)), key=lambda n: -float(found[n])), time.perf_counter() - started

    return rank


def begun_as(earlier: Sequence[Sequence[str]], texts: Sequence[str]) -> list[int]:
    """Numbers of the texts: first as in the earlier prompt that shares most of its first texts, then the rest."""
    shared = [list(itertools.takewhile(set(texts).__contains__, each)) for each in earlier]
    first = [texts.index(text) for text in max(shared, key=len, default=[])]
    return first + [n for n in range(len(texts)) if n not in first]


class Rivals:
    """Ways to answer, with one engine that keeps nothing and one that keeps prompts."""

    def __init__(self, models: dict[str, Any], method: str, ratio: float, rank: Ranker, keep: Sequence[int]) -> None:
        models = {**models, "system_prompt": INSTRUCTION, "on_miss": "ignore"}
        self._engine, self._keeping = CacheClipEngine(**models), CacheClipEngine(**models, prefix_cache_bytes=2**31)
        self._name, self._method = method, self._engine.make_method(method, ratio)
        self._rank, self._keep = rank, keep
        self._earlier: list[list[str]] = []

    def answers(self, record: Record) -> dict[str, Any]:
        full, texts = preset("full"), [chunk.as_read.strip() for chunk in record.chunks]
        order, seconds = self._rank(record.question, texts)
        ways = {"full": self._ask(record, full), self._name: self._ask(record, self._method)}
        for count in self._keep:
            if count < len(texts):
                fewer = replace(record, chunks=tuple(record.chunks[n] for n in sorted(order[:count])))
                ways[f"prune {count}"] = self._ask(fewer, full, ranked_s=seconds)
                ways[f"both {count}"] = self._ask(fewer, self._method, ranked_s=seconds)
        numbers = begun_as(self._earlier, texts)
        ordered = replace(record, chunks=tuple(record.chunks[n] for n in numbers))
        ways["ordered"] = self._ask(ordered, preset("prefix"), engine=self._keeping)
        self._earlier.append([texts[n] for n in numbers])
        return {"id": record.id, "ways": ways}

    def _ask(
        self, record: Record, method: Method, *, ranked_s: float = 0.0, engine: CacheClipEngine | None = None
    ) -> dict[str, Any]:
        keeps, engine = engine is not None, engine or self._engine
        asked = ask(engine, record)
        if method.reuses_chunks and not keeps:
            engine.precompute(asked.chunks, method=method)
        if not keeps:
            engine.prefixes.clear()
        params = SamplingParams(max_tokens=asked.max_tokens)
        answer = engine.generate(asked.segments, params, method=method, question=record.question)
        engine.release(asked.chunks)
        judged = asked.judged(answer.text)
        return {
            "text": answer.text,
            "f1": METRICS["f1"](judged, record.answers),
            "contains": METRICS["contains"](judged, record.answers),
            "seconds": answer.stats.ttft_s + ranked_s,
            "tokens": answer.stats.prompt_tokens,
        }


def table(items: Sequence[dict[str, Any]], method: str) -> Iterator[str]:
    ways = [way for way in items[0]["ways"] if all(way in item["ways"] for item in items)]
    mean = {way: fmean(item["ways"][way]["seconds"] for item in items) for way in ways}
    pruned = [way for way in ways if way.startswith("prune")]
    equal = min(pruned, key=lambda way: abs(mean[way] - mean[method]), default="")
    yield f"way         F1     contains  seconds  F1 over {method}'s       seconds over {method}'s"
    for way in ways:
        f1, contains = (fmean(item["ways"][way][key] for item in items) for key in ("f1", "contains"))
        shares = [
            paired_ratio([i["ways"][way][key] for i in items], [i["ways"][method][key] for i in items])
            for key in ("f1", "seconds")
        ]
        compared = ["-" if share is None else f"{share[0]:.2f} [{share[1]:.2f}, {share[2]:.2f}]" for share in shares]
        note = "  the nearest in time" if way == equal else ""
        yield f"{way:10}  {f1:.3f}  {contains:7.0%}  {mean[way]:7.2f}  {compared[0]:20}  {compared[1]:18}{note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dataset", required=True, help="files, comma-separated")
    parser.add_argument("--half", help="dev or test: every second question")
    parser.add_argument("--limit", type=int, default=200, help="most questions, spread over the files")
    parser.add_argument("--method", default="cacheclip")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--keep", default="1,2,3,5", help="numbers of chunks that are kept")
    parser.add_argument("--ranker", default="packaged:all-MiniLM-L6-v2", help="embedder, if there is no cross-encoder")
    parser.add_argument("--cross-encoder", help="folder or hub id of a sentence-transformers cross-encoder")
    parser.add_argument("--log", type=Path, required=True, help="one JSON object a line; read again at start")
    parser.add_argument("--json", type=Path, help="also write the answers to this file")
    args = parser.parse_args()
    rank = by_cross_encoder(args.cross_encoder) if args.cross_encoder else by_embedding(args.ranker)
    models = {"primary": args.primary, "auxiliary": args.auxiliary, "dtype": args.dtype}
    rivals = Rivals(models, args.method, args.ratio, rank, [int(count) for count in args.keep.split(",")])
    records = spread(args.dataset, half=args.half, limit=args.limit)
    items = ask_each(args.log, records, rivals.answers)
    print(f"{len(items)} questions, {args.dtype}, ratio {args.ratio:g}, {processor_name()}")
    print("\n".join(table(items, args.method)))
    if args.json:
        args.json.write_text(json.dumps(items, indent=1))


if __name__ == "__main__":
    main()
