"""What else could one do in the same time? Gold F1 and seconds of ours beside full prefill of fewer chunks.

    python benchmarks/rivals.py --dataset 2wikimqa.jsonl.gz,hotpotqa.jsonl.gz --half test --limit 200 --log FILE

    full      ordinary prefill of all chunks
    METHOD    at --ratio: the time that the others are compared with
    prune K   ordinary prefill of the K best chunks, in their order; the table names the K whose mean time is nearest
    both K    the K best chunks, by METHOD at --ratio
    ordered   ordinary prefill, the chunks ordered so that the prompt begins as an earlier one did (as ContextPilot
              does), and the prefix cache holds earlier prompts; the other ways find nothing there

The best chunks are those that a ranker finds: an embedder, which finds those nearest to the question, ``auxiliary``,
whose scores METHOD makes anyway (a chunk is worth the sum of its tokens' scores), or a cross-encoder of
sentence-transformers (``--cross-encoder``). Seconds are to the first token, ranking included; chunks' embeddings are
there before, as in an index, and what the auxiliary scored counts once. Questions in the log are not asked again, but
what ``ordered`` finds then is less: the prefix cache begins empty.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from cacheclip_ingest import Embedder
from cacheclip_lab.evaluation.questions import ask
from cacheclip_lab.evaluation.records import Record
from cacheclip_lab.evaluation.scores import METRICS
from cacheclip_lab.evaluation.statistics import paired_bootstrap, paired_ratio
from resumed import ask_each, spread

from cacheclip_rag import Answer, CacheClipEngine, SamplingParams
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


def by_scores(answer: Answer, texts: Sequence[str]) -> tuple[list[int], float]:
    """The same by the scores that a method gave the tokens of all chunks of an answer, which has a trace."""
    assert answer.trace is not None, "asked for"
    worth = dict.fromkeys(texts, 0.0)
    for span in answer.trace.spans:
        if span.text is not None:
            worth[answer.trace.texts[span.text].text] += sum(span.scores)
    order = sorted(range(len(texts)), key=lambda n: -worth[texts[n]])
    return order, answer.stats.phases_s["select"]


class Rivals:
    """Ways to answer, with one engine that keeps nothing and one that keeps prompts."""

    def __init__(
        self,
        models: dict[str, Any],
        method: str,
        ratio: float,
        rankers: Mapping[str, Ranker | None],
        keep: Sequence[int],
        orders: bool,
    ) -> None:
        models = {**models, "system_prompt": INSTRUCTION, "on_miss": "ignore"}
        self._engine, self._keeping = CacheClipEngine(**models), CacheClipEngine(**models, prefix_cache_bytes=2**31)
        self._name, self._method = method, self._engine.make_method(method, ratio)
        self._rankers, self._keep, self._orders = rankers, keep, orders
        self._earlier: list[list[str]] = []

    def answers(self, record: Record) -> dict[str, Any]:
        full, texts = preset("full"), [chunk.as_read.strip() for chunk in record.chunks]
        self._engine.precompute(texts, method=self._method)
        try:
            whole, own = self._answer(record, self._method, trace=True)
            ways = {"full": self._ask(record, full), self._name: own}
            done: dict[tuple[int, ...], list[dict[str, Any]]] = {}  # by kept chunks: two rankers may keep the same
            for name, rank in self._rankers.items():
                order, seconds = by_scores(whole, texts) if rank is None else rank(record.question, texts)
                for count in self._keep:
                    kept = tuple(sorted(order[:count]))
                    if count < len(texts) and kept not in done:
                        fewer = replace(record, chunks=tuple(record.chunks[n] for n in kept))
                        done[kept] = [self._ask(fewer, full), self._ask(fewer, self._method)]
                    if count < len(texts):
                        pruned, both = done[kept]
                        scored_s = both["select_s"] if rank is None else 0.0  # of the kept chunks, scored before
                        ways[f"prune {count}{name}"] = {**pruned, "seconds": pruned["seconds"] + seconds, "kept": kept}
                        both_s = both["seconds"] - scored_s + seconds
                        ways[f"both {count}{name}"] = {**both, "seconds": both_s, "kept": kept}
            if self._orders:
                numbers = begun_as(self._earlier, texts)
                ordered = replace(record, chunks=tuple(record.chunks[n] for n in numbers))
                ways["ordered"] = self._ask(ordered, preset("prefix"), engine=self._keeping)
                self._earlier.append([texts[n] for n in numbers])
        finally:
            self._engine.release(texts)
        return {"id": record.id, "gold": record.meta.get("gold_chunks"), "ways": ways}

    def _ask(self, record: Record, method: Method, *, engine: CacheClipEngine | None = None) -> dict[str, Any]:
        return self._answer(record, method, engine=engine)[1]

    def _answer(
        self, record: Record, method: Method, *, trace: bool = False, engine: CacheClipEngine | None = None
    ) -> tuple[Answer, dict[str, Any]]:
        keeps, engine = engine is not None, engine or self._engine
        asked = ask(engine, record)
        if not keeps:
            engine.prefixes.clear()
        params = SamplingParams(max_tokens=asked.max_tokens)
        answer = engine.generate(asked.segments, params, method=method, question=record.question, trace=trace)
        judged = asked.judged(answer.text)
        return answer, {
            "text": answer.text,
            "f1": METRICS["f1"](judged, record.answers),
            "contains": METRICS["contains"](judged, record.answers),
            "seconds": answer.stats.ttft_s,
            "select_s": answer.stats.phases_s["select"],
            "tokens": answer.stats.prompt_tokens,
        }


def difference(values: Sequence[float], others: Sequence[float]) -> str:
    apart = [value - other for value, other in zip(values, others, strict=True)]
    low, high = paired_bootstrap(apart)
    return f"{fmean(apart):+.3f} [{low:+.3f}, {high:+.3f}]"


def table(items: Sequence[dict[str, Any]], method: str) -> Iterator[str]:
    ways = [way for way in items[0]["ways"] if all(way in item["ways"] for item in items)]
    values = {key: {way: [i["ways"][way][key] for i in items] for way in ways} for key in ("f1", "contains", "seconds")}
    f1, seconds = values["f1"], values["seconds"]
    pruned = [way for way in ways if way.startswith("prune")]
    equal = min(pruned, key=lambda way: abs(fmean(seconds[way]) - fmean(seconds[method])), default="")
    yield f"{'way':24}  F1     contains  seconds  F1 minus full's           sooner than full      F1 minus {method}'s"
    for way in ways:
        to_full, to_method = (difference(f1[way], f1[other]) for other in ("full", method))
        sooner = paired_ratio(seconds["full"], seconds[way])
        times = "-" if sooner is None else "{:.1f} [{:.1f}, {:.1f}]".format(*sooner)
        note = "  the nearest in time" if way == equal else ""
        means = f"{fmean(f1[way]):.3f}  {fmean(values['contains'][way]):7.0%}  {fmean(seconds[way]):7.2f}"
        yield f"{way:24}  {means}  {to_full:24}  {times:20}  {to_method}{note}"


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
    parser.add_argument("--ranker", default="packaged:all-MiniLM-L6-v2", help="embedders or auxiliary, comma-separated")
    parser.add_argument("--cross-encoder", help="folder or hub id of a sentence-transformers cross-encoder")
    parser.add_argument("--without-ordered", action="store_true", help="leave out the way that orders chunks")
    parser.add_argument("--log", type=Path, required=True, help="one JSON object a line; read again at start")
    parser.add_argument("--json", type=Path, help="also write the answers to this file")
    args = parser.parse_args()
    names = args.ranker.split(",")
    rankers: dict[str, Ranker | None] = {
        "" if len(names) == 1 else f" {name.rpartition(':')[2]}": None if name == "auxiliary" else by_embedding(name)
        for name in names
    }
    if args.cross_encoder:
        rankers = {"": by_cross_encoder(args.cross_encoder)}
    models = {"primary": args.primary, "auxiliary": args.auxiliary, "dtype": args.dtype}
    keep = [int(count) for count in args.keep.split(",")]
    rivals = Rivals(models, args.method, args.ratio, rankers, keep, not args.without_ordered)
    records = spread(args.dataset, half=args.half, limit=args.limit)
    items = ask_each(args.log, records, rivals.answers)
    print(f"{len(items)} questions, {args.dtype}, ratio {args.ratio:g}, {processor_name()}")
    print("\n".join(table(items, args.method)))
    if args.json:
        args.json.write_text(json.dumps(items, indent=1))


if __name__ == "__main__":
    main()
